"""
Audited actions of an operator on jobs.

Many at once: a `Selection` says which jobs, `BulkAction` counts them, changes them in chunks and reports, the same for
every verb. Or one whose payload was edited: the inputs of an assignment's step, or what a job of a source asks its
connector for. That job is discarded and keeps its payload byte for byte; the edited one has the next version of its id.
Both happen in one step, so a command that was cut off is given again as it was.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from json import dumps, loads
from shlex import quote
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.output import plural, progress, put, put_document, put_json, say
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.core.messages import LARGEST_MESSAGE, InvalidMessage, read_assignment
from reefknot.core.redaction import HIDDEN
from reefknot.core.versions import next_record, next_version, replaced_reason
from reefknot.core.work import ROUTER, WorkItem, WorkState, assignment_and_tenant, is_ingestion
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.cli.options import OperatorFlags
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

CHUNK = 500
MOST_SHOWN = 20


class Selection(Protocol):
    """The jobs that an operator has selected."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The records that were named one by one; none when a filter selects."""

    def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        """The selected jobs, at most `CHUNK` at a time. Those that were handed out may be changed meanwhile."""

    async def count(self, store: Store) -> dict[str, int]:
        """The number of selected jobs by kind, the most frequent first."""

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        """Why a job that was named is not selected, and where to look."""


async def counted(chunks: AsyncIterator[list[WorkItem]]) -> dict[str, int]:
    """The number of jobs by kind, the most frequent first."""
    number: Counter[str] = Counter()
    async for chunk in chunks:
        number.update(item.kind for item in chunk)
    return dict(number.most_common())


Act = Callable[["Store", "tuple[str, ...]", "list[AuditEntry]"], Awaitable[list[str]]]
"""Changes the jobs of these records, with these events. Returns the records that it has changed."""


class ChangedJobs:
    """The records that an action has changed: the first few, their number, and all of them as lines of JSON on disk."""

    def __init__(self, wanted: tuple[str, ...], lines: IO[str]) -> None:
        self.first: list[str] = []
        self.count = 0
        self.missing = set(wanted)
        self._lines = lines

    def add(self, ids: Sequence[str]) -> None:
        self.first += ids[: MOST_SHOWN - len(self.first)]
        self.count += len(ids)
        self.missing.difference_update(ids)
        self._lines.writelines(f"{dumps(one)}\n" for one in ids)

    def as_json(self, part: int) -> Iterator[str]:
        """The assignment ids (part 0) or the tenants (part 1) as a list of JSON, in pieces."""
        self._lines.seek(0)
        before = "["
        for line in self._lines:
            yield f"{before}\n    {dumps(assignment_and_tenant(loads(line))[part])}"
            before = ","
        yield "[]" if before == "[" else "\n  ]"


class UnclaimedJobs:
    """Jobs that an operator returns to the queue, of sources that nobody has: neither the configuration here nor a
    system that runs now. They wait, however many systems run."""

    def __init__(self, sources: Collection[str]) -> None:
        """`sources` are those that somebody has."""
        self.count = 0
        self.sources: set[str] = set()
        self._known = sources
        self._first = ""

    @classmethod
    async def over(cls, store: Store, address: StoreAddress) -> UnclaimedJobs:
        """None yet, by the configuration of this command and the systems over its store."""
        from reefknot.app.presence import living_systems

        running = {name for one in await living_systems(store) for name in one.get("sources", ())}
        configured = () if address.settings is None else address.settings.configuration.sources
        return cls(running.union(configured))

    def add(self, items: Iterable[WorkItem]) -> None:
        for item in items:
            if is_ingestion(item) and item.source not in self._known:
                self.count += 1
                self.sources.add(item.source)
                self._first = self._first or item.assignment_id

    def text(self, *, dry_run: bool) -> str:
        """The sentence about them: why they wait, and what to do."""
        names = [printable(name, most=60) for name in sorted(self.sources)]
        listed = ", ".join(names[:MOST_SHOWN]) + (" …" if len(names) > MOST_SHOWN else "")
        wait = "would wait" if dry_run else "waits" if self.count == 1 else "wait"
        add = f"reefknot source add {names[0] if len(names) == 1 else 'NAME'} …"
        cancel = f"reefknot job cancel {quote(printable(self._first)) if self.count == 1 else 'ID'}"
        why = "not configured here, and in no running system"
        text = f"{plural(self.count, 'job')} {wait} for {listed} ({why})"
        return f"{text}. Add the source: {add}; or cancel the job: {cancel}"


def say_when(total: int, unclaimed: UnclaimedJobs, *, dry_run: bool) -> None:
    """Print when jobs that were returned to the queue run, and which of them do not."""
    others = total - unclaimed.count
    if others and not dry_run:
        which = f"the other {others}" if unclaimed.count else "it" if total == 1 else "them"
        say(f"a running system picks {which} up within seconds; to start one: reefknot up")
    if unclaimed.count:
        say(unclaimed.text(dry_run=dry_run))


class BulkAction:
    """An audited action on the selected jobs, in chunks. Their number is printed before the first is changed."""

    def __init__(
        self, name: str, participle: str, options: OperatorFlags, *, because: str = "", requeues: str = ""
    ) -> None:
        """`name` is the action in the audit log; `requeues` the reason of a requeue, for an action that is one."""
        self.address = address_of(options)
        self._name = name
        self._participle = participle
        self._options = options
        self._because = because
        self._requeues = requeues

    def run(self, selection: Selection, act: Act) -> int:
        from tempfile import TemporaryFile

        dry_run, done = self._options.dry_run, self._participle
        with TemporaryFile("w+", encoding="utf-8") as lines:
            changed = ChangedJobs(selection.ids, lines)
            unclaimed = with_store(self.address, lambda store: self._apply(store, act, selection, changed))
            missing = [assignment_and_tenant(one)[0] for one in sorted(changed.missing)]
            if self._options.json:
                fields = {"missing": missing, "count": changed.count, "actor": self.address.actor, "dry_run": dry_run}
                if self._requeues:
                    fields["unconfigured_sources"] = sorted(unclaimed.sources)
                put_json(fields, first={done: changed.as_json(0), "tenant_ids": changed.as_json(1)})
        if not self._options.json:
            for name, tenant in map(assignment_and_tenant, changed.first):
                put(f"{name}{f' of {tenant}' if tenant else ''} {'would be ' if dry_run else ''}{done}")
            if changed.count > MOST_SHOWN:
                put(f"… and {changed.count - MOST_SHOWN} more")
        if self._requeues:
            say_when(changed.count, unclaimed, dry_run=dry_run)
        return Exit.FAILED if missing else Exit.FINE

    async def _apply(self, store: Store, act: Act, selection: Selection, changed: ChangedJobs) -> UnclaimedJobs:
        """Change the jobs, or with --dry-run only collect their records. Returns those that nobody will run."""
        dry_run = self._options.dry_run
        unclaimed = await UnclaimedJobs.over(store, self.address) if self._requeues else UnclaimedJobs(())
        counts = await selection.count(store)
        total = sum(counts.values())
        if total:
            kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
            say(f"{total} {'would be' if dry_run else 'to be'} {self._participle}: {kinds}")
        elif not selection.ids:
            say("no job matches")
        is_shown = dry_run and not self._options.json and not selection.ids and not self._requeues
        with progress(self._name.rpartition(".")[2], total) as advance:
            async for chunk in selection.chunks(store):
                ids = tuple(item.id for item in chunk)
                if is_shown:  # what is shown is enough
                    changed.add(ids[:MOST_SHOWN])
                    changed.count = total
                    return unclaimed
                done = ids if dry_run else await act(store, ids, self._events(chunk))
                changed.add(done)
                unclaimed.add(item for item in chunk if item.id in set(done))
                advance(len(chunk))
        await _report_missing(store, selection, sorted(changed.missing))
        return unclaimed

    def _events(self, items: list[WorkItem]) -> list[AuditEntry]:
        """Audit entries: one for the action, and one per job that goes back to the queue."""
        from reefknot import clock
        from reefknot.audit.journal import Journal, about_item
        from reefknot.core.audit.event import Requeued

        subject = items[0].assignment_id if len(items) == 1 else None
        tenants = [item.tenant_id for item in items]
        tenant = tenants[0] if len(set(tenants)) == 1 else None
        details: dict[str, Any] = {"count": len(items), "ids": [item.assignment_id for item in items]}
        if any(tenants):
            details["tenant_ids"] = tenants
        if self._because:
            details["reason"] = self._because
        events = [self.address.event(self._name, subject, tenant_id=tenant, **details)]
        if self._requeues:
            why = f": {self._because}" if self._because else ""
            reason, wall = f"{self._requeues} by {self.address.actor}{why}", clock.wall()
            returning = [
                Requeued(**about_item(item, wall), reason=reason, generation=item.generation + 1) for item in items
            ]
            events += Journal(None, redactor=self.address.redactor).entries(returning)
        return events


async def _report_missing(store: Store, selection: Selection, names: list[str]) -> None:
    """Print why named jobs are not selected."""
    for name in names[:MOST_SHOWN]:
        item, (job, tenant) = await store.work.get(name), assignment_and_tenant(name)
        hint = tenant_hint(tenant) if item is None else ""
        say(f"{named(job, tenant)} {await selection.missing(store, item)}{hint}")
    if len(names) > MOST_SHOWN:
        say(f"… and {len(names) - MOST_SHOWN} more are not")


def named(job: str, tenant: str | None) -> str:
    """A job's id in a message, with its tenant."""
    of = f" of tenant {printable(tenant[:200])!r}" if tenant else ""
    return f"{printable(job[:200])!r}{of}"


def tenant_hint(tenant: str | None) -> str:
    """The hint for a job that was not found without a tenant."""
    return "" if tenant else "; for a job of a tenant, give --tenant"


# ---- an edited payload -----------------------------------------------------------------------------------------------


def payload_of(item: WorkItem) -> dict[str, Any]:
    """The part of a job's payload that a person may edit."""
    try:
        body = msgspec.json.decode(item.payload)
        found = body.get("payload", {}) if is_ingestion(item) else body["job"].get("payload", {})
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        text = "what is stored cannot be read as a job, so there is no payload to edit; `quarantine show` prints it"
        raise CommandError(f"{item.assignment_id}: {text}", Exit.FAILED)
    return found


def put_payload(item: WorkItem, address: StoreAddress) -> None:
    """Print a job's payload, to be edited. Secrets are hidden, and then it cannot be given back as it is."""
    payload = payload_of(item)
    shown = address.redactor.tree(payload)
    put_document(_text(shown))
    if (why := _nothing_to_edit(item)) is not None:
        say(why)
    if shown != payload:
        say(f"parts are hidden as {HIDDEN}; write their values in place of that before you give the payload back")


def _text(payload: object) -> str:
    return dumps(payload, indent=2, ensure_ascii=False)


def read_payload(name: str) -> dict[str, Any]:
    """The payload in a file, or on stdin for `-`."""
    from reefknot.cli.assignments import STDIN, display_name, repeated_key, require_file

    require_file(name, flag="--payload", holds="the payload as JSON")
    shown = f"--payload: {display_name(name)}"
    try:
        if name == STDIN:
            text = sys.stdin.buffer.read(LARGEST_MESSAGE + 1)
        else:
            with open(name, "rb") as file:
                text = file.read(LARGEST_MESSAGE + 1)
    except OSError as error:
        raise CommandError(f"{shown}: cannot be read: {error.strerror}", Exit.NO_INPUT) from None
    if len(text) > LARGEST_MESSAGE:
        raise CommandError(f"{shown}: longer than {LARGEST_MESSAGE} bytes; accepted: a payload that fits a message")
    try:
        payload = msgspec.json.decode(text.decode())
        repeated = repeated_key(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{shown}: not JSON in UTF-8: {error}; {_ACCEPTED}") from None
    if not isinstance(payload, dict):
        raise CommandError(f"{shown}: not an object; {_ACCEPTED}")
    if repeated is not None:
        raise CommandError(f"{shown}: {repeated[0]}: the key stands twice in one object; keep one of them")
    return payload


_ACCEPTED = "accepted: the object that `quarantine show ID --payload-only` prints, edited"


def _nothing_to_edit(item: WorkItem) -> str | None:
    """Why a job of a source has no payload to edit, and what to do instead; None for a job that has one."""
    if not is_ingestion(item):
        return None
    location = msgspec.json.decode(item.payload).get("item")
    if location:
        text = f"{item.assignment_id} only fetches {location!r} again, and has no payload to edit"
        return f"{text}; to run it again: reefknot quarantine requeue {quote(printable(item.assignment_id))}"
    if not payload_of(item):
        text = f"{item.assignment_id} is a sync of {item.source} and has no payload to edit"
        return f"{text}; change the settings of the source, then: reefknot source run {item.source}"
    return None


def with_payload(item: WorkItem, payload: dict[str, Any]) -> bytes:
    """The stored form of the next version of a job: the same with this payload, checked as a submission is."""
    before = payload_of(item)
    if (why := _nothing_to_edit(item)) is not None:
        raise CommandError(f"--payload: {why}")
    if payload == before and dumps(payload) == dumps(before):
        again = f"to run it again as it is: quarantine requeue {item.assignment_id}"
        raise CommandError(f"--payload: it is the payload that {item.assignment_id} has already; {again}")
    if HIDDEN in dumps(payload) and HIDDEN not in dumps(before):
        text = f"--payload: {HIDDEN} stands for a part that was hidden; write its value instead"
        raise CommandError(text)
    body = msgspec.json.decode(item.payload)
    if is_ingestion(item):
        if not payload:
            text = f"--payload: without a payload {item.assignment_id} would be a sync of {item.source}"
            raise CommandError(f"{text}; to sync it: reefknot source run {item.source}")
        return msgspec.json.encode({**body, "payload": payload})
    successor = next_version(item.assignment_id)
    body |= {"assignment_id": successor, "job": {**body["job"], "payload": payload}}
    written = msgspec.json.encode(body)
    found = read_assignment(written)
    if isinstance(found, InvalidMessage):
        raise CommandError(f"--payload: {found.message}")
    return written


class PayloadEdit:
    """An audited action: a job goes on with an edited payload."""

    def __init__(self, selection: Selection, because: str, options: OperatorFlags) -> None:
        """`selection` is of one job, by its id."""
        self._selection = selection
        self._because = because
        self._options = options
        self._address = address_of(options)

    def run(self, name: str) -> int:
        """Replace the job by one with the payload in this file, or with --dry-run show the difference."""
        from difflib import unified_diff

        payload, dry_run, address = read_payload(name), self._options.dry_run, self._address
        item, unclaimed = with_store(address, self._find)
        body, redacted = with_payload(item, payload), address.redactor.tree
        old, successor = item.assignment_id, next_version(item.assignment_id)
        if not dry_run:
            with_store(address, lambda store: self._replace(store, item, body))
        lines = _text(redacted(payload_of(item))).splitlines(), _text(redacted(payload)).splitlines()
        diff = list(unified_diff(*lines, old, successor, lineterm=""))
        if self._options.json:
            fields = {"requeued": [successor], "tenant_ids": [item.tenant_id], "replaces": old, "diff": diff}
            fields |= {"count": 1, "actor": address.actor, "dry_run": dry_run}
            put_json(fields | {"unconfigured_sources": sorted(unclaimed.sources)})
        else:
            if dry_run:
                put_document("\n".join(diff))
            put(f"{old} {'would be ' if dry_run else ''}replaced by {successor}")
        say_when(1, unclaimed, dry_run=dry_run)
        return Exit.FINE

    async def _find(self, store: Store) -> tuple[WorkItem, UnclaimedJobs]:
        """The job with its payload: in quarantine, or replaced by an earlier run of the same command. Its next version
        may be one that nobody will run."""
        (record,) = self._selection.ids
        item = await store.work.get(record)
        if item is not None and (item.state is WorkState.QUARANTINED or _is_replaced(item)):
            unclaimed = await UnclaimedJobs.over(store, self._address)
            unclaimed.add([msgspec.structs.replace(item, id=next_record(item.id))])
            return item, unclaimed
        name = named(*assignment_and_tenant(record))
        raise CommandError(f"{name} {await self._selection.missing(store, item)}", Exit.FAILED)

    async def _replace(self, store: Store, item: WorkItem, body: bytes) -> None:
        who, successor = self._address.actor, next_record(item.id)
        events = self._events(item, body)
        done = await store.quarantine.replace(item.id, body, who=who, why=self._because, events=events)
        if done is not None:
            return
        old, new = await store.work.get(item.id), await store.work.get(successor)
        if old is not None and _is_replaced(old) and new is not None and new.payload == body:
            return  # by this command, which was cut off before it could say so
        name = assignment_and_tenant(successor)[0]
        if new is None:
            raise CommandError(f"{item.assignment_id} was taken out of quarantine meanwhile", Exit.FAILED)
        text = f"there is a job {name} already, with another payload; `job show {name}` shows it"
        raise CommandError(f"{item.assignment_id} cannot be replaced: {text}", Exit.FAILED)

    def _events(self, item: WorkItem, body: bytes) -> list[AuditEntry]:
        """Audit entries: the operator's action, and the submission of the next version."""
        from reefknot import clock
        from reefknot.audit.assignments import submitted_event
        from reefknot.audit.journal import Journal

        successor = next_version(item.assignment_id)
        details: dict[str, Any] = {"count": 1, "ids": [item.assignment_id], "replaced_by": successor}
        if item.tenant_id:
            details["tenant_ids"] = [item.tenant_id]
        if self._because:
            details["reason"] = self._because
        action = self._address.event("quarantine.requeue", item.assignment_id, tenant_id=item.tenant_id, **details)
        new = msgspec.structs.replace(item, id=next_record(item.id), resource_class=ROUTER, payload=body)
        journal = Journal(None, redactor=self._address.redactor)
        return [action, *journal.entries([submitted_event(new, clock.wall())])]


def _is_replaced(item: WorkItem) -> bool:
    """Whether the next version of a job runs instead of it."""
    return item.state is WorkState.DISCARDED and item.history[-1].why == replaced_reason(item.assignment_id)
