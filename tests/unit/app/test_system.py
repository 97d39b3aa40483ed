"""Several systems over one store: who lives, who is called what, and what they say of themselves."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest

from reefknot.app.system import System, running_system
from reefknot.errors import NameTakenError
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model.messages import ExecAssignment, Job
from reefknot.queue.presence import living_systems
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.steps.fs import FsSettings
from reefknot.steps.python import BlockSettings, by_name, standard_blocks
from reefknot.stores.opening import open_store

pytestmark = pytest.mark.real_time


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return load_settings(None, environ={}, cwd=tmp_path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - nobody tells when it does
            await asyncio.sleep(0.01)


async def test_names_that_a_living_system_has_are_not_given_again(tmp_path: Any, settings: Settings) -> None:
    url = f"sqlite:{tmp_path / 'state.db'}"
    async with open_store(url) as store:
        system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=("worker-1",))
        await store.control.report(system.system_id, json.dumps(system.snapshot()), keep=300)
    async with running_system(url, settings, workers=2, drain=0) as system:
        assert [worker.worker_id for worker in system.workers] == ["worker-2", "worker-3"]


async def test_one_router_of_a_file_leads_and_the_others_hear_no_worker_until_it_has_gone(
    tmp_path: Any, settings: Settings
) -> None:
    (tmp_path / "a.txt").write_text("a")
    blocks = BlockSettings(fs=FsSettings((tmp_path,)))

    def system(router: str) -> AbstractAsyncContextManager[System]:
        steps = by_name(standard_blocks(blocks))
        url = f"sqlite:{tmp_path / 'state.db'}"
        return running_system(url, settings, modules=steps, drain=0, workers=1, router=router)

    async with AsyncExitStack() as first:
        leader = await first.enter_async_context(system("router-1"))
        async with system("router-2") as other:
            await until(lambda: len(leader.router.snapshot().workers.get("cpu", {})) == 2)
            for name in ("a", "b"):
                done = await other.submit(ExecAssignment(name, "r", Job("fs.blob_get", {"path": "a.txt"})))
                assert (await asyncio.wait_for(done, 10)).status == "success"
            assert (leader.router.leads, other.router.leads) == (True, False)
            await until(lambda: leader.router.ended["success"] == 2)  # it may hear of an end after the caller
            assert other.router.ended["success"] == 0
            assert other.router.snapshot().workers == {}
            await first.aclose()
            done = await other.submit(ExecAssignment("c", "r", Job("fs.blob_get", {"path": "a.txt"})))
            assert (await asyncio.wait_for(done, 10)).status == "success"
            assert other.router.leads


async def test_a_status_is_json_that_every_reader_understands(settings: Settings) -> None:
    """`-Infinity` is no JSON: a worker that was never probed says null."""
    async with running_system("memory:", settings, drain=0) as system:
        await until(lambda: bool(system.snapshot()["router"]["workers"]))
        assert '"probed_at": null' in json.dumps(system.snapshot(), allow_nan=False, default=str)


async def test_a_drain_from_another_process_is_obeyed_by_the_worker_it_names(settings: Settings) -> None:
    async with running_system("memory:", settings, workers=2, drain=0) as system:
        await system.store.control.post("drain", target="router", body='{"worker_id": "worker-2", "seconds": 0}')
        await until(lambda: system.workers[1].snapshot().draining)
        assert [worker.snapshot().draining for worker in system.workers] == [False, True]


async def test_a_worker_that_was_paused_takes_nothing_until_it_is_resumed(settings: Settings) -> None:
    async with running_system("memory:", settings, drain=0) as system:
        worker = system.workers[0]
        for command, takes_nothing in (("pause", True), ("resume", False), ("drain", True), ("resume", False)):
            await system.store.control.post(command, target="router", body='{"worker_id": "worker-1"}')
            await until(lambda wanted=takes_nothing: worker.snapshot().draining is wanted)  # type: ignore[misc]
            assert {pool.paused for pool in worker.pools.values()} == {takes_nothing}


async def test_router_and_worker_in_two_systems_over_a_file_work_as_one(tmp_path: Any, settings: Settings) -> None:
    """As two processes would: neither shares anything with the other but the file."""
    (tmp_path / "a.txt").write_text("ahoy")
    url = f"sqlite:{tmp_path / 'state.db'}"
    blocks = BlockSettings(fs=FsSettings((tmp_path,)))
    async with open_store(url) as here, open_store(url) as there, asyncio.timeout(20):
        clock, plain = SystemClock(), default_settings()
        router = System(here, clock, settings=plain, blocks={}, workers=(), router="router-1")
        worker = System(there, clock, settings=plain, blocks=by_name(standard_blocks(blocks)), router=None)
        await router.start()
        await worker.start()
        try:
            result = await (await router.submit(ExecAssignment("a", "r", Job("fs.blob_get", {"path": "a.txt"}))))
        finally:
            await worker.stop()
            await router.stop()
    assert str((result.output or {})["content"]) == "ahoy"


@pytest.mark.parametrize(("part", "names"), [("worker", (("mine",), None)), ("router", ((), "mine"))])
async def test_a_name_of_a_living_system_is_refused(tmp_path: Any, settings: Settings, part: str, names: Any) -> None:
    url = f"sqlite:{tmp_path / 'state.db'}"
    mine: dict[str, Any] = {"workers": names[0], "router": names[1], "drain": 0}
    async with running_system(url, settings, **mine) as first:
        with pytest.raises(NameTakenError, match=f"{part} mine is running already"):
            async with running_system(url, settings, **mine):
                pass
        assert {one["system_id"] for one in await living_systems(first.store)} <= {first.system_id}


async def test_two_that_start_at_once_without_names_get_different_ones(tmp_path: Any, settings: Settings) -> None:
    url = f"sqlite:{tmp_path / 'state.db'}"
    names: set[str] = set()
    all_there = asyncio.Barrier(3)

    async def one() -> None:
        async with running_system(url, settings, workers=1, router=None, drain=0) as system:
            names.update(worker.worker_id for worker in system.workers)
            await all_there.wait()

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(one())
    assert len(names) == 3


async def test_a_system_that_ends_or_gives_way_leaves_no_status_and_one_without_a_router_says_so() -> None:
    async with open_store("memory:") as store:
        first, second = (System(store, SystemClock(), settings=default_settings(), blocks={}) for _ in range(2))
        await first.start()
        with pytest.raises(NameTakenError):
            await second.start()
        assert [one.name for one in await store.control.reports()] == [first.system_id]
        await first.stop()
        assert await store.control.reports() == []
        alone = System(store, SystemClock(), settings=default_settings(), blocks={}, router=None)
        assert alone.snapshot()["router"] is None
        with pytest.raises(LookupError, match="no router"):
            await alone.submit(ExecAssignment("a", "r", Job("x")))
