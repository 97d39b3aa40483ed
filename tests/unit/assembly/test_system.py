"""Several systems over one store: who lives, who is called what, and what they say of themselves."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from reefknot.assembly import open_store
from reefknot.assembly.system import OBSERVERS, STATUS, System, living_systems, running_system
from reefknot.config.settings import Settings, load_settings
from reefknot.engines.system import SystemClock
from reefknot.ports.store import Store
from reefknot.worker.settings import default_settings


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return load_settings(None, environ={}, cwd=tmp_path)


async def said(store: Store, **changes: Any) -> None:
    """A status of somebody else."""
    system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=("worker-1",))
    await store.control.post(STATUS, target=OBSERVERS, body=json.dumps({**system.snapshot(), **changes}))


async def until(holds: Callable[[], bool]) -> None:
    """A bounded wait for what a system does by itself."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - nobody tells when it does
            await asyncio.sleep(0.01)


def gone_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("changes", "lives"),
    [
        ({}, True),
        ({"ended": True}, False),
        ({"pid": gone_process(), "host": socket.gethostname()}, False),
        ({"pid": gone_process(), "host": "somewhere-else"}, True),
        ({"pid": 1, "host": socket.gethostname()}, True),
    ],
)
def test_a_system_lives_until_it_says_goodbye_or_its_process_is_gone(changes: dict[str, Any], lives: bool) -> None:
    async def main() -> int:
        async with open_store("memory:") as store:
            await said(store, **changes)
            return len(await living_systems(store))

    assert asyncio.run(main()) == lives


def test_names_that_a_living_system_has_are_not_given_again(tmp_path: Any, settings: Settings) -> None:
    async def main() -> list[str]:
        url = f"sqlite:{tmp_path / 'state.db'}"
        async with open_store(url) as store:
            await said(store, pid=1)
        async with running_system(url, settings, workers=2, drain=0) as system:
            return [worker.worker_id for worker in system.workers]

    assert asyncio.run(main()) == ["worker-2", "worker-3"]


def test_a_status_is_json_that_every_reader_understands(settings: Settings) -> None:
    """`-Infinity` is no JSON: a worker that was never probed says null."""

    async def main() -> str:
        async with running_system("memory:", settings, drain=0) as system:
            await until(lambda: bool(system.snapshot()["router"]["workers"]))
            return json.dumps(system.snapshot(), allow_nan=False, default=str)

    assert '"probed_at": null' in asyncio.run(main())


def test_a_drain_from_another_process_is_obeyed_by_the_worker_it_names(settings: Settings) -> None:
    async def main() -> list[bool]:
        async with running_system("memory:", settings, workers=2, drain=0) as system:
            await system.store.control.post("drain", target="router", body='{"worker_id": "worker-2", "seconds": 0}')
            await until(lambda: system.workers[1].snapshot().draining)
            return [worker.snapshot().draining for worker in system.workers]

    assert asyncio.run(main()) == [False, True]
