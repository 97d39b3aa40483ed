"""
Moves between two stores, interrupted at a point and repeated: `moved` makes one, `judge` says what must hold after it.

As a program it makes a move and is killed at the point that it is given.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from msgspec import structs

from reefknot import StoreMovedError, open_store
from reefknot.audit.model.chain import Head
from reefknot.console.cli.audit import export_log
from reefknot.console.cli.audit_files import head_file_of
from reefknot.console.operations.move import NOT_MOVED, Move, move_store
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import shown_url, store_to_move
from reefknot.stores.port import Store, move_mark
from reefknot.testing.conformance.harness import event
from reefknot.testing.conformance.records import all_of, odd_items, odd_keys

WEEK_S = 604_800.0
VALUES = {"schedule:nightly": '{"next": 5}', "source:mail": '{"position": "ü"}', "telemetry:imap": "{}"}
WATCHED = ("work", "idempotency", "values")
"""The parts of a store whose calls are points."""
How = Callable[[Move], Awaitable[dict[str, Any]]]


class DiedError(Exception):
    """The end of the process that moves."""


class Points:
    """Counts the points of a move, and dies at one of them: with an error, or for good as `kill -9` does."""

    def __init__(self, last: int = 0, *, is_killed: bool = False) -> None:
        self.reached = 0
        self._last = last
        self._is_killed = is_killed

    def reach(self) -> None:
        self.reached += 1
        if self.reached == self._last:
            if self._is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise DiedError(self.reached)


class Watched:
    """A store, or a part of one: before each of its calls is a point, and after it, when its answer is lost."""

    def __init__(self, part: Any, points: Points) -> None:
        self._part = part
        self._points = points

    def __getattr__(self, name: str) -> Any:
        found, reach = getattr(self._part, name), self._points.reach
        if name in WATCHED:
            return Watched(found, self._points)
        if name == "records":

            async def pages() -> AsyncIterator[list[Any]]:
                async for page in found():
                    reach()
                    yield page

            return pages
        if not asyncio.iscoroutinefunction(found):
            return found

        @wraps(found)
        async def call(*arguments: Any, **named: Any) -> Any:
            reach()
            answer = await found(*arguments, **named)
            reach()
            return answer

        return call


@contextmanager
def quiet(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress that is not shown."""
    yield lambda _: None


async def fill(url: str, *, more: int = 0, has_large: bool = False) -> None:
    """Give a new store work and keys in each state, values and events; and so many more items and keys."""
    async with open_store(url) as store:
        clock = SystemClock()
        items, keys = odd_items(clock), odd_keys(clock)
        if not has_large:
            items, keys = [one for one in items if one.id not in ("large", "done")], [keys[0], *keys[2:]]
        plain, key = items[1], structs.replace(keys[0], expires_at=keys[0].expires_at + 86_400_000)
        for at in range(0, more, 1000):
            many = range(at, min(more, at + 1000))
            await store.work.adopt([structs.replace(plain, id=f"job-{n:06}", due_at=n) for n in many])
            await store.idempotency.adopt([structs.replace(key, key=f"key-{n:06}") for n in many])
        await store.work.adopt(items)
        await store.idempotency.adopt([structs.replace(one, expires_at=key.expires_at) for one in keys])
        for name, body in VALUES.items():
            await store.values.put(name, body, version=0)
        await store.audit.append([event("submitted", at=1), event("succeeded", at=2)])


def open_target(url: str) -> AbstractAsyncContextManager[Store]:
    return store_to_move(url, None, creates=True, work_retention=WEEK_S)


@asynccontextmanager
async def asked(old: str, new: str, archive: Path, points: Points) -> AsyncIterator[Move]:
    """A move between two stores that are opened for it."""

    def operator(store: Store, url: str) -> Operator:
        watched: Any = Watched(store, points)
        return Operator(watched, Redactor(()), "ann", None, shown_url(url))

    async def export(store: Any, file: Path) -> list[Head]:
        points.reach()
        heads = (await export_log(store._part, file, head_file_of(file)))[1]
        points.reach()
        return heads

    async with store_to_move(old, None, creates=False) as source, open_target(new) as target:
        yield Move(operator(source, old), operator(target, new), export, WEEK_S, quiet, archive)


async def moved(old: str, new: str, archive: Path, points: Points | None = None, how: How = move_store) -> Any:
    async with asked(old, new, archive, points or Points()) as move:
        return await how(move)


async def can_be_worked_on(url: str) -> bool:
    try:
        async with open_store(url):
            return True
    except StoreMovedError:
        return False


async def inventory(url: str) -> list[Any]:
    """The records of a store without leases, and its values: work in its order."""
    async with store_to_move(url, None, creates=False) as store:
        work = [structs.replace(one, lease_until=0) for one in await all_of(store.work.records())]
        keys = [structs.replace(one, lease_until=0) for one in await all_of(store.idempotency.records())]
        values = [(one.name, one.body) for one in await store.values.list() if one.name not in NOT_MOVED]
    return [work, sorted(keys, key=lambda one: one.key), values]


async def actions(url: str) -> list[str]:
    """The actions of operators on record."""
    async with store_to_move(url, None, creates=False) as store:
        bodies = [kept.entry.body.decode() for kept in await store.audit.read()]
    names = ("store.move", "store.move.begin")
    return [name for body in bodies for name in names if f'"action":"{name}"' in body]


async def judge_a_halt(old: str, new: str) -> None:
    """Wherever a move stands: nothing can be worked on in both stores, and not in a target that has a part of it."""
    if await can_be_worked_on(new):
        assert not await can_be_worked_on(old) or not any(await inventory(new)), "work could run in both"


async def judge(old: str, new: str, before: list[Any], archive: Path) -> None:
    """What must hold after a move: the target has everything once, only it is worked on, both tell of the other."""
    there = await inventory(new)
    for name, ours, theirs in zip(("work", "keys", "values"), before, there, strict=True):
        assert ours == theirs, f"the {name} differ"
    assert await inventory(old) == before, "the source is left as it was"
    assert (await can_be_worked_on(old), await can_be_worked_on(new)) == (False, True)
    assert await actions(old) == ["store.move.begin", "store.move"]
    assert await actions(new) == ["store.move.begin", "store.move"]
    missing = await asyncio.to_thread(lambda: [one for one in (archive, head_file_of(archive)) if not one.is_file()])
    assert missing == []
    for url in (old, new):
        async with store_to_move(url, None, creates=False) as store:
            mark, _ = await move_mark(store)
            assert mark is not None
            assert mark.report["jobs"]["running"] == 1
            assert await store.audit.verify() == []


if __name__ == "__main__":
    old_url, new_url, file, number = sys.argv[1:]
    asyncio.run(moved(old_url, new_url, Path(file), Points(int(number), is_killed=True)))
