"""kill -9 of an orchestrator at every call to its source and its stores, and what the next one makes of it."""

from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.carrying_out import KILLED, Life, Plan, carried_out
from tests.faults.ingestion_child import BAD, PAGES, PER_PAGE
from tests.faults.points import spread

ITEMS = sorted({*(f"item-{n}" for n in range(PAGES * PER_PAGE)), "own"} - {BAD})
LOOKS = ("claim", "open_classes", "renew")
"""Calls that are made by the clock, so that a life may end before the last of them."""


def lived(folder: Path, plans: list[Plan]) -> list[Life]:
    return carried_out(folder, plans, program="tests.faults.ingestion_child")


def plan(at: int | None, when: str = "before", flaw: str = "", of: str = "") -> Plan:
    return {"at": at, "when": when, "flaw": flaw, "of": of}


def told(life: Life, which: str, word: str) -> Any:
    return next((words[1] for words in life[which] if words[0] == word), None)


def judge(life: Life) -> list[str]:
    """Every promise that was broken."""
    left, found = told(life, "left", "left"), told(life, "second", "found")
    if left is None or found is None:
        return [f"a process failed: {life}"]
    wrong = []
    passed = {f"item-{n}" for n in range(int(left["cursor"] or "0") * PER_PAGE)} - {BAD}
    if missing := sorted(passed - set(left["documents"])):
        wrong.append(f"the cursor {left['cursor']} is ahead of its documents: {missing}")
    if found["documents"] != ITEMS:
        wrong.append(f"documents lost or twice: {found['documents']}")
    if found["states"] != {"sync": "succeeded", "bad": "quarantined", "fine": "succeeded"}:
        wrong.append(f"ended as {found['states']}")
    if [one.partition("@")[0] for one in found["quarantined"]] != ["bad", f"numbers/{BAD}"]:
        wrong.append(f"quarantined are {found['quarantined']}")
    if found["attempts"] != {"sync": 1, "bad": 1, "fine": 1}:
        wrong.append(f"a death spent attempts: {found['attempts']}")
    return [f"{life['plan']}: {one}" for one in wrong]


def test_a_killed_orchestrator_loses_nothing_and_keeps_nothing_twice(tmp_path: Path) -> None:
    """A death is at the n-th call of a name: how often an idle orchestrator looks for work depends on the machine."""
    (whole,) = lived(tmp_path, [plan(None)])
    assert judge(whole) == []
    calls = Counter(told(whole, "first", "calls"))
    assert calls.total() > 15
    assert set(calls) >= {"claim", "settle", "enqueue", "fetch", "fetch_item", "keep"}
    sides = ("before", "after")
    points = [(name, at, when) for name, times in calls.items() for at in range(1, times + 1) for when in sides]
    lives = lived(tmp_path, [plan(at, when, of=name) for name, at, when in spread(points, 10)])
    assert [one for life in lives for one in judge(life)] == []
    survivors = [life["plan"] for life in lives if life["first_ended"] != KILLED]
    assert [one for one in survivors if one["of"] not in LOOKS] == [], "every other call is made in every life"


def test_a_cursor_that_moves_before_its_documents_is_caught(tmp_path: Path) -> None:
    """Jobs run side by side, so the order of calls varies: the deaths are at those that write a page's documents."""
    lives = lived(tmp_path, [plan(at, flaw="cursor first", of="put") for at in range(1, PAGES + 1)])
    assert [life["first_ended"] for life in lives] == [KILLED] * PAGES
    for life in lives:
        assert any("ahead of its documents" in one for one in judge(life)), life["plan"]
