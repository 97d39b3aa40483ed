"""Results: an end is told by what was stored, or by its reason, in the same words as often as it is asked."""

from typing import Any

import msgspec

from reefknot.core.failure import ErrorCode
from reefknot.queue.model import messages, results
from reefknot.queue.model.messages import ExecResult, Executor, Job, ResultJob, ResultStatus, encode
from reefknot.queue.model.results import DOWN, DROPPED, answer_of, assignment_of, down_reason, waits_for
from reefknot.queue.model.submission import EXPIRED, OVERDUE
from reefknot.queue.model.work import WorkItem, WorkState
from tests.rows import for_each_row

S, R = WorkState, ResultStatus
ASSIGNMENT = messages.ExecAssignment(
    "a",
    "r-1",
    Job("test.step", {"n": 1}),
    tenant_id="t",
    correlation=messages.Correlation("trace"),
    resource_class="cpu",
)


def ended(state: WorkState = S.FAILED, **fields: object) -> WorkItem:
    item = WorkItem("a", "test.step", "cpu@w1", state=state, payload=encode(ASSIGNMENT), updated_at=7_000)
    return msgspec.structs.replace(item, **fields)


def told(item: WorkItem) -> ExecResult:
    answer = answer_of(item)
    assert answer is not None
    return answer


def test_what_has_not_ended_has_no_answer() -> None:
    open_ones = [ended(state, result=result) for state in (S.PENDING, S.RUNNING) for result in (None, "{}")]
    assert [answer_of(one) for one in open_ones] == [None] * 4


@for_each_row("state", [S.SUCCEEDED, S.FAILED, S.CANCELLED, S.DISCARDED, S.QUARANTINED])
def test_a_stored_result_is_the_answer_as_it_was_stored(state: WorkState) -> None:
    stored = ExecResult("a", "r-1", R.SUCCESS, "w9", ResultJob("test.step"), 12.5, 3, output={"x": [1]}, timestamp=5)
    assert answer_of(ended(state, result=encode(stored).decode(), reason="no matter")) == stored


@for_each_row(
    ("states", "reason", "status", "code", "message"),
    [
        ([S.CANCELLED], DROPPED, R.ERROR, ErrorCode.system_overload, results.DROPPED_MESSAGE),
        ([S.CANCELLED, S.FAILED], EXPIRED, R.TIMEOUT, ErrorCode.cancelled_by_timeout, results.EXPIRED_MESSAGE),
        ([S.CANCELLED, S.FAILED], OVERDUE, R.TIMEOUT, ErrorCode.cancelled_by_timeout, results.OVERDUE_MESSAGE),
        ([S.QUARANTINED], EXPIRED, R.ERROR, ErrorCode.internal_error, f"quarantined: {EXPIRED}"),
        ([S.CANCELLED], "no need", R.CANCELLED, ErrorCode.cancelled_by_user, "no need"),
        ([S.CANCELLED], "", R.CANCELLED, ErrorCode.cancelled_by_user, None),
        ([S.QUARANTINED, S.DISCARDED], "crashed", R.ERROR, ErrorCode.internal_error, "quarantined: crashed"),
        ([S.FAILED], "timeout", R.ERROR, ErrorCode.internal_error, "timeout"),
        ([S.SUCCEEDED], "", R.ERROR, ErrorCode.internal_error, None),
    ],
)
def test_an_end_without_a_result_is_told_by_its_reason(
    states: list[WorkState], reason: str, status: ResultStatus, code: ErrorCode, message: str | None
) -> None:
    for state in states:
        answer = told(ended(state, reason=reason))
        assert (answer.status, answer.error_code, answer.error_message) == (status, code.wire, message)


def test_such_an_answer_says_whose_work_it_was_and_when_it_ended_as_often_as_it_is_asked() -> None:
    item = ended(S.CANCELLED, reason="no need", attempts=3)
    answer = told(item)
    assert (answer.assignment_id, answer.request_id, answer.job) == ("a", "r-1", ResultJob("test.step"))
    assert (answer.tenant_id, answer.trace_id, answer.provider_id) == ("t", "trace", "w1")
    assert (answer.retries_used, answer.timestamp, answer.latency_ms, answer.cost) == (2, 7_000, 0, 0)
    assert answer_of(item) == answer
    retries = [told(ended(S.QUARANTINED, attempts=attempts)).retries_used for attempts in (0, 1, 2)]
    assert retries == [0, 0, 1], "never less than none"


def test_the_provider_of_what_no_step_ended_is_the_one_named_the_worker_that_had_it_or_the_router() -> None:
    classes = ("router", "cpu", "io@w2")
    providers = [told(ended(S.CANCELLED, resource_class=name)).provider_id for name in classes]
    assert providers == ["router", "router", "w2"]
    for executor, provider in ((None, "router"), (Executor(), "router"), (Executor(provider_id="p-1"), "p-1")):
        assignment = msgspec.structs.replace(ASSIGNMENT, executor=executor)
        result = results.unrun_result(assignment, R.ERROR, ErrorCode.internal_error, "")
        assert (result.provider_id, result.error_message) == (provider, None)


def test_the_assignment_is_the_one_that_was_submitted_and_of_a_damaged_one_what_stands_beside_it() -> None:
    assert assignment_of(ended()) == ASSIGNMENT
    for payload in (b"{broken", b"", b"[]", b"{}", b'{"assignment":{}}'):
        for trace in (None, "trace"):
            item = ended(payload=payload, tenant_id="t", correlation_id="r-1", trace_id=trace)
            found = assignment_of(item)
            assert (found.assignment_id, found.request_id, found.job) == ("a", "r-1", Job("test.step"))
            assert (found.tenant_id, found.trace_id) == ("t", trace)
            assert assignment_of(msgspec.structs.replace(item, correlation_id=None)).request_id == ""


@for_each_row(
    ("payload", "same"),
    [
        ({}, True),
        ({"request_id": "r-2", "tenant_id": None}, True),
        ({"job": Job("test.step", {"n": 2})}, False),
        ({"job": Job("test.step", {"n": 1.0})}, False),
        ({"job": Job("test.step", {"n": True})}, False),
        ({"job": Job("other.step", {"n": 1})}, False),
        (b'{"something": "else"}', False),
        (b"{broken", True),
        (b"", True),
    ],
)
def test_the_same_job_is_told_from_another_one(payload: bytes | dict[str, Any], same: bool) -> None:
    """What is damaged counts as the same: the worker that runs it says that it is damaged."""
    if isinstance(payload, dict):
        payload = encode(msgspec.structs.replace(ASSIGNMENT, **payload))
    assert results.is_same_job(ended(payload=payload), ASSIGNMENT) is same


def test_a_reason_to_cancel_is_bounded_and_never_means_another_end() -> None:
    for given, kept in (
        (None, "cancelled"),
        ("  ", "cancelled"),
        (" changed my mind ", "changed my mind"),
        (EXPIRED, f"cancelled: {EXPIRED}"),
        (OVERDUE, f"cancelled: {OVERDUE}"),
        (DROPPED, f"cancelled: {DROPPED}"),
        ("x" * 1000, "x" * 300),
    ):
        assert results.cancel_reason(given) == kept, given


@for_each_row(
    ("resource_class", "state", "reason"),
    [("cpu@w1", S.RUNNING, OVERDUE), ("cpu@w1", S.PENDING, EXPIRED), ("router", S.RUNNING, EXPIRED)],
)
def test_a_deadline_that_passed_is_told_by_who_had_it(resource_class: str, state: WorkState, reason: str) -> None:
    assert results.overdue_reason(WorkItem("a", "test.step", resource_class, state=state)) == reason


def test_a_job_that_waits_for_a_destination_says_for_which_since_when_and_until_when() -> None:
    since = 1_700_000_000_123
    item = WorkItem("a", "k", due_at=1_700_000_060_000, reason=down_reason("api (2) since ever:443", since))
    assert waits_for(item) == results.WaitsFor("api (2) since ever:443", since, 1_700_000_060_000)
    assert waits_for(msgspec.structs.replace(item, state=S.RUNNING)) == waits_for(item), "claimed, to be tried again"
    for reason in ("shutdown", DOWN, f"{DOWN} (x) since yesterday"):
        assert waits_for(WorkItem("a", "k", reason=reason)) is None, reason
    assert waits_for(WorkItem("a", "k", state=S.FAILED, reason=down_reason("x", 1))) is None
