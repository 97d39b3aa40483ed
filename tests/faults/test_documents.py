"""kill -9 while pages are kept, and two processes that keep pages of one source."""

import random
from functools import partial
from pathlib import Path

from tests.faults.carrying_out import KILLED, Life, Plan, at_every_call, carried_out
from tests.faults.keeping import PAGES, expected
from tests.faults.points import ALL

FEW = 20


def plan(at: int | None, *, torn: bool = False, flaw: str = "") -> Plan:
    return {"at": at, "torn": torn, "flaw": flaw}


def complaints(lives: list[Life]) -> list[str]:
    """Differences between what is left and the whole pages up to the position, each with its plan."""
    wrong = []
    for life in lives:
        found = life["evidence"]
        assert life["second"] == 0, found
        pages = found["sequence"]
        versions = dict(found["versions"])
        told = max([number for what, number in life["said"] if what == "kept"], default=0)
        facts = {
            "the cursor is not that of the last page": found["cursor"] == (f"cursor {pages}" if pages else ""),
            "documents and position differ": versions == expected(pages),
            "a document is there twice": len(versions) == len(found["versions"]) == len(found["listed"]),
            "the index differs from the documents": sorted(found["hits"]) == sorted(versions),
            "the count differs": found["counted"] == len(versions),
            "a page is lost that was kept": pages >= told,
        }
        wrong += [f"{what} ({life['plan']})" for what, holds in facts.items() if not holds]
    return wrong


def points(folder: Path, flaw: str) -> list[Plan]:
    """Every storage call of a whole run; a write also half done."""
    (whole,) = carried_out(folder, [plan(None, flaw=flaw)], program="tests.faults.keeping")
    assert (whole["ended"], whole["evidence"]["sequence"], complaints([whole | {"said": []}])) == (0, PAGES, [])
    return at_every_call(whole, partial(plan, flaw=flaw))


def some(folder: Path, flaw: str = "") -> list[Plan]:
    every = points(folder, flaw)
    return every if ALL and not flaw else random.Random(7).sample(every, FEW)


def test_a_sync_killed_at_any_storage_call_leaves_whole_pages_and_the_cursor_behind_them(tmp_path: Path) -> None:
    lives = carried_out(tmp_path, some(tmp_path), program="tests.faults.keeping")
    assert complaints(lives) == []
    assert sum(life["ended"] == KILLED for life in lives) >= 0.95 * len(lives) >= 0.95 * FEW
    assert len({life["evidence"]["sequence"] for life in lives}) > FEW / 4, "the deaths lie in many pages"


def test_a_cursor_that_is_moved_in_a_second_transaction_is_caught(tmp_path: Path) -> None:
    lives = carried_out(tmp_path, some(tmp_path, "in two steps"), program="tests.faults.keeping")
    assert any(one.startswith("documents and position differ") for one in complaints(lives))


def test_two_processes_that_keep_pages_of_one_source_never_interleave(tmp_path: Path) -> None:
    pages = 150
    (both,) = carried_out(tmp_path, [{"at_once": pages}], program="tests.faults.keeping", within=300)
    assert both["ended"] == [0, 0], both["said"]
    kept = sorted(number for one in both["said"] for number in one["kept"])
    refused = sum(len(one["refused"]) for one in both["said"])
    assert kept == list(range(1, len(kept) + 1)), "every sequence was given to one of them, once"
    assert (len(kept) + refused, refused > 0) == (2 * pages, True)
