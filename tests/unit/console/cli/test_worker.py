"""`reefknot worker` and `reefknot router`, seen from another process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.operations import systems
from reefknot.stores.port import Store
from tests.unit.console.cli import work_items
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands
from tests.unit.console.operations.statuses import running


@pytest.fixture
def store(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(systems, "OBEY_WAIT_S", 0.1)
    work_items.submitted(store, "x")
    return store


@pytest.mark.parametrize("words", [("worker", "list"), ("worker", "list", "--wide"), ("top", "--once")])
@pytest.mark.parametrize("width", ["40", "80"])
def test_unhealthy_levels_and_open_breakers_have_a_line(rk: Commands, store: Path, words: Any, width: str) -> None:
    """In lines no wider than the terminal. A worker that is well, and a closed breaker, have none."""
    rk.environment.setenv("COLUMNS", width)
    places = {"worker_id": "worker-1", "throttled": True, "tokens": 0.5}
    holding = [{**places, "name": "pay.charge", "breaker": "open"}, {**places, "name": "mail", "breaker": "closed"}]
    reason = "85 of 100 places in the queue are taken"

    async def report(kept: Store) -> None:
        levels = {"worker-1": {"io": reason}}
        await running(kept, status="overloaded", depth=85, levels=levels, destinations=holding)
        await running(kept, "worker-2")

    in_store(store, report)
    shown = rk(*words).out
    text = " ".join(shown.split())
    assert f"worker-1 io is overloaded: {reason} breaker of pay.charge at worker-1 is open: jobs wait for it" in text
    assert (text.count(" is overloaded"), text.count("breaker of"), "worker-2 io is" in text) == (1, 1, False)
    lines = [line for line in shown.splitlines() if "overloaded:" in line or "breaker of" in line]
    assert max(map(len, lines)) <= int(width)


def test_many_troubles_are_cut_short(rk: Commands, store: Path) -> None:
    broken = {"worker_id": "worker-1", "breaker": "open", "throttled": False, "tokens": 5}
    places = [{**broken, "name": f"host-{number}"} for number in range(12)]
    in_store(store, lambda kept: running(kept, destinations=places))
    shown = rk("worker", "list").out.splitlines()
    assert (shown[-2].startswith("breaker of host-9 "), shown[-1]) == (True, "and 2 more; --json shows all")


def test_the_router_says_what_was_submitted_and_every_router_on_the_store_is_listed(rk: Commands, store: Path) -> None:
    work_items.reported_running(store, "worker-1")
    found = rk("router", "status", "--json").json
    assert found["handed_in"] == {"pending": 1}
    assert (found["routers"][0]["status"], found["routers"][0]["pending"]) == ("healthy", 0)
    assert "submitted so far: 1 pending" in rk("router", "status").out
    work_items.reported_running(store, "worker-2")
    assert len({one["system_id"] for one in rk("router", "status", "--json").json["routers"]}) == 2
    assert rk("router", "status").out.count("router of pid") == 2


@pytest.mark.parametrize(
    ("verb", "done", "code"), [("drain", "drained", 75), ("pause", "paused", 75), ("resume", "resumed", 0)]
)
def test_a_command_that_no_worker_obeys_is_75(rk: Commands, store: Path, verb: str, done: str, code: int) -> None:
    """The status is all there is of this system; none was paused before."""
    work_items.reported_running(store, "worker-1")
    assert rk("worker", verb, "worker-7").code == 2
    assert f"worker-1 would be {done}" in rk("worker", verb, "--dry-run").out
    assert rk("worker", verb, "worker-1", "--as", "ann").code == code


@pytest.mark.parametrize("words", [("worker", "list"), ("worker", "drain"), ("worker", "pause"), ("router", "status")])
def test_that_nothing_runs_is_told_without_waiting(rk: Commands, store: Path, words: tuple[str, ...]) -> None:
    async def waited(seconds: float) -> None:
        raise AssertionError(f"waited for {seconds} s")

    rk.environment.setattr(asyncio, "sleep", waited)
    ended = rk(*words)
    assert (ended.code, "start one with: reefknot up" in ended.err) == (69, True)
