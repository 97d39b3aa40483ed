"""
`JetStreamStore`: all parts of a store on a NATS server or cluster, which many machines share.

Its time is the server's: the difference to this machine's clock is measured at the start, and again at intervals.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import json

from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.time import Moment
from reefknot.errors import (
    OperationError,
    ReefknotError,
    StoreError,
    StorePermissionError,
    StoreReplacedError,
    StoreVersionError,
)
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.queue.port.quarantine import QuarantineStore
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import Services, run_in_background
from reefknot.stores.jetstream import roles
from reefknot.stores.jetstream.assignments import AssignmentStream
from reefknot.stores.jetstream.audit_log import JetStreamAuditLog
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.connection import ADVISORY, Connection, NatsOptions, options_from_url
from reefknot.stores.jetstream.control import JetStreamControl, JetStreamValues
from reefknot.stores.jetstream.events import AuditWriter
from reefknot.stores.jetstream.examination import problem_in, unreadable_records
from reefknot.stores.jetstream.idempotency import JetStreamIdempotencyStore
from reefknot.stores.jetstream.leases import JetStreamLeases
from reefknot.stores.jetstream.reads import last_message
from reefknot.stores.jetstream.requests import RefusedError
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.streams import (
    Names,
    Restored,
    StoreUser,
    StreamInfo,
    ensure_stream,
    patient_info,
    state_stream,
    stream_info,
)
from reefknot.stores.jetstream.transport import JetStreamTransport
from reefknot.stores.jetstream.wire import NOT_FOUND, Heard
from reefknot.stores.jetstream.work import JetStreamWorkQueue
from reefknot.stores.port.engines import RecordsReport, UnreadableRecord

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.subscription import Subscription

    from reefknot.audit.port import AuditEntry

ALIGN_EVERY_S = 30.0
MOST_SWEPT = 10_000
SWEEP_EVERY = 20
LOOK_S = 1.0
"""How often a process looks whether its store is still there."""
LOOKS, AGAIN_S = 3, 0.15
"""How many looks in a row say that it is gone, and the pause between them."""
NOTE_S = 30 * 86_400
"""How long the note stays that a store was restored."""
_HARMLESS = tuple(f"{ADVISORY}STREAM.{one}." for one in ("SNAPSHOT_CREATE", "SNAPSHOT_COMPLETE", "UPDATED"))
CHECK_S = 600.0
"""How long all records are read, at most."""
CLOCK_STEP_S = 0.05
"""Differences to the server's time below this come from the network, and are ignored."""


class _ParentsConnection(Connection):
    """The parent's connection in a fork: whatever is read from its socket here would be lost to the parent."""

    @property
    def client(self) -> Client:
        raise opened_before_fork(self.options.shown)

    @property
    def is_closed(self) -> bool:
        return True


class JetStreamStore:
    """A durable store. Open it with `await JetStreamStore.open(url, clock)`."""

    durable = True
    path = None
    expires_by_itself = True

    def __init__(
        self,
        options: NatsOptions,
        clock: Clock,
        *,
        retention: float = KEY_RETENTION_S,
        largest_result: int = 1 << 20,
        most_keys: int | None = None,
        work_retention: float | None = None,
        has_server_time: bool = True,
    ) -> None:
        """Without `has_server_time` the clock's own time counts, for tests in virtual time."""
        self.options = options
        self.identity = f"nats:{options.shown}"
        self.names = Names(options.name)
        self._has_server_time = has_server_time
        self._machine_clock = clock
        self.connection = Connection(options, roles.denial)
        work_ttl = None if work_retention is None else max(60, int(work_retention))
        self.state = State(self.connection, self.names, clock, work_ttl=work_ttl)
        self._writer = AuditWriter(self.connection, self.names)
        self._commits = Commits(self.connection, self.state, self._writer)
        self.audit = JetStreamAuditLog(self.state, self._commits, self._writer, has_server_time=has_server_time)
        self.idempotency = JetStreamIdempotencyStore(
            self.state,
            self._commits,
            self.audit,
            retention=retention,
            largest_result=largest_result,
            most_keys=most_keys,
        )
        self.work = JetStreamWorkQueue(self.state, self._commits)
        self.quarantine = QuarantineStore(self.work)
        self.control = JetStreamControl(self.state, self._commits)
        self.leases = JetStreamLeases(self.work)
        self.values = JetStreamValues(self.state, self._commits)
        self._services = Services("store")
        self._loss = roles.Loss()
        self._watch = StoreWatch(self.connection, self.names, self.state.wake_all)
        self._closed = False
        FORKS.in_child(self._let_go)

    @classmethod
    async def open(cls, url: str, clock: Clock, *, name: str = "", **options: Any) -> JetStreamStore:
        """A store by its address, connected and read."""
        found = options_from_url(url if not name else f"{url.rstrip('/')}/{name}")
        return await cls(found, clock, **options).start()

    async def start(self) -> JetStreamStore:
        await self.connection.open()
        try:
            replicas, max_bytes = self.options.replicas, self.options.max_bytes
            await roles.check(self.connection)
            self.connection.on_reconnect(self._check_roles)
            found = await ensure_stream(self.connection, state_stream(self.names, replicas, max_bytes))
            await self._align()
            await self._watch.start(found)
            self._commits.start()
        except BaseException:
            await self.connection.close()
            raise
        if self._has_server_time:
            self._services.keep("server time", self._keep_up)
        return self

    def _check_roles(self) -> None:
        run_in_background(self._loss.look(self.connection), "the permissions of this user")

    async def _align(self) -> None:
        """Adopt the server's time, which was read halfway between request and answer."""
        if not self._has_server_time:
            return
        clock = self._machine_clock
        asked = clock.now()
        found = await patient_info(self.connection, self.names.state)
        answered = clock.now()
        server = datetime.fromisoformat(found.ts).timestamp()
        offset = server - (asked + answered) / 2
        if abs(offset - self.state.timeline.offset) > CLOCK_STEP_S + (answered - asked):
            self.state.timeline.offset = offset

    async def _keep_up(self) -> None:
        """Read the server's time again at intervals, and remove leftover records, until cancelled."""
        for number in count(1):
            await asyncio.sleep(ALIGN_EVERY_S)
            try:
                await self._align()
                await self._loss.look(self.connection)
                if number % SWEEP_EVERY == 0 and not self.options.read_only:
                    await sweep_blobs(self.state)
            except (StoreError, ValueError) as error:
                logger().info("the server's time was not read (%s); trying again", error_text(error))

    @property
    def failure(self) -> ReefknotError | None:
        """The final error of the store: its stream was deleted or replaced. An unreachable server may come back."""
        return self.connection.failure

    @property
    def read_only(self) -> bool:
        return self.options.read_only

    @property
    def reached_for(self) -> float:
        return self.connection.up_for

    @property
    def clock(self) -> SteadyClock:
        return SteadyClock(self._machine_clock, offset=self.state.timeline.offset)

    def moment(self) -> Moment:
        return self.state.now()

    async def newest_record_at(self) -> int | None:
        found = [self.state.table.newest_at, await self.idempotency.newest_at(), await self.audit.newest_at()]
        return max((at for at in found if at is not None), default=None)

    async def check_records(self) -> RecordsReport:
        return await unreadable_records(self.connection, self.names, CHECK_S)

    async def forget_record(self, subject: str, *, events: Sequence[AuditEntry], dry_run: bool) -> UnreadableRecord:
        prefix, is_plain = f"{self.names.name}.", not any(one in subject for one in "*> \t\r\n")
        message = None
        if subject.startswith(prefix) and is_plain:
            message = await last_message(self.connection, self.names.state, subject)
        if message is None or not message.body:
            raise OperationError(f"there is no record {subject}; `reefknot store check` names them", "not_found")
        problem = problem_in(message)
        if not problem:
            raise OperationError(f"{subject} can be read, and stays: it is removed with what it belongs to", "conflict")
        found = UnreadableRecord(subject, message.sequence, problem)
        if not dry_run:

            def run(batch: Batch, now: Moment) -> None:
                batch.add(Message(subject, b"", found.sequence, ttl=1))
                batch.events += events

            await self._commits.change(run)
        return found

    async def room(self) -> int | None:
        stream = await stream_info(self.connection, self.names.state)
        account: dict[str, Any] = json.decode(await self.connection.api("INFO"))
        bounds = [(stream.config.get("max_bytes", -1), stream.state.get("bytes", 0))]
        bounds.append((account.get("limits", {}).get("max_storage", -1), account.get("storage", 0)))
        return min((most - used for most, used in bounds if most > 0), default=None)

    def transport(self, *, keeps_shared: bool = False) -> JetStreamTransport:
        most = self.options.max_shared_assignments
        return JetStreamTransport(self.connection, shared_stream=keeps_shared, most_assignments=most)

    def _let_go(self) -> None:
        """In a fork: leave the connection to the parent, and refuse every call."""
        FORKS.keep(self.connection._client)
        self.connection._client, self.connection.__class__ = None, _ParentsConnection

    def acquire_retention_lock(self) -> bool:
        return not self.options.roles  # none of them may purge

    async def close(self) -> None:
        if self._closed or (self.connection.is_closed and self.failure is None):  # in a fork it is the parent's
            return
        self._closed = True
        await self._services.stop()
        await self._watch.stop()
        await self._commits.close()
        await self.audit.close()
        await self.state.close()
        await self.connection.close()


async def create(options: NatsOptions, *, keeps_shared: bool) -> list[str]:
    """
    Make the streams of a store that are not there; returns their names.

    A stream that is there and differs from what these options say is refused, before another one is made.
    """
    if options.roles:
        problem = f"a user with the role {options.roles[0]} makes no store"
        raise StorePermissionError(options.shown, problem, "do this as an administrator, without nats.roles")
    connection = Connection(options, roles.denial)
    await connection.open()
    try:
        shared = AssignmentStream(connection, most=options.max_shared_assignments)
        names = [Names(options.name).state, *([shared.name] if keeps_shared else [])]
        missing = [name for name in names if not await _is_as_wanted(connection, name)]
        await ensure_stream(connection, state_stream(Names(options.name), options.replicas, options.max_bytes))
        if keeps_shared:
            await shared.ensure()
        return missing
    finally:
        await connection.close()


async def _is_as_wanted(connection: Connection, name: str) -> bool:
    """Whether a stream is there; one with other replicas or another bound than the configured ones is an error."""
    options = connection.options
    try:
        found = (await stream_info(connection, name)).config
    except RefusedError as error:
        if error.number != NOT_FOUND:
            raise
        return False
    is_state = name == Names(options.name).state
    wanted = {"num_replicas": options.replicas, "max_bytes": options.max_bytes if is_state else None}
    differs = [
        f"{field} is {found.get(field)}, not {value}"
        for field, value in wanted.items()
        if value is not None and found.get(field) != value
    ]
    if differs:
        way_out = f"change it (nats stream edit {name}), or leave out what differs"
        raise StoreVersionError(options.shown, f"the stream {name} is there: {'; '.join(differs)}", way_out)
    return True


class StoreWatch:
    """
    A look at the stream of a store every second, and after every reconnection before anything is changed.

    A stream that was deleted is not there, one that was made again or restored through the server has another time of
    creation, and one whose files were replaced by older ones ends before a sequence that this process knows of. What
    does not answer is waited for: only an answer can say that the store of this process is gone.
    """

    def __init__(self, connection: Connection, names: Names, wake_all: Callable[[], None]) -> None:
        self._connection, self._names, self._wake_all = connection, names, wake_all
        self._created = ""
        self._hint = asyncio.Event()
        self._services = Services("watch of the store")
        self._forget: Callable[[], None] | None = None
        self._subscriptions: list[Subscription] = []

    async def start(self, found: StreamInfo) -> None:
        """Watch the stream that was found."""
        connection, state = self._connection, self._names.state
        self._created = found.created
        self._saw(found)
        connection.is_watched = True
        self._forget = connection.on_reconnect(self._hint.set)
        roles, listen = connection.options.roles, connection.listen
        if not roles or "router" in roles:
            self._subscriptions.append(await listen(self._names.users, self._answer))
        if not roles:
            self._subscriptions.append(await listen(f"{ADVISORY}STREAM.*.{state}", self._hear))
        self._services.keep("looks", self._run)

    async def stop(self) -> None:
        if self._forget is not None:
            self._forget()
            self._forget = None
        await self._services.stop()
        if self._connection.is_up:
            await self._connection.unsubscribe(self._subscriptions)

    def _saw(self, found: StreamInfo) -> None:
        self._connection.highest = max(self._connection.highest, found.state.get("last_seq", 0))

    def _hear(self, message: Heard) -> None:
        if not message.subject.startswith(_HARMLESS):
            self._hint.set()

    async def _answer(self, message: Heard) -> None:
        if message.reply:
            process = f"pid {os.getpid()} on {socket.gethostname()}"
            await self._connection.publish(message.reply, json.encode(StoreUser(process, self._created)))

    async def _run(self) -> None:
        """Look until the store is gone, or cancelled."""
        while self._connection.failure is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hint.wait()
            self._hint.clear()
            if await self._connection.wait_until_up(LOOK_S):
                await self.look()

    async def look(self) -> None:
        """Look at the stream; what looks wrong is looked at again, while nothing is changed."""
        for number in range(LOOKS):
            highest = self._connection.highest
            try:
                found = await stream_info(self._connection, self._names.state, timeout=LOOK_S)
            except RefusedError as error:
                if error.number != NOT_FOUND:
                    return
                found = None
            except (StoreError, msgspec.DecodeError):
                return
            if found is not None and found.created == self._created and found.state.get("last_seq", 0) >= highest:
                self._saw(found)
                self._connection.trust(True)
                return
            self._connection.trust(False)
            if number < LOOKS - 1:
                await asyncio.sleep(AGAIN_S)
        await self._end(found, highest)

    async def _end(self, found: StreamInfo | None, highest: int) -> None:
        """End the store of this process, which is gone, and leave a note in the one that has its place."""
        shown, stream = self._connection.options.shown, self._names.state
        if found is None:
            problem = f"its stream {stream} was deleted while it was open"
            way_out = "restore it from a backup (nats stream restore), or start again to make a new, empty store"
        else:
            last = found.state.get("last_seq", 0)
            what = "made again, or restored from a backup," if found.created != self._created else "set back"
            problem = f"its stream {stream} was {what} while it was open: it was at {highest} and is at {last}"
            way_out = "start again to go on with what is there now; reefknot doctor says what to check first"
            options = self._connection.options
            if not (options.read_only or options.roles):
                await self._note(Restored(self._created, found.created, highest, last, found.ts))
        logger().error("%s: %s; %s", shown, problem, way_out)
        self._connection.end_with(lambda: StoreReplacedError(shown, problem, way_out))
        self._wake_all()

    async def _note(self, note: Restored) -> None:
        """Leave a note for `doctor`, unless another process has left one that says more."""
        connection, subject = self._connection, self._names.restored
        try:
            known = await last_message(connection, self._names.state, subject)
            if known is not None and known.body and json.decode(known.body, type=Restored).was_at >= note.was_at:
                return
            message = Message(subject, json.encode(note), 0 if known is None else known.sequence, ttl=NOTE_S)
            answer = await connection.request(subject, message.body, headers=message.headers(), timeout=LOOK_S)
            connection.check(answer.data)
        except (StoreError, msgspec.DecodeError) as error:  # another one was faster, or may
            logger().debug("no note of the restored store was left (%s)", error_text(error))


async def sweep_blobs(state: State) -> int:
    """
    Remove payloads and results whose records are gone: the server removes a record, but not its parts.

    Returns how many messages went. A record and its blobs are stored in one batch, so a blob without one is left over.
    """
    connection, names, gone = state.connection, state.names, 0
    body = {"subjects_filter": f"{names.name}.blob.>"}
    answer = await connection.api(f"STREAM.INFO.{names.state}", body)
    subjects = json.decode(answer, type=StreamInfo).state.get("subjects") or {}
    for subject in sorted(subjects)[:MOST_SWEPT]:
        owner, field, part = subject.split(".")[2:5]
        if field == "key":
            continue  # it has the time limit of its record
        if field == "unique":
            owner = part
        blob = await last_message(connection, names.state, subject)
        record = await last_message(connection, names.state, f"{names.name}.work.*.*.{owner}")
        if blob is not None and blob.body and (record is None or not record.body):
            nothing = Message(subject, b"", blob.sequence, ttl=1)
            answered = await connection.request(subject, b"", headers=nothing.headers())
            connection.check(answered.data)
            gone += 1
    return gone
