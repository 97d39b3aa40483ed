"""`reefknot worker` and `reefknot router`, seen from another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.cli import observing
from reefknot.cli import worker as worker_commands
from tests.unit.cli import keeping
from tests.unit.cli.running import Commands


@pytest.fixture
def store(rk: Commands, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(observing, "PATIENCE_S", 0.1)
    monkeypatch.setattr(worker_commands, "HEARD_S", 0.1)
    path = rk.folder / ".reefknot" / "state.db"
    keeping.handed_in(path, "x")
    return path


def test_the_workers_of_a_running_system_are_listed_class_by_class(rk: Commands, store: Path) -> None:
    keeping.seen_running(store, "worker-1", "worker-2")
    found = rk("worker", "list", "--json").json["workers"]

    assert [one["worker_id"] for one in found] == ["worker-1", "worker-2"]
    assert found[0]["classes"]["io"]["capacity"] == 8
    assert rk("worker", "list").out.count("worker-2") == 3


@pytest.mark.parametrize("words", [["worker", "list"], ["worker", "drain"], ["router", "status"]])
def test_without_a_system_the_way_out_is_told_with_69(rk: Commands, store: Path, words: list[str]) -> None:
    ended = rk(*words)

    assert (ended.code, "start one with: reefknot up" in ended.err) == (69, True)


@pytest.mark.parametrize("words", [["worker", "list"], ["worker", "drain"], ["router", "status"]])
def test_help_shows_an_example(rk: Commands, words: list[str]) -> None:
    assert f"    reefknot {' '.join(words)}" in rk(*words, "--help").out


def test_the_router_says_what_was_handed_in(rk: Commands, store: Path) -> None:
    keeping.seen_running(store, "worker-1")
    found = rk("router", "status", "--json").json

    assert found["handed_in"] == {"pending": 1}
    assert (found["routers"][0]["status"], found["routers"][0]["pending"]) == ("healthy", 0)
    assert "handed in so far: 1 pending" in rk("router", "status").out


def test_a_worker_that_nobody_knows_is_refused_with_the_known_ones(rk: Commands, store: Path) -> None:
    keeping.seen_running(store, "worker-1")
    ended = rk("worker", "drain", "worker-7")

    assert (ended.code, "accepted: worker-1" in ended.err) == (2, True)
    assert keeping.deeds(store) == []


def test_draining_is_on_record_and_a_system_that_does_not_obey_is_75(rk: Commands, store: Path) -> None:
    """The status is all there is of this system, so nobody obeys."""
    keeping.seen_running(store, "worker-1")
    assert rk("worker", "drain", "--dry-run").code == 0
    assert keeping.deeds(store) == []

    assert rk("worker", "drain", "worker-1", "--as", "ann").code == 75
    assert keeping.deeds(store) == [("ann", "worker.drain")]
