"""
The audit log of a store on JetStream: the chains of all processes that ever wrote to it, in one stream.

The sequence of an event is its position in the stream. Its number in its chain is used by `heads`, `verify_chains` and
`read_chain`. Type and work are in an event's subject, so the server filters by them; the rest is filtered here, page by
page. A read waits for what this process has stored, so it sees its own writes.

Retention removes from the start of the stream. It is a change like any other, one process after the other: the anchors
of all chains that lose events are stored first, in the chain of the process that removes, with a record of how far it
goes; then the stream is purged up to there, by the next process if this one dies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
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
from reefknot.audit.port import EVERYTHING, AuditEntry, AuditQuery, ChainReport, KeptEntry, LogEnd
from reefknot.core.time import Moment
from reefknot.errors import StoreUnavailableError
from reefknot.stores.jetstream.audit import TRIM, AuditWriter, anchors
from reefknot.stores.jetstream.commits import Batch, Commits
from reefknot.stores.jetstream.events import StoredEvent, Verification, decoded, subject_of
from reefknot.stores.jetstream.reads import Feed, StreamMessage, behind, last_message, page
from reefknot.stores.jetstream.state import Message, State
from reefknot.stores.jetstream.streams import stream_info

PAGE = 1000
WIDEST_WINDOW = 256_000
"""Positions that are looked through at once for the newest events of a kind."""
OWN_COPIES_S = 5.0
MOST_PASSES = 5
"""Times that a verification starts over because retention removed events in the meantime."""
MOST_CHAINS_AT_ONCE = 50
"""Most chains that one step of retention shortens: each takes an anchor event."""
UNREADABLE = "unreadable"


class _TrimRecord(Struct, frozen=True):
    """The record of how far retention has gone: the position of the last event that it removed."""

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

    def add(self, position: int, event: StoredEvent | None) -> None:
        self.until, self.count = position, self.count + 1
        if event is None:
            return
        if event.chain in self.chains:
            self.chains[event.chain].add(event)
        else:
            self.chains[event.chain] = _Gone(event)
        head = anchor_in(event.entry.body) if event.entry.event_type == ANCHOR else None
        if head is not None:
            self.anchors[head.chain] = head, event


class JetStreamAuditLog:
    """Appends events to the chain of this process, and reads, verifies and trims those of all."""

    def __init__(self, state: State, commits: Commits, writer: AuditWriter) -> None:
        self._state = state
        self._commits = commits
        self._writer = writer
        self._connection = state.connection
        self._names = state.names
        self._beginning = asyncio.Lock()
        self._has_recovered = False
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
            error = StoreUnavailableError(self._names.audit, "it is closed", "open it again")
            failed = error if done.cancelled() else done.exception()
            if failed is None:
                head.set_result(self._writer.head)
            else:
                head.set_exception(failed)

        stored.add_done_callback(report)
        return head

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _see_all(self) -> None:
        """Wait until the events of this process can be read; the first time, also those that dead processes left."""
        if not await self._writer.copied(OWN_COPIES_S):
            problem = f"events of this process were not copied into {self._names.audit} within {OWN_COPIES_S:g} s"
            raise StoreUnavailableError(self._connection.options.shown, problem, "check the server, and try again")
        async with self._beginning:
            if not self._has_recovered:
                await self._writer.recover(is_patient=True)
                self._has_recovered = True

    async def read(self, query: AuditQuery = EVERYTHING) -> list[KeptEntry]:
        await self._see_all()
        return await (self._newest(query) if query.newest_first else self._oldest(query))

    async def _oldest(self, query: AuditQuery) -> list[KeptEntry]:
        found: list[KeptEntry] = []
        filters = self._names.events(query.event_type, query.work_id)
        async for message in self._messages(filters, after=query.after, before=query.before, most=query.limit):
            kept = _kept(message)
            if query.matches(kept.entry):
                found.append(kept)
            if len(found) >= query.limit:
                break
        return found

    async def _newest(self, query: AuditQuery) -> list[KeptEntry]:
        """Events from the end backwards, in windows that grow while they hold too few matches."""
        first, last = await self._bounds()
        low = max(query.after, first - 1)
        high = last if query.before is None else min(last, query.before - 1)
        filters = self._names.events(query.event_type, query.work_id)
        found: list[KeptEntry] = []
        width = max(PAGE, query.limit)
        while high > low and len(found) < query.limit:
            start = max(low, high - width)
            newest: deque[KeptEntry] = deque(maxlen=query.limit - len(found))
            async for message in self._messages(filters, after=start, before=high + 1, most=high - start):
                kept = _kept(message)
                if query.matches(kept.entry):
                    newest.append(kept)
            found += reversed(newest)
            high, width = start, min(WIDEST_WINDOW, 4 * width)
        return found

    async def _messages(
        self, filters: Sequence[str], *, after: int = 0, before: int | None = None, most: int = PAGE
    ) -> AsyncIterator[StreamMessage]:
        """The messages of these filters as of now, some at a time."""
        is_more, position = True, after
        while is_more:
            some, is_more = await page(
                self._connection, self._names.audit, filters, start=behind(position), most=max(1, min(PAGE, most))
            )
            for message in some:
                if before is not None and message.sequence >= before:
                    return
                yield message
                position = message.sequence

    async def _bounds(self) -> tuple[int, int]:
        """The positions of the first and the last event; without any, the last is before the first."""
        state = (await stream_info(self._connection, self._names.audit)).state
        first: int = state["first_seq"]
        return first, state["last_seq"] if state["messages"] else max(0, first - 1)

    async def end(self) -> LogEnd:
        await self._see_all()
        info = await stream_info(self._connection, self._names.audit)
        return LogEnd(f"{self._names.audit} of {info.created}", info.state["last_seq"] if info.state["messages"] else 0)

    async def newest_at(self) -> int | None:
        newest = await self.read(AuditQuery(newest_first=True, limit=1))
        return newest[0].entry.at if newest else None

    async def wait(self, after: int, timeout: float) -> bool:
        await self._see_all()
        async with self._beginning:
            if self._feed is None:
                self._feed = await self._follow()
        self._last = max(self._last, self._writer.position)
        last = await self._state.watch(
            self._last_heard, "audit", pause=lambda last: inf if last <= after else 0.0, timeout=timeout
        )
        return last > after

    async def _follow(self) -> Feed:
        _, self._last = await self._bounds()
        start = {**behind(self._last), "headers_only": True}
        feed = Feed(self._connection, self._names.audit, [self._names.chain("*")], self._arrived, start=start)
        feed.position = self._last
        await feed.start()
        return feed

    def _arrived(self, message: StreamMessage) -> None:
        self._last = max(self._last, message.sequence)
        self._state.wake("audit")

    async def _last_heard(self) -> int:
        return self._last

    async def close(self) -> None:
        """Follow the log no longer."""
        if self._feed is not None:
            await self._feed.stop()

    @property
    def late(self) -> int:
        return self._writer.late

    # ---- chains ------------------------------------------------------------------------------------------------------

    async def head(self) -> Head:
        """The head of this process's chain; before its first event, that of the chain that was written last."""
        await self._see_all()
        if self._writer.head.sequence:
            return self._writer.head
        last = await last_message(self._connection, self._names.audit, self._names.chain("*"))
        event = None if last is None else decoded(last.body)
        return self._writer.head if event is None else Head(event.chain, event.sequence, event.hash)

    async def heads(self) -> list[Head]:
        """The heads of all chains that have events, in the order of their beginnings."""
        await self._see_all()
        found: dict[str, None] = {}
        async for message in self._messages([self._names.first_events]):
            found[message.subject.split(".")[2]] = None
        kept = [head.chain for head in (anchor_in(one.entry.body) for _, one in await self._anchors()) if head]
        heads = []
        for chain in dict.fromkeys([*kept, *found]):
            last = await last_message(self._connection, self._names.audit, self._names.chain(chain))
            event = None if last is None else decoded(last.body)
            if event is not None:
                heads.append(Head(chain, event.sequence, event.hash))
        return heads

    async def read_chain(self, chain: str, *, after: int = 0, limit: int = PAGE) -> list[KeptEntry]:
        """A page of one chain's events behind its number `after`. Their sequences are the chain's numbers."""
        number, position = self._places.get(chain, (0, 0))
        found: list[KeptEntry] = []
        async for message in self._messages(
            [self._names.chain(chain)], after=position if number == after else 0, most=limit
        ):
            event = decoded(message.body)
            if event is None:
                found.append(_kept(message))
            elif event.sequence > after:
                found.append(KeptEntry(event.sequence, event.hash, event.entry))
                self._places[chain] = event.sequence, message.sequence
            if len(found) >= limit:
                break
        return found

    async def _anchors(self) -> list[tuple[int, StoredEvent]]:
        return await anchors(self._connection, self._names)

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
        await self._see_all()
        await self._writer.recover(is_patient=True)
        own = [self._writer.head] if self._writer.head.sequence else []
        for _ in range(MOST_PASSES):
            first, last = await self._bounds()
            verification = Verification([*own, *heads], await self._anchors(), in_force)
            number = 0
            async for message in self._messages([self._names.chain("*")], before=last + 1):
                event = decoded(message.body)
                in_place = event is not None and subject_of(self._names, event) == message.subject
                verification.add(message, event if in_place else None)
                number += 1
                if progress is not None and number % PAGE == 0:
                    progress(PAGE)
            if progress is not None:
                progress(number % PAGE)
            if (await self._bounds())[0] == first:
                break
        return verification.reports()

    # ---- retention ---------------------------------------------------------------------------------------------------

    async def trim(self, before: int, *, rule: str = "by hand") -> int:
        await self._see_all()
        await self._writer.recover(is_patient=True)
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
                batch.add(Message(self._names.outbox(TRIM), record, steps[0].revision))
                bodies = [anchor_body(head, now.wall, removal) for head, removal in entries]
                batch.events.extend(AuditEntry(body, ANCHOR, now.wall) for body in bodies)

        await self._commits.change(run, prepare=plan_anew)
        if steps[0].count:
            await self._writer.copied(OWN_COPIES_S)
            await self._purge(steps[0].until)
        return steps[0].count

    async def _purge(self, until: int) -> None:
        await self._connection.api(f"STREAM.PURGE.{self._names.audit}", {"seq": until + 1}, timeout=30.0)

    async def _plan(self, before: int) -> _Step:
        """The next events to remove: those before this time, from the start of the log on, of a few chains."""
        found = await last_message(self._connection, self._names.state, self._names.outbox(TRIM))
        done = 0 if found is None else json.decode(found.body, type=_TrimRecord).until
        if done >= (await self._bounds())[0]:  # the process that planned that step did not finish it
            await self._purge(done)
        step = _Step(0 if found is None else found.sequence)
        held: list[tuple[int, StoredEvent | None]] = []
        async for message in self._messages([self._names.chain("*")], after=done):
            event = decoded(message.body)
            if event is not None and event.entry.at >= before:
                break
            held.append((message.sequence, event))
            if event is None or event.entry.event_type == ANCHOR:
                continue
            chains = {one.chain for _, one in held if one is not None}
            if step.count and len(chains.union(step.chains)) > MOST_CHAINS_AT_ONCE:
                break
            for position, one in held:
                step.add(position, one)
            held.clear()
        return step

    async def _removals(self, step: _Step, rule: str) -> list[tuple[Head, Removal]]:
        """The anchors that a step needs: of every chain that loses events, or an anchor and not all of its events."""
        if not step.count:
            return []
        hashes = {(head.chain, head.sequence): head.hash for head, _ in step.anchors.values()}
        lost = [gone for gone in step.chains.values() if gone.previous is None]
        if any((gone.last.chain, gone.last.sequence - 1) not in hashes for gone in lost):
            found = [anchor_in(one.entry.body) for _, one in await self._anchors()]
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
            left = await last_message(self._connection, self._names.audit, self._names.chain(chain))
            if left is not None and left.sequence > step.until:
                removals.append((head, _removal_in(event)))
        return removals


def _removal_in(event: StoredEvent) -> Removal:
    """The removal that an anchor describes, for another anchor."""
    anchor: dict[str, Any] = json.decode(event.entry.body)
    return Removal(anchor.get("rule", ""), 0, anchor.get("previous", ""), anchor.get("last", "").encode())


def _kept(message: StreamMessage) -> KeptEntry:
    """The event in a message, with its position; any other message is shown as it is."""
    event = decoded(message.body)
    if event is None:
        return KeptEntry(message.sequence, "", AuditEntry(message.body, UNREADABLE, message.stored_at))
    return KeptEntry(message.sequence, event.hash, event.entry)
