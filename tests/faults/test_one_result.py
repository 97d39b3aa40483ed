"""Sixteen callers in four processes ask for every key, with sleepers among them and clocks that disagree by days."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import apsw
import pytest

from reefknot.stores.opening import open_store
from tests.faults.points import either

ROOT = Path(__file__).parents[2]
PROCESSES = 4
CALLERS = 4
LONGEST = 1500


def raced(path: Path, keys: int, variant: str) -> list[dict[str, Any]]:
    """All callers start together; the sleepers report when the last caller has its last answer."""

    async def make() -> None:
        async with open_store(f"sqlite:{path}"):
            pass

    asyncio.run(make())
    with ExitStack() as stack:
        processes = []
        for seed in range(PROCESSES):
            words = [str(path), str(seed), str(CALLERS), str(keys), variant]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.racing", *words],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for word in ("ready\n", "done\n"):
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == word
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        return [json.loads(process.communicate(timeout=LONGEST)[0]) for process in processes]


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
    reports = raced(tmp_path / "state.db", keys, "sound")
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
    reports = raced(tmp_path / "state.db", 100, "open door")
    assert any(len(seen) > 1 for seen in answers(reports).values())
    assert max(records(tmp_path / "state.db").values()) > 1
