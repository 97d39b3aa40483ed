"""Workers and routers that run, and commands to them."""

import asyncio
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import pytest

from reefknot.audit.model.event import OperatorAction
from reefknot.console.operations import systems
from reefknot.console.operations.operator import polled
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.presence import living_systems
from reefknot.stores.port import Store
from tests.unit.console.cli import work_items
from tests.unit.console.operations.operator_scene import asked

LEAVING = {"draining": True, "leaving": True}
"""What a worker reports of itself when it was told to drain."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(systems, "OBEY_WAIT_S", 0.2)
    return tmp_path / "state.db"


def actions(path: Path) -> list[OperatorAction]:
    return [one for one in work_items.events(path) if isinstance(one, OperatorAction)]


def changed_later(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], looks: int = 2
) -> None:
    """Have the systems report something else after so many looks: what they do when they obey."""
    seen = 0

    async def report(store: Store) -> list[dict[str, Any]]:
        nonlocal seen
        seen += 1
        found = await living_systems(store)
        return change(found) if seen > looks else found

    monkeypatch.setattr(systems, "living_systems", report)


def test_where_nothing_runs_a_page_has_empty_lists_and_a_command_an_error_with_the_way_out(path: Path) -> None:
    assert asked(path, systems.running_systems) == {"workers": [], "routers": [], "gone": [], "unserved": []}
    for operation, part in ((systems.list_workers, "worker"), (systems.list_routers, "router")):
        with pytest.raises(
            OperationError, match=f"no {part} is running on sqlite:.*start one with: reefknot up"
        ) as one:
            asked(path, operation)
        assert one.value.kind == "unreachable"


@pytest.mark.parametrize(
    ("asks", "parameter"),
    [
        (lambda operator: systems.command_worker(operator, "drain", "worker-7"), "worker"),
        (lambda operator: systems.command_worker(operator, "stop"), "verb"),
        *(
            (lambda operator, s=s: systems.command_worker(operator, "drain", seconds=s), "seconds")
            for s in (-1.0, 86_401.0, nan)
        ),
        (lambda operator: systems.reload_parts(operator, "engine"), "part"),
        (lambda operator: systems.reload_parts(operator, "router", "router-9"), "router"),
    ],
)
def test_what_is_not_known_or_never_ends_is_refused_and_nothing_is_sent(path: Path, asks: Any, parameter: str) -> None:
    work_items.reported_running(path, "worker-1")
    with pytest.raises(ParameterError) as refused:
        asked(path, asks)
    assert (refused.value.parameter, actions(path)) == (parameter, [])


def test_a_drain_is_audited_and_obeyed_when_every_worker_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_items.reported_running(path, "worker-1", "worker-2")

    def draining(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**one, "workers": [worker | LEAVING for worker in one["workers"]]} for one in found]

    changed_later(monkeypatch, draining)
    answer = asked(path, lambda operator: systems.command_worker(operator, "drain", seconds=7))
    assert answer == {"workers": ["worker-1", "worker-2"], "drained": True, "actor": "ann", "dry_run": False}
    (one,) = actions(path)
    assert (one.action, one.subject, one.actor, one.details) == ("worker.drain", "*", "ann", {"seconds": 7})


def test_disobedience_is_reported_unless_the_worker_is_gone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_items.reported_running(path, "worker-1")
    answer = asked(path, lambda operator: systems.command_worker(operator, "resume", "worker-1", dry_run=True))
    assert answer == {"workers": ["worker-1"], "resumed": False, "actor": "ann", "dry_run": True}
    assert asked(path, lambda operator: systems.reload_parts(operator, "router", dry_run=True))["dry_run"] is True
    assert actions(path) == []
    assert asked(path, lambda operator: systems.command_worker(operator, "pause"))["paused"] is False
    changed_later(monkeypatch, lambda found: [{**one, "workers": []} for one in found])
    assert asked(path, lambda operator: systems.command_worker(operator, "pause"))["paused"] is True


def test_a_reload_answers_with_the_outcome_of_each_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_items.reported_running(path, "worker-1")
    (silent,) = asked(path, lambda operator: systems.reload_parts(operator, "worker"))["systems"]
    assert list(silent) == ["system_id"]
    outcome = {"sequence": 10**9, "problems": []}
    changed_later(monkeypatch, lambda found: [{**one, "reload": outcome} for one in found])
    (told,) = asked(path, lambda operator: systems.reload_parts(operator, "worker", "worker-1"))["systems"]
    assert told == {"system_id": silent["system_id"], **outcome}
    assert [(one.action, one.subject) for one in actions(path)] == [("worker.reload", one) for one in ("*", "worker-1")]


def test_a_poll_ends_with_the_last_look_when_nothing_is_enough() -> None:
    looks: list[int] = []

    async def look() -> int:
        looks.append(len(looks))
        return looks[-1]

    assert asyncio.run(polled(look, 0.2, enough=lambda found: found > 99)) == 2
    assert asyncio.run(polled(look, 9.0, enough=lambda found: found > 2)) == 3
