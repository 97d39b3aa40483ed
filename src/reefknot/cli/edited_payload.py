"""
The payload of a quarantined job, given back edited: `quarantine show --payload-only`, `quarantine requeue --payload`.

The inputs of an assignment's step, or what an ingestion job asks its connector for. The quarantined job is discarded
and keeps its payload byte for byte; the job with the edited one has the next version of its id. Both happen in one
step, so a command that was cut off is given again as it was.
"""

from __future__ import annotations

import sys
from difflib import unified_diff
from json import dumps
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.assignments import STDIN, display_name, repeated_key, require_file
from reefknot.cli.output import put, put_document, put_json, say
from reefknot.cli.store import StoreAddress, address_of, with_store
from reefknot.core.messages import LARGEST_MESSAGE, InvalidMessage, read_assignment
from reefknot.core.redaction import HIDDEN
from reefknot.core.work import (
    ROUTER,
    WorkItem,
    WorkState,
    assignment_and_tenant,
    is_ingestion,
    next_version_of,
    record_id,
    replaced_reason,
)

if TYPE_CHECKING:
    from reefknot.cli.options import OperatorFlags
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store


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
    if shown != payload:
        say(f"parts are hidden as {HIDDEN}; write their values in place of that before you give the payload back")


def _text(payload: object) -> str:
    return dumps(payload, indent=2, ensure_ascii=False)


def read_payload(name: str) -> dict[str, Any]:
    """The payload in a file, or on stdin for `-`."""
    require_file(name)
    shown = display_name(name)
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


def with_payload(item: WorkItem, payload: dict[str, Any]) -> bytes:
    """What is stored for the next version of a job: the same with this payload, checked as a submission is."""
    before = payload_of(item)
    if payload == before and dumps(payload) == dumps(before):
        again = f"to run it again as it is: quarantine requeue {item.assignment_id}"
        raise CommandError(f"--payload: it is the payload that {item.assignment_id} has already; {again}")
    if HIDDEN in dumps(payload) and HIDDEN not in dumps(before):
        text = f"--payload: {HIDDEN} stands for a part that was hidden; write its value instead"
        raise CommandError(text)
    body = msgspec.json.decode(item.payload)
    if is_ingestion(item):
        if body.get("item"):
            text = f"{item.assignment_id} only fetches {body['item']!r} again, and has no payload to edit"
            raise CommandError(f"--payload: {text}; to run it again: quarantine requeue {item.assignment_id}")
        return msgspec.json.encode({**body, "payload": payload})
    successor, _ = assignment_and_tenant(next_version_of(item.id))
    body |= {"assignment_id": successor, "job": {**body["job"], "payload": payload}}
    written = msgspec.json.encode(body)
    found = read_assignment(written)
    if isinstance(found, InvalidMessage):
        raise CommandError(f"--payload: {found.message}")
    return written


# ---- the replacement -------------------------------------------------------------------------------------------------


class PayloadEdit:
    """One job that goes on with an edited payload, as an audited action."""

    def __init__(self, job: str, tenant: str | None, because: str, options: OperatorFlags) -> None:
        self._record = record_id(job, tenant)
        self._because = because
        self._options = options
        self._address = address_of(options)

    def run(self, name: str) -> int:
        """Replace the job by one with the payload in this file, or with --dry-run show the difference."""
        payload, dry_run, address = read_payload(name), self._options.dry_run, self._address
        item = with_store(address, self._find)
        body, redacted = with_payload(item, payload), address.redactor.tree
        old, successor = item.assignment_id, assignment_and_tenant(next_version_of(item.id))[0]
        if not dry_run:
            with_store(address, lambda store: self._replace(store, item, body))
        lines = _text(redacted(payload_of(item))).splitlines(), _text(redacted(payload)).splitlines()
        diff = list(unified_diff(*lines, old, successor, lineterm=""))
        if self._options.json:
            fields = {"requeued": [successor], "tenant_ids": [item.tenant_id], "replaces": old, "diff": diff}
            put_json({**fields, "count": 1, "actor": address.actor, "dry_run": dry_run})
            return Exit.FINE
        if dry_run:
            put_document("\n".join(diff))
        put(f"{old} {'would be ' if dry_run else ''}replaced by {successor}")
        if not dry_run:
            say("a running system picks it up within seconds; to start one: reefknot up")
        return Exit.FINE

    async def _find(self, store: Store) -> WorkItem:
        """The job with its payload: in quarantine, or replaced by an earlier run of the same command."""
        from reefknot.cli.job import state_in_words

        item = await store.work.get(self._record)
        if item is not None and (item.state is WorkState.QUARANTINED or _is_replaced(item)):
            return item
        state = "there is no such job" if item is None else f"it is {await state_in_words(store, item)}"
        name = assignment_and_tenant(self._record)[0]
        raise CommandError(f"{name!r} is not in quarantine: {state}; `quarantine list` shows what is", Exit.FAILED)

    async def _replace(self, store: Store, item: WorkItem, body: bytes) -> None:
        who, successor = self._address.actor, next_version_of(item.id)
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

        successor = assignment_and_tenant(next_version_of(item.id))[0]
        details: dict[str, Any] = {"count": 1, "ids": [item.assignment_id], "replaced_by": successor}
        if item.tenant_id:
            details["tenant_ids"] = [item.tenant_id]
        if self._because:
            details["reason"] = self._because
        action = self._address.event("quarantine.requeue", item.assignment_id, tenant_id=item.tenant_id, **details)
        new = msgspec.structs.replace(item, id=next_version_of(item.id), resource_class=ROUTER, payload=body)
        journal = Journal(None, redactor=self._address.redactor)
        return [action, *journal.entries([submitted_event(new, clock.wall())])]


def _is_replaced(item: WorkItem) -> bool:
    """Whether the next version of a job runs instead of it."""
    return item.state is WorkState.DISCARDED and item.history[-1].why == replaced_reason(item.id)
