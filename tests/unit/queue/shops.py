"""What the tests of the queue do again and again in a shop, each in one call."""

import asyncio
import subprocess
from typing import Any

from reefknot.queue.model.messages import ExecAssignment, ExecResult
from reefknot.queue.model.work import WorkItem
from reefknot.queue.router.service import Router
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.processes import process_mark
from reefknot.steps.port import Block
from tests.workshop import Shop, Step, work

ONE = {"cpu": 1}
"""A worker with one slot."""


async def sent(shop: Shop, *assignments: ExecAssignment | bytes, wait: float, to: str = "w1") -> None:
    await shop.send(*assignments, to=to)
    await asyncio.sleep(wait)


async def ran(shop: Shop, *given: Step | ExecAssignment, wait: float, **settings: Any) -> Worker:
    """Worker `w1` with the given steps, `wait` seconds after the given assignments, or work `a`, were sent to it."""
    worker = await shop.worker("w1", *(one for one in given if isinstance(one, Step)), **settings)
    await sent(shop, *([one for one in given if isinstance(one, ExecAssignment)] or [work("a")]), wait=wait)
    return worker


async def served(shop: Shop, *steps: Step, wait: float = 0.0, **settings: Any) -> Router:
    """A router and worker `w1` with these steps, `wait` seconds later: after one second it is heard of."""
    router = await shop.router()
    await shop.worker("w1", *steps, **settings)
    await asyncio.sleep(wait)
    return router


async def answers(*futures: asyncio.Future[ExecResult], within: float = 60.0) -> list[ExecResult]:
    async with asyncio.timeout(within):
        return [await one for one in futures]


async def told(shop: Shop, kind: type[Any]) -> list[Any]:
    return list(await shop.events(kind))


async def stored(shop: Shop, name: str) -> WorkItem:
    item = await shop.store.work.get(name)
    assert item is not None
    return item


def made(shop: Shop, name: str, *blocks: Block, lease: float = 60.0, **given: Any) -> Worker:
    """A worker that is not started yet, with what `Shop.worker` does not give."""
    worker = Worker(
        name,
        settings=default_settings(lease=lease),
        blocks={block.type: block for block in blocks} or {"test.step": Step()},
        **{"store": shop.store, "transport": shop.transport, "clock": shop.clock, **given},
    )
    shop.members.append(worker)
    return worker


def broken(shop: Shop, name: str, *errors: Exception) -> list[Exception]:
    """The store's queue fails so often with these when `name` is asked of it, and then works again."""
    real, left = getattr(shop.store.work, name), list(errors)

    async def asked(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop(0)
        return await real(*given, **named)

    setattr(shop.store.work, name, asked)
    return left


def gone_process() -> str:
    with subprocess.Popen(["sleep", "60"]) as process:
        mark = process_mark(process.pid)
        process.kill()
    return mark
