"""
`move_store`: everything that a store keeps, moved to an empty one of any engine.

Both stores get a mark first, and while they have it nothing works on them. The records are then copied as they are:
ids, due times, attempts and fences stay, and leases end, because they count by a clock that stays behind. A copy leaves
alone what is there already, so a move that was interrupted goes on by copying again. It ends when the target has
exactly what the source has: the source is marked as moved, and only then the target is opened for work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field, json, structs, to_builtins

from reefknot.audit.model.chain import Head
from reefknot.audit.port import end_of
from reefknot.console.operations.operator import Operator
from reefknot.core.time import Moment
from reefknot.errors import OperationError, StoreFullError, StoreVersionError
from reefknot.idempotency.model import KeyRecord, KeyState, is_spent
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.queue.presence import GONE, living_systems
from reefknot.runtime.processes import owner_is_gone
from reefknot.runtime.seeds import new_id
from reefknot.stores.port import MOVE, MoveMark, Role, Store, StoredValue, move_mark
from reefknot.stores.port.engines import size_text

R = TypeVar("R", WorkItem, KeyRecord)
RECORD_BYTES = 1500
"""What a record takes in a store, in addition to its payload and its result."""
SOON_MS = 3_600_000
"""What goes by itself within this time may be gone from one of the stores already, and is not compared."""
MOST_HEADS = 100
"""The heads of the archive that the events name; the file with the heads has all of them."""
NOT_MOVED = frozenset({MOVE, GONE})
Export = Callable[[Store, Path], Awaitable[list[Head]]]
"""Writes the whole audit log of a store to a file, complete or not at all; returns the heads of its chains."""
Advance = Callable[[int], None]


class Move(Struct, frozen=True):
    """A move as it was asked for. `archive` is where the audit log of the source goes."""

    source: Operator
    target: Operator | None
    """None while it is not there: then only what speaks against the move is looked for."""
    export: Export
    work_retention: float | None
    progress: Callable[[str, int], AbstractContextManager[Advance]]
    """The progress of a step, given its label and its total."""
    archive: Path | None = None
    """Where the audit log of the source goes; None for a file in the current folder."""


class Inventory(Struct):
    """The inventory of a store: counts, and a sum over all records that must be the same in both stores."""

    jobs: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    values: int = 0
    size: int = 0
    compared: int = 0
    total: int = 0
    held: list[str] = []
    """Names of a few records that a living process may hold."""

    @property
    def number(self) -> int:
        return self.jobs.total() + self.keys.total() + self.values

    def counts(self) -> dict[str, Any]:
        return {"jobs": dict(self.jobs), "keys": dict(self.keys), "values": self.values, "bytes": self.size}

    def note(self, record: WorkItem | KeyRecord | StoredValue, size: int, *, is_compared: bool) -> None:
        self.size += size + RECORD_BYTES
        if is_compared:
            self.compared += 1
            self.total += int.from_bytes(blake2b(json.encode(record), digest_size=8).digest())


async def move_store(move: Move, *, dry_run: bool = False) -> dict[str, Any]:
    """
    Move the source's records to the target, or go on with a move that was interrupted.

    The answer has the counts, the archive and its heads; a dry run has the reasons for a refusal as `refused`.
    """
    mark, is_marked = await _mark_of_both(move)
    if mark is not None and mark.ended_at is not None:
        return _answer(move, mark, mark.report) if dry_run else await _finish(move, mark)
    found = await _inventory(move, move.source.store)
    refused = await _refusals(move, found, is_new=not is_marked)
    if mark is None and move.archive is not None and move.archive.exists():
        refused.append(OperationError(f"{move.archive}: exists already; name another file with --archive", "conflict"))
    if dry_run:
        return _answer(move, mark, found.counts()) | {"refused": [str(one) for one in refused], "dry_run": True}
    if refused:
        raise refused[0]
    if move.target is None:
        return _answer(move, mark, found.counts())
    mark = mark or await _begin(move)
    await _mark_target(move, mark)
    await _refuse_running(move)  # a system that was starting has reported by now, or has seen the mark
    await _copy(move, found)
    archive = (move.archive or Path(mark.archive)).absolute()
    heads = await move.export(move.source.store, archive)
    await _refuse_running(move)
    report = found.counts() | {"chains": len(heads), "heads": to_builtins(heads[:MOST_HEADS])}
    ended_at = move.source.store.moment().wall
    return await _finish(move, structs.replace(mark, ended_at=ended_at, archive=str(archive), report=report))


async def give_up(move: Move) -> dict[str, Any]:
    """Give up a move that has not ended: the source may be worked on again. The target, which may be away, stays."""
    source = move.source
    mark, version = await move_mark(source.store)
    if mark is None or mark.role != "source" or mark.ended_at is not None:
        raise OperationError(f"no move from {source.shown} is under way", "conflict")
    event = source.event("store.move.cancel", mark.target, move=mark.id)
    if not await source.store.values.delete(MOVE, version=version, events=[event]):
        raise OperationError(f"the move from {source.shown} has just changed; try again", "temporary")
    return {"move": mark.id, "source": mark.source, "target": mark.target, "cancelled": True}


# ---- marks -----------------------------------------------------------------------------------------------------------


async def _mark_of_both(move: Move) -> tuple[MoveMark | None, bool]:
    """
    The source's mark of this very move, if it was begun before, and whether the target has it as well.

    An error says that one of the stores is in another move.
    """
    source, target = move.source, move.target
    if source.store.read_only:
        raise StoreVersionError(source.shown, "it has an older version", "migrate it first: reefknot store migrate")
    ours, _ = await move_mark(source.store)
    theirs = None if target is None else (await move_mark(target.store))[0]
    if ours is not None and not ours.forbids_work:
        ours = None  # it came from elsewhere, and was worked on since
    is_marked = ours is not None and theirs is not None and (theirs.id, theirs.role) == (ours.id, "target")
    if ours is not None and not is_marked:
        is_begun = ours.role == "source" and ours.ended_at is None and theirs is None
        if not is_begun or (target is not None and target.shown != ours.target):
            raise ours.error()
    if theirs is not None and theirs.forbids_work and not is_marked:
        refusal = theirs.error()
        text = f"{refusal.store}: {refusal.problem}; delete it, or name another target"
        raise OperationError(text, "conflict")
    return ours, is_marked


async def _begin(move: Move) -> MoveMark:
    """Mark both stores, the source first: what is copied is then no longer worked on."""
    source, target = move.source, _target(move)
    began_at = source.store.moment().wall
    number = new_id()
    archive = (move.archive or Path(f"reefknot-audit-{number}.jsonl")).absolute()
    mark = MoveMark(number, "source", source.shown, target.shown, began_at, str(archive))
    _, version = await move_mark(source.store)
    event = source.event("store.move.begin", target.shown, move=mark.id)
    if await source.store.values.put(MOVE, _text(mark, "source"), version=version, events=[event]) is None:
        raise OperationError(f"another move from {source.shown} has just begun; try again", "temporary")
    return mark


async def _mark_target(move: Move, mark: MoveMark) -> None:
    target = _target(move)
    known, version = await move_mark(target.store)
    if known is None or (not known.forbids_work and mark.ended_at is None):
        body = _text(mark, "target")
        event = target.event("store.move.begin", mark.source, move=mark.id)
        made = await target.store.values.put(MOVE, body, version=version, events=[event])
        known = None if made is None else mark
    elif known.role == "source":
        await give_up(move)
        raise OperationError(f"{mark.source} and {mark.target} are the same store", "invalid")
    if known is None or known.id != mark.id:
        raise OperationError(f"another move to {target.shown} has just begun; try again", "temporary")


async def _finish(move: Move, mark: MoveMark) -> dict[str, Any]:
    """Mark the source as moved, then open the target. Either may have been done before."""
    source, target, details = move.source, _target(move), _details(mark)
    ends: list[tuple[Operator, Role, str]] = [(source, "source", mark.target), (target, "target", mark.source)]
    for operator, role, other in ends:
        known, version = await move_mark(operator.store)
        if known is None or (known.id, known.role) != (mark.id, role):
            raise OperationError(
                f"the move was given up meanwhile: {operator.shown} does not have its mark", "conflict"
            )
        if known.ended_at is None:
            body, event = _text(mark, role), operator.event("store.move", other, **details)
            if await operator.store.values.put(MOVE, body, version=version, events=[event]) is None:
                raise OperationError(f"the mark of {operator.shown} has just changed; repeat the command", "temporary")
    return _answer(move, mark, mark.report)


def _details(mark: MoveMark) -> dict[str, Any]:
    """The fields of the event in both stores."""
    stores = {"move": mark.id, "from": mark.source, "to": mark.target, "archive": mark.archive}
    return stores | mark.report


def _answer(move: Move, mark: MoveMark | None, report: dict[str, Any]) -> dict[str, Any]:
    about = {
        "move": None if mark is None else mark.id,
        "source": move.source.shown,
        "target": None if move.target is None else move.target.shown,
        "archive": None if mark is None else mark.archive,
    }
    return {**about, **report, "actor": move.source.actor, "dry_run": False}


def _text(mark: MoveMark, role: Role) -> str:
    return json.encode(structs.replace(mark, role=role)).decode()


def _target(move: Move) -> Operator:
    assert move.target is not None
    return move.target


# ---- refusals --------------------------------------------------------------------------------------------------------


async def _refusals(move: Move, found: Inventory, *, is_new: bool) -> list[Exception]:
    """The reasons against the move, the most important first."""
    refused: list[Exception] = []
    try:
        await _refuse_running(move)
    except OperationError as error:
        refused.append(error)
    if found.held:
        names, more = ", ".join(found.held), "; stop it, or wait until its lease has ended"
        refused.append(OperationError(f"{move.source.shown}: a process still holds {names}{more}", "temporary"))
    if move.target is None:
        return refused
    store, shown = move.target.store, move.target.shown
    if store.read_only:
        refused.append(StoreVersionError(shown, "it has an older version", "name an empty store"))
    if is_new and not await _is_empty(store):
        text = f"{shown} is not empty: a store is moved to a new one; name another"
        refused.append(OperationError(text, "conflict"))
    room = await store.room()
    if is_new and room is not None and found.size > room:
        problem = f"there is room for {size_text(room)}, and {size_text(found.size)} are needed"
        refused.append(StoreFullError(shown, problem, "make room, raise its bound, or name another store"))
    return refused


async def _refuse_running(move: Move) -> None:
    """Raise if a system runs over one of the stores."""
    for operator in (move.source, move.target):
        for one in [] if operator is None else await living_systems(operator.store):
            assert operator is not None
            text = f"a system runs over {operator.shown}: pid {one['pid']} on {one['host']}; stop it first"
            raise OperationError(text, "temporary")


async def _is_empty(store: Store) -> bool:
    everything: list[AsyncIterator[Any]] = [store.work.records(), store.idempotency.records()]
    for records in everything:
        async for page in records:
            if page:
                return False
    return not await _values(store)


# ---- records ---------------------------------------------------------------------------------------------------------


async def _pages(pages: AsyncIterator[list[R]], now: Moment, retention: float | None) -> AsyncIterator[list[R]]:
    """The records that have not outlived their retention, without leases."""
    async for page in pages:
        kept = [one for one in page if not _is_over(one, now, retention)]
        yield [structs.replace(one, lease_until=0) for one in kept]


def _is_over(record: WorkItem | KeyRecord, now: Moment, retention: float | None) -> bool:
    """Whether the retention of a record is over at this moment."""
    if isinstance(record, KeyRecord):
        return is_spent(record, now)
    return retention is not None and record.state in ENDED and record.updated_at + retention * 1000 <= now.wall


def _may_be_held(record: WorkItem | KeyRecord, now: Moment) -> bool:
    """Whether the lease of a record runs, and its owner is not known to be gone."""
    is_open = record.state in (WorkState.RUNNING, KeyState.IN_PROGRESS)
    is_leased = now.steady < record.lease_until <= now.steady + record.lease_ms
    return is_open and is_leased and not owner_is_gone(record.owner)


async def _inventory(move: Move, store: Store, *, since: Moment | None = None) -> Inventory:
    """The inventory of a store; records that go within an hour, counted from `since`, are not compared."""
    found, now = Inventory(), store.moment() if since is None else since
    soon = Moment(now.steady, now.wall + SOON_MS)
    everything: list[AsyncIterator[Any]] = [store.work.records(), store.idempotency.records()]
    for records, counts in zip(everything, (found.jobs, found.keys), strict=True):
        async for page in records:
            for one in page:
                if _is_over(one, now, move.work_retention):
                    continue
                counts[one.state.value] += 1
                if len(found.held) < 3 and _may_be_held(one, now):
                    found.held.append(f"{one.id if isinstance(one, WorkItem) else one.key} ({one.owner})")
                notes = await _notes(store, one) if isinstance(one, WorkItem) else {}
                parts = (getattr(one, "payload", b""), one.result or "", one.failure or "", *notes.values())
                at_rest = structs.replace(one, lease_until=0)
                found.note(at_rest, sum(map(len, parts)), is_compared=not _is_over(at_rest, soon, move.work_retention))
    for value in await _values(store):
        found.values += 1
        found.note(structs.replace(value, version=0), len(value.body), is_compared=True)
    return found


async def _values(store: Store) -> list[StoredValue]:
    return [one for one in await store.values.list() if one.name not in NOT_MOVED]


async def _copy(move: Move, found: Inventory) -> None:
    """Copy until the target has what the source has. What a client writes meanwhile is copied by a second pass."""
    source, target = move.source.store, _target(move).store
    for _ in range(2):
        end, now = await end_of(source.audit), source.moment()
        with move.progress("moving", found.number) as advance:
            await _copy_once(move, now, advance)
        ours, theirs = [await _inventory(move, one, since=now) for one in (source, target)]
        if (ours.compared, ours.total) == (theirs.compared, theirs.total) and await end_of(source.audit) == end:
            found.jobs, found.keys, found.values, found.size = ours.jobs, ours.keys, ours.values, ours.size
            return
    text = (
        f"{move.source.shown} was changed while it was moved: {ours.compared} records there, {theirs.compared} in the "
        "target. Stop the clients that use it and repeat the command; if that does not help, give the move up with "
        "--cancel, and begin again with another target"
    )
    raise OperationError(text, "temporary")


async def _notes(store: Store, item: WorkItem) -> dict[str, bytes]:
    """The parts of the notes of an item: its checkpoint and its lines."""
    return await store.work.notes(item.id) if item.extra.notes else {}


async def _copy_once(move: Move, now: Moment, advance: Advance) -> None:
    source, target = move.source.store, _target(move).store
    async for items in _pages(source.work.records(), now, move.work_retention):
        await target.work.adopt(items, {one.id: await _notes(source, one) for one in items if one.extra.notes})
        advance(len(items))
    await target.idempotency.adopt([])  # for the fences, if there are no keys
    async for keys in _pages(source.idempotency.records(), now, None):
        await target.idempotency.adopt(keys)
        advance(len(keys))
    for value in await _values(source):
        await target.values.put(value.name, value.body, version=0)
        advance(1)
