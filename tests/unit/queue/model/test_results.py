"""Results: an end is told by what was stored or by its reason; fingerprints of failures, and their groups."""

import json
import time
from typing import Any

import msgspec
import pytest

from reefknot.core.failure import ErrorCode
from reefknot.queue.model import failure_groups, messages, results
from reefknot.queue.model.failure_groups import FailureGroups, failure_summary, fingerprint_of, has_error, normalised
from reefknot.queue.model.messages import ExecResult, Executor, Job, ResultJob, ResultStatus, encode
from reefknot.queue.model.results import DOWN, DROPPED, answer_of, assignment_of, down_reason, item_of, waits_for
from reefknot.queue.model.submission import EXPIRED, OVERDUE
from reefknot.queue.model.work import WorkItem, WorkState, vanished_reason
from tests.rows import for_each_row

S, R = WorkState, ResultStatus
OF_TENANT: Any = {"tenant_id": "t", "correlation": messages.Correlation("trace"), "resource_class": "cpu"}
ASSIGNMENT = messages.ExecAssignment("a", "r-1", Job("test.step", {"n": 1}), **OF_TENANT)


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
def test_an_end_without_a_result_has_its_reason(states: Any, reason: str, status: Any, code: Any, message: Any) -> None:
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


def test_of_work_whose_record_is_gone_or_was_retried_the_caller_gets_an_error_that_says_so() -> None:
    done = ended(S.CANCELLED, reason="no need")
    assert results.result_or_gone(done, "a") == told(done)
    gone = results.result_or_gone(None, "acme|order")
    assert (gone.assignment_id, gone.tenant_id, gone.job.type, gone.status) == ("order", "acme", "", R.ERROR)
    assert gone.error_message == "its record is not kept any longer"
    retried = results.result_or_gone(ended(S.PENDING), "a")
    assert (retried.assignment_id, retried.tenant_id, retried.job.type) == ("a", None, "test.step")
    assert (retried.status, retried.error_message) == (R.ERROR, "it is not over: it was retried")


def test_the_provider_of_what_no_step_ended_is_the_one_named_the_worker_that_had_it_or_the_router() -> None:
    classes = ("router", "cpu", "io@w2")
    providers = [told(ended(S.CANCELLED, resource_class=name)).provider_id for name in classes]
    assert providers == ["router", "router", "w2"]
    for executor, provider in ((None, "router"), (Executor(), "router"), (Executor(provider_id="p-1"), "p-1")):
        assignment = msgspec.structs.replace(ASSIGNMENT, executor=executor)
        result = results.unrun_result(assignment, R.ERROR, ErrorCode.internal_error, "")
        assert (result.provider_id, result.error_message) == (provider, None)


def test_the_assignment_is_the_one_that_was_submitted_and_of_a_damaged_one_what_stands_beside_it() -> None:
    item = item_of(ASSIGNMENT, encode(ASSIGNMENT), "cpu", begins_at=5_000, due_at=6_000)
    assert (item.due_at, item.deadline_at, assignment_of(item)) == (6_000, None, ASSIGNMENT)
    options = messages.AssignmentOptions(deadline_ms=300)
    timed = item_of(msgspec.structs.replace(ASSIGNMENT, options=options), b"", "cpu", begins_at=5_000, due_at=6_000)
    assert timed.deadline_at == 5_300
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


def item(message: str = "", *, name: str = "a", at: int = 1, source: str = "", **failure: object) -> WorkItem:
    body = {"failure_type": "permanent", "code": "HTTP_ERROR", "message": message, **failure}
    return WorkItem(name, "imap", source=source, updated_at=at, reason="not_retryable", failure=json.dumps(body))


@for_each_row(
    ("one", "other"),
    [
        ("HTTP 503 after 12 tries", "HTTP 503 after 7 tries"),
        ("waited 1.5 s of 30", "waited 12,75 s of 1000"),
        ("no folder 'Work'", "no folder 'Home/2024'"),
        ('no field "a" in `b`', 'no field "title" in `front matter`'),
        ("cannot read /home/ann/notes/a.md: denied", "cannot read /srv/b.txt: denied"),
        ("cannot read notes/a b.md", "cannot read work/c b.md"),
        (r"cannot read C:\notes\a.md", r"cannot read D:\b.md"),
        ("commit 1f3a9c2d7 is gone", "commit 0be2211f9aa is gone"),
        ("job 6f9619ff-8b86-d011-b42d-00cf4fc964ff ended", "job 00000000-8b86-d011-b42d-00cf4fc964aa ended"),
        ("object at 0x7f3a11", "object at 0xffff"),
        ("at 2024-05-01T10:00:00Z it was shut", "at 2026-11-16 09:36:39.120+02:00 it was shut"),
        ("shut since 09:36", "shut since 10:00:01"),
        ("https://a.example/x?y=1 does not answer", "imaps://mail.example:993 does not answer"),
        ("10.0.0.1:993 refused", "mail.example.org:143 refused"),
        ("[::1]:80 refused", "[fe80::2] refused"),
        ("ann@example.org may not", "bob.b+x@mail.example.com may not"),
        ("a  line\nand another", "a line and another"),
    ],
)
def test_what_differs_from_job_to_job_does_not_count(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert fingerprint_of(item(one)) == fingerprint_of(item(other))


@for_each_row(
    "message",
    ["it can't be read and isn't there", "the folder is missing", "login failed: wrong password", "decade of cafe"],
)
def test_words_stay_as_they_are(message: str) -> None:
    assert normalised(message) == message


def test_type_code_status_exception_and_words_make_the_difference() -> None:
    one = item("it failed")
    others = [
        item("it broke"),
        item("it failed", failure_type="transient"),
        item("it failed", code="NETWORK_ERROR"),
        item("it failed", http_status=404),
        item("it failed", exceptions=["builtins.OSError", "builtins.Exception"]),
    ]
    found = [fingerprint_of(each) for each in (one, *others)]
    assert (len(set(found)), {len(each) for each in found}) == (6, {failure_groups.DIGITS})
    assert found[0] == "46a9df25ed46", "it is the same in every process and version"


def test_without_a_message_the_reason_is_the_message() -> None:
    for failure in (None, "no json", '{"code": 1}', '{"message": ""}', '{"message": "\ud800"}'):
        found = failure_summary(WorkItem("a", "t", reason="no worker knows its type: x", failure=failure))
        assert found.message == "no worker knows its type: x"


def test_an_owner_that_vanished_hides_the_failure_of_an_attempt_before_it() -> None:
    lost = WorkItem("a", "t", crashes=3, reason=vanished_reason(3), failure='{"message": "an old failure"}')
    failed_later = WorkItem("a", "t", crashes=1, reason="attempts_spent", failure='{"message": "its own failure"}')
    assert failure_summary(lost).message == "its owner vanished 3 times"
    assert failure_summary(failed_later).message == "its own failure"


def test_groups_are_counted_with_their_times_sources_and_the_newest_message() -> None:
    items = [
        item("no 'a'", name="1", at=5, source="notes"),
        item("no 'b'", name="2", at=9, source="mail"),
        item("no 'c'", name="3", at=7, source="mail"),
        item("another", name="4", at=1),
    ]
    first, second = FailureGroups(items).groups()
    assert (first.count, first.message, first.oldest_at, first.newest_at) == (3, "no 'b'", 5, 9)
    assert (second.count, second.message, second.oldest_at, second.newest_at) == (1, "another", 1, 1)
    assert (first.sources, first.kinds, second.sources) == (("mail", "notes"), ("imap",), ())
    assert first.fingerprint == fingerprint_of(items[0])


def test_what_is_kept_of_many_groups_and_sources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_groups, "MOST_GROUPS", 2)
    monkeypatch.setattr(failure_groups, "MOST_SOURCES", 1)
    words = ["one", "two", "three", "one", "four"]
    found = FailureGroups(item(word * 400, source=word + str(at), at=at) for at, word in enumerate(words))
    assert [(one.count, one.sources) for one in found.groups()] == [(2, ("one0",)), (1, ("two1",))]
    assert (found.ungrouped, len(found.groups()[0].message)) == (2, failure_groups.LONGEST_EXAMPLE)


@pytest.mark.parametrize("piece", ["a.", "'", "a-", "0a", "/", "a@", "1:", "~/.", "x://", "1.1.1."])
def test_no_message_takes_long(piece: str) -> None:
    began = time.process_time()
    normalised(piece * 100_000)
    assert time.process_time() - began < 1.0


def test_a_text_is_looked_for_in_the_reason_and_in_what_a_failure_says() -> None:
    found = item("it answered 503")
    assert all(has_error(found, text) for text in ("not_retry", "HTTP_ERROR", "permanent", "Http_Error", "IT ANSWERED"))
    assert has_error(found, "answered 503")
    assert not any(has_error(found, text) for text in ("answered 504", "message", "imap"))
    for failure in (None, "no JSON"):
        odd = WorkItem("a", "t", reason="gone", failure=failure)
        assert (has_error(odd, "gone"), has_error(odd, "JSON")) == (True, False)
