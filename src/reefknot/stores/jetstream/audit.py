"""
The chain of events that this process writes, on its way into the audit stream; and events that dead processes left.

Every process has a chain of its own. Its events are stored in the batch of the change they belong to, in the process's
outbox; then a task copies them into the audit stream, in order, and an event leaves the outbox with the next batch
after its copy. When a process dies in between, its outbox still has the events, and any other process copies them. Both
copy by compare-and-set on the chain, so an event is copied once.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from math import inf

from reefknot.audit.model.chain import ANCHOR, Head, anchor_in, link
from reefknot.audit.model.event import timestamp_ms
from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreError, StoreFullError
from reefknot.runtime.changes import Waiters
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.seeds import new_id
from reefknot.runtime.tasks import Services
from reefknot.stores.jetstream.connection import Connection, RefusedError, UnansweredError
from reefknot.stores.jetstream.events import SealedEvent, StoredEvent, decoded, outbox_events, sealed
from reefknot.stores.jetstream.reads import LATEST, StreamMessage, behind, last_message, message_at, page, scan
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.streams import Names, stream_info
from reefknot.stores.jetstream.wire import WRONG_LAST, Written

MOST_COPIED = 200
"""Events that are copied in one batch."""
MOST_COPIED_BYTES = 4 << 20
MOST_UNCOPIED_BYTES = 400_000
"""Bytes of events that may wait for their copy before the next changes wait too."""
MOST_OUTBOX_BYTES = 900_000
COMPRESSED_FROM = 256_000
HEADROOM = 8192
"""Bytes of a message that its headers may need."""
GRACE_MS = 500
"""How long the events in a process's outbox are left to it: a living process copies them within milliseconds."""
RECOVER_EVERY_S = 10.0
OUTBOX_KEPT_MS = 86_400_000
LATE_S = 5.0
"""How long an event may wait for its copy before it counts as late."""
LONGEST_PAUSE_S = 2.0
CLOSING_S = 5.0
TRIM = "trim"
"""The name, in place of a writer's, of the record of how far retention has gone."""


class _Uncopied:
    """Copies events of one chain into the audit stream. `position` is the stream's sequence of its last event."""

    def __init__(self, connection: Connection, names: Names, chain: str) -> None:
        self._connection = connection
        self._names = names
        self._chain = chain
        self.position = 0
        self._is_alone = False
        self.copied = 0
        """The number in its chain of the last event that was found in the stream."""

    async def send(self, events: Sequence[SealedEvent]) -> None:
        """
        Store these behind the chain's last event.

        As one batch, unless no other process wrote to the stream last time: then one after the other, without a batch's
        wait for the server's disk. Each message expects the one before it at the end of the stream; if another process
        writes in between, the next message is refused, and so are all that follow it.
        """
        before, is_alone, self._is_alone = self.position, self._is_alone, False
        if is_alone:
            messages = [self._behind(one, before + number, is_at_end=True) for number, one in enumerate(events)]
            self.position = await self._connection.store_in_order(messages)
        else:
            messages = [(one.subject, one.body, {}) for one in events]
            messages[0] = self._behind(events[0], before)
            self.position = await self._connection.store(messages)
        has_replicas = self._connection.options.replicas > 1  # they refuse a message that follows another this closely
        self._is_alone = self.position == before + len(events) and not has_replicas

    def _behind(self, event: SealedEvent, position: int, is_at_end: bool = False) -> Written:
        headers = Message(event.subject, expected=position, over=self._names.chain(self._chain)).headers()
        if is_at_end:
            headers["Nats-Expected-Last-Sequence"] = str(position)
        return event.subject, event.body, headers

    async def missing(self, events: Collection[SealedEvent]) -> list[SealedEvent]:
        """The events among these that are not in the audit stream yet, by the last one that is."""
        last = await last_message(self._connection, self._names.audit, self._names.chain(self._chain))
        removed = await self._removed() if last is None else 0
        events = list(events)  # more may have come meanwhile, and have been copied by others
        self.position = 0 if last is None else last.sequence
        if last is None:
            self.copied = removed
            return [one for one in events if one.sequence > removed]
        found = decoded(last.body)
        self.copied = 0 if found is None else found.sequence
        if found is None or not events or found.sequence < events[0].sequence:
            return list(events)
        for number, event in enumerate(events):
            if (event.sequence, event.hash) == (found.sequence, found.hash):
                return list(events[number + 1 :])
        if found.sequence > events[-1].sequence:  # copied, and more after it
            return []
        text = "event %s of chain %s in %s was not written by this process; `reefknot audit verify` shows what changed"
        logger().error(text, found.sequence, self._chain, self._names.audit)
        return list(events)

    async def _removed(self) -> int:
        """The last event of the chain that retention removed, by its anchor."""
        bodies = [event.entry.body for _, event in await anchors(self._connection, self._names)]
        heads = [head for head in map(anchor_in, bodies) if head is not None and head.chain == self._chain]
        return max((head.sequence for head in heads), default=0)


async def anchors(connection: Connection, names: Names) -> list[tuple[int, StoredEvent]]:
    """All anchor events with their positions; there are few."""
    found: list[tuple[int, StoredEvent]] = []
    position, is_more = 0, True
    while is_more:
        some, is_more = await page(connection, names.audit, names.events(ANCHOR), start=behind(position), most=1000)
        for message in some:
            event = decoded(message.body)
            if event is not None:
                found.append((message.sequence, event))
        position = some[-1].sequence if some else position
    return found


class AuditWriter:
    """The chain of this process. `Commits` seals and stores its events; a task copies them."""

    def __init__(self, state: State) -> None:
        self.writer = new_id()
        self.head = Head(self.writer)
        self._connection, self._names = connection, names = state.connection, state.names
        self._clock = state.clock
        self._uncopied: deque[SealedEvent] = deque()
        self._stored_at: deque[float] = deque()
        """The times at which those were stored."""
        self._uncopied_bytes = 0
        self._chain = _Uncopied(connection, names, self.writer)
        self._changes = Waiters()
        self.services = Services("store")
        self._more = asyncio.Event()
        self._has_outbox = False
        self._settled: dict[str, int] = {}
        """By writer: the outbox whose events are known to be in the audit stream."""

    @property
    def position(self) -> int:
        """The position in the log of the last event of this chain; 0 before the first."""
        return self._chain.position

    @property
    def late(self) -> int:
        """The number of events whose copy is overdue."""
        before = self._clock.now() - LATE_S
        return sum(at < before for at in self._stored_at)

    async def start(self) -> None:
        """Begin to copy events; not in a store that is open for reading only, which writes none."""
        if self._connection.options.read_only:
            return
        self.services.keep("copy of events", self._copy_events)
        self.services.keep("recovery of events", self._recover_now_and_then)

    async def close(self) -> None:
        """Copy the remaining events, for a bounded time, and remove the outbox. Call it after the last batch."""
        if self.services.names and not await self.copied(CLOSING_S if self._connection.is_up else 0.0):
            logger().warning("%d audit events are not copied yet; another process copies them", len(self._uncopied))
        await self.services.stop()
        if self._has_outbox and not self._uncopied and self._connection.is_up:
            try:
                await self._remove_outbox(self.writer, None)
            except (StoreError, RefusedError) as error:
                logger().info("the empty outbox of this process was not removed (%s)", error_text(error))

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def has_room(self) -> None:
        """Wait while too many events wait for their copy."""
        await self._changes.watch(
            self._bytes_waiting,
            "copied",
            pause=lambda waiting: 0.0 if waiting <= MOST_UNCOPIED_BYTES else inf,
            timeout=inf,
        )

    async def _bytes_waiting(self) -> int:
        return self._uncopied_bytes

    def seal(self, events: Sequence[AuditEntry]) -> list[SealedEvent]:
        """The events with their numbers and hashes, if they are stored next."""
        head, found = self.head, []
        for entry in events:
            head, _ = link(head, entry.body)
            event = sealed(self._names, head, entry)
            if len(event.body) > self._most_bytes:
                problem = f"an event has {len(event.body)} bytes, and {self._most_bytes} are the most"
                raise StoreFullError(self._connection.options.shown, problem, "record less in it")
            found.append(event)
        return found

    @property
    def _most_bytes(self) -> int:
        return min(MOST_OUTBOX_BYTES, self._connection.max_payload - HEADROOM)

    def outbox(self, sealed: Sequence[SealedEvent]) -> bytes:
        """The body of the outbox: these events and all that are not copied yet, as a CloudEvents batch."""
        body = b"[%s]" % b",".join([one.body for one in self._uncopied] + [one.body for one in sealed])
        if len(body) > COMPRESSED_FROM:
            body = zlib.compress(body, 1)
        if len(body) > self._most_bytes:
            problem = f"the events of these changes have {len(body)} bytes, compressed"
            raise StoreFullError(self._connection.options.shown, problem, "make it in smaller parts")
        return body

    def stored(self, sealed: Sequence[SealedEvent]) -> None:
        """Note that the batch with this outbox is stored."""
        self._has_outbox = True
        if sealed:
            self.head = Head(self.writer, sealed[-1].sequence, sealed[-1].hash)
            # While the answer was missing another process may have found them in the outbox, and copied them.
            left = [one for one in sealed if one.sequence > self._chain.copied]
            self._uncopied += left
            self._stored_at += [self._clock.now()] * len(left)
            self._uncopied_bytes += sum(len(one.body) for one in left)
            self._more.set()

    async def copied(self, timeout: float) -> bool:
        """
        Wait until what is stored now is in the audit stream too. False if that takes longer than `timeout` seconds.
        """
        wanted = self.head.sequence
        left = await self._changes.watch(
            self._first_waiting, "copied", pause=lambda first: 0.0 if first > wanted else inf, timeout=timeout
        )
        return left > wanted

    async def _first_waiting(self) -> float:
        return self._uncopied[0].sequence if self._uncopied else inf

    async def _copy_events(self) -> None:
        """Copy events as they come, until cancelled; failures are retried."""
        while True:
            if not self._uncopied:
                self._more.clear()
                await self._more.wait()
            tries = 0
            while self._uncopied:
                some = _batch_of(self._uncopied)
                try:
                    await self._chain.send(some)
                    self._drop(len(some))
                    tries = 0
                    continue
                except Exception as error:  # the events are not lost in any case, and are tried again
                    tries += 1
                    if not _may_be_stored(error) or tries > 1:
                        self._say_waiting(tries, error)
                try:
                    left = await self._chain.missing(self._uncopied)
                    self._drop(len(self._uncopied) - len(left))
                except Exception as error:
                    self._say_waiting(tries, error)
                await self._connection.wait_until_up(1.0)
                await asyncio.sleep(min(LONGEST_PAUSE_S, 0.005 * 2 ** min(tries, 10)))

    def _drop(self, number: int) -> None:
        for _ in range(number):
            self._uncopied_bytes -= len(self._uncopied.popleft().body)
            self._stored_at.popleft()
        self._changes.wake("copied")

    def _say_waiting(self, tries: int, error: Exception) -> None:
        if tries % 10 == 1:
            text = error_text(error)
            logger().warning("%d events wait to be copied into %s (%s)", len(self._uncopied), self._names.audit, text)

    # ---- recovery ----------------------------------------------------------------------------------------------------

    async def _recover_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(RECOVER_EVERY_S)
            if self._connection.is_up:
                await self.recover()

    async def recover(self, *, is_patient: bool = False) -> None:
        """
        Copy the events that dead processes have left in their outboxes.

        With `is_patient`, wait for events that were stored a moment ago and are not copied yet. A store that is open
        for reading only leaves them where they are.
        """
        if self._connection.options.read_only:
            return
        try:
            if await self._recover() and is_patient:
                await asyncio.sleep(2 * GRACE_MS / 1000)
                await self._recover()
        except (StoreError, RefusedError, TimeoutError) as error:
            logger().warning("audit events of ended processes are not copied yet; trying again (%s)", error_text(error))

    async def _recover(self) -> int:
        """Check all outboxes; returns how many have uncopied events that are still too young to be copied here."""
        names = self._names
        start = {**LATEST, "headers_only": True}
        found = await scan(self._connection, names.state, [names.outbox("*")], start=start)
        now = timestamp_ms((await stream_info(self._connection, names.state)).ts) or 0
        settled, waiting = {}, 0
        for message in found:
            writer = message.subject.rsplit(".", 1)[1]
            if writer in (self.writer, TRIM) or message.headers.get("Nats-Msg-Size") == "0":
                continue
            age = now - message.stored_at
            is_settled = self._settled.get(writer) == message.sequence
            if is_settled or await self._recover_outbox(writer, may_copy=age >= GRACE_MS):
                settled[writer] = message.sequence
                if age > OUTBOX_KEPT_MS:
                    await self._remove_outbox(writer, message.sequence)
            else:
                waiting += 1
        self._settled = settled
        return waiting

    async def _recover_outbox(self, writer: str, *, may_copy: bool) -> bool:
        """Copy the missing events of one outbox. True when none is missing any more."""
        outbox = await last_message(self._connection, self._names.state, self._names.outbox(writer))
        events = [] if outbox is None else outbox_events(self._names, outbox.body)
        chain = _Uncopied(self._connection, self._names, writer)
        missing = await chain.missing(events) if events else []
        if outbox is None or not missing or (chain.position == 0 and await self._were_removed(outbox)):
            return True
        if not may_copy:
            return False
        while missing:
            some = _batch_of(missing)
            try:
                await chain.send(some)
            except (UnansweredError, RefusedError) as error:
                if not _may_be_stored(error):
                    raise
                return False  # the writer lives, or another process does the same: the next check will show
            missing = missing[len(some) :]
        logger().info("the last events of the process %s were copied for it", writer)
        return True

    async def _were_removed(self, outbox: StreamMessage) -> bool:
        """Whether a copy of these events would have been removed by retention, as everything of its time was."""
        state = (await stream_info(self._connection, self._names.audit)).state
        if state["first_seq"] <= 1:
            return False
        first = await message_at(self._connection, self._names.audit, state["first_seq"])
        return first is None or first.stored_at > outbox.stored_at

    async def _remove_outbox(self, writer: str, sequence: int | None) -> None:
        """Remove an outbox that has nothing left to copy, unless its writer has written again."""
        message = Message(self._names.outbox(writer), b"", sequence, ttl=1)
        answer = await self._connection.request(message.subject, message.body, headers=message.headers())
        try:
            self._connection.check(answer.data)
        except RefusedError as error:
            if error.number not in WRONG_LAST:
                raise


async def uncopied_events(connection: Connection, names: Names) -> float | None:
    """Seconds for which the oldest uncopied event has waited; None without one."""
    found = await scan(connection, names.state, [names.outbox("*")])
    now = timestamp_ms((await stream_info(connection, names.state)).ts) or 0
    ages = []
    for message in found:
        writer = message.subject.rsplit(".", 1)[1]
        events = [] if writer == TRIM else outbox_events(names, message.body)
        if events and await _Uncopied(connection, names, writer).missing(events):
            ages.append((now - message.stored_at) / 1000)
    return max(ages, default=None)


def _batch_of(events: Sequence[SealedEvent]) -> list[SealedEvent]:
    """The first of these events that go into one batch."""
    some: list[SealedEvent] = []
    size = 0
    for event in events:
        size += len(event.body)
        if some and (len(some) == MOST_COPIED or size > MOST_COPIED_BYTES):
            break
        some.append(event)
    return some


def _may_be_stored(error: Exception) -> bool:
    """
    Whether the events of a failed copy may be in the stream: the answer is missing, or another process was faster.
    """
    return isinstance(error, UnansweredError) or (isinstance(error, RefusedError) and error.number in WRONG_LAST)
