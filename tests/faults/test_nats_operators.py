"""Operators' commands on NATS, from processes that just started, about work at a worker that mirrors nothing."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.console.nats_servers import NatsServer
from tests.faults import nats_system
from tests.faults.nats_system import CONFIG, Load, Parts
from tests.faults.test_nats_parts import PATIENCE_S, under_load
from tests.faults.test_nats_queues import until_queued
from tests.warm_commands import run_warm

pytestmark = pytest.mark.slow

SOON_S = 3.0
"""Two seconds, and a busy machine."""


async def command(parts: Parts, *words: str, code: int = 0) -> Any:
    """What a command prints for programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REEFKNOT")}
    line = (*words, "--json", "--engine", parts.url)
    ended = await asyncio.to_thread(run_warm, *line, cwd=parts.folder, env=kept | {"REEFKNOT_ACTOR": "ada"})
    assert ended.returncode == code, (words, ended.returncode, ended.stderr, ended.stdout)
    return json.loads(ended.stdout)


async def until(holds: Callable[[], Awaitable[bool]], within: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within):
        while not await holds():  # noqa: ASYNC110 - other processes are waited for
            await asyncio.sleep(0.1)


async def states(parts: Parts) -> dict[str, str]:
    return {one["id"]: one["state"] for one in (await command(parts, "job", "list", "--limit", "100"))["jobs"]}


async def ended_soon(asking: asyncio.Task[None]) -> None:
    async with asyncio.timeout(SOON_S):
        await asyncio.shield(asking)


async def cancelled_and_run_again(parts: Parts, load: Load, *, has_router: bool) -> None:
    """What waits for a retry, what waits for a slot, and what runs."""
    tasks = {f"retried{n}": asyncio.create_task(load.ask(f"retried{n}", fails=True)) for n in range(2)}
    await until_queued(parts.url, 2)
    tasks |= {f"long{n}": asyncio.create_task(load.ask(f"long{n}", seconds=8.0)) for n in range(8)}
    await until_queued(parts.url, 4)
    if not has_router:
        parts.kill("router-1")
    found = await states(parts)
    waits = next(name for name, state in found.items() if state == "pending" and name.startswith("long"))
    runs = next(name for name, state in found.items() if state == "running")
    for name in ("retried0", waits, *([runs] if has_router else [])):
        await command(parts, "job", "cancel", name)
        await ended_soon(tasks[name])
        assert load.found.statuses["cancelled"] == 1
        load.found.statuses.clear()
    await command(parts, "job", "retry", waits)
    if not has_router:
        await parts.start("router-1")
    async with rk.connect(parts.url) as client:
        again = await client.job(waits).result(PATIENCE_S)
    assert again.status == "success"
    await asyncio.gather(*tasks.values())
    assert set((await states(parts)).values()) == {"cancelled", "succeeded"}


async def operated(
    folder: Path, server: NatsServer, act: Callable[[Parts, Load], Awaitable[None]], names: tuple[str, ...]
) -> None:
    async with under_load(folder, server, *names, per_second=0.0) as (parts, load):
        await act(parts, load)


@pytest.mark.parametrize("has_router", [True, False])
def test_a_job_at_a_worker_is_cancelled_and_run_again_at_once(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch, has_router: bool
) -> None:
    monkeypatch.setattr(nats_system, "CONFIG", CONFIG.replace("base_delay_ms: 800", "base_delay_ms: 15000"))

    async def act(parts: Parts, load: Load) -> None:
        await cancelled_and_run_again(parts, load, has_router=has_router)

    asyncio.run(operated(tmp_path, server, act, ("router-1", "worker-1")))


async def steered(parts: Parts, load: Load) -> None:
    """Commands reach a worker, and what a command shows is there as soon as it starts."""
    listed = (await command(parts, "worker", "list"))["workers"]
    assert {one["worker_id"] for one in listed} == {"worker-1", "worker-2"}
    assert (await command(parts, "worker", "pause", "worker-1"))["paused"] is True
    assert (await command(parts, "worker", "drain", "worker-2"))["drained"] is True
    asking = asyncio.create_task(load.ask("waits"))
    await until(lambda: is_there(parts, "waits"))
    assert await states(parts) == {"waits": "pending"}
    assert "waits" not in parts.effects()
    await command(parts, "top", "--once")
    await command(parts, "doctor")
    assert (await command(parts, "worker", "resume", "worker-1"))["resumed"] is True
    async with asyncio.timeout(PATIENCE_S):
        await asking
    assert await states(parts) == {"waits": "succeeded"}


async def is_there(parts: Parts, name: str) -> bool:
    return name in await states(parts)


def test_commands_reach_workers_that_mirror_nothing(tmp_path: Path, server: NatsServer) -> None:
    asyncio.run(operated(tmp_path, server, steered, ("router-1", "worker-1", "worker-2")))
