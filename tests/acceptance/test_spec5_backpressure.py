"""Worker backpressure, §8: the acceptance list, each line by its number, on the example configurations end to end."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.errors import QueueFullError
from reefknot.policy.settings import load_settings
from reefknot.queue.model.admission import Degradation, OverloadStatus, RejectionPolicy, Rules
from reefknot.queue.model.messages import AckStatus, ResultStatus, encode
from reefknot.queue.worker.settings import WorkerSettings, settings_from
from tests.workshop import NO_BREAKER, OK, REFUSED, Shop, Step, work

SAMPLES = Path(__file__).parent / "samples"
H, D, O, C = OverloadStatus  # noqa: E741


def configured(sample: str, *, environ: dict[str, str] | None = None, **changes: Any) -> WorkerSettings:
    """A worker's settings from a document's own example, with one slot so that work waits."""
    loaded = load_settings(str(SAMPLES / sample), environ=environ or {}, cwd=SAMPLES)
    changes = {"concurrency": {"cpu": 1}, **changes}
    gates = {"retries_gate": loaded.retries_gate, "queue_gate": loaded.queue_gate}
    return settings_from(loaded.configuration, loaded.book, **gates, **changes)


async def flooded(shop: Shop, settings: WorkerSettings, waiting: int, seconds: float = 10_000) -> Any:
    worker = await shop.worker("w1", Step(seconds=seconds), settings=settings)
    await shop.send(work("run"))
    for start in range(0, waiting, 500):
        await shop.send(*(work(f"q{n}") for n in range(start, min(waiting, start + 500))))
    await asyncio.sleep(0.01)
    return worker


async def test_8_1_1_and_8_1_2_the_queue_is_bounded_and_rejects_when_it_is_full(shop: Shop) -> None:
    worker = await flooded(shop, configured("spec5-7.1-minimal.json"), 1000)
    assert worker.pools["cpu"].queue.depth == 1000
    await shop.send(work("late"))
    ack = shop.ack("late")
    assert (ack.status, ack.message) == (AckStatus.REJECTED, "Queue full, rejecting assignment")
    assert ack.overload_status is C


async def test_8_1_3_the_depth_can_be_watched(shop: Shop) -> None:
    worker = await flooded(shop, configured("spec5-7.1-minimal.json"), 7)
    shown = worker.snapshot().classes["cpu"]
    assert (shown.depth, shown.size, shown.active, shown.capacity) == (7, 1000, 1, 1)
    assert worker.heartbeat().classes["cpu"].queue_depth == 7
    assert shop.ack("q6").queue_depth == 7


@pytest.mark.parametrize(
    ("sample", "environ", "v2"),
    [
        ("spec5-7.1-minimal.json", {}, True),
        ("spec5-7.1-minimal.json", {"WORKER_QUEUE_V2_ENABLED": "false"}, False),
        ("spec5-3.2-policies.json", {}, False),
        ("spec5-3.2-policies.json", {"WORKER_QUEUE_V2_ENABLED": "true"}, True),
    ],
)
async def test_8_1_4_the_flag_gates_it_all(shop: Shop, sample: str, environ: dict[str, str], v2: bool) -> None:
    await flooded(shop, configured(sample, environ=environ), 1001)
    refused = [one for one in shop.acks if one.status is AckStatus.REJECTED]
    assert len(refused) == (1 if v2 else 0)
    assert all((one.overload_status is not None) is v2 for one in shop.acks)


async def test_8_2_1_and_8_2_3_the_ack_tells_the_level_by_depth(shop: Shop) -> None:
    await flooded(shop, configured("spec5-7.1-minimal.json"), 1000)
    told = {one.queue_depth: one.overload_status for one in shop.acks}
    assert [told[depth] for depth in (0, 499, 500, 799, 800, 999, 1000)] == [H, H, D, D, O, O, C]


async def test_8_2_2_the_result_tells_the_depth_at_queueing_and_the_level_at_completion(shop: Shop) -> None:
    settings = configured("spec5-7.1-minimal.json")
    rules = Rules(size=10)
    await flooded(shop, msgspec.structs.replace(settings, rules=rules), 9, seconds=1)
    await asyncio.sleep(60)
    results = {one.assignment_id: one for one in shop.results}
    assert (results["run"].queue_depth, results["run"].overload_status) == (0, O)
    assert results["q8"].queue_depth == 9
    assert results["q7"].overload_status is H


async def test_8_2_4_a_router_of_the_old_kind_reads_the_old_fields_and_ignores_the_new_ones(shop: Shop) -> None:
    await flooded(shop, configured("spec5-7.1-minimal.json"), 0, seconds=0.1)
    await asyncio.sleep(1)
    ack, result = (json.loads(encode(message)) for message in (shop.ack("run"), shop.result("run")))
    assert {"assignment_id", "status", "message"} <= ack.keys()
    assert ack["status"] == "accepted"
    assert {"assignment_id", "request_id", "status", "provider_id", "job", "latency_ms", "cost"} <= result.keys()
    assert isinstance(result["latency_ms"], int | float)


async def test_8_3_1_reject_new(shop: Shop) -> None:
    await flooded(shop, configured("spec5-7.1-minimal.json"), 1003)
    assert [one.message for one in shop.acks[-4:]] == ["Assignment queued", *["Queue full, rejecting assignment"] * 3]


async def test_8_3_2_drop_oldest(shop: Shop) -> None:
    await flooded(shop, configured("spec5-7.2-drop-oldest.json"), 500)
    await shop.send(work("new"))
    assert shop.ack("new").message == "Assignment queued (dropped oldest)"
    assert (shop.ack("q0").status, shop.ack("q0").reason) == (AckStatus.REJECTED, "dropped_oldest")
    assert shop.result("q0").error_code == "SYSTEM_OVERLOAD"
    await asyncio.sleep(61)
    await shop.send(work("newer"))
    assert shop.ack("newer").message == "Queue full, rejecting assignment", "the oldest is protected by its age"


async def test_8_3_3_defer(shop: Shop) -> None:
    settings = configured("spec5-3.2-policies.json", environ={"WORKER_QUEUE_V2_ENABLED": "1"})
    deferring = msgspec.structs.replace(settings, rules=Rules(policy=RejectionPolicy.DEFER))
    await flooded(shop, deferring, 751)
    assert shop.ack("q750").message == "Assignment deferred for 15000ms"
    assert shop.ack("q499").message == "Assignment queued"
    await shop.send(*(work(f"x{n}") for n in range(250)))
    assert shop.ack("x249").message == "Queue at capacity, cannot defer"


async def test_8_3_4_degrade(shop: Shop) -> None:
    settings = configured("spec5-7.3-degrade.json")
    assert settings.rules.medium == Degradation(skip_retries=True, timeout_factor=0.8)
    await flooded(shop, settings, 2001)
    words = [shop.ack(f"q{n}").message for n in (999, 1000, 1600, 1900, 1999, 2000)]
    degraded = [f"Assignment accepted with degradation: {level}" for level in ("light", "medium", "heavy", "heavy")]
    assert words == ["Assignment queued", *degraded, "Queue at capacity, cannot degrade"]


def test_8_3_5_the_named_policy_is_the_one_that_acts() -> None:
    for sample, policy, size in (
        ("spec5-3.2-policies.json", RejectionPolicy.REJECT_NEW, 1000),
        ("spec5-7.1-minimal.json", RejectionPolicy.REJECT_NEW, 1000),
        ("spec5-7.2-drop-oldest.json", RejectionPolicy.DROP_OLDEST, 500),
        ("spec5-7.3-degrade.json", RejectionPolicy.DEGRADE, 2000),
    ):
        rules = configured(sample).rules
        assert (rules.policy, rules.size) == (policy, size)
        assert (rules.max_drop_age_ms, rules.max_defer_time_ms) == (60_000, 30_000)
        assert rules.heavy == Degradation(True, 0.5, True)


async def test_8_4_1_to_8_4_3_the_router_hears_the_level_and_routes_by_it(shop: Shop) -> None:
    router = await shop.router()
    small = WorkerSettings(configured("spec5-7.1-minimal.json").book, rules=Rules(size=4), concurrency={"cpu": 1})
    await shop.worker("small", Step(seconds=5), settings=small)
    await shop.worker("large", Step(seconds=0.1))
    await asyncio.sleep(1.1)
    futures = [await router.submit(work(f"a{n}")) for n in range(60)]
    results = [await one for one in futures]
    by_small = [one for one in results if one.worker_id == "small"]
    assert len(by_small) <= 5, "degraded at 2 of 4, and then others are preferred"
    assert {one.status for one in results} == {ResultStatus.SUCCESS}
    health = router.snapshot().workers["cpu"]["small"]
    assert health["capacity"] == 1
    assert health["heartbeat_at"] is not None


async def test_8_4_4_pressure_travels_to_the_caller(shop: Shop) -> None:
    router = await shop.router(rules=Rules(size=30))
    small = WorkerSettings(configured("spec5-7.1-minimal.json").book, rules=Rules(size=4), concurrency={"cpu": 1})
    await shop.worker("small", Step(seconds=5), settings=small)
    await asyncio.sleep(1.1)
    accepted, waits = [], []
    for n in range(100):
        try:
            accepted.append(await router.submit(work(f"a{n}")))
        except QueueFullError as error:
            waits.append(error.retry_after)
        await asyncio.sleep(0.01)
    assert len(waits) >= 50
    assert min(waits) > 0
    assert {(await one).status for one in accepted} == {ResultStatus.SUCCESS}, "what was accepted is done"


async def test_retries_keep_their_place_and_the_bound_holds(shop: Shop) -> None:
    rules = Rules(size=10)
    worker = await shop.worker("w1", Step(REFUSED, OK), rules=rules, concurrency={"cpu": 3}, breaker=NO_BREAKER)
    most = 0
    for n in range(300):
        await shop.send(work(f"a{n}"))
        most = max(most, worker.pools["cpu"].queue.depth)
    assert most <= 10 + 3
    await asyncio.sleep(60)
    accepted = [one for one in shop.acks if one.status is AckStatus.ACCEPTED]
    assert len(shop.results) == len(accepted)
