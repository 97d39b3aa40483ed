"""
The engine on NATS JetStream: a store that many machines share.

A process mirrors the work that it decides about; every change is an atomic batch with the revisions that it was decided
on, and with its events.

`JetStreamStore` and nats-py are imported on use: an address is checked without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from reefknot.runtime.addresses import NATS_ACCEPTED, nats_address
from reefknot.stores.port.engines import Engine, Examination, ExamineOptions, Finding, OpenOptions, StoreFiles

if TYPE_CHECKING:
    from reefknot.stores.jetstream.connection import NatsOptions, options_from_url
    from reefknot.stores.jetstream.store import JetStreamStore
    from reefknot.stores.port import Store

__all__ = ["ENGINE", "JetStreamStore", "NatsOptions", "options_from_url"]


class JetStreamEngine:
    """The engine of `nats://HOST:PORT`."""

    magic = b""
    without_file = (
        "is a store on NATS and has no file of its own; accepted here: sqlite:PATH. On NATS, `reefknot doctor` looks "
        "at the streams, `reefknot audit verify` verifies the events, and `nats stream backup` copies a stream"
    )
    hears_peers = True
    extra = "nats"

    def path(self, url: str) -> None:
        try:
            nats_address(url)
        except ValueError as error:
            why = "" if str(error) == NATS_ACCEPTED else f"; {error}"
            raise ValueError(f"a store on NATS is {NATS_ACCEPTED}{why}") from None

    def files(self) -> StoreFiles:
        raise LookupError(self.without_file)

    async def open(self, url: str, options: OpenOptions) -> Store:
        from reefknot.stores.jetstream.connection import options_from_url
        from reefknot.stores.jetstream.store import JetStreamStore

        limits = {**options.limits, "work_retention": options.work_retention}
        read_only = options.read_only or set(options.settings.get("roles", ())) == {"reader"}
        of_server = options_from_url(url, **options.settings, read_only=read_only)
        return await JetStreamStore(of_server, options.clock, **limits, has_server_time=not options.inline).start()

    async def create(self, url: str, settings: Mapping[str, Any], *, keeps_shared: bool) -> list[str]:
        from reefknot.stores.jetstream.connection import options_from_url
        from reefknot.stores.jetstream.store import create

        return await create(options_from_url(url, **settings), keeps_shared=keeps_shared)

    async def examine(self, url: str, options: ExamineOptions) -> Examination:
        from reefknot.stores.jetstream.connection import options_from_url
        from reefknot.stores.jetstream.examination import server_findings

        found = [one async for one in server_findings(options_from_url(url, **options.settings), options)]
        are_whole = {one.level for one in found if one.check == "stream"} == {"ok"}
        return Examination(found, is_ready=are_whole and all(one.level != "problem" for one in found))

    async def examine_open(self, store: Store, options: ExamineOptions) -> list[Finding]:
        from reefknot.queue.model.work import WorkState
        from reefknot.stores.jetstream.examination import server_findings

        counts = (await store.work.snapshot()).counts.values()
        open_jobs = sum(one.get(WorkState.PENDING, 0) + one.get(WorkState.RUNNING, 0) for one in counts)
        of_server = cast("JetStreamStore", store).options
        return [one async for one in server_findings(of_server, options, open_jobs)]


ENGINE: Engine = JetStreamEngine()


def __getattr__(name: str) -> Any:
    if name == "JetStreamStore":
        from reefknot.stores.jetstream.store import JetStreamStore

        return JetStreamStore
    if name in ("NatsOptions", "options_from_url"):
        from reefknot.stores.jetstream import connection

        return getattr(connection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
