"""`reefknot dashboard`: the pages and the HTTP API of a store, served without running a system."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from reefknot.console.cli.app import CommandError, Exit, noun
from reefknot.console.cli.live_output import LOG, LogFlags
from reefknot.console.cli.options import STORE, StoreFlags, arg, check_number, check_seconds
from reefknot.console.cli.output import flush_stdout, put_json, say
from reefknot.console.cli.serve import For, say_address, shutdown_on_signals, until_text
from reefknot.console.cli.store import StoreAddress, address_of, opened, place_of
from reefknot.queue.presence import store_failed
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import until_first_ends

if TYPE_CHECKING:
    from reefknot.console.dashboard.server import Serving
    from reefknot.console.dashboard.site import Site
    from reefknot.stores.port import Store

REOPEN_EVERY_S = 2.0

app = noun(
    "dashboard",
    "dashboard",
    "dashboard --engine sqlite:state.db --port 9000 --read-only",
    "dashboard --engine nats://127.0.0.1:4222",
    help="Serve the pages and the HTTP API of a store, on this machine only by default. The address that is printed "
    "holds a token; `reefknot up` serves the same for its own store. Ctrl-C ends it.",
)


@app.default
def dashboard(
    *,
    host: Annotated[str | None, arg("Address to listen on. Default: dashboard.host, or 127.0.0.1.")] = None,
    port: Annotated[int | None, arg("Port; 0 takes a free one. Default: dashboard.port, or 8321 if free.")] = None,
    read_only: Annotated[bool, arg("Refuse every action: pages and API only read.")] = False,
    seconds: For = None,
    log: LogFlags = LOG,
    options: StoreFlags = STORE,
) -> int:
    """
    Serve a store's pages and API until Ctrl-C or SIGTERM.

    The exit code is 75 when the port is in use, and 78 for an address that other machines reach without TLS and a
    configured token.
    """
    from reefknot.console.dashboard.server import missing_extra, prepare

    check_seconds("--for", seconds)
    check_number("--port", port, 0, 65_535, "a port from 0 to 65535; 0 takes a free one")
    if host is not None and not host.strip():
        raise CommandError(f"--host: {host!r} is not accepted: an address of this machine, such as 127.0.0.1")
    lacking = missing_extra()
    if lacking:
        raise CommandError(lacking, Exit.MISCONFIGURED)
    address = address_of(options)
    served = prepare(address.settings, host=host, port=port, read_only=read_only)
    try:
        with log.applied(is_service=True):
            return asyncio.run(_serve(address, served, seconds, json=options.json, watches=not read_only))
    finally:
        served.socket.close()


async def _serve(address: StoreAddress, served: Serving, seconds: float | None, *, json: bool, watches: bool) -> int:
    """Serve until the time is over or a signal comes; the result is the exit code."""
    from reefknot.console.dashboard.server import serving
    from reefknot.console.dashboard.site import Site

    with shutdown_on_signals(runs_steps=False) as shutdown:
        keeper = StoreKeeper(address, watches=watches)
        store = await keeper.start()
        try:
            site = Site(
                store,
                access=served.access,
                redactor=address.redactor,
                settings=address.settings,
                shown=address.shown,
                on_lost=keeper.lost.set,
            )
            keeper.site = site
            async with serving(site, served) as server:
                _announce(served, address, seconds, json=json)
                await until_first_ends(shutdown.requested.wait(), asyncio.shield(server), timeout=seconds)
        finally:
            await keeper.stop()
    return Exit.FINE if shutdown.code is None else shutdown.code


def _announce(served: Serving, address: StoreAddress, seconds: float | None, *, json: bool) -> None:
    """Tell where the pages are: as JSON on stdout, else as a message."""
    if json:
        put_json({"url": served.url, "token": served.token, "store": address.shown})
        flush_stdout()
        return
    say(f"serving {place_of(address.url)} {until_text(seconds)}")
    say_address(served, address.url)


class StoreKeeper:
    """The open store of a site. One that is lost, because its file or its server is gone, is opened again."""

    def __init__(self, address: StoreAddress, *, watches: bool = True) -> None:
        """With `watches`, alerts are raised and dead systems recorded from here, while no running system does."""
        self._watches = watches
        self.site: Site | None = None
        self.lost = asyncio.Event()
        self._address = address
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> Store:
        """Open the store; an error is the caller's."""
        first: asyncio.Future[Store] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(first), name="dashboard store")
        pending: list[asyncio.Future[Any]] = [self._task, first]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await self._task  # raises
        return first.result()

    async def stop(self) -> None:
        """Close the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self, first: asyncio.Future[Store]) -> None:
        """Keep a store open, from one task, because what a task opens it has to close."""
        while True:
            try:
                async with opened(self._address) as store, self._watched(store):
                    self._found(store, first)
                    await until_first_ends(self.lost.wait(), store_failed(store))
                    self._say_lost("its connection or its file was lost")
            except Exception as error:
                if not first.done():
                    raise
                self._say_lost(error_text(error))
            await asyncio.sleep(REOPEN_EVERY_S)

    def _watched(self, store: Store) -> AbstractAsyncContextManager[object]:
        from reefknot.app.alert_watch import watched_alerts
        from reefknot.audit.journal import Journal
        from reefknot.clock import SteadyClock

        if not self._watches:
            return nullcontext()
        journal = Journal(store.audit, redactor=self._address.redactor)
        return watched_alerts(store, SteadyClock(store.clock), journal, self._address.settings, stands_in=True)

    def _found(self, store: Store, first: asyncio.Future[Store]) -> None:
        if self.site is not None:
            self.site.store, self.site.loss = store, ""
            logger().warning("dashboard: the store is back")
        if not first.done():
            first.set_result(store)
        self.lost.clear()

    def _say_lost(self, why: str) -> None:
        shown, reason = self._address.shown, self._address.redactor(why)
        text = f"the store {shown} is gone: {reason}; it is opened again as soon as it is back"
        if self.site is not None and self.site.loss != text:
            self.site.loss = text
            logger().warning("dashboard: %s", text)
