"""Stores with work items, without a running system."""

import asyncio
from pathlib import Path
from typing import Any

from reefknot.app.system import System
from reefknot.audit.model.event import AnyEvent, OperatorAction, decode
from reefknot.ingest.jobs import IngestionJob
from reefknot.queue.client import Client
from reefknot.queue.model.messages import ExecAssignment, Job, encode
from reefknot.queue.model.work import Quarantine, Settled, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import SystemClock
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands

OF_SOURCE = '{"code": "EXECUTION_FAILED", "failure_type": "permanent", "message": "no folder \'Wokr\'"}'
PAYLOAD = {"path": "a.txt", "password": "hunter2hunter2"}


def submitted(path: Path, *names: str) -> None:
    """Submissions that no router has claimed."""

    async def work(store: Store) -> None:
        client = Client(store, SystemClock())
        for name in names:
            await client.submit("fs.blob_get", PAYLOAD, assignment_id=name)

    in_store(path, work)


def accepted(
    path: Path,
    name: str,
    settled: Settled | None,
    *,
    kind: str = "fs.blob_get",
    worker: str = "worker-1",
    payload: dict[str, Any] | None = None,
) -> None:
    """A step that a worker accepted, and its report; None while it still runs."""

    async def work(store: Store) -> None:
        submitted = await store.work.get(name)
        request = "r" if submitted is None else submitted.correlation_id or ""
        assignment = ExecAssignment(name, request, Job(kind, payload or PAYLOAD))
        ids: dict[str, Any] = {"correlation_id": request, "tenant_id": name.rpartition("|")[0]}
        item = WorkItem(name, kind, f"cpu@{worker}", payload=encode(assignment), **ids)
        assert await store.work.assign([item]) != [None]
        (claimed,) = await store.work.claim(1, WorkClaim(owner="worker-1#1", classes=(f"cpu@{worker}",), lease=0.001))
        if settled is not None:
            assert await store.work.settle([Settlement(claimed.id, claimed.owner, claimed.fence, settled)]) == [True]

    in_store(path, work)


def quarantined(path: Path, name: str, reason: str = "attempts_spent", **more: Any) -> None:
    accepted(path, name, Quarantine(reason, '{"code": "HTTP_ERROR"}'), **more)


def failed_job(path: Path, job: IngestionJob, payload: bytes | None = None) -> None:
    """A job of a source in quarantine; with another payload than its own where one is given."""

    async def work(store: Store) -> None:
        item = job.as_item()
        body = item.payload if payload is None else payload
        item = WorkItem(item.id, item.kind, item.resource_class, source=item.source, payload=body)
        await store.work.enqueue([item])
        (held,) = await store.work.claim(1, WorkClaim(owner="o", classes=(item.resource_class,)))
        settled = Quarantine("not_retryable: no folder 'Wokr'", OF_SOURCE)
        assert await store.work.settle([Settlement(held.id, "o", held.fence, settled)]) == [True]

    in_store(path, work)


def reported_running(path: Path, *workers: str) -> None:
    """The status that a system reports every second."""

    async def main() -> None:
        async with open_store(f"sqlite:{path}") as store:
            system = System(store, SystemClock(), settings=default_settings(), blocks={}, workers=workers)
            await system._report_status()

    asyncio.run(main())


def events(path: Path) -> list[AnyEvent]:
    async def read(store: Store) -> list[AnyEvent]:
        return [decode(kept.entry.body) for kept in await store.audit.read()]

    return in_store(path, read, read_only=True)


def operator_actions(path: Path) -> list[tuple[str, str]]:
    return [(one.actor, one.action) for one in events(path) if isinstance(one, OperatorAction)]


def item(path: Path, name: str) -> Any:
    async def read(store: Store) -> WorkItem | None:
        return await store.work.get(name)

    return in_store(path, read)


def ids(rk: Commands, noun: str, *words: str) -> list[str]:
    found = rk(noun, "list", "--json", *words).json
    return [one["id"] for one in found["jobs" if noun == "job" else "items"]]
