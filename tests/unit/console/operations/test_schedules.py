"""Operations on schedules: the list beside sources, a run by hand, pauses."""

import asyncio
from datetime import timedelta

import pytest

from reefknot.console.operations import schedules
from reefknot.errors import OperationError
from reefknot.ingest.schedules import ScheduleRun, change_state, time_of
from tests.unit.console.operations.operator_scene import CONFIG, OperatorScene, names_of


async def test_the_runs_of_a_schedule_are_shown_and_the_missed_ones_are_run_once(scene: OperatorScene) -> None:
    at, store = scene.operator, scene.operator.store
    by_hand = (await schedules.run_schedule(at, "nightly"))["job"]
    now = time_of(store)
    missed = [ScheduleRun(now - timedelta(days=days)) for days in (2, 1)]
    await change_state(store, "nightly", lambda known: known.with_runs(*missed))

    shown = await schedules.show_schedule(at, "nightly")
    assert [one["job"] for one in shown["runs"]] == [by_hand, None, None]
    assert [one["outcome"].partition(":")[0] for one in shown["runs"]] == ["pending", "missed", "missed"]
    would = await schedules.run_schedule(at, "nightly", missed=True, dry_run=True)
    assert (would["count"], would["job"]) == (2, None)
    done = await schedules.run_schedule(at, "nightly", missed=True)
    assert (done["jobs"], done["count"]) == (would["jobs"], 2)
    again = await schedules.run_schedule(at, "nightly", missed=True)
    assert (again["jobs"], again["count"]) == ([], 0)
    assert {one["job"] for one in (await schedules.show_schedule(at, "nightly"))["runs"]} == {by_hand, *done["jobs"]}
    assert names_of(await scene.actions()) == [("schedule.run", "nightly", "ann")] * 2
    with pytest.raises(OperationError, match="notes is a source; show it with: reefknot source show notes"):
        await schedules.show_schedule(at, "notes")


@pytest.mark.parametrize(
    "scene",
    [f"{CONFIG}router: {{max_queue_size: 1}}\n", f"{CONFIG}worker: {{queue: {{v2: {{max_queue_size: 1}}}}}}\n"],
    indirect=True,
)
async def test_a_run_by_hand_is_bounded_by_the_configured_queue(scene: OperatorScene) -> None:
    await schedules.run_schedule(scene.operator, "nightly")
    await asyncio.sleep(1)
    with pytest.raises(OperationError, match="nightly: not submitted, queue is full: 1 of 1") as refused:
        await schedules.run_schedule(scene.operator, "nightly")
    assert refused.value.kind == "temporary"
