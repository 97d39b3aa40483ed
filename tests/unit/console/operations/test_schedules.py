"""Operations on schedules: the list beside sources, a run by hand, pauses."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from reefknot.console.operations import schedules, sources
from reefknot.errors import OperationError, ParameterError
from reefknot.ingest.schedules import ScheduleRun, change_state, time_of
from tests.unit.console.operations.operator_scene import CONFIG, SECRET, OperatorScene, names_of


async def listed(scene: OperatorScene, name: str) -> dict[str, Any]:
    found = (await schedules.list_schedules(scene.operator))["schedules"]
    return dict(next(one for one in found if one["name"] == name))


async def test_schedules_are_listed_beside_the_timetables_of_sources(scene: OperatorScene) -> None:
    found = (await schedules.list_schedules(scene.operator))["schedules"]
    assert [(one["name"], one["kind"]) for one in found] == [
        ("nightly", "schedule"),
        ("notes", "source"),
        ("mail", "source"),
    ]
    assert (await listed(scene, "notes"))["timetable"] == "every 15m"
    await sources.pause_source(scene.operator, "notes", because="it moves")
    paused = await listed(scene, "notes")
    assert (paused["paused_by"], paused["why"], paused["next_due"]) == ("ann", "it moves", None)


async def test_a_run_by_hand_is_a_job_and_audited(scene: OperatorScene) -> None:
    dry = await schedules.run_schedule(scene.operator, "nightly", dry_run=True)
    assert (dry["job"], await scene.actions()) == (None, [])
    done = await schedules.run_schedule(scene.operator, "nightly")
    assert done["job"].startswith("nightly@")
    assert (await listed(scene, "nightly"))["last_outcome"] == "pending"
    assert names_of(await scene.actions()) == [("schedule.run", "nightly", "ann")]


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
    assert {one["job"] for one in (await schedules.show_schedule(at, "nightly"))["runs"]} == {
        by_hand,
        *done["jobs"],
    }
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


async def test_a_pause_needs_a_reason_and_is_audited_once(scene: OperatorScene) -> None:
    at = scene.operator
    with pytest.raises(ParameterError, match="because: give the reason"):
        await schedules.pause_schedule(at, "nightly", because=" ")
    would = await schedules.pause_schedule(at, "nightly", because="x", dry_run=True)
    assert (would["changed"], would["paused"]) == (True, False)
    done = await schedules.pause_schedule(at, "nightly", because=f"key {SECRET}")
    assert (done["changed"], done["paused"], done["why"]) == (True, True, "key [redacted]")
    assert (await schedules.pause_schedule(at, "nightly", because="again"))["changed"] is False
    assert (await schedules.resume_schedule(at, "nightly"))["next_due"] is not None
    assert (await schedules.resume_schedule(at, "nightly"))["changed"] is False
    assert names_of(await scene.actions()) == [
        ("schedule.pause", "nightly", "ann"),
        ("schedule.resume", "nightly", "ann"),
    ]


async def test_a_source_and_an_unknown_name_are_refused(scene: OperatorScene) -> None:
    with pytest.raises(OperationError, match="notes is a source; run it with: reefknot source run notes"):
        await schedules.run_schedule(scene.operator, "notes")
    with pytest.raises(ParameterError, match="'nightli' is unknown; accepted: nightly; did you mean 'nightly'"):
        await schedules.resume_schedule(scene.operator, "nightli")
