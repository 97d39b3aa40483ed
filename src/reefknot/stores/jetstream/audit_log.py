"""
The audit log of a store on JetStream: the chains of all processes that ever wrote to it, in packs, in one stream.

The sequence of an event is its position in the log: a thousand positions belong to each message of the stream, and the
last event of a pack has the last of them. Its number in its chain is used by `heads`, `verify_chains` and `read_chain`.
The server filters packs by chain and by what they are about; events are filtered here.

Retention removes whole packs from the start of the log. It is a change like any other, one process after the other: the
anchors of all chains that lose events are stored first, in the chain of the process that removes, with a record of how
far it goes; then the packs up to there are purged, by the next process if this one dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from math import inf
from typing import Any

from msgspec import Struct, json, structs

from reefknot.audit.model.chain import (
    ANCHOR,
    GENESIS,
    Head,
    Mismatch,
    Removal,
    RetentionInForce,
    anchor_body,
    anchor_in,
)
from reefknot.audit.model.event import timestamp
from reefknot.audit.port import EVERYTHING, AuditEntry, AuditQuery, ChainReport, KeptEntry, LogEnd
from reefknot.core.time import Moment
from reefknot.errors import StoreUnavailableError
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.events import (
    POSITIONS,
    RARE,
    UNREADABLE,
    AuditWriter,
    Pack,
    StoredEvent,
    Verification,
    chain_of,
)
from reefknot.stores.jetstream.reads import Feed, Start, StreamMessage, behind, count, first_message, last_message, page
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.streams import stream_info

PAGE = 1000
MOST_PACKS_AT_ONCE = 200
"""Packs that are asked for at once."""
FULL_WINDOW = 250
"""Packs that a window of a search from the end should hold: all of them are in memory."""
APART_MS = 10_000
"""The most by which the time of an event may be after that of its message: clocks and rounding."""
DELAYED_MS = 60_000
"""How long an event may wait before it is stored, and still be found by a time."""
MOST_PASSES = 5
"""Times that a verification starts over because retention removed events in the meantime."""
MOST_CHAINS_AT_ONCE = 50
"""Most chains that one step of retention shortens: each takes an anchor event."""


class _TrimRecord(Struct, frozen=True):
    """The record of how far retention has gone: the sequence of the last message that it removed."""

    until: int


class _Gone:
    """The events of one chain that a step of retention removes."""

    def __init__(self, event: StoredEvent) -> None:
        self.first = self.last = event
        self.previous: str | None = GENESIS if event.sequence == 1 else None

    def add(self, event: StoredEvent) -> None:
        self.previous, self.last = self.last.hash, event


class _Step:
    """The events that one step of retention removes."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        """The sequence of the record of retention that this step goes on from."""
        self.until = 0
        self.count = 0
        self.chains: dict[str, _Gone] = {}
        self.anchors: dict[str, tuple[Head, StoredEvent]] = {}
        """By chain: the newest of the anchors that are removed."""

    def add(self, sequence: int, events: Iterable[StoredEvent | None]) -> None:
        self.until = sequence
        for event in events:
            self.count += 1
            if event is not None:
                self._add(event)

    def _add(self, event: StoredEvent) -> None:
        if event.chain in self.chains:
            self.chains[event.chain].add(event)
        else:
            self.chains[event.chain] = _Gone(event)
        head = anchor_in(event.entry.body) if event.entry.event_type == ANCHOR else None
        if head is not None:
            self.anchors[head.chain] = head, event


class JetStreamAuditLog:
    """Appends events to the chain of this process, and reads, verifies and trims those of all."""

    def __init__(self, state: State, commits: Commits, writer: AuditWriter, *, has_server_time: bool = True) -> None:
        """Without `has_server_time`, times of messages say nothing about those of events, which virtual clocks gave."""
        self._state = state
        self._commits = commits
        self._writer = writer
        self._connection = state.connection
        self._names = state.names
        self._has_server_time = has_server_time
        self._beginning = asyncio.Lock()
        self._last = 0
        self._feed: Feed | None = None
        self._places: dict[str, tuple[int, int]] = {}
        """By chain: the number of the last event that `read_chain` has read, and its position."""

    async def append(self, entries: Sequence[AuditEntry]) -> Head:
        def run(batch: Batch, now: Moment) -> None:
            batch.events.extend(entries)

        await self._commits.change(run)
        return self._writer.head

    def append_soon(self, entries: Sequence[AuditEntry]) -> asyncio.Future[Head]:
        def run(batch: Batch, now: Moment) -> None:
            batch.events.extend(entries)

        stored = self._commits.change_soon(run)
        head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()

        def report(done: asyncio.Future[None]) -> None:
            if head.cancelled():
                return
            error = StoreUnavailableError(self._names.state, "it is closed", "open it again")
            failed = error if done.cancelled() else done.exception()
            if failed is None:
                head.set_result(self._writer.head)
            else:
                head.set_exception(failed)

        stored.add_done_callback(report)
        return head

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        return await (self._newest(query) if query.newest_first else self._oldest(query))

    def _filters(self, query: AuditQuery) -> list[str]:
        if query.event_type in RARE:
            return [self._names.rare_packs]
        return [self._names.packs] if query.work_id is None else self._names.packs_about(query.work_id)

    def _stored_between(self, query: AuditQuery) -> tuple[int, float]:
        """The times (ms UTC) between which matching events were stored."""
        if not self._has_server_time:
            return 0, inf
        until = inf if query.until is None else query.until + DELAYED_MS
        return (0 if query.since is None else query.since - APART_MS), until

    async def _oldest(self, query: AuditQuery) -> list[KeptEntry]:
        found: list[KeptEntry] = []
        since, until = self._stored_between(query)
        most = min(MOST_PACKS_AT_ONCE, query.limit)
        async for message in self._messages(self._filters(query), after=query.after, since=since, most=most):
            if message.stored_at > until or (query.before is not None and message.sequence > _last_pack(query.before)):
                break
            found += Pack(message).kept(query)
            if len(found) >= query.limit:
                break
        return found[: query.limit]

    async def _newest(self, query: AuditQuery) -> list[KeptEntry]:
        """Events from the end backwards, in windows of the stream that grow while they hold few packs."""
        state = (await stream_info(self._connection, self._names.state)).state
        low, high = max(query.after // POSITIONS, state["first_seq"] - 1), state["last_seq"]
        if query.before is not None:
            high = min(high, _last_pack(query.before))
        filters, since = self._filters(query), self._stored_between(query)[0]
        found: list[KeptEntry] = []
        width, above = min(FULL_WINDOW, max(16, 4 * query.limit)), None
        while high > low and len(found) < query.limit:
            start = max(low, high - width)
            if high - start > FULL_WINDOW:
                above = await self._number(filters, high) if above is None else above
                number = await self._number(filters, start)
                if number - above > 2 * FULL_WINDOW:
                    width = max(FULL_WINDOW, width // 4)
                    continue
                above = number
            else:
                above = None
            window = [one async for one in self._messages(filters, after=start * POSITIONS, until=high)]
            for message in reversed(window):
                found += reversed(Pack(message).kept(query))
            if window and window[0].stored_at < since:
                break
            high = start
            if len(window) < FULL_WINDOW // 4:
                width *= 4
        return found[: query.limit]

    async def _number(self, filters: Sequence[str], sequence: int) -> int:
        """The number of packs behind a message."""
        return await count(self._connection, self._names.state, filters, start=behind(sequence))

    async def _messages(
        self,
        filters: Sequence[str],
        *,
        after: int = 0,
        since: int = 0,
        until: float = inf,
        most: int = MOST_PACKS_AT_ONCE,
    ) -> AsyncIterator[StreamMessage]:
        """
        The messages of these filters as of now, some at a time: from that of a position on, up to this sequence.

        `since` is a time (ms UTC) before which the server stored those that are left out.
        """
        start: Start = behind(after // POSITIONS)
        if since > 0 and not after:
            start = {"deliver_policy": "by_start_time", "opt_start_time": timestamp(since / 1000)}
        is_more = True
        while is_more:
            some, is_more = await page(self._connection, self._names.state, filters, start=start, most=max(1, most))
            for message in some:
                if message.sequence > until:
                    return
                yield message
                start = behind(message.sequence)
            most = min(MOST_PACKS_AT_ONCE, 4 * most)

    async def end(self) -> LogEnd:
        """The end of the log: no event of now is behind it, though the newest may be before it."""
        info = await stream_info(self._connection, self._names.state)
        return LogEnd(f"{self._names.state} of {info.created}", info.state["last_seq"] * POSITIONS)

    async def removed_up_to(self) -> int:
        record, _ = await self._trimmed()
        return record.until * POSITIONS

    async def newest_at(self) -> int | None:
        newest = await self.read(AuditQuery(newest_first=True, limit=1))
        return newest[0].entry.at if newest else None

    async def wait(self, after: int, timeout: float) -> bool:
        async with self._beginning:
            if self._feed is None:
                self._feed = await self._follow()
        self._last = max(self._last, self._writer.position)
        last = await self._state.watch(
            self._last_heard, "audit", pause=lambda last: inf if last <= after else 0.0, timeout=timeout
        )
        return last > after

    async def _follow(self) -> Feed:
        last = await last_message(self._connection, self._names.state, self._names.packs)
        sequence = 0 if last is None else last.sequence
        self._last = sequence * POSITIONS
        start = {**behind(sequence), "headers_only": True}
        feed = Feed(self._connection, self._names.state, [self._names.packs], self._arrived, start=start)
        feed.position = sequence
        await feed.start()
        return feed

    def _arrived(self, message: StreamMessage) -> None:
        self._last = max(self._last, message.sequence * POSITIONS)
        self._state.wake("audit")

    async def _last_heard(self) -> int:
        return self._last

    async def close(self) -> None:
        """Follow the log no longer."""
        if self._feed is not None:
            await self._feed.stop()

    # ---- chains ------------------------------------------------------------------------------------------------------

    async def head(self) -> Head:
        """The head of this process's chain; before its first event, that of the chain that was written last."""
        if self._writer.head.sequence:
            return self._writer.head
        return await self._head_of(self._names.packs) or self._writer.head

    async def _head_of(self, packs: str) -> Head | None:
        """The head of the chain that the last of these packs belongs to; None when there is none that is readable."""
        last = await last_message(self._connection, self._names.state, packs)
        event = None if last is None else Pack(last).events()[-1:]
        return Head(event[0].chain, event[0].sequence, event[0].hash) if event and event[0] is not None else None

    async def heads(self) -> list[Head]:
        """The heads of all chains that have events, in the order of their beginnings."""
        kept = [head.chain for head in (anchor_in(one.entry.body) for one in await self._anchors()) if head]
        found = [chain_of(one) async for one in self._messages([self._names.first_packs], most=PAGE)]
        heads = [await self._head_of(self._names.chain(chain)) for chain in dict.fromkeys([*kept, *found])]
        return [one for one in heads if one is not None]

    async def read_chain(self, chain: str, *, after: int = 0, limit: int = PAGE) -> list[KeptEntry]:
        """A page of one chain's events behind its number `after`. Their sequences are the chain's numbers."""
        number, place = self._places.get(chain, (0, 0))
        place = place if number == after else 0
        found: list[KeptEntry] = []
        async for message in self._messages([self._names.chain(chain)], after=place):
            for position, event in Pack(message).placed():
                if position <= place or (event is not None and event.sequence <= after):
                    continue
                if event is None:  # in place of the next one
                    unreadable = AuditEntry(message.body, UNREADABLE, message.stored_at)
                    found.append(KeptEntry((found[-1].sequence if found else after) + 1, "", unreadable))
                else:
                    found.append(KeptEntry(event.sequence, event.hash, event.entry))
                self._places[chain] = found[-1].sequence, position
                if len(found) == limit:
                    return found
        return found

    async def _anchors(self) -> list[StoredEvent]:
        """All anchor events; there are few."""
        packs = [Pack(one) async for one in self._messages([self._names.rare_packs])]
        return [one for pack in packs for one in pack.events() if one is not None and one.entry.event_type == ANCHOR]

    async def verify(
        self,
        head: Head | None = None,
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Mismatch]:
        heads = [] if head is None else [head]
        reports = await self.verify_chains(heads, in_force=in_force, progress=progress)
        wanted = [one for one in reports if head is None or one.head.chain == head.chain]
        if len(wanted) == 1:
            return wanted[0].mismatches
        return [
            structs.replace(found, problem=f"chain {one.head.chain}: {found.problem}")
            for one in wanted
            for found in one.mismatches
        ]

    async def verify_chains(
        self,
        heads: Sequence[Head] = (),
        *,
        in_force: RetentionInForce | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[ChainReport]:
        """Verify all chains in one pass, and compare them with these heads, each with those of its chain."""
        own = [self._writer.head] if self._writer.head.sequence else []
        for _ in range(MOST_PASSES):
            first, last = await self._first(), (await self.end()).sequence // POSITIONS
            verification = Verification([*own, *heads], await self._anchors(), in_force)
            async for message in self._messages([self._names.packs], until=last):
                number = verification.add(self._names, Pack(message))
                if progress is not None:
                    progress(number)
            if await self._first() == first:
                break
        return verification.reports()

    async def _first(self) -> int:
        """The sequence of the first pack; 0 without one."""
        first = await first_message(self._connection, self._names.state, self._names.packs)
        return 0 if first is None else first.sequence

    # ---- retention ---------------------------------------------------------------------------------------------------

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        gone = 0
        while True:
            step = await self._plan(before)
            if not step.count:
                return gone
            gone += await self._remove(step, before, rule)

    async def _remove(self, step: _Step, before: int, rule: str) -> int:
        """Store the anchors of a step, which is planned again while others are faster, and purge the stream."""
        steps = [step]
        entries: list[tuple[Head, Removal]] = await self._removals(step, rule)

        async def plan_anew() -> None:
            steps[0] = await self._plan(before)
            entries[:] = await self._removals(steps[0], rule)

        def run(batch: Batch, now: Moment) -> None:
            if steps[0].count:
                record = json.encode(_TrimRecord(steps[0].until))
                batch.add(Message(self._names.trim, record, steps[0].revision))
                bodies = [anchor_body(head, now.wall, removal) for head, removal in entries]
                batch.events.extend(AuditEntry(body, ANCHOR, now.wall) for body in bodies)

        await self._commits.change(run, prepare=plan_anew)
        if steps[0].count:
            await self._purge(steps[0].until)
        return steps[0].count

    async def _purge(self, until: int) -> None:
        which = {"filter": self._names.packs, "seq": until + 1}
        await self._connection.api(f"STREAM.PURGE.{self._names.state}", which, timeout=30.0)

    async def _trimmed(self) -> tuple[_TrimRecord, int]:
        """The record of how far retention has gone, and its revision."""
        found = await last_message(self._connection, self._names.state, self._names.trim)
        return (_TrimRecord(0), 0) if found is None else (json.decode(found.body, type=_TrimRecord), found.sequence)

    async def _plan(self, before: int) -> _Step:
        """The next packs to remove: those from before this time, from the start of the log on, of a few chains."""
        record, revision = await self._trimmed()
        done = record.until
        if 0 < await self._first() <= done:  # the process that planned that step did not finish it
            await self._purge(done)
        step = _Step(revision)
        held: list[tuple[int, Sequence[StoredEvent | None]]] = []
        chains: set[str] = set()
        async for message in self._messages([self._names.packs], after=done * POSITIONS):
            events = Pack(message).events()
            if any(one is not None and one.entry.at >= before for one in events):
                break
            held.append((message.sequence, events))
            chains |= {one.chain for one in events if one is not None}
            if all(one is None or one.entry.event_type == ANCHOR for one in events):
                continue
            if step.count and len(chains) > MOST_CHAINS_AT_ONCE:
                break
            for sequence, some in held:
                step.add(sequence, some)
            held.clear()
        return step

    async def _removals(self, step: _Step, rule: str) -> list[tuple[Head, Removal]]:
        """The anchors that a step needs: of every chain that loses events, or an anchor and not all of its events."""
        if not step.count:
            return []
        hashes = {(head.chain, head.sequence): head.hash for head, _ in step.anchors.values()}
        lost = [gone for gone in step.chains.values() if gone.previous is None]
        if any((gone.last.chain, gone.last.sequence - 1) not in hashes for gone in lost):
            found = [anchor_in(one.entry.body) for one in await self._anchors()]
            hashes |= {(head.chain, head.sequence): head.hash for head in found if head is not None}
        removals: list[tuple[Head, Removal]] = []
        for gone in step.chains.values():
            last = gone.last
            previous = gone.previous or hashes.get((last.chain, last.sequence - 1), "")
            shown = last.entry.body if previous else b""
            number = last.sequence - gone.first.sequence + 1
            removals.append((Head(last.chain, last.sequence, last.hash), Removal(rule, number, previous, shown)))
        for chain, (head, event) in step.anchors.items():
            if chain in step.chains:
                continue
            left = await last_message(self._connection, self._names.state, self._names.chain(chain))
            if left is not None and left.sequence > step.until:
                removals.append((head, _removal_in(event)))
        return removals


def _removal_in(event: StoredEvent) -> Removal:
    """The removal that an anchor describes, for another anchor."""
    anchor: dict[str, Any] = json.decode(event.entry.body)
    return Removal(anchor.get("rule", ""), 0, anchor.get("previous", ""), anchor.get("last", "").encode())


def _last_pack(before: int) -> int:
    """The sequence of the last pack that may have an event before this position."""
    return (before - 1 + POSITIONS - 1) // POSITIONS
