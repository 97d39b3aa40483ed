"""Submissions have ids that no caller can choose, and those of an earlier version are still found."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from reefknot.core import work as core
from reefknot.core.messages import ExecResult, ResultStatus, encode
from reefknot.core.overload.admission import Rules
from reefknot.core.work import SUBMISSION_ONCE, WorkState, submission_id, submitted
from reefknot.router.client import Client
from reefknot.router.submissions import CLASS
from tests.workshop import Shop, Step, with_shop, work

SHADOW = SUBMISSION_ONCE + "victim"
"""What a submission of `victim` was called once."""


@pytest.mark.parametrize("first", ["victim", SHADOW])
@pytest.mark.parametrize("priority", ["normal", "critical"])
def test_an_id_that_reads_like_a_submission_of_somebody_else_takes_nothing_from_it(first: str, priority: str) -> None:
    async def story(shop: Shop) -> None:
        for name in (first, SHADOW if first == "victim" else "victim"):
            await Client(shop.store, shop.clock).hand_in(
                work(name, {"name": name}, **({"priority": priority} if name == SHADOW else {}))
            )
        assert await ends(shop) == {"victim": "success", SHADOW: "success"}

    with_shop(story)


async def ends(shop: Shop) -> dict[str, str]:
    """Both of them, through a router and a worker with one place each."""
    step = Step()
    router = await shop.router(rules=Rules(size=1))
    await shop.worker("w1", step, concurrency={"cpu": 1}, rules=Rules(size=1))
    await asyncio.sleep(20)
    found = {name: await router.desk.look(name) for name in ("victim", SHADOW)}
    return {name: "nothing" if one is None else one.status.value for name, one in found.items()}


def test_ids_that_a_caller_can_choose_lose_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the ids of once, the one hijacks the other."""
    monkeypatch.setattr(core, "SUBMISSION", SUBMISSION_ONCE)

    async def story(shop: Shop) -> None:
        client = Client(shop.store, shop.clock)
        await client.hand_in(work("victim"))
        await client.hand_in(work(SHADOW, priority="critical"))
        assert await ends(shop) != {"victim": "success", SHADOW: "success"}

    with_shop(story)


@pytest.mark.parametrize("name", ["a", "route/a", "\u00e4 b"])
def test_a_submission_is_named_by_what_no_assignment_may_be_named(name: str) -> None:
    assert name.isprintable()
    assert not submission_id(name).isprintable()
    assert submitted(submission_id(name)) == name
    assert submitted(SUBMISSION_ONCE + name) == name


def test_what_an_earlier_version_handed_in_is_routed_and_found() -> None:
    async def story(shop: Shop) -> None:
        client = Client(shop.store, shop.clock)
        handle = await client.hand_in(work("other"))
        fresh = handle._desk.submission(work("a"), encode(work("a")))
        await shop.store.work.enqueue([structs.replace(fresh, id=SUBMISSION_ONCE + "a")])
        router = await shop.router()
        assert await router.desk.has("a")
        await shop.worker("w1", Step())
        result = await router.desk.result("a", 30)
        assert isinstance(result, ExecResult)
        assert result.status is ResultStatus.SUCCESS
        item = await shop.store.work.get(SUBMISSION_ONCE + "a")
        assert item is not None
        assert (item.state, item.resource_class) == (WorkState.SUCCEEDED, CLASS)
        # a worker's piece of that name is no submission
        await shop.store.work.enqueue([structs.replace(fresh, id=SUBMISSION_ONCE + "b", resource_class="cpu@w9")])
        assert not await router.desk.has("b")

    with_shop(story)
