"""Sixteen callers in four processes ask for every key, with sleepers among them and clocks that disagree by days."""

from collections import Counter
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.faults.carrying_out import carried_out
from tests.faults.points import either

PROCESSES = 4
CALLERS = 4


def raced(file: Path, keys: int, *, is_open: bool = False) -> list[dict[str, Any]]:
    plan = {"file": str(file), "processes": PROCESSES, "callers": CALLERS, "keys": keys, "open": is_open}
    (life,) = carried_out(file.parent, [plan], program="tests.faults.racing", within=1500)
    assert life["ended"] == [0] * PROCESSES, life
    reports: list[dict[str, Any]] = life["reports"]
    return reports


def answers(reports: list[dict[str, Any]]) -> dict[str, Counter[str]]:
    """How often each key was answered what."""
    found: dict[str, Counter[str]] = {}
    for report in reports:
        for key, answer in report["answers"]:
            found.setdefault(key, Counter())[answer] += 1
    return found


def records(path: Path) -> Counter[str]:
    """How often a result was recorded for each key."""
    connection = apsw.Connection(str(path))
    query = (
        "SELECT body ->> 'idempotency_key' FROM audit WHERE event_type = 'idempotency' AND body ->> 'action' = 'record'"
    )
    return Counter(str(key) for (key,) in connection.execute(query))


@pytest.mark.slow
def test_every_key_has_one_result_and_every_caller_the_same_answer(tmp_path: Path) -> None:
    keys = either(150, 10_000)
    reports = raced(tmp_path / "state.db", keys)
    found = answers(reports)
    assert len(found) == keys
    assert [key for key, seen in found.items() if len(seen) != 1] == []
    assert {seen.total() for seen in found.values()} == {PROCESSES * CALLERS}
    kept = records(tmp_path / "state.db")
    assert set(kept.values()) == {1}
    assert len(kept) == keys
    asleep, refused = sum(one["asleep"] for one in reports), sum(one["refused"] for one in reports)
    assert asleep == refused > 0
    print(f"{PROCESSES * CALLERS} callers x {keys} keys: 1 result each, 0 differing, {refused} sleepers refused")


@pytest.mark.slow
def test_the_race_catches_a_store_that_lets_everybody_in(tmp_path: Path) -> None:
    reports = raced(tmp_path / "state.db", 100, is_open=True)
    assert any(len(seen) > 1 for seen in answers(reports).values())
    assert max(records(tmp_path / "state.db").values()) > 1
