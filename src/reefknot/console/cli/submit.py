"""`reefknot submit`: submit assignments through the store, to the system that runs on it now or later."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from json import dumps
from shlex import quote
from signal import SIGTERM, signal
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from reefknot.console.cli.app import CommandError, Exit, noun
from reefknot.console.cli.assignments import InvalidLine, assignments, display_name, repeated_key, require_file
from reefknot.console.cli.live_output import LOG, LogFlags
from reefknot.console.cli.options import (
    LONGEST_S,
    STORE,
    FileName,
    StoreFlags,
    arg,
    checked_duration,
    file_arg,
    moment_of,
    settings,
    time_arg,
)
from reefknot.console.cli.output import put, put_jobs, say
from reefknot.console.cli.store import StoreAddress, address_of, shown_url
from reefknot.console.operations.bulk import named
from reefknot.console.operations.systems import has_part
from reefknot.errors import KeyConflictError, ParameterError, QueueFullError, ResultPendingError
from reefknot.queue.model.message_schema import written_assignment
from reefknot.queue.model.messages import ExecAssignment, ExecResult, InvalidMessage
from reefknot.queue.model.unique import NOT_UNIQUE, Unique, unique_of
from reefknot.queue.model.work import WorkState, record_id
from reefknot.runtime.log import printable
from reefknot.runtime.seeds import new_id

if TYPE_CHECKING:
    from reefknot.queue.client import Client, Handle

MOST_WAITING = 100
LONGEST_WAIT_S = 5.0
GIVE_UP_S = 60.0
LONGEST_TIMEOUT_S = 1e9
MOST_SHOWN = 20
_FLAGS = {
    "job.type": "--type",
    "job.payload": "--inputs",
    "assignment_id": "--id",
    "tenant_id": "--tenant",
    "options.deadline_ms": "--deadline",
    "options.timeout_ms": "--timeout-ms",
    "options.attempt_timeout_ms": "--attempt-timeout-ms",
}
"""The flags of one step, by the field that a line of a file has for each."""
_EXISTING = ("id", "tenant_id", "state", "due_at", "due_in_s")
_RETRIED = (WorkState.FAILED.value, WorkState.CANCELLED.value, WorkState.QUARANTINED.value)
"""The states of jobs that `job retry` runs again."""

app = noun(
    "submit",
    "submit assignments.jsonl",
    'submit --type fs.blob_get --inputs \'{"path": "a.txt"}\' --wait',
    "submit reminders.jsonl --in 10m",
    "submit --type report.render --unique report-7 --for 1h",
    help="Submit a file of assignments, or one step. Accepted work is stored, whether a system is running or not.",
)


@app.default
def submit(
    file: Annotated[
        FileName | None, file_arg("One assignment per line, as JSON; - is stdin.", allow_leading_hyphen=True)
    ] = None,
    /,
    *,
    type_: Annotated[str | None, arg("Submit one step of this type, instead of a file.", "--type")] = None,
    inputs: Annotated[str | None, arg("Inputs of the step, as a JSON object.")] = None,
    id_: Annotated[str | None, arg("Assignment id; an id identifies one job of a tenant.", "--id")] = None,
    tenant: Annotated[str | None, arg("Tenant of the step.")] = None,
    deadline: Annotated[float | None, arg("Deadline in seconds from now, queueing included.")] = None,
    timeout_ms: Annotated[int | None, arg("Milliseconds for all executions of the step and the waits between.")] = None,
    attempt_timeout_ms: Annotated[int | None, arg("Milliseconds for one execution of the step.")] = None,
    unique: Annotated[str | None, arg("Key of the step: while a job of the tenant has it, no other is made.")] = None,
    for_: Annotated[str | None, time_arg("Hold --unique this long although the job ends: 90s, 2h.", "--for")] = None,
    in_: Annotated[str | None, time_arg("Run it not before this time from now: 90s, 10m, 2h, 7d.", "--in")] = None,
    at: Annotated[str | None, time_arg("Run it not before this time, ISO 8601; without a zone it is local.")] = None,
    wait: Annotated[bool, arg("Wait for the results. The exit code is 1 unless all succeeded.")] = False,
    timeout: Annotated[float, arg("Most seconds that --wait waits. Default: 60.")] = 60.0,
    log: LogFlags = LOG,
    options: StoreFlags = STORE,
) -> int:
    """Submit a file of assignments, or one step, and optionally wait for the results."""
    if (file is None) == (type_ is None):
        raise CommandError("give either a FILE of assignments or one step with --type")
    if file is not None:
        _refuse_beside_file(None, inputs, id_, tenant, deadline, timeout_ms, attempt_timeout_ms)
        if unique is not None or for_ is not None:
            raise CommandError("--unique: accepted with --type; lines of a FILE have ids: the same id is the same job")
    _check_positive("--timeout", timeout)
    engine = "" if options.engine is None else f" --engine {quote(shown_url(options.engine))}"
    key = _unique(unique, for_)
    submission = Submission(address_of(options), timeout if wait else None, at=_due(in_, at), engine=engine, unique=key)
    if file is not None:
        require_file(file)
    limits = {"timeout_ms": timeout_ms, "attempt_timeout_ms": attempt_timeout_ms}
    if deadline is not None:
        _check_positive("--deadline", deadline)
        limits["deadline_ms"] = max(1, round(deadline * 1000))
    work = file or _step(type_ or "", inputs, id_, tenant, limits)
    with log.applied(), _ended_by_sigterm():
        try:
            asyncio.run(submission.submit(work))
        except (Exception, KeyboardInterrupt, SystemExit):
            if submission.handles:  # accepted work is stored, whatever happened after it: its caller needs the ids
                submission.report(json=options.json)
            raise
        return submission.report(json=options.json)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises `SystemExit`: the command then reports what was accepted, as after Ctrl-C."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal(SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    try:
        yield
    finally:
        signal(SIGTERM, before)


def _refuse_beside_file(*values: object) -> None:
    """Refuse flags of one step together with a file, whose lines have fields for them. `values` follow `_FLAGS`."""
    given = {field: flag for (field, flag), value in zip(_FLAGS.items(), values, strict=True) if value is not None}
    if given:
        own = ", ".join(f"`{field}`" for field in given)
        flags = ", ".join(given.values())
        raise CommandError(f"{flags}: accepted with --type; in a FILE each line names its own, as {own}")


def _due(in_: str | None, at: str | None) -> datetime | None:
    """The time that `--in` or `--at` names; None for now."""
    if in_ is not None and at is not None:
        raise CommandError("--at: not together with --in; give one of them")
    now = datetime.now().astimezone()
    if in_ is not None:
        return now + timedelta(seconds=checked_duration("--in", in_))
    if at is None:
        return None
    due = moment_of("--at", at)
    if due < now:
        raise CommandError(f"--at: {due.isoformat(timespec='seconds')} is over; leave --at out to submit for now")
    if due - now > timedelta(seconds=LONGEST_S):
        raise CommandError(f"--at: {due.isoformat(timespec='seconds')} is more than ten years ahead")
    return due


def _unique(key: str | None, for_: str | None) -> Unique:
    """The key that `--unique` and `--for` name."""
    try:
        return unique_of({"unique": key, "for_": None if for_ is None else checked_duration("--for", for_)})
    except ParameterError as error:
        name = "--for" if error.parameter == "for_" else "--unique"
        raise CommandError(f"{name}: {error.problem}".replace("with unique,", "with --unique,")) from None


def _check_positive(flag: str, seconds: float) -> None:
    if not 0 < seconds < LONGEST_TIMEOUT_S:
        raise CommandError(f"{flag}: {seconds:g} is not accepted: seconds, more than 0")


def _step(
    type_: str, inputs: str | None, id_: str | None, tenant: str | None, limits: Mapping[str, int | None]
) -> ExecAssignment:
    """The assignment that the flags describe."""
    try:
        payload: Any = msgspec.json.decode(inputs or "{}")
        repeated = repeated_key((inputs or "{}").encode())
    except RecursionError:
        raise CommandError("--inputs: nested too deeply") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"--inputs: not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise CommandError('--inputs: accepted: a JSON object, such as {"path": "a.txt"}')
    if repeated is not None:
        raise CommandError(f"--inputs: {repeated[0]}: the key stands twice in one object; keep one of them")
    fields: dict[str, Any] = {"job": {"type": type_, "payload": payload}}
    if id_ is not None:
        fields["assignment_id"] = id_
    if tenant is not None:
        fields["tenant_id"] = tenant
    fields["options"] = {name: given for name, given in limits.items() if given is not None}
    found = written_assignment(fields, new_id(), new_id())
    if isinstance(found, InvalidMessage):
        field, _, problem = found.message.partition(": ")
        raise CommandError(f"{_FLAGS.get(field, field)}: {problem}")
    return found


async def _any_open(handles: list[Handle]) -> bool:
    """Whether one of them has no result yet; the last one is the likeliest."""
    for handle in reversed(handles):
        if await handle.status() in (WorkState.PENDING, WorkState.RUNNING):
            return True
    return False


def _there_already(job: Mapping[str, Any]) -> str:
    """The message about a job that was there before it was submitted: its state, and how to run it again."""
    name = quote(job["id"]) + (f" --tenant {quote(job['tenant_id'])}" if job["tenant_id"] else "")
    if job["state"] in _RETRIED:
        more = f"to run it again: reefknot job retry {name}"
    elif job["due_in_s"]:
        due = datetime.fromisoformat(job["due_at"]).astimezone().isoformat(timespec="seconds")
        more = f"it stays due at {due}"
    elif job["state"] in (WorkState.PENDING, WorkState.RUNNING):
        more = "it goes on as it was"
    else:
        more = f"to see its result: reefknot job show {name}; only a new id runs it again"
    return f"{named(job['id'], job['tenant_id'])} was there already and is {job['state']}: {more}"


class Submission:
    """Submitted assignments and their results. `wait` is how long to wait for results; None does not wait."""

    def __init__(
        self,
        address: StoreAddress,
        wait: float | None,
        *,
        at: datetime | None = None,
        engine: str = "",
        unique: Unique = NOT_UNIQUE,
    ) -> None:
        """`at` is when the work is due; None for now. `engine` is the flag with which others find the same store."""
        self._unique = unique
        self._engine = engine
        self.handles: list[Handle] = []
        self.mistakes = 0
        self._address = address
        self._size = (address.settings or settings(None)).queue_size
        self._wait = wait
        self._at = at
        self._results: dict[Handle, ExecResult | None] = {}
        self._existing: list[dict[str, Any]] = []
        """The jobs that were there before, as they are: nothing was submitted for them."""

    async def submit(self, work: str | ExecAssignment) -> None:
        """Submit one assignment, or those of the file with this name, and wait for the results if asked to."""
        from reefknot.queue.connect import client_of, opened_or_made
        from reefknot.stores.opening import options_of

        found = self._address.settings
        nats = {} if found is None else options_of(found)["nats"]
        async with opened_or_made(self._address.url, nats) as (store, is_new):
            client = client_of(store, store.clock, self._size)
            if is_new:
                say(self._address.made)
            if isinstance(work, str):
                handles = [handle async for handle in self._submit_file(client, work)]
            else:
                handles = [await self._submit(client, work)]
            await self._say_what_exists(client, handles)
            if self._wait is not None:
                self._say_what_is_late(self._wait)
                await self._say_what_is_missing(client, handles, self._wait)
            await self._await_results(handles)

    async def _say_what_exists(self, client: Client, handles: list[Handle]) -> None:
        """Say which jobs were there already. They keep their due times, and ended ones do not run again."""
        from reefknot.console.operations.job_filters import now_in
        from reefknot.console.operations.jobs import job_fields

        known = [one for one in handles if not one.is_new]
        if not known:
            return
        now = await now_in(client.store)
        for handle in known:
            item = await client.store.work.get(record_id(handle.assignment_id, handle.tenant_id))
            if item is not None:  # it may have been purged meanwhile
                fields = job_fields(item, now)
                self._existing.append({name: fields[name] for name in _EXISTING})
        for job in self._existing[:MOST_SHOWN]:
            say(_there_already(job))
        if len(self._existing) > MOST_SHOWN:
            say(f"… and {len(self._existing) - MOST_SHOWN} more were there already; --json lists them all")

    def _say_what_is_late(self, wait: float) -> None:
        """Say at once that the wait ends before the work is due."""
        late = [job["due_in_s"] or 0.0 for job in self._existing]
        if self._at is not None:
            seconds = (self._at - datetime.now().astimezone()).total_seconds()
            late += [seconds for one in self.handles if one.is_new]
        late = [seconds for seconds in late if seconds > wait]
        if late:
            say(
                f"{len(late)} of {len(self.handles)} due later than --wait lasts ({wait:g} s), the first in"
                f" {min(late):.0f} s: no result of that is waited for; --timeout SECONDS waits longer"
            )

    async def _say_what_is_missing(self, client: Client, handles: list[Handle], wait: float) -> None:
        """Say at once which part of a system is not running: without it there will be no results."""
        from reefknot.queue.presence import living_systems

        living = await living_systems(client.store)
        missing = [part for part in ("router", "worker") if not has_part(living, part, for_all=True)]
        if missing and await _any_open(handles):
            start = "up" if len(missing) == 2 else f"{missing[0]} start"
            say(
                f"no {' and no '.join(missing)} is running on this store; the work is stored, and --wait lasts up to"
                f" {wait:g} s. Start one with: reefknot {start} --engine {quote(self._address.shown)}"
            )

    async def _submit_file(self, client: Client, name: str) -> AsyncIterator[Handle]:
        async for line in assignments(name):
            where = f"{display_name(name)}:{line.line}"
            if isinstance(line, InvalidLine):
                self._reject(f"{where}: {line.text(self._address.redactor)}")
                continue
            try:
                yield await self._submit(client, line.assignment)
            except KeyConflictError as error:
                self._reject(f"{where}: assignment_id: {error}")

    def _reject(self, text: str) -> None:
        say(printable(text))
        self.mistakes += 1

    async def _submit(self, client: Client, assignment: ExecAssignment) -> Handle:
        """Submit, waiting as advised while the queue is full; one that stays full is an error."""
        waited = 0.0
        while True:
            try:
                key, seconds = self._unique.key or None, self._unique.for_ms / 1000 or None
                handle = await client.hand_in(assignment, at=self._at, unique=key, for_=seconds)
            except QueueFullError as error:
                if waited >= GIVE_UP_S:
                    count = f"{len(self.handles)} were submitted before it"
                    text = f"{error}; {count}. Is a system running? reefknot router status"
                    raise CommandError(text, Exit.TEMPORARY) from None
                pause = min(max(error.retry_after, 0.05), LONGEST_WAIT_S)
                waited += pause
                await asyncio.sleep(pause)
            else:
                self.handles.append(handle)
                return handle

    async def _await_results(self, handles: list[Handle]) -> None:
        if self._wait is None:
            return
        room = asyncio.Semaphore(MOST_WAITING)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait

        async def result(handle: Handle) -> None:
            async with room:
                try:
                    found = await handle.result(max(0.0, until - loop.time()))
                except ResultPendingError:
                    found = None
            self._results[handle] = found

        await asyncio.gather(*map(result, handles))

    def report(self, *, json: bool) -> int:
        """Print the ids or the results; the result is the exit code."""
        pending = [one for one in self.handles if self._wait is not None and self._results.get(one) is None]
        if json:
            self._put_json()
        elif self._wait is None:
            for handle in self.handles:
                put(handle.assignment_id)
            new = sum(one.is_new for one in self.handles)
            due = "" if self._at is None or not new else f", due at {self._at.isoformat(timespec='seconds')}"
            known = f", {len(self.handles) - new} there already" if new < len(self.handles) else ""
            say(f"{new} submitted{due}{known}; list them with: reefknot job list{self._engine}")
        else:
            self._put_table()
        if pending:
            ask = f"reefknot router status{self._engine}"
            say(f"{len(pending)} have no result yet; they are stored. Is a system running? {ask}")
        if self.mistakes or any(one is not None and one.status.value != "success" for one in self._results.values()):
            return Exit.FAILED
        return Exit.TEMPORARY if pending else Exit.FINE

    def _put_json(self) -> None:
        results = None
        if self._wait is not None:
            found = [one for one in map(self._results.get, self.handles) if one is not None]
            results = [self._address.redactor.tree(msgspec.to_builtins(one)) for one in found]
        ids = [handle.assignment_id for handle in self.handles]
        fields = {"handed_in": ids, "existing": self._existing, "mistakes": self.mistakes, "results": results}
        print(dumps(fields, ensure_ascii=True))

    def _put_table(self) -> None:
        rows = []
        for handle in self.handles:
            name, result = handle.assignment_id, self._results.get(handle)
            if result is None:
                rows.append((name, "pending", ""))
                continue
            text = dumps(self._address.redactor.tree(result.output or {}), ensure_ascii=False)
            if result.error_code:
                text = self._address.redactor(f"{result.error_code}: {result.error_message or ''}")
            rows.append((name, result.status.value, text[:400]))
        columns, tenants = ("assignment", "status", "result"), [one.tenant_id or "" for one in self.handles]
        put_jobs(columns, rows, tenants, styles=("cyan", "bold"), whole=("assignment", "tenant", "status"))
