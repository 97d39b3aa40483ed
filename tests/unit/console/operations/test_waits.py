"""Why a job waits, from the facts of a store: causes that are rare, or that need another host, a source or a key."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from reefknot.console.operations.jobs import JobQuery, job_story, list_jobs, show_job
from reefknot.console.operations.operator import Operator
from reefknot.console.operations.queues import pause_queue
from reefknot.core.redaction import Redactor
from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.sources import SourceRecords, with_health
from reefknot.queue.model.results import down_reason
from reefknot.queue.model.source_health import SourceHealth
from reefknot.queue.model.work import ROUTER, Snooze, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.runtime.processes import process_mark
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.unit.queue.test_presence import ELSEWHERE, reported

Stage = Callable[[Store], Awaitable[str]]
BUSY = {"status": "healthy", "depth": 3, "size": 9, "active": 2, "capacity": 2, "oldest_age_s": 1.0}
SEEN = {"state": "running", "active": 0, "capacity": 4}


def worker(name: str = "worker-1", **changes: Any) -> dict[str, Any]:
    return {"worker_id": name, "draining": False, "leaving": False, "classes": {"cpu": BUSY}, "retries": {}, **changes}


def router(**changes: Any) -> dict[str, Any]:
    return {"router_id": "router", "waiting": 0, "pending": 1, "status": "healthy", "workers": {}, **changes}


async def enqueued(store: Store, name: str = "a", resource_class: str = ROUTER, **changes: Any) -> str:
    await store.work.enqueue([WorkItem(name, "own.step", resource_class, pool="cpu", **changes)])
    return name


async def snoozed(store: Store, reason: str) -> str:
    """A job in the queue of worker-1 that was put off for this reason."""
    name = await enqueued(store, resource_class="cpu@worker-1")
    (item,) = await store.work.claim(1, WorkClaim(owner="worker-1#1", classes=("cpu@worker-1",)))
    due = store.moment().wall + 60_000
    await store.work.settle([Settlement(item.id, item.owner, item.fence, Snooze(due, reason))])
    return name


async def unacknowledged(store: Store) -> str:
    await reported(store, router=router(unanswered={"a": ["worker-1", 4.5]}))
    return await enqueued(store)


def elsewhere(owner: str, resource_class: str) -> Stage:
    """A job that a silent process on another host holds."""

    async def stage(store: Store) -> str:
        name = await enqueued(store, resource_class=resource_class)
        await store.work.claim(1, WorkClaim(owner=f"{owner}#1@{ELSEWHERE}", classes=(resource_class,), lease=30))
        await reported(store, worker="worker-2")
        return name

    return stage


async def foreign_worker(store: Store) -> str:
    """A worker over another store, which only the router hears of: nobody can tell which steps it knows."""
    await reported(store, workers=[], router=router(workers={"cpu": {"far-1": SEEN}}))
    return await enqueued(store)


async def of_a_run(store: Store) -> str:
    """A job of `reefknot run`, whose router and worker serve it alone."""
    await reported(store, own_work_only=True, workers=[worker("run-1", classes={})], router=router())
    name = await enqueued(store)
    await store.work.claim(1, WorkClaim(owner=f"router#1@{process_mark()}", classes=(ROUTER,)))
    return name


async def behind_its_tenant(store: Store) -> str:
    await reported(store, workers=[worker()], blocks=["own.step"], router=router())
    for number in range(9):
        await enqueued(store, f"acme|{number}", tenant_id="acme")
    return "acme|8"


async def behind_others(store: Store) -> str:
    await reported(store, workers=[worker()], blocks=["own.step"], router=router())
    for number in range(4):
        await enqueued(store, str(number), priority=number % 2)
    return "2"


async def breaker(store: Store) -> str:
    down = {"name": "api:443", "worker_id": "worker-1", "breaker": "open", "throttled": False, "tokens": None}
    await reported(store, workers=[worker()], activity={"destinations": [down]})
    return await snoozed(store, down_reason("api:443", 1_794_962_840_123))


async def key_of_a_dead_record(store: Store) -> str:
    """The key is free again: the reason of the last pause is not why it waits now."""
    await reported(store, workers=[worker()])
    return await snoozed(store, "key 'k' is in progress at somebody")


def of_source(health: Callable[[SourceHealth, int], SourceHealth], **more: Any) -> Stage:
    async def stage(store: Store) -> str:
        await reported(store, sources=["mail"])
        now = store.moment().wall
        await SourceRecords(store).change("mail", with_health(lambda one: health(one, now), **more))
        await JobQueue(store).enqueue(IngestionJob("sync-1", "imap_mailbox", "mail"))
        return "sync-1"

    return stage


async def no_orchestrator(store: Store) -> str:
    await reported(store)
    await JobQueue(store).enqueue(IngestionJob("sync-1", "imap_mailbox", "mail"))
    return "sync-1"


def replaced(**changes: Any) -> Callable[[SourceHealth, int], SourceHealth]:
    """The health with these changes; a number of milliseconds is one from now on."""
    return lambda health, now: SourceHealth(
        **{name: now + value if name.endswith("_until") else value for name, value in changes.items()}
    )


STAGES: list[tuple[Stage, str, str]] = [
    (unacknowledged, "unacknowledged", "it was sent to worker-1 4 s ago and is not acknowledged yet"),
    (elsewhere("worker-1", "cpu@worker-1"), "owner_silent", "worker-1 holds it and has been silent for"),
    (elsewhere("router-9", ROUTER), "owner_silent", "router-9 holds it and has been silent for"),
    (foreign_worker, "soon", "a router is about to send it to a worker"),
    (of_a_run, "no_class", "no running worker has the class cpu"),
    (behind_its_tenant, "tenant_turn", "11 jobs are ahead of it, 8 of them of its own tenant acme"),
    (behind_others, "pool_full", "all 2 slots of the class cpu are busy, and 6 jobs are ahead of it"),
    (breaker, "destination_down", "destination api:443 has been down since 2026-11-18 00:47:20 UTC; next probe in"),
    (key_of_a_dead_record, "put_off", "it was put off"),
    (of_source(replaced(paused=True), paused_by="ann", paused_because="moving"), "source_paused", "(by ann: moving)"),
    (of_source(replaced(cools_until=90_000, cooling_reason="asked: 429")), "source_cooling", "for 90 s (asked: 429)"),
    (of_source(replaced(rests_until=30_000, rests=1)), "source_resting", "does not answer and rests for 30 s"),
    (of_source(replaced(rests=1)), "source_probed", "one job tries whether it is back"),
    (of_source(replaced()), "soon", "it is about to begin"),
    (no_orchestrator, "no_sync", "no running system syncs the source mail"),
]


@pytest.mark.parametrize("engine", ["memory:", "sqlite:"])
@pytest.mark.parametrize(
    ("stage", "code", "text"), STAGES, ids=[f"{code}-{n}" for n, (_, code, _) in enumerate(STAGES)]
)
@pytest.mark.real_time
async def test_a_job_that_waits_says_why(engine: str, stage: Stage, code: str, text: str, tmp_path: Any) -> None:
    async with open_store(f"{engine}{tmp_path / 'state.db'}" if engine == "sqlite:" else engine) as store:
        tenant, _, name = (await stage(store)).rpartition("|")
        operator = Operator(store, Redactor(()))
        shown = (await show_job(operator, name, tenant or None))["waiting"]
        assert shown["code"] == code
        assert text in shown["text"]
        assert shown["remedy"]
        story = (await job_story(operator, name, tenant or None))["waiting"]
        (listed,) = [one for one in (await list_jobs(operator, JobQuery()))["jobs"] if one["id"] == name]
        assert story["code"] == listed["waiting"]["code"] == code


@pytest.mark.real_time
async def test_a_job_that_runs_or_has_ended_does_not_wait() -> None:
    async with open_store("memory:") as store:
        await reported(store)
        name = await enqueued(store, resource_class="cpu@worker-1")
        await store.work.claim(1, WorkClaim(owner=f"worker-1#1@{process_mark()}", classes=("cpu@worker-1",)))
        operator = Operator(store, Redactor(()))
        assert (await show_job(operator, name))["waiting"] is None
        await store.work.cancel(name)
        assert (await show_job(operator, name))["waiting"] is None


HELD = {"waiting": 7, "running": 0, "next_in_s": 3.2}
LIMIT: dict[str, Any] = {
    "running": None,
    "name": "own.*",
    "rate": {"count": 10.0, "unit": "s"},
    "burst": 20,
    "types": "own.*",
    "per": "",
    "only": "",
    "place": "reefknot.yaml:2:3",
    "text": "10/s, burst 20",
    "held": {"own.*": HELD},
}


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (LIMIT, "it waits for the limit own.* (10/s, burst 20; reefknot.yaml:2:3), as 7 jobs do; the next one starts"),
        (LIMIT | {"held": {}}, ""),
        (LIMIT | {"types": "other.*"}, ""),
        (
            LIMIT | {"name": "tenant", "types": "*", "per": "tenant", "held": {"tenant acme": HELD}},
            "it waits for the limit tenant acme (10/s",
        ),
        (
            LIMIT | {"name": "tenant", "types": "*", "per": "tenant", "held": {"tenant b": HELD}},
            "",
        ),
    ],
)
@pytest.mark.real_time
async def test_a_job_names_the_limit_that_it_waits_for_and_its_line(limit: Any, text: str) -> None:
    async with open_store("memory:") as store:
        await reported(store, router=router(limits=[limit]))
        await enqueued(store, "acme|a", tenant_id="acme")
        shown = (await show_job(Operator(store, Redactor(())), "a", "acme"))["waiting"]
        assert (shown["code"] == "limited") is bool(text), shown
        assert shown["text"].startswith(text)
        if text:
            assert "raise the limit in reefknot.yaml:2:3, then `reefknot router reload`" in shown["remedy"]


@pytest.mark.real_time
async def test_a_paused_job_says_who_paused_it_wherever_it_is() -> None:
    async with open_store("memory:") as store:
        await reported(store, router=router())
        await pause_queue(Operator(store, Redactor(()), "ann"), type="own.*", reason="closed")
        for name, pool in (("a", ROUTER), ("b", "cpu@worker-1")):
            await enqueued(store, name, pool)
            shown = (await show_job(Operator(store, Redactor(())), name))["waiting"]
            assert (shown["code"], shown["text"]) == ("queue_paused", "the type own.* is paused by ann (closed)")
