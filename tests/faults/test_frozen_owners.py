"""An owner that sleeps past its lease and wakes up believing that nothing has happened."""

from pathlib import Path

import pytest

from tests.faults.carrying_out import MODES, Life, Plan, carried_out, plan
from tests.faults.dying import FENCELESS
from tests.faults.holding import HEIR, ZOMBIE
from tests.faults.judging import judge_frozen
from tests.faults.points import spread


def awakened(folder: Path, *variants: str) -> list[Life]:
    """An owner frozen past its lease, another one that takes over, and what the first is told when it wakes up."""
    lives = carried_out(folder, [{"variant": variant} for variant in variants], program="tests.faults.holding")
    for life in lives:
        before, after = life.pop("fences")
        assert after > before
    return lives


def test_a_frozen_owner_that_wakes_up_is_refused(tmp_path: Path) -> None:
    refused = {"said": [{"record": "LeaseLostError", "settled": False}], "ended": 0, "results": [HEIR, HEIR]}
    assert awakened(tmp_path, "ports", "function") == [refused, refused]


def test_without_the_fence_the_zombie_overwrites_what_its_heir_recorded(tmp_path: Path) -> None:
    overwritten = {"said": [{"record": "recorded", "settled": True}], "ended": 0, "results": [ZOMBIE, ZOMBIE]}
    assert awakened(tmp_path, "no fence") == [overwritten]


def points(flaw: str = "", modes: tuple[str, ...] = MODES) -> list[Plan]:
    return [plan("used", mode, at, flaw=flaw, freezes=True) for mode in modes for at in range(1, 150)]


@pytest.mark.slow
def test_an_owner_frozen_at_any_storage_call_never_gives_a_key_a_second_result(tmp_path: Path) -> None:
    tried = spread(points(), 90)
    lives = carried_out(tmp_path, tried)
    assert [(one, life["plan"]) for life in lives for one in judge_frozen(life)] == []
    assert all(life["stopped"] for life in lives)
    kept_out = sum("kept out" in life["between"] for life in lives)
    refused = sum(said[:2] == ["error", "LeaseLostError"] for life in lives for said in life["said"])
    assert kept_out > 0
    assert refused > 0
    print(f"{len(lives)} freezes, {kept_out} with the lock in hand, {refused} refused on waking")


def test_the_judge_catches_a_store_that_does_not_look_at_the_fence(tmp_path: Path) -> None:
    lives = carried_out(tmp_path, points(FENCELESS, ("retry",))[30:140:3])
    said = [one for life in lives for one in judge_frozen(life)]
    assert any(one.startswith("differing:") for one in said)
    assert any(one.startswith("twice:") for one in said)
