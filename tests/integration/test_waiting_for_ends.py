"""
A wait for a result ends within about a second of the result, whatever gets lost on the way.

Each engine runs with every wake-up dropped. The control sleeps through it: a wait without its look every second.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import reefknot as rk
from reefknot.console.nats_servers import NatsServer
from reefknot.queue.model.work import WorkDone, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.changes import Waiters
from reefknot.runtime.clocks import LoopClock, VirtualLoop, run_in_virtual_loop
from reefknot.stores.jetstream import JetStreamStore, ended_work
from reefknot.stores.jetstream.commits import Commits
from reefknot.stores.jetstream.state import State
from reefknot.stores.memory import MemoryStore
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from reefknot.stores.sqlite import work as sqlite_work
from reefknot.stores.work_in_memory import queue as table_queue

SOON_S = 4.0
"""A look every second, and a busy machine."""


async def end_all(store: Store) -> None:
    """Claim everything that waits, and end it."""
    held = await store.work.claim(1000, WorkClaim(owner="w"))
    settled = [Settlement(one.id, one.owner, one.fence, WorkDone('"done"')) for one in held]
    assert all(await store.work.settle(settled))


async def waited(waits: Store, ender: Store, number: int = 3, *, deaf: Callable[[], None]) -> list[WorkItem | None]:
    """The items as they ended for one store, which is deaf to changes, while another ends them."""
    names = [f"w{one}-{uuid4().hex[:8]}" for one in range(number)]
    await ender.work.enqueue([WorkItem(name, "t", payload=b"p") for name in names])
    waiting = [asyncio.create_task(waits.work.ended(name, 30.0)) for name in names]
    await asyncio.sleep(0.1)
    deaf()
    await end_all(ender)
    async with asyncio.timeout(SOON_S):
        return list(await asyncio.gather(*waiting))


def no_wakes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(Waiters, "wake", lambda self, *topics: None)


def sleep_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a waiter that looks only when it is woken."""
    for module in (table_queue, sqlite_work, ended_work):
        monkeypatch.setattr(module, "LOOK_S", inf)


class TestEveryWakeUpIsDropped:
    @pytest.mark.parametrize("is_control", [False, True])
    def test_in_memory(self, monkeypatch: pytest.MonkeyPatch, is_control: bool) -> None:
        async def main() -> list[WorkItem | None]:
            store = MemoryStore(LoopClock(loop))
            return await waited(store, store, deaf=no_wakes(monkeypatch))

        loop = VirtualLoop()
        self._check(lambda: run_in_virtual_loop(main(), loop), monkeypatch, is_control)

    @pytest.mark.parametrize("is_control", [False, True])
    def test_in_a_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_control: bool) -> None:
        async def main() -> list[WorkItem | None]:
            address = f"sqlite:{tmp_path}/state.db"
            async with open_store(address) as ender, open_store(address) as waits:
                return await waited(waits, ender, deaf=no_wakes(monkeypatch))

        self._check(lambda: asyncio.run(main()), monkeypatch, is_control)

    @pytest.mark.parametrize("is_control", [False, True])
    def test_on_nats(self, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, is_control: bool) -> None:
        """With many waiters, and a process that hears nothing at all."""

        def deaf(store: Store) -> None:
            assert isinstance(store, JetStreamStore)
            no_wakes(monkeypatch)()
            monkeypatch.setattr(store.state, "arrived", lambda apply, message: None)

        async def main() -> list[WorkItem | None]:
            address = f"{nats_server.url}/deaf-{uuid4().hex[:8]}"
            async with open_store(address) as ender, open_store(address) as waits:
                return await waited(waits, ender, 105, deaf=lambda: deaf(waits))

        self._check(lambda: asyncio.run(main()), monkeypatch, is_control)

    @staticmethod
    def _check(run: Callable[[], list[WorkItem | None]], monkeypatch: pytest.MonkeyPatch, is_control: bool) -> None:
        if is_control:
            sleep_on(monkeypatch)
            with pytest.raises(TimeoutError):
                run()
        else:
            assert all(item is not None and item.result == '"done"' for item in run())


def test_a_client_without_a_loop_waits_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"sqlite:{tmp_path}/state.db"

    async def end() -> None:
        async with open_store(address) as store:
            item = (await store.work.search()).items[0]
            await store.work.cancel(item.id, reason="not wanted", who="test")

    with rk.connect_sync(address) as client, ThreadPoolExecutor(1) as waiting:
        handle = client.submit("own.step", {})
        no_wakes(monkeypatch)()
        result = waiting.submit(handle.result, timeout=30)
        asyncio.run(end())
        assert result.result(SOON_S).status == "cancelled"


async def _say_nothing(commits: Commits, over: object) -> None:
    """End work without a message to its waiters."""


@pytest.mark.real_time
class TestWhatLosesAWakeUpOnNats:
    @staticmethod
    @asynccontextmanager
    async def _two(server: NatsServer) -> AsyncIterator[tuple[Store, JetStreamStore]]:
        """One store that ends work, and one that waits and looks only when it is woken."""
        address = f"{server.url}/two-{uuid4().hex[:8]}"
        async with open_store(address) as ender, open_store(address) as waits:
            assert isinstance(waits, JetStreamStore)
            yield ender, waits

    @pytest.mark.parametrize("is_control", [False, True], ids=["", "control: no message of an end"])
    async def test_the_message_of_an_end_wakes_its_waiter_which_mirrors_nothing(
        self, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, is_control: bool
    ) -> None:
        sleep_on(monkeypatch)
        async with self._two(nats_server) as (ender, waits):
            if is_control:
                monkeypatch.setattr(Commits, "_announce_ends", _say_nothing)
                with pytest.raises(TimeoutError):
                    await waited(waits, ender, deaf=lambda: None)
            else:
                assert all(await waited(waits, ender, deaf=lambda: None))
            assert not waits.state._mirrors

    async def test_a_server_that_answers_with_the_record_before_its_end_is_asked_again(
        self, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer
    ) -> None:
        """In a cluster a deposed leader may answer reads for a moment longer."""
        sleep_on(monkeypatch)
        read: Callable[..., Awaitable[Any]] = State.read_work
        before: dict[str, tuple[Any, int]] = {}
        names = ["a", "b", "c"]
        async with self._two(nats_server) as (ender, waits):
            state = waits.state

            async def lagging(work_id: str) -> Any:
                answer, times = before.get(work_id, (None, 0))
                if answer is None or times >= 3:
                    return await read(state, work_id)
                before[work_id] = answer, times + 1
                return answer

            await ender.work.enqueue([WorkItem(name, "t", payload=b"p") for name in names])
            waiting = [asyncio.create_task(waits.work.ended(name, 30.0)) for name in names]
            await asyncio.sleep(0.2)  # all of them have read their records, which are open
            for work_id in names:
                before[work_id] = await read(state, work_id), 0
            monkeypatch.setattr(state, "read_work", lagging)
            await end_all(ender)
            async with asyncio.timeout(SOON_S):
                assert all(await asyncio.gather(*waiting))
        assert all(times == 3 for _, times in before.values())


@pytest.mark.parametrize("steps", range(12))
async def test_a_wait_that_begins_while_the_last_look_for_others_ends_is_woken(tmp_path: Path, steps: int) -> None:
    """Whichever turn of the loop it begins in after the others have got their results, and though none follows it."""
    async with open_store(f"sqlite:{tmp_path / 'state.db'}") as store:
        await store.work.enqueue([WorkItem("first", "t", payload=b"p")])
        first = asyncio.create_task(store.work.ended("first", 30.0))
        await asyncio.sleep(0.1)
        await end_all(store)
        for _ in range(steps):
            await asyncio.sleep(0)
        late = asyncio.create_task(store.work.ended("late", 30.0))
        await first
        await store.work.enqueue([WorkItem("late", "t", payload=b"p")])
        await asyncio.sleep(0.1)
        await end_all(store)
        async with asyncio.timeout(SOON_S):
            assert await late is not None
