"""Follow-ups: chains, gathers and work after other work, in a system under test and on a store that lasts."""

import asyncio
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import reefknot as rk
from reefknot.console.nats_servers import NatsServer
from reefknot.queue.family import awaited_by, family_of
from reefknot.queue.model.follow_ups import MOST_STORED, child_id
from reefknot.queue.model.messages import ResultStatus
from reefknot.queue.model.work import ROUTER, Extra, WorkItem, assignment_and_tenant, record_id
from reefknot.stores.opening import open_store
from reefknot.testing import SyncVirtualSystem

Inputs = Mapping[str, Any]
V2: dict[str, Any] = {"worker": {"retries": {"v2": {"enabled": True}}, "queue": {"v2": {"enabled": True}}}}
ASIDE: dict[str, Any] = {"worker": {**V2["worker"], "quarantine_failed": True}}


@rk.block("flow.start")
async def start(inputs: Inputs, context: rk.BlockContext) -> Any:
    """A mail, and a gather over as many pages as it is asked for."""
    context.then("flow.mail", {"to": "ops"}, delay=timedelta(seconds=5))
    pages = [rk.then("flow.page", {"n": n}) for n in range(inputs["pages"])]
    return rk.gather(*pages, then=rk.then("flow.report"), return_failures=inputs.get("failures", False))


@rk.block("flow.page")
async def page(inputs: Inputs, context: rk.BlockContext) -> dict[str, Any]:
    if inputs["n"] == 2 and BROKEN:
        raise rk.RejectedError("the page is gone")
    return {"n": inputs["n"]}


@rk.block("flow.mail")
def mail(inputs: Inputs, context: rk.BlockContext) -> rk.FollowUp | None:
    return rk.then("flow.mail", {"left": inputs["left"] - 1}) if inputs.get("left") else None


@rk.block("flow.report")
async def report(inputs: Inputs, context: rk.BlockContext) -> dict[str, Any]:
    found = await context.children()
    return {"pages": [None if one.output is None else one.output["n"] for one in found]}


@rk.block("flow.plain_report")
def plain_report(inputs: Inputs, context: rk.BlockContext) -> dict[str, Any]:
    return {"seen": [one.status.value for one in context.children()]}


@rk.block("flow.many")
async def many(inputs: Inputs, context: rk.BlockContext) -> list[rk.FollowUp]:
    return [rk.then("flow.page", {"n": n}) for n in range(3, 3 + inputs["number"])]


STEPS = [start, page, mail, report, plain_report, many]
BROKEN = False


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The step of page 2 fails until this is undone."""
    monkeypatch.setattr(f"{__name__}.BROKEN", True)
    return monkeypatch


@pytest.fixture
def system() -> Iterator[SyncVirtualSystem]:
    with rk.testing.system_sync(STEPS, V2) as found:
        yield found


def states(system: SyncVirtualSystem) -> dict[str, str]:
    return {name: result.status.value for name, result in system.results().items()}


def test_a_gather_runs_once_when_all_children_have_ended_and_gets_their_results_in_order(
    system: SyncVirtualSystem,
) -> None:
    system.submit("flow.start", {"pages": 30}, assignment_id="site", tenant_id="acme", trace_id="t1")
    system.drain()
    found = system.results()
    assert found["site:2"].output == {"pages": list(range(30))}
    assert set(found) == {"site", "site:1", "site:2", *(f"site:2:{number}" for number in range(1, 31))}
    assert {one.tenant_id for one in found.values()} == {"acme"}
    assert {one.trace_id for one in found.values()} == {"t1"}
    assert len(system.calls("flow.report")) == 1
    submitted = {one["work_id"]: one.get("parent") for one in system.events("submitted")}
    assert (submitted["site"], submitted["site:1"], submitted["site:2:7"]) == (None, "site", "site:2")
    assert (system.now.timestamp() - 1_700_000_000) % 1000 >= 5, "the mail waits for its delay"


def test_a_retried_parent_has_its_follow_ups_once_and_a_failed_one_none(system: SyncVirtualSystem) -> None:
    system.fail("flow.start", times=2)
    system.submit("flow.start", {"pages": 2}, assignment_id="again")
    system.fail("flow.many", times=None, error=rk.RejectedError("no"))
    system.submit("flow.many", {"number": 2}, assignment_id="never")
    system.drain()
    assert set(system.results()) == {"again", "again:1", "again:2", "again:2:1", "again:2:2", "never"}
    assert len(system.calls("flow.start")) == 3


def test_a_gather_fails_with_the_first_failure_unless_it_asks_for_the_failures(
    system: SyncVirtualSystem, broken: pytest.MonkeyPatch
) -> None:
    system.submit("flow.start", {"pages": 4}, assignment_id="strict")
    system.submit("flow.start", {"pages": 4, "failures": True}, assignment_id="lenient")
    system.drain()
    strict = system.job("strict:2").result()
    assert strict.status is ResultStatus.ERROR
    assert (
        strict.error_message == "not run: strict:2:3, which it waited for, has failed (RejectedError: the page is gone)"
    )
    assert system.job("lenient:2").result().output == {"pages": [0, 1, None, 3]}
    (routing,) = [
        one for one in system.events("routing", job="strict:2") if one["reason"] == "what it waited for failed"
    ]
    assert routing["inputs"] == {"failed": ["strict:2:3"], "number": 1, "of": 4}
    broken.undo()
    system.job("strict:2:3").retry()
    system.drain()
    system.job("strict:2").retry()
    system.drain()
    assert system.job("strict:2").result().output == {"pages": [0, 1, 2, 3]}


def test_a_child_in_quarantine_holds_its_gather_which_says_so_and_goes_on_after_a_requeue(
    broken: pytest.MonkeyPatch,
) -> None:
    with rk.testing.system_sync(STEPS, ASIDE) as system:
        system.submit("flow.start", {"pages": 4}, assignment_id="site")
        with pytest.raises(rk.JobsStuckError) as stuck:
            system.drain()
        assert "waits for 1 of 4 jobs: site:2:3, which is in quarantine" in str(stuck.value)
        assert "reefknot quarantine requeue site:2:3" in str(stuck.value)
        broken.undo()
        system.job("site:2:3").retry()
        system.drain()
        assert system.job("site:2").result().output == {"pages": [0, 1, 2, 3]}


def test_after_waits_for_jobs_of_any_state_and_gives_their_results(system: SyncVirtualSystem) -> None:
    ended = system.submit("flow.page", {"n": 7}, assignment_id="ended")
    system.drain()
    later = system.submit("flow.page", {"n": 8}, delay=3600)
    last = system.submit("flow.report", after=[ended, later, "ended"], assignment_id="last")
    plain = system.submit("flow.plain_report", after=[last])
    system.advance(3000)
    assert (last.status(), plain.status()) == ("pending", "pending")
    system.drain()
    assert last.result().output == {"pages": [7, 8]}
    assert plain.result().output == {"seen": ["success"]}


def test_after_a_failure_or_a_cancellation_a_job_is_not_run(
    system: SyncVirtualSystem, broken: pytest.MonkeyPatch
) -> None:
    bad = system.submit("flow.page", {"n": 2}, assignment_id="bad")
    called_off = system.submit("flow.page", {"n": 1}, assignment_id="off", delay=60)
    after_bad, after_off = system.submit("flow.report", after=[bad]), system.submit("flow.report", after=[called_off])
    called_off.cancel("not needed")
    system.drain()
    assert "bad, which it waited for, has failed (RejectedError" in str(after_bad.result().error_message)
    assert "off, which it waited for, has failed (not needed)" in str(after_off.result().error_message)
    assert system.calls("flow.report") == []


def test_a_deadline_counts_while_a_job_waits_for_others(system: SyncVirtualSystem) -> None:
    slow = system.submit("flow.page", {"n": 1}, delay=3600)
    late = system.submit("flow.report", after=[slow], deadline=60)
    system.drain()
    assert late.result().status is ResultStatus.TIMEOUT
    assert system.calls("flow.report") == []


def test_many_follow_ups_go_into_a_gather_without_a_job_of_its_own(system: SyncVirtualSystem) -> None:
    system.submit("flow.many", {"number": MOST_STORED + 1}, assignment_id="wide")
    system.submit("flow.many", {"number": MOST_STORED}, assignment_id="less")
    system.drain()
    found = system.results()
    assert found["wide:1"].output == {"succeeded": MOST_STORED + 1, "failed": 0}
    assert (found["wide:1:257"].status, found["less:256"].status) == (ResultStatus.SUCCESS, ResultStatus.SUCCESS)


@pytest.mark.parametrize(
    ("step", "inputs", "message"),
    [
        ("flow.many", {"number": 10_001}, "at most 10000 children of one job"),
        ("flow.mail", {"left": 40}, "at most 32 follow-ups in a row"),
    ],
)
def test_what_exceeds_the_bounds_fails_by_name_and_is_not_retried(
    system: SyncVirtualSystem, step: str, inputs: Inputs, message: str
) -> None:
    system.submit(step, inputs, assignment_id="top")
    system.drain()
    (failed,) = [one for one in system.results().values() if one.status is ResultStatus.ERROR]
    assert message in str(failed.error_message)
    assert failed.retries_used == 0
    assert failed.assignment_id == "top" + 32 * ":1" * (step == "flow.mail")


def test_a_follow_up_that_is_refused_puts_its_whole_parent_off_and_spends_nothing() -> None:
    small: dict[str, Any] = {"worker": V2["worker"], "router": {"max_queue_size": 20}}
    with rk.testing.system_sync(STEPS, small) as system:
        waiting = [system.submit("flow.page", {"n": 1}, resource_class="gpu") for _ in range(15)]
        system.submit("flow.many", {"number": 19}, assignment_id="top")
        system.advance(5)
        assert system.job("top").status() == "pending"
        (why, *_) = [one["reason"] for one in system.events("requeued", job="top")]
        assert why == "follow-up flow.page (top:19) was refused: Queue full, rejecting assignment"
        assert len(waiting) == 15


def test_a_follow_up_whose_id_is_taken_fails_its_parent(system: SyncVirtualSystem) -> None:
    system.submit("flow.page", {"n": 1}, assignment_id="top:1")
    system.submit("flow.many", {"number": 2}, assignment_id="top")
    system.drain()
    assert system.job("top").status() == "quarantined"
    assert "other work has this id" in str(system.job("top").result().error_message)
    assert system.job("top:2").status() == "unknown"


def test_cancelling_a_tree_cancels_what_follows_and_what_waits(system: SyncVirtualSystem) -> None:
    first = system.submit("flow.page", {"n": 1}, assignment_id="first", delay=3600)
    second = system.submit("flow.page", {"n": 1}, assignment_id="second", after=[first])
    third = system.submit("flow.page", {"n": 1}, assignment_id="third", after=["second"])
    other = system.submit("flow.page", {"n": 1}, assignment_id="other", delay=3600)
    first.cancel("not needed", tree=True)
    assert [one.status() for one in (first, second, third, other)] == ["cancelled", "cancelled", "cancelled", "pending"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": ["a"], "assignment_id": "a"}, "a job that waits for itself is a cycle"),
        ({"after": "a"}, "a list of ids or handles"),
        ({"after": [7]}, r"after\[0\]"),
        ({"after": [str(one) for one in range(101)]}, "at most 100 jobs"),
        ({"afterwards": []}, "did you mean 'after'"),
    ],
)
def test_a_wrong_after_is_refused_where_it_is_called(
    system: SyncVirtualSystem, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rk.ParameterError, match=message):
        system.submit("flow.page", {"n": 1}, **options)


def test_after_an_unknown_job_and_cycles_within_a_list_are_refused(system: SyncVirtualSystem) -> None:
    with pytest.raises(rk.UnknownJobError, match="nothing-like-it"):
        system.submit("flow.page", {"n": 1}, after=["nothing-like-it"])
    one: rk.SubmitItem = {"job_type": "flow.page", "inputs": {"n": 1}, "assignment_id": "one"}
    two: rk.SubmitItem = {"job_type": "flow.page", "inputs": {"n": 1}, "assignment_id": "two", "after": ["one"]}
    with pytest.raises(rk.ParameterError, match=r"items\[0\].after.*items\[1\] comes later.*cycle"):
        system.submit_many([two, one])
    assert system.results() == {}
    system.submit_many([one, two])
    system.drain()
    assert states(system) == {"one": "success", "two": "success"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.then("flow.page", {"n": object()}), "inputs"),
        (lambda: rk.then("flow.page", delay=-1), "delay"),
        (lambda: rk.then("flow.page", eta=1), "did you mean 'at'"),  # type: ignore[call-arg]
        (lambda: rk.then("flow.page", assignment_id="x"), "assignment_id"),  # type: ignore[call-arg]
        (lambda: rk.gather(), "one or more follow-ups"),
        (lambda: rk.gather("flow.page"), "one or more follow-ups"),  # type: ignore[arg-type]
        (lambda: rk.gather(rk.then("a"), then=rk.then("b", delay=3)), "it runs when the children have ended"),
        (lambda: rk.gather(*[rk.then("a")] * 10_001), "at most 10000 children"),
    ],
)
def test_a_wrong_follow_up_is_refused_where_it_is_made(make: Any, message: str) -> None:
    with pytest.raises((rk.ParameterError, rk.NotJsonError), match=message):
        make()


def test_a_step_can_be_called_without_a_worker_and_shows_what_it_asked_for() -> None:
    context = rk.BlockContext("order-7", 1, "order-7/0", 30.0)
    returned = asyncio.run(start({"pages": 2}, context))
    assert [one.assignment.job.type for one in context.follow_ups if isinstance(one, rk.FollowUp)] == ["flow.mail"]
    assert isinstance(returned, rk.Gather)
    assert asyncio.run(report({}, context)) == {"pages": []}


@pytest.mark.parametrize(
    "parent",
    ["a", "x" * 250, record_id("x" * 250, "acme"), record_id("a|b", None)],
)
def test_ids_of_children_are_of_their_parent_distinct_and_short_enough(parent: str) -> None:
    ids = [child_id(parent, number) for number in (1, 2, 10_000)]
    assert len(set(ids)) == 3
    for one in ids:
        name, tenant = assignment_and_tenant(one)
        assert len(name) <= 256
        assert tenant == assignment_and_tenant(parent)[1]
    assert child_id("a", 3) == "a:3"


async def test_a_system_goes_on_with_what_another_one_left_waiting(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'state.db'}"
    async with rk.system(url, modules=STEPS, workers=0) as client:
        first = await client.submit("flow.page", {"n": 1}, assignment_id="first")
        last = await client.submit("flow.report", after=[first], assignment_id="last")
        await asyncio.sleep(0.3)
        assert await last.status() == "pending"
    async with open_store(url) as store:
        item = await store.work.get("last")
        assert item is not None
        assert (item.reason, item.snoozes, item.attempts) == ("scheduled", 0, 0)
        found = await awaited_by(store.work, item)
        assert (found.number, found.left, found.first and found.first.id) == (1, 1, "first")
        top = await store.work.get("first")
        assert top is not None
        assert [one.id for one in await family_of(store.work, top)] == ["first", "last"]
    async with rk.system(url, modules=STEPS) as client:
        assert (await client.job("last").result(20)).output == {"pages": [1]}


async def test_children_that_cannot_be_read_go_to_quarantine_with_their_gather(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'state.db'}"
    async with open_store(url) as store:
        broken = b'{"assignment_id":"g","request_id":"g","job":{"type":"flow.report"},"children":"eJw="}'
        await store.work.enqueue([WorkItem("g", "flow.report", ROUTER, payload=broken, extra=Extra(gathers=3))])
    async with rk.system(url, modules=STEPS) as client:
        assert await client.job("g").wait(20) == "quarantined"
        assert "its children" in str((await client.job("g").result()).error_message)


def test_a_busy_router_stores_a_few_children_all_the_same() -> None:
    small: dict[str, Any] = {"worker": V2["worker"], "router": {"max_queue_size": 100}}
    with rk.testing.system_sync(STEPS, small) as system:
        for _ in range(60):  # more than half of the places, of a class that no worker has
            system.submit("flow.page", {"n": 1}, resource_class="gpu")
        system.submit("flow.start", {"pages": 30}, assignment_id="site")
        system.advance(20)
        assert system.job("site:2").status() == "succeeded"


@pytest.mark.real_time
async def test_a_worker_without_a_router_stores_follow_ups_on_nats(nats_server: NatsServer) -> None:
    url = f"{nats_server.url}/follow{uuid4().hex[:8]}"
    routed = rk.system(url, modules=STEPS, workers=0)
    async with routed as client, rk.system(url, modules=STEPS, router=False):
        await client.submit("flow.start", {"pages": 20}, assignment_id="site")
        assert await client.job("site").wait(20) == "succeeded"
        assert (await client.job("site:2").result(30)).output == {"pages": list(range(20))}
