"""`reefknot up`, for fractions of a second."""

from __future__ import annotations

import asyncio
import json
from signal import SIGHUP, SIGTERM
from typing import TYPE_CHECKING, Any, cast

import pytest

from reefknot.app.reload import ReloadOutcome
from reefknot.console.cli.serve import Shutdown
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands, Ended
from tests.unit.console.cli.steps import lines, prepared, up_until_ended

if TYPE_CHECKING:
    from reefknot.app.system import System


ODD = {"assignment_id": "odd", "request_id": "r", "job": {"type": "fs.blob_get", "payload_ref": "elsewhere"}}
"""A worker refuses it, and the router ends it for that: one rejection."""


def summed(ended: Ended) -> dict[str, Any]:
    *_, last = [json.loads(line) for line in ended.out.splitlines()]
    return dict(last["summary"])


def test_every_end_is_counted_once_and_for_programs_every_line_is_json(rk: Commands) -> None:
    own = prepared(rk)
    late = own.nap("late", 9, options={"timeout_ms": 50})
    rk("submit", lines(rk, own.flaky("good", 0), ODD, own.flaky("bad", 9), late, own.flaky("lucky", 1)))
    ended = up_until_ended(rk, "good", "odd", "bad", "late", "lucky", module=own.module, as_json=True)
    summary = summed(ended)
    ends = {name: summary[name] for name in ("succeeded", "failed", "timed_out", "cancelled", "rejected", "dropped")}
    assert ends == {"succeeded": 2, "failed": 1, "timed_out": 1, "cancelled": 0, "rejected": 1, "dropped": 0}
    assert summary["recovered"] == 1
    events = [json.loads(line) for line in ended.out.splitlines()[:-1]]
    assert [one["event_type"] for one in events if one["work_id"] == "lucky"] == ["retry_attempt", "retry_recovered"]
    assert any('"odd"' in line for line in ended.out.splitlines())


def test_every_end_of_jobs_that_were_run_again_is_counted_from_one_source(rk: Commands) -> None:
    """A time-out, a cancellation and a rejection, of which the router hears nothing, or a worker nothing."""
    own = prepared(rk)
    rk("submit", lines(rk, own.nap("late", 9, options={"timeout_ms": 50})))
    up_until_ended(rk, "late", module=own.module)
    assert rk("job", "retry", "late").code == 0
    rk("submit", lines(rk, ODD, own.nap("expired", 0, options={"deadline_ms": 1})))
    summary = summed(up_until_ended(rk, "late", "odd", "expired", module=own.module, as_json=True))
    assert (summary["timed_out"], summary["rejected"], summary["failed"], summary["cancelled"]) == (2, 1, 0, 0)


def test_work_left_by_a_worker_that_is_gone_is_taken_over(rk: Commands) -> None:
    """It was requeued for `worker-9`, which nobody has any more."""
    own = prepared(rk)
    path = rk.folder / ".reefknot" / "state.db"
    job = own.flaky("left", 0)["job"]
    work_items.quarantined(path, "left", worker="worker-9", kind=job["type"], payload=job["payload"])
    assert rk("quarantine", "requeue", "left").code == 0
    up_until_ended(rk, "left", module=own.module)
    assert work_items.item(path, "left").state.value == "succeeded"


class SlowReloads:
    def __init__(self) -> None:
        self.ends: list[asyncio.Future[None]] = []

    def reload(self, actor: str) -> asyncio.Task[ReloadOutcome]:
        self.ends.append(asyncio.get_running_loop().create_future())

        async def reloading() -> ReloadOutcome:
            await self.ends[-1]
            return ReloadOutcome(0, "book")

        return asyncio.create_task(reloading())


@pytest.mark.real_time
async def test_many_hangups_during_a_reload_are_one_more_reload(capsys: pytest.CaptureFixture[str]) -> None:
    system, shutdown = SlowReloads(), Shutdown(asyncio.Event())
    shutdown._has_terminal = False
    shutdown.reloads(cast("System", system))
    for reloads in (1, 2):
        for _ in range(100):
            shutdown.on_signal(SIGHUP)
            await asyncio.sleep(0)
        assert len(system.ends) == reloads
        system.ends[-1].set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
    assert len(system.ends) == 3, "signals during the second one are a third, which sees the last change"
    system.ends[-1].set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(system.ends) == 3
    assert capsys.readouterr().err.count("SIGHUP: the policies are unchanged") == 3


@pytest.mark.parametrize(("is_asked_before", "stops_at"), [(True, 2), (False, 1)])
async def test_a_signal_that_comes_after_the_parents_word_is_not_the_second_one(
    *, is_asked_before: bool, stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that ends all processes of a service signals a parent and its workers; control: two signals."""
    shutdown, stopped = Shutdown(asyncio.Event()), list[int]()
    monkeypatch.setattr(shutdown, "stop_at_once", stopped.append)
    if is_asked_before:
        shutdown.request()
    for _ in range(stops_at):
        shutdown.on_signal(SIGTERM)
    assert (shutdown.requested.is_set(), stopped) == (True, [143] if is_asked_before else [])
    shutdown.request()
    assert len(stopped) == int(is_asked_before), "the parent may ask at any time"
    shutdown.on_signal(SIGTERM)
    assert len(stopped) == int(is_asked_before) + 1
