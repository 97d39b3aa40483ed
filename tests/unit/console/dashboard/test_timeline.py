"""The rows of a job's timeline: what is on record, and nothing else."""

from typing import Any

from reefknot.audit.model.event import timestamp
from reefknot.console.dashboard.views import timeline_rows

NOON = 1_769_342_400.0


def at(second: float | None) -> str | None:
    return None if second is None else timestamp(NOON + second)


def attempt(number: int, started: float | None, ended: float | None, **more: Any) -> dict[str, Any]:
    took = None if started is None or ended is None else ended - started
    told = {"generation": 0, "due_at": None, "code": None, "outcome": "retried", "duration_s": took, **more}
    return {"number": number, "started_at": at(started), "ended_at": at(ended), **told}


def rows(*attempts: dict[str, Any], total_s: float, **more: Any) -> list[Any]:
    story = {"created_at": at(0), "state": "succeeded", "due_at": None, "generation": 0, "history": [], **more}
    found = timeline_rows(story | {"total_s": total_s, "attempts": attempts})
    return [
        (name, words, [(one["begins"] - NOON, one["ends"] - NOON, one["kind"]) for one in spans])
        for name, words, spans in found
    ]


def test_each_attempt_has_the_wait_before_it_and_a_run_that_crashed_a_bar_of_its_own() -> None:
    found = rows(attempt(1, 8, 9, code="TIMEOUT"), attempt(2, 11, 12.5, outcome="succeeded"), total_s=12.5)
    assert found == [
        ("attempt 1", "TIMEOUT, ran 1 s, after a wait of 8 s", [(0, 8, "waiting"), (8, 9, "failed")]),
        ("attempt 2", "succeeded, ran 1.5 s, after a wait of 2 s", [(9, 11, "waiting"), (11, 12.5, "succeeded")]),
    ]
    crashed = attempt(1, 1, 9, outcome="crashed", duration_s=None)
    found = rows(crashed, attempt(1, 10, 11, due_at=at(9), outcome="succeeded"), total_s=11)
    assert found == [
        ("attempt 1", "crashed, noticed within 8 s, after a wait of 1 s", [(0, 1, "waiting"), (1, 9, "crashed")]),
        ("attempt 1", "succeeded, ran 1 s, after a wait of 1 s", [(9, 10, "waiting"), (10, 11, "succeeded")]),
    ]


def test_a_second_run_waits_from_its_requeue_on() -> None:
    second = attempt(1, 61, 62, generation=1, due_at=at(60), outcome="succeeded")
    found = rows(attempt(1, 0, 1, outcome="failed"), second, total_s=62, generation=1)
    assert [name for name, _, _ in found] == ["run 1, attempt 1", "run 2, attempt 1"]
    assert found[1][2] == [(60, 61, "waiting"), (61, 62, "succeeded")]


def test_a_start_that_is_not_on_record_is_not_made_up_and_a_running_attempt_goes_on_until_now() -> None:
    (row,) = rows(attempt(1, None, 3), total_s=3)
    assert row == ("attempt 1", "retried, start not recorded", [(0, 3, "other")])
    (row,) = rows(attempt(1, 1, None, outcome="running"), total_s=4, state="running")
    assert row == ("attempt 1", "running, for 3 s, after a wait of 1 s", [(0, 1, "waiting"), (1, 4, "running")])


def test_a_job_that_waits_for_its_retry_shows_it() -> None:
    found = rows(attempt(1, 0, 1), total_s=2, state="pending", due_at=at(5))
    assert found[-1] == ("next attempt", "waits", [(1, 5, "waiting")])
    requeued = [{"at": at(60), "what": "requeued"}]
    found = rows(attempt(1, 0, 1), total_s=61, state="pending", generation=1, history=requeued)
    assert found[-1][2] == [(60, 61, "waiting")]
