"""
`JetStreamStore`: all parts of a store on a NATS server or cluster, which many machines share.

Its time is the server's: the difference to this machine's clock is measured at the start, and again at intervals.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec import json

from reefknot.clock import SteadyClock
from reefknot.core.clock import Clock
from reefknot.core.time import Moment
from reefknot.errors import ReefknotError, StoreError, StoreVersionError
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.queue.port.quarantine import QuarantineStore
from reefknot.runtime.forks import FORKS, opened_before_fork
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import Services
from reefknot.stores.jetstream.audit_log import JetStreamAuditLog
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.connection import Connection, NatsOptions, NobodyThereError, options_from_url
from reefknot.stores.jetstream.control import JetStreamControl, JetStreamValues
from reefknot.stores.jetstream.events import AuditWriter
from reefknot.stores.jetstream.idempotency import JetStreamIdempotencyStore
from reefknot.stores.jetstream.leases import JetStreamLeases
from reefknot.stores.jetstream.reads import last_message
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.streams import Names, StreamInfo, ensure_stream, state_stream, stream_info
from reefknot.stores.jetstream.transport import JetStreamTransport
from reefknot.stores.jetstream.work import JetStreamWorkQueue

if TYPE_CHECKING:
    from nats.aio.client import Client

ALIGN_EVERY_S = 30.0
MOST_SWEPT = 10_000
SWEEP_EVERY = 20
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
        self.connection = Connection(options)
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
            try:
                await ensure_stream(self.connection, state_stream(self.names, replicas, max_bytes))
            except NobodyThereError as error:
                raise StoreVersionError(self.options.shown, "JetStream is not enabled there", error.way_out) from error
            await self._align()
            self._commits.start()
        except BaseException:
            await self.connection.close()
            raise
        if self._has_server_time:
            self._services.keep("server time", self._keep_up)
        return self

    async def _align(self) -> None:
        """Adopt the server's time, which was read halfway between request and answer."""
        if not self._has_server_time:
            return
        clock = self._machine_clock
        asked = clock.now()
        found = await stream_info(self.connection, self.names.state)
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
                if number % SWEEP_EVERY == 0 and not self.options.read_only:
                    await sweep_blobs(self.state)
            except (StoreError, ValueError) as error:
                logger().info("the server's time was not read (%s); trying again", error_text(error))

    @property
    def failure(self) -> ReefknotError | None:
        """The final error of the store; always None, because an unreachable server may come back."""
        return None

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
        return True

    async def close(self) -> None:
        if self._closed or self.connection.is_closed:  # in a fork it is the parent's
            return
        self._closed = True
        await self._services.stop()
        await self._commits.close()
        await self.audit.close()
        await self.state.close()
        await self.connection.close()


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
        owner, field = subject.split(".")[2:4]
        if field == "key":
            continue  # it has the time limit of its record
        blob = await last_message(connection, names.state, subject)
        record = await last_message(connection, names.state, f"{names.name}.work.*.*.{owner}")
        if blob is not None and blob.body and (record is None or not record.body):
            nothing = Message(subject, b"", blob.sequence, ttl=1)
            answered = await connection.request(subject, b"", headers=nothing.headers())
            connection.check(answered.data)
            gone += 1
    return gone
