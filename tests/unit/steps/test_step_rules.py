"""`@rk.block(on=…)`: a step says itself which of its exceptions are retried, and a replay decides the same."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.audit.model.event import decode
from reefknot.audit.model.replay import decided_again
from reefknot.steps.python import registry
from reefknot.testing import SyncVirtualSystem
from tests.warm_commands import run_warm

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
QUICK: Any = {"attempts": 3, "base_delay": 1, "jitter": "none", "timeout": 3600}


class Busy(Exception):
    """A class of one's own, of which no policy knows anything."""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a test registers end with it."""
    monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


def step(on: Any, **options: Any) -> Callable[..., Any]:
    """A step whose input `error` is the exception that it raises."""

    @rk.block("order.send", on=on, **{**QUICK, **options})
    async def send(inputs: Mapping[str, Any], context: Any) -> dict[str, Any]:
        return {"attempt": context.attempt}

    return send


def attempts(system: SyncVirtualSystem, error: BaseException, job: str = "o-1") -> int:
    """The executions of a job whose step raises this each time. Every decision is repeated with the same answer."""
    system.fail("order.send", times=None, error=error)
    system.run("order.send", assignment_id=job)
    system.fail("order.send", times=0)
    for one in system.events(job=job):
        if "decision" in one:
            record = decode(json.dumps(one).encode()).decision  # type: ignore[union-attr]  # it has one: see above
            assert decided_again(record) == record
    return len(system.calls("order.send"))


def later(error: Exception) -> bool:
    return "later" in str(error)


BOTH, ONE_OF_TWO = ExceptionGroup("both", [Busy(), Busy()]), ExceptionGroup("both", [Busy(), ValueError()])
AWAY = rk.StoreUnavailableError("state.db", "it is away", "start it")


@pytest.mark.parametrize(
    ("on", "error", "executions"),
    [
        *((kind, kind("not yet"), 3) for kind in (Busy, FileNotFoundError, PermissionError)),
        *((Busy, error, 3) for error in (BOTH, rk.RetryAfter(5), AWAY)),
        *((Busy, error, 1) for error in (ONE_OF_TWO, ConnectionError("reset"))),
        ((Busy, KeyError), KeyError("id"), 3),
        *((later, error, executions) for error, executions in ((Busy("later"), 3), (Busy("never"), 1))),
        *((later, ConnectionError("gone"), 1), (lambda error: 1 / 0, ConnectionError("reset"), 1)),
        *((Exception, SystemExit(1), 1), (None, ConnectionError("reset"), 3), (None, Busy(), 1)),
    ],
)
def test_an_exception_is_retried_if_the_step_says_so_and_only_then(
    on: Any, error: BaseException, executions: int
) -> None:
    with rk.testing.system_sync(step(on)) as system:
        assert attempts(system, error) == executions


async def asleep_for_seconds(error: Exception) -> float:
    await asyncio.sleep(2)
    return 30.0


@pytest.mark.parametrize(
    ("on", "waits"),
    [
        (lambda error: 60.0, [60.0, 60.0]),
        (lambda error: timedelta(minutes=2), [120.0, 120.0]),
        (lambda error: 0.0, [1.0, 2.0]),
        (lambda error: 60, [1.0, 2.0]),
        (asleep_for_seconds, [30.0, 30.0]),
    ],
    ids=["seconds", "a timedelta", "no wait of its own", "a whole number is a truth", "an async predicate"],
)
def test_seconds_are_waited_at_least(on: Any, waits: list[float]) -> None:
    with rk.testing.system_sync(step(on)) as system:
        assert attempts(system, Busy()) == 3
        found = [one["delay_seconds"] for one in system.events("retry_attempt")]
    assert [int(one) for one in found] == waits


def test_the_predicate_has_the_time_of_its_attempt_and_no_more() -> None:
    async def hangs(error: Exception) -> bool:
        await asyncio.sleep(3600)
        return True

    with rk.testing.system_sync(step(hangs, attempt_timeout=5), start=START) as system:
        attempts(system, Busy())
        assert system.now - START < timedelta(minutes=1)
        (end,) = system.events("retry_exhausted")
    assert end["decision"]["failure"]["code"] == "CONNECTION_TIMEOUT"


def test_the_record_has_the_verdict_and_the_place_of_the_decorator() -> None:
    with rk.testing.system_sync(step(Busy)) as system:
        attempts(system, ValueError("no"))
        (refused,) = system.events("retry_refused")
        attempts(system, Busy(), "o-2")
        again = system.events("retry_attempt", job="o-2")[0]
    for event, verdict in ((refused, False), (again, True)):
        record = event["decision"]
        assert record["verdict"] is record["policy"]["retryable"] is verdict
        assert "test_step_rules.py:" in record["set_by_step"]["retryable"]
    assert (again["decision"]["failure"]["code"], again["decision"]["failure"]["failure_type"]) == (
        *("EXECUTION_FAILED", "transient"),
    )


def test_failures_that_the_step_did_not_raise_are_left_to_the_policies() -> None:
    with rk.testing.system_sync(step(Busy, attempt_timeout=1)) as system:
        system.fail("order.send", times=1, status=503)
        assert system.run("order.send").output == {"attempt": 2}
        system.fail("order.send", times=1, delay=60)
        assert system.run("order.send").output == {"attempt": 2}


def test_what_the_configuration_forbids_for_this_step_stays_forbidden_and_the_baseline_does_not_ask() -> None:
    never = {"error_overrides": {"execution_failed": {"retryable": False}}}
    retries = {"v2": {"enabled": True, "block_policies": {"order.send": never}}}
    with rk.testing.system_sync(step(Busy), {"worker": {"retries": retries}}) as system:
        assert attempts(system, Busy()) == 1
    with rk.testing.system_sync(step(Busy), {}) as system:
        assert attempts(system, ConnectionError()) == 4


def test_an_outage_told_by_exceptions_of_ones_own_spends_no_attempts() -> None:
    with rk.testing.system_sync(step(Busy), start=START) as system:
        system.fail("order.send", times=200, error=Busy("down"))
        jobs = [system.submit("order.send", {"n": n}) for n in range(20)]
        system.drain()
        assert {job.status() for job in jobs} == {"succeeded"}


STEPS = """\
import reefknot as rk


@rk.block("order.send", attempts=2, base_delay=0.01, on=lambda error: "later" in str(error))
def send(inputs, context):
    raise ValueError(inputs["text"])
"""


def test_commands_name_the_rule_and_a_replay_is_exact(tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        return run_warm(*words, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path), "COLUMNS": "200"})

    (tmp_path / "reefknot.yaml").write_text("worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}\n")
    (tmp_path / "steps.py").write_text(STEPS)
    texts = {"o-1": "later", "o-2": "never"}
    work = [
        {"assignment_id": name, "job": {"type": "order.send", "payload": {"text": text}}}
        for name, text in texts.items()
    ]
    (tmp_path / "work.json").write_text(json.dumps(work))
    explain = ("policy", "explain", "block:order.send", "--exception", "ValueError", "--module", "steps")
    assert "The step has on= (steps.py:4)" in command(*explain).stdout
    assert json.loads(command(*explain, "--json").stdout)["on"]["source"].endswith("steps.py:4")

    assert command("run", "work.json", "--module", "steps").returncode == 1
    assert "after 2 attempts" in command("job", "show", "o-1").stdout
    shown = command("job", "show", "o-2").stdout
    assert "after 1 attempt" in shown
    assert "retryable is set at steps.py:4" in shown
    assert command("audit", "replay").returncode == 0
