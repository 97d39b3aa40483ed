"""
`system` and `system_sync`: a router and workers in the process of an application, on a store that lasts.

They are `reefknot up` without the command: the same parts on the same store, next to any number of other processes. The
block yields a client of that store. It ends as a drained worker does: running steps get time to finish, and those that
do not finish return to the queue.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from reefknot.app.blocks import Modules, blocks_of
from reefknot.app.system import ROUTER_NAME, System, running_system, worker_settings
from reefknot.core import checks
from reefknot.errors import ParameterTypeError, ReefknotError
from reefknot.policy.secrets import secret_texts
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.client import Client
from reefknot.queue.connect import CLOSE_S, ClientThread, SyncClient, SystemScope
from reefknot.runtime.event_loops import require_asyncio
from reefknot.runtime.log import logger
from reefknot.stores.opening import store_url
from reefknot.stores.port.engines import accepted_urls

MOST_WORKERS = 64

Config = str | os.PathLike[str] | None
Seconds = float | timedelta


@asynccontextmanager
async def system(
    url: str | None = None,
    *,
    modules: Modules = (),
    config: Config = None,
    workers: int = 1,
    router: bool = True,
    sources: bool = False,
    drain: Seconds | None = None,
) -> AsyncIterator[Client]:
    """
    A router and workers in this process, and their client: `async with rk.system(modules="steps") as client:`.

    `url` and `config` are as in `connect`. `modules` are the steps: names of modules, modules, or functions under
    `@rk.block`. `workers` is the number of workers, 0 for none; `router=False` leaves routing to another process.
    With `sources`, the configured sources are synced too. At the end running steps get `drain` seconds (default:
    `worker.drain_seconds`), and what has not ended by then returns to the queue.

    The steps share the event loop of the application; plain functions run in threads. A store that fails for good is
    logged, makes every later call of the client raise, and is raised at the end of the block.
    """
    require_asyncio("system")
    options = _options(url, modules, config, workers, router=router, sources=sources, drain=drain)
    async with _running(options) as client:
        yield client


def system_sync(
    url: str | None = None,
    *,
    modules: Modules = (),
    config: Config = None,
    workers: int = 1,
    router: bool = True,
    sources: bool = False,
    drain: Seconds | None = None,
) -> SyncClient:
    """
    A system for code without an event loop: `with rk.system_sync(modules="steps") as client:`.

    Router and workers run in a thread of their own, and async steps on its loop. The parameters are those of `system`.
    In a fork the client connects to the same store; the system stays in the process that started it.
    """
    options = _options(url, modules, config, workers, router=router, sources=sources, drain=drain)
    return _SystemClient(url, config, options)


def _options(
    url: str | None,
    modules: Modules,
    config: Config,
    workers: int,
    *,
    router: bool,
    sources: bool,
    drain: Seconds | None,
) -> dict[str, Any]:
    """The arguments of `running_system`, once these parameters are checked and the configuration is read."""
    if url is not None:
        checks.text("url", url, accepted_urls())
    if config is not None and not isinstance(config, str | os.PathLike):
        raise ParameterTypeError("config", config, "the path of a configuration file, or None for the nearest one")
    checks.whole_number("workers", workers, least=0, most=MOST_WORKERS)
    checks.flag("router", router)
    checks.flag("sources", sources)
    seconds = None if drain is None else checks.seconds("drain", drain, or_zero=True)
    settings = _read(config)
    address = store_url(settings, url)
    secrets, problems = secret_texts(settings.tree, settings.path, environ=os.environ)
    for problem in problems:
        logger().warning("%s", problem)
    return {
        "url": address,
        "settings": settings,
        "modules": blocks_of(settings, modules, store=address),
        "workers": workers,
        "router": ROUTER_NAME if router else None,
        "drain": worker_settings(settings).drain if seconds is None else seconds,
        "secrets": secrets,
        "reread": lambda: _read(config),
        "ingestion": sources,
    }


@asynccontextmanager
async def _running(options: dict[str, Any]) -> AsyncIterator[Client]:
    async with running_system(**options) as running:
        watch = asyncio.create_task(_report_failure(running), name="reefknot store")
        try:
            yield running.client
        finally:
            watch.cancel()


def _read(config: Config) -> Settings:
    named = None if config is None else os.fspath(config)
    return load_settings(named, environ=os.environ, cwd=Path.cwd())


async def _report_failure(system: System) -> None:
    try:
        await system.store_failed()
    except ReefknotError as error:
        logger().error("the system in this process has stopped, because its store has failed: %s", error)


class _SystemClient(SyncClient):
    """A sync client whose thread runs the system as well; in a fork it is a client of the same store."""

    def __init__(self, url: str | None, config: Config, options: dict[str, Any]) -> None:
        self._options = options
        super().__init__(url, config=config)

    def _opened_link(self, scope: SystemScope | None) -> ClientThread:
        return ClientThread(_running(self._options), CLOSE_S + self._options["drain"])
