"""kill -9 of the whole system at every stage of a step, and what the next process makes of what it finds."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.carrying_out import KILLED, Life, Plan, carried_out
from tests.faults.points import either
from tests.faults.system_child import STAGES, VICTIM

TICK_MS = 50
IN_A_SLOT = ("started", "claimed", "running")
"""Here a slot held it when the process died."""
IN_NO_SLOT = ("held", "submitted", "assigned", "waiting", "settled", "published")


def lived(folder: Path, plans: list[Plan]) -> list[Life]:
    return carried_out(folder, plans, program="tests.faults.system_child")


def plan(stage: str, flaw: str = "") -> Plan:
    return {"stage": stage, "flaw": flaw}


def judge(life: Life) -> list[str]:
    """Every promise that was broken, with the stage."""
    stage, after = life["plan"]["stage"], life["evidence"]
    accepted = [words[1] for words in life["said"] if words[0] == "accepted"]
    wrong = [] if life["ended"] == KILLED else [f"never died: {life['ended']}, {life['said']}"]
    if not isinstance(after, dict):
        return [*wrong, f"the second process failed: {after}"]
    for name in accepted:
        found = after["results"][name]
        if found is None:
            wrong.append(f"lost: {name}")
            continue
        told = {words[2] for words in life["said"] if words[:2] == ["told", name]}
        if told | {found, after["again"][name]} != {found}:
            wrong.append(f"more than one result: {name}")
        if '"status":"success"' not in found:
            wrong.append(f"failed: {name}, {found}")
        if not any(mark[0] == name for mark in life["effects"]):
            wrong.append(f"never done: {name}")
    if after["tampered"]:
        wrong.append(f"the audit chain: {after['tampered']}")
    if VICTIM in after["crashes"]:
        wrong += _about_the_victim(stage, life, after)
    return [f"{stage}: {one}" for one in wrong]


def _about_the_victim(stage: str, life: Life, after: dict[str, Any]) -> list[str]:
    wrong = []
    times = [at for name, _, at in life["effects"] if name == VICTIM]
    expected = 2 if stage in ("running", "waiting") else 1
    if len(times) != expected:
        wrong.append(f"done {len(times)} times, not {expected}")
    if (stage in IN_A_SLOT and not after["in_a_slot"]) or (stage in IN_NO_SLOT and after["in_a_slot"]):
        wrong.append(f"in a slot: {after['in_a_slot']}")
    if after["crashes"][VICTIM] != after["in_a_slot"]:
        wrong.append(f"{after['crashes'][VICTIM]} crashes counted, in a slot: {after['in_a_slot']}")
    if after["attempts"][VICTIM] != (2 if stage == "waiting" else 1):
        wrong.append(f"{after['attempts'][VICTIM]} attempts spent")
    due = [words[2] for words in life["said"] if words[0] == "due"]
    if due and len(times) > 1 and times[1] * 1000 < due[0] - TICK_MS:
        wrong.append(f"tried again {due[0] - times[1] * 1000:.0f} ms early")
    return wrong


@pytest.mark.slow
def test_a_system_killed_at_any_stage_of_a_step_gives_every_accepted_assignment_one_result(tmp_path: Path) -> None:
    lives = lived(tmp_path, [plan(stage) for stage in STAGES] * either(1, 10))
    assert [one for life in lives for one in judge(life)] == []
    assert {life["plan"]["stage"] for life in lives} == set(STAGES)
    waits = [words[0] for life in lives if life["plan"]["stage"] == "waiting" for words in life["said"]]
    assert "due" in waits, "a wait was really on record when the process died"


@pytest.mark.slow
def test_the_judge_catches_what_each_wrong_way_breaks(tmp_path: Path) -> None:
    flaws = {
        "memory": plan("assigned", "memory"),
        "promises too early": plan("submitted", "promises too early"),
        "forgets the wait": plan("waiting", "forgets the wait"),
        "forgets the result": plan("settled", "forgets the result"),
    }
    said = {life["plan"]["flaw"]: judge(life) for life in lived(tmp_path, list(flaws.values()))}
    assert f"assigned: lost: {VICTIM}" in said["memory"]
    assert f"submitted: lost: {VICTIM}" in said["promises too early"]
    assert any("ms early" in one for one in said["forgets the wait"])
    assert "settled: done 2 times, not 1" in said["forgets the result"]
