"""The frozen wire: what is accepted, what is refused and how, and the exact bytes of acks and results."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.failure import ErrorCode
from reefknot.queue.model import messages
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.messages import (
    LARGEST_MESSAGE,
    LONGEST_MS,
    AckStatus,
    AssignmentOptions,
    Cancel,
    ClassHealth,
    Correlation,
    ExecAssignment,
    ExecAssignmentAck,
    ExecResult,
    Executor,
    Fleet,
    Heartbeat,
    InvalidMessage,
    Job,
    ResultJob,
    ResultStatus,
    RetryOptions,
    StepRequest,
    StepResult,
    StepStatus,
    assign_subject,
    checked,
    encode,
    read_assignment,
    resource_class,
    trace_of,
)
from tests.rows import for_each_row

LEAST: dict[str, Any] = {"assignment_id": "a", "request_id": "r", "job": {"type": "http.request"}}


def body(**changes: Any) -> bytes:
    return json.dumps({**LEAST, **changes}).encode()


def read(**changes: Any) -> ExecAssignment:
    found = read_assignment(body(**changes))
    assert isinstance(found, ExecAssignment), found
    return found


def refused(raw: bytes, headers: dict[str, str] | None = None) -> InvalidMessage:
    found = read_assignment(raw, headers)
    assert isinstance(found, InvalidMessage), found
    return found


@for_each_row(
    ("deadline_ms", "header", "wall_ms", "left"),
    [
        (5_000, "104000", 100_000, 4_000),
        (5_000, "900000", 100_000, 5_000),
        (5_000, "99000", 100_000, 1),
        (None, "104000", 100_000, None),
        (5_000, "104000", None, 5_000),
        (5_000, "", 100_000, 5_000),
        (5_000, "soon", 100_000, 5_000),
        (5_000, "-1", 100_000, 5_000),
        (5_000, "9" * 16, 100_000, 5_000),
    ],
)
def test_a_deadline_by_the_workers_clock_counts_what_passed_on_the_way(
    deadline_ms: int | None, header: str, wall_ms: int | None, left: int | None
) -> None:
    options = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
    found = read_assignment(body(options=options), {"deadline_at": header}, wall_ms)
    assert isinstance(found, ExecAssignment)
    assert found.options.deadline_ms == left


def test_a_header_makes_no_invalid_deadline_valid() -> None:
    found = read_assignment(body(options={"deadline_ms": 0}), {"deadline_at": "104000"}, 100_000)
    assert isinstance(found, InvalidMessage)


def test_the_subjects_are_frozen() -> None:
    assert (messages.ASSIGN, messages.ACK, messages.RESULT, messages.CANCEL, messages.HEARTBEAT, messages.FLEET) == (
        "caf.exec.assign.v1",
        "caf.exec.assign.v1.ack",
        "caf.exec.result.v1",
        "caf.exec.cancel.v1",
        "caf.worker.heartbeat.v1",
        "caf.worker.fleet.v1",
    )
    assert assign_subject("w1") == "caf.exec.assign.v1.w.w1"
    assert (messages.VERSION, LARGEST_MESSAGE, messages.LONGEST_ID) == ("1", 1048576, 256)
    assert (messages.DEFAULT_TIMEOUT_MS, LONGEST_MS, messages.HIGHEST_PRIORITY) == (30_000, 315_360_000_000, 1_000_000)


def test_the_least_assignment_is_read_with_its_defaults() -> None:
    assert read() == ExecAssignment("a", "r", Job("http.request"))
    assert read().version == "1"
    assert read().options == AssignmentOptions(0, None, None, None, False, None)


def test_every_field_is_read_and_unknown_ones_are_ignored() -> None:
    found = read(
        version="1",
        tenant_id="t",
        job={"type": "x", "payload": {"a": 1}, "resources": {"class": "gpu"}, "later": 1},
        executor={"provider_id": "p", "channel": "nats"},
        options={
            "priority": "high",
            "deadline_ms": 5,
            "timeout_ms": 6,
            "retry_count": 7,
            "skip_circuit_breaker": True,
            "retry": {"max_attempts": 2, "backoff_ms": 50},
        },
        resource_class="io",
        correlation={"trace_id": "tr"},
        decision={"why": "cheap"},
        metadata={"k": "v"},
        invented_later={"x": 1},
    )

    assert found == ExecAssignment(
        "a",
        "r",
        Job("x", {"a": 1}, None, {"class": "gpu"}),
        "1",
        "t",
        Executor("p", "nats"),
        AssignmentOptions("high", 5, 6, 7, True, RetryOptions(2, 50)),
        "io",
        Correlation("tr"),
        {"why": "cheap"},
        {"k": "v"},
    )


@for_each_row(("given", "number"), [("low", -10), ("normal", 0), ("high", 10), ("critical", 20), (7, 7), (-3, -3)])
def test_a_priority_is_a_number_or_a_word(given: int | str, number: int) -> None:
    assert read(options={"priority": given}).priority == number


@for_each_row(
    ("options", "retries"),
    [
        ({}, None),
        ({"retry_count": 2}, 2),
        ({"retry": {"max_attempts": 5}}, 5),
        ({"retry": {"max_attempts": 0}, "retry_count": 2}, 0),
        ({"retry": {"backoff_ms": 5}, "retry_count": 2}, 2),
        ({"retry": {}}, None),
    ],
)
def test_retries_have_two_names(options: dict[str, Any], retries: int | None) -> None:
    assert read(options=options).retries == retries


@for_each_row(
    ("options", "payload", "timeout"),
    [
        ({}, {}, 30_000),
        ({"timeout_ms": 5}, {"timeout_ms": 7}, 5),
        ({}, {"timeout_ms": 7}, 7),
        ({}, {"timeout_ms": "7"}, 30_000),
        ({}, {"timeout_ms": True}, 30_000),
    ],
)
def test_the_timeout_comes_from_the_options_then_the_payload(
    options: dict[str, Any], payload: dict[str, Any], timeout: int
) -> None:
    assert read(options=options, job={"type": "x", "payload": payload}).timeout_ms == timeout


@for_each_row(
    ("job", "said", "expected"),
    [
        ({"type": "http.request"}, None, "io"),
        ({"type": "fs.blob_put"}, None, "io"),
        ({"type": "http"}, None, "io"),
        ({"type": "fs_blob_get"}, None, "io"),
        ({"type": "ai.embed"}, None, "gpu"),
        ({"type": "media.cut"}, None, "gpu"),
        ({"type": "sql.query"}, None, "cpu"),
        ({"type": "sql"}, None, "cpu"),
        ({"type": "invoice.render"}, None, "cpu"),
        ({"type": "https.x"}, None, "cpu"),
        ({"type": "http.request"}, "gpu", "gpu"),
        ({"type": "http.request", "resources": {"class": "cpu"}}, None, "cpu"),
        ({"type": "http.request", "resources": {"class": "cpu"}}, "gpu", "gpu"),
        ({"type": "http.request", "resources": {"class": 5}}, None, "io"),
        ({"type": "http.request", "resources": {"class": ""}}, None, "io"),
        ({"type": "http.request", "resources": {}}, None, "io"),
    ],
)
def test_the_pool_is_the_one_said_else_the_types(job: dict[str, Any], said: str | None, expected: str) -> None:
    assert resource_class(read(job=job, resource_class=said)) == expected


# ---- headers --------------------------------------------------------------------------------------------------------

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@for_each_row(
    ("headers", "trace", "tenant"),
    [
        ({}, "tp", "pt"),
        ({"trace_id": "th"}, "th", "pt"),
        ({"tenant_id": "ht"}, "tp", "ht"),
        ({"traceparent": TRACEPARENT}, "0af7651916cd43dd8448eb211c80319c", "pt"),
        ({"trace_id": "th", "traceparent": TRACEPARENT}, "th", "pt"),
        ({"traceparent": "00-short-b7-01"}, "tp", "pt"),
        ({"traceparent": "0af7651916cd43dd8448eb211c80319c"}, "tp", "pt"),
        ({"trace_id": "", "tenant_id": ""}, "tp", "pt"),
    ],
)
def test_headers_beat_the_payload(headers: dict[str, str], trace: str, tenant: str) -> None:
    found = read_assignment(body(tenant_id="pt", correlation={"trace_id": "tp"}), headers)

    assert isinstance(found, ExecAssignment)
    assert (found.trace_id, found.tenant_id, found.assignment_id) == (trace, tenant, "a")


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOT_TRACEPARENTS = (
    *("", TRACE, "00-short-b7-01", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01-more"),
    *(f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-01\n"),
    *(f"00-{TRACE.upper()}-{SPAN}-01", f"00-{chr(7) * 32}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-" + "x" * 300),
)


def test_the_header_traceparent_beats_the_payloads_and_keeps_the_given_trace_id() -> None:
    own = f"00-{'1' * 32}-{'2' * 16}-00"
    payload = body(correlation={"trace_id": "tp", "traceparent": own})

    found = [read_assignment(payload, headers) for headers in ({}, {"trace_id": "th"}, {"traceparent": TRACEPARENT})]

    assert [(one.trace_id, one.traceparent) for one in found if isinstance(one, ExecAssignment)] == [
        ("tp", own),
        ("th", own),
        (TRACE, TRACEPARENT),
    ]


def test_a_payloads_traceparent_gives_the_trace_id_where_none_is_said() -> None:
    found = read(correlation={"traceparent": TRACEPARENT})
    assert (found.trace_id, found.traceparent) == (TRACE, TRACEPARENT)
    assert trace_of(f"01-{TRACE}-{SPAN}-01-what-a-later-version-says") == TRACE


@pytest.mark.parametrize("text", NOT_TRACEPARENTS)
def test_a_traceparent_that_is_not_valid_is_ignored(text: str) -> None:
    by_header = read_assignment(body(), {"traceparent": text})
    assert isinstance(by_header, ExecAssignment)
    for found in (by_header, read(correlation={"traceparent": text})):
        assert (found.trace_id, found.traceparent) == (None, None)


def test_the_versions_header_beats_the_payload_both_ways() -> None:
    assert isinstance(read_assignment(body(version="9"), {"version": "1"}), ExecAssignment)
    assert refused(body(version="1"), {"version": "2"}).field == "version"
    assert read().trace_id is None


# ---- what is refused ------------------------------------------------------------------------------------------------


@for_each_row(
    "raw", [b"", b"hello", b"\xff\xfe", b'{"assignment_id": "a"', body() + b" x", b'{"assignment_id":"\xff"}']
)
def test_what_is_no_json_is_an_error_that_says_so(raw: bytes) -> None:
    found = refused(raw)

    assert found.message.startswith("the message: not JSON: ")
    assert (found.readable, found.ack_status, found.assignment_id, found.field) == (False, AckStatus.ERROR, "", "")


@for_each_row("raw", [b"null", b"[]", b"5", b'"text"', b"[" * 100_000])
def test_json_that_is_no_object_is_refused(raw: bytes) -> None:
    found = refused(raw)

    assert found.message.startswith("the message: Expected `object`")
    assert found.ack_status is AckStatus.REJECTED


def test_nesting_without_end_is_refused_and_crashes_nothing() -> None:
    deep = b'{"assignment_id":"a","request_id":"r","job":{"type":"x","payload":' + b'{"a":' * 5000 + b"1" + b"}" * 5002

    assert "recursion" in refused(deep).message


@for_each_row(
    ("changes", "field"),
    [
        ({"assignment_id": None}, "assignment_id"),
        ({"assignment_id": 5}, "assignment_id"),
        ({"assignment_id": ""}, "assignment_id"),
        ({"assignment_id": "x" * 257}, "assignment_id"),
        ({"assignment_id": "a\nb"}, "assignment_id"),
        ({"request_id": []}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"job": "x"}, "job"),
        ({"job": {}}, "job.type"),
        ({"job": {"type": ""}}, "job.type"),
        ({"job": {"type": 5}}, "job.type"),
        ({"job": {"type": "x", "payload": []}}, "job.payload"),
        ({"job": {"type": "x", "payload_ref": 5}}, "job.payload_ref"),
        ({"job": {"type": "x", "payload": {"timeout_ms": 0}}}, "job.payload.timeout_ms"),
        ({"version": "2"}, "version"),
        ({"version": 1}, "version"),
        ({"options": {"priority": "urgent"}}, "options.priority"),
        ({"options": {"priority": 1.5}}, "options.priority"),
        ({"options": {"priority": 1_000_001}}, "options.priority"),
        ({"options": {"priority": -1_000_001}}, "options.priority"),
        ({"options": {"deadline_ms": 0}}, "options.deadline_ms"),
        ({"options": {"deadline_ms": -1}}, "options.deadline_ms"),
        ({"options": {"deadline_ms": "5"}}, "options.deadline_ms"),
        ({"options": {"deadline_ms": True}}, "options.deadline_ms"),
        ({"options": {"deadline_ms": 10**30}}, "options.deadline_ms"),
        ({"options": {"deadline_ms": LONGEST_MS + 1}}, "options.deadline_ms"),
        ({"options": {"timeout_ms": 0}}, "options.timeout_ms"),
        ({"options": {"timeout_ms": LONGEST_MS + 1}}, "options.timeout_ms"),
        ({"options": {"retry_count": -1}}, "options.retry_count"),
        ({"options": {"retry_count": 101}}, "options.retry_count"),
        ({"options": {"retry": {"max_attempts": -1}}}, "options.retry.max_attempts"),
        ({"options": {"retry": {"max_attempts": 101}}}, "options.retry.max_attempts"),
        ({"options": {"retry": {"backoff_ms": -1}}}, "options.retry.backoff_ms"),
        ({"options": {"retry": {"backoff_ms": 86_400_001}}}, "options.retry.backoff_ms"),
        ({"tenant_id": 5}, "tenant_id"),
        ({"resource_class": []}, "resource_class"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str) -> None:
    found = refused(body(**changes))

    assert found.field == field
    assert found.message.startswith(f"{field}: ")
    assert found.ack_status is AckStatus.REJECTED
    assert found.assignment_id == ("a" if "assignment_id" not in changes else found.assignment_id)


@pytest.mark.parametrize("field", ["assignment_id", "request_id", "job"])
def test_a_missing_field_is_named(field: str) -> None:
    raw = json.dumps({name: value for name, value in LEAST.items() if name != field}).encode()

    assert refused(raw).message == f"{field}: missing"
    assert refused(raw).field == field


@for_each_row(
    "options",
    [
        {"deadline_ms": 1},
        {"deadline_ms": LONGEST_MS},
        {"timeout_ms": 1},
        {"timeout_ms": LONGEST_MS},
        {"retry_count": 0},
        {"retry_count": 100},
        {"retry": {"max_attempts": 0, "backoff_ms": 0}},
        {"retry": {"max_attempts": 100, "backoff_ms": 86_400_000}},
        {"priority": 1_000_000},
        {"priority": -1_000_000},
    ],
)
def test_the_bounds_themselves_are_accepted(options: dict[str, Any]) -> None:
    assert isinstance(read_assignment(body(options=options)), ExecAssignment)


def test_the_messages_say_what_is_accepted() -> None:
    assert refused(body(version="2")).message == "version: '2' is not accepted; accepted: '1'"
    assert refused(body(options={"priority": "urgent"})).message == (
        "options.priority: 'urgent' is not accepted; accepted: a whole number, or one of low, normal, high, critical"
    )
    assert refused(body(options={"deadline_ms": 0})).message == (
        "options.deadline_ms: 0 is not accepted; accepted: a whole number from 1 to 315360000000"
    )
    assert refused(body(request_id="")).message == "request_id: accepted: printable text of 1 to 256 characters"


TEXTS: list[tuple[str, Any]] = [
    ("tenant_id", lambda text: {"tenant_id": text}),
    ("correlation.trace_id", lambda text: {"correlation": {"trace_id": text}}),
    ("resource_class", lambda text: {"resource_class": text}),
    ("executor.provider_id", lambda text: {"executor": {"provider_id": text}}),
    ("executor.channel", lambda text: {"executor": {"channel": text}}),
    ("job.resources.class", lambda text: {"job": {"type": "x", "resources": {"class": text}}}),
    ("job.payload_ref", lambda text: {"job": {"type": "x", "payload_ref": text}}),
]


@for_each_row(("field", "changes"), TEXTS)
def test_every_text_has_a_bound_and_no_control_characters(field: str, changes: Any) -> None:
    most = 4096 if field == "job.payload_ref" else 256
    for text in ("\u00fc" * most, ""):
        assert isinstance(read_assignment(body(**changes(text))), ExecAssignment)
    for text in ("x" * (most + 1), "x" * 900_000, "a\nb", "a\x1b[2Jb", "\u2028", "\x00"):
        found = refused(body(**changes(text)))
        assert found.message == f"{field}: accepted: printable text of at most {most} characters"
        assert (found.field, found.assignment_id, found.ack_status) == (field, "a", AckStatus.REJECTED)


@pytest.mark.parametrize(
    ("headers", "field"), [({"tenant_id": "x" * 257}, "tenant_id"), ({"trace_id": "a\tb"}, "correlation.trace_id")]
)
def test_headers_have_the_same_bounds(headers: dict[str, str], field: str) -> None:
    assert refused(body(), headers).field == field


@pytest.mark.parametrize(
    "changes", [{"version": "9" * 900_000}, {"options": {"priority": "x" * 900_000}}, {"assignment_id": "x" * 900_000}]
)
def test_an_answer_is_short_however_long_the_mistake_is(changes: dict[str, Any]) -> None:
    found = refused(body(**changes))
    assert len(found.message) < 300
    assert len(found.assignment_id) <= 256
    assert refused(body(assignment_id="a\x00b")).assignment_id == ""


def test_ids_of_the_longest_length_are_accepted() -> None:
    assert read(assignment_id="x" * 256).assignment_id == "x" * 256


def test_ten_megabytes_are_refused_and_the_sender_is_told_which_it_was() -> None:
    found = refused(body(metadata={"text": "x" * 10_000_000}))

    assert found.assignment_id == "a"
    assert found.ack_status is AckStatus.REJECTED
    assert found.message.endswith("accepted: at most 1048576")
    assert found.message.startswith("the message: it has 1000")


def test_the_largest_message_is_accepted_and_one_byte_more_is_not() -> None:
    room = LARGEST_MESSAGE - len(body(metadata={"t": ""}))

    assert isinstance(read_assignment(body(metadata={"t": "x" * room})), ExecAssignment)
    assert isinstance(read_assignment(body(metadata={"t": "x" * (room + 1)})), InvalidMessage)


@for_each_row(
    ("raw", "name", "status"),
    [
        (b"x" * (LARGEST_MESSAGE + 1), "", AckStatus.ERROR),
        (b'{"assignment_id": 5, "pad": "' + b"x" * LARGEST_MESSAGE + b'"}', "", AckStatus.REJECTED),
        (b'{"assignment_id": "a\\nb", "pad": "' + b"x" * LARGEST_MESSAGE + b'"}', "", AckStatus.REJECTED),
        (b'{"assignment_id": "' + b"y" * LARGEST_MESSAGE + b'"}', "y" * 256, AckStatus.REJECTED),
        (b'{"assignment_id": 5, "x": ', "", AckStatus.REJECTED),
        (b'{"assignment_id": "a", "job": 5, "x": ', "", AckStatus.ERROR),
    ],
)
def test_an_id_is_told_only_if_it_can_be_found(raw: bytes, name: str, status: AckStatus) -> None:
    found = refused(raw)

    assert (found.assignment_id, found.ack_status) == (name, status)


@pytest.mark.parametrize("number", [b"1e999", b"1" * 5000])
def test_a_number_that_no_machine_holds_is_refused(number: bytes) -> None:
    raw = b'{"assignment_id":"a","request_id":"r","job":{"type":"x","payload":{"a":' + number + b"}}}"

    assert refused(raw).field == "job.payload[...]"
    assert refused(raw).assignment_id == "a"


@given(st.binary(max_size=300))
def test_no_bytes_at_all_raise(raw: bytes) -> None:
    assert isinstance(read_assignment(raw), ExecAssignment | InvalidMessage)


def test_an_assignment_that_was_built_here_is_checked_the_same_way() -> None:
    good = ExecAssignment("a", "r", Job("x"))

    assert checked(good) is good
    bad = checked(ExecAssignment("", "r", Job("x")))
    assert isinstance(bad, InvalidMessage)
    assert (bad.field, bad.readable) == ("assignment_id", True)


# ---- the bytes ------------------------------------------------------------------------------------------------------


def test_the_baselines_ack_has_no_new_field() -> None:
    assert encode(ExecAssignmentAck("a", AckStatus.ACCEPTED, "Assignment queued")) == (
        b'{"assignment_id":"a","status":"accepted","message":"Assignment queued"}'
    )


def test_version_2s_ack_has_every_overload_field_even_when_it_is_nothing() -> None:
    ack = ExecAssignmentAck("a", AckStatus.REJECTED, "Queue full", OverloadStatus.HEALTHY, 0, "w1", "queue_full", 0)

    assert encode(ack) == (
        b'{"assignment_id":"a","status":"rejected","message":"Queue full","overload_status":"healthy","queue_depth":0,'
        b'"worker_id":"w1","reason":"queue_full","retry_after_ms":0}'
    )


def test_the_baselines_result_has_only_what_always_goes() -> None:
    result = ExecResult("a", "r", ResultStatus.SUCCESS, "p", ResultJob("x"), 0, 0, retries_used=0)

    assert encode(result) == (
        b'{"assignment_id":"a","request_id":"r","status":"success","provider_id":"p","job":{"type":"x"},"latency_ms":0,'
        b'"cost":0,"retries_used":0}'
    )


def test_version_2s_result_has_every_field() -> None:
    result = ExecResult(
        "a",
        "r",
        ResultStatus.ERROR,
        "p",
        ResultJob("x"),
        1.5,
        0.25,
        "tr",
        "te",
        1700000000000,
        0,
        OverloadStatus.HEALTHY,
        "w",
        2,
        "HTTP_ERROR",
        "boom",
        {"k": 1},
    )

    assert encode(result) == (
        b'{"assignment_id":"a","request_id":"r","status":"error","provider_id":"p","job":{"type":"x"},"latency_ms":1.5,'
        b'"cost":0.25,"trace_id":"tr","tenant_id":"te","timestamp":1700000000000,"queue_depth":0,'
        b'"overload_status":"healthy","worker_id":"w","retries_used":2,"error_code":"HTTP_ERROR","error_message":"boom",'
        b'"output":{"k":1}}'
    )


def test_an_assignment_survives_the_wire() -> None:
    given_ = ExecAssignment(
        "a", "r", Job("x", {"n": 1}), options=AssignmentOptions("high", 5), correlation=Correlation("t")
    )

    assert read_assignment(encode(given_)) == given_


def test_an_assignment_is_written_with_its_version_and_without_what_is_not_set() -> None:
    written = b'{"assignment_id":"a","request_id":"r","job":{"type":"x"},"version":"1"}'

    assert encode(ExecAssignment("a", "r", Job("x"))) == written
    assert encode(_read(b'{"assignment_id":"a","request_id":"r","job":{"type":"x"}}')) == written


def _read(body: bytes) -> ExecAssignment:
    read = read_assignment(body)
    assert isinstance(read, ExecAssignment)
    return read


def test_the_small_messages() -> None:
    beat = Heartbeat("w", 5, {"io": ClassHealth(OverloadStatus.HEALTHY, 0, 1, 8)}, incarnation="w#1", store="5f")

    assert encode(beat) == (
        b'{"worker_id":"w","timestamp":5,"classes":{"io":{"status":"healthy","queue_depth":0,"active":1,"capacity":8}},'
        b'"draining":false,"incarnation":"w#1","store":"5f","leaving":false}'
    )
    assert encode(Cancel("a")) == b'{"assignment_id":"a"}'
    assert encode(Cancel("a", "why")) == b'{"assignment_id":"a","reason":"why"}'
    assert encode(Fleet(3)) == b'{"workers":3}'


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_steps_request_and_result_have_the_documented_defaults() -> None:
    assert StepRequest("x") == StepRequest("x", {}, {}, 30_000, None)
    assert StepResult() == StepResult(StepStatus.OK, ErrorCode.none, {}, "", {}, 0.0, 0, 0, OverloadStatus.HEALTHY)
    assert [status.value for status in StepStatus] == ["ok", "error", "timeout", "cancelled"]
    assert [status.value for status in ResultStatus] == ["success", "error", "timeout", "cancelled"]
    assert StepResult().ok
    assert not StepResult(StepStatus.TIMEOUT).ok


def test_a_steps_request_is_what_its_assignment_asks_for_by_either_name() -> None:
    job = {"type": "x", "payload": {"a": 1, "timeout_ms": 700}, "resources": {"class": "gpu"}}
    asked = read(job=job, options={"retry_count": 1, "retry": {"max_attempts": 4}})

    assert StepRequest.of(asked) == StepRequest("x", {"a": 1, "timeout_ms": 700}, {"class": "gpu"}, 700, 4)
    assert StepRequest.of(read()) == StepRequest("http.request")


@pytest.mark.parametrize(
    ("skip_retries", "factor", "expected"),
    [
        (False, 1.0, StepRequest("x", timeout_ms=1000, retry_count=5)),
        (True, 0.8, StepRequest("x", timeout_ms=800, retry_count=0)),
        (False, 0.0001, StepRequest("x", timeout_ms=1, retry_count=5)),
    ],
)
def test_a_degraded_request_asks_for_less(skip_retries: bool, factor: float, expected: StepRequest) -> None:
    request = StepRequest("x", timeout_ms=1000, retry_count=5)

    assert request.degraded(skip_retries=skip_retries, timeout_factor=factor) == expected


@for_each_row(
    ("metadata", "outputs", "status"),
    [
        ({"http_status_code": 503}, {"status_code": 200}, 503),
        ({"http_status_code": "503"}, {}, 503),
        ({}, {"status_code": 404}, 404),
        ({"http_status_code": True}, {"status_code": 404}, 404),
        ({"http_status_code": "x"}, {}, None),
        ({"http_status_code": "²²²"}, {"status_code": "9" * 5000}, None),
        ({"http_status_code": 10**400}, {"status_code": -5}, None),
        ({}, {}, None),
    ],
)
def test_a_status_is_read_from_the_metadata_then_the_outputs(
    metadata: dict[str, Any], outputs: dict[str, Any], status: int | None
) -> None:
    assert StepResult(metadata=metadata, outputs=outputs).http_status == status


@for_each_row(
    ("name", "fits"),
    [("worker-1", True), ("ü", True), ("", False), ("a b", False), ("a.b", False), ("a>", False), ("a\n", False)],
)
def test_a_part_is_called_what_a_subject_and_a_queue_can_hold(name: str, fits: bool) -> None:
    assert messages.can_name_a_part(name) is fits


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (
            {"type": "http.request", "payload": {"headers": {"A": "fine", "X-Name": "José"}}},
            "job.payload.headers.X-Name",
        ),
        ({"type": "http", "payload": {"headers": {"X-Name": "José"}}}, "job.payload.headers.X-Name"),
        ({"type": "http.request", "payload": {"headers": {"X-Name": 'a; b="José"', "N": 1}}}, ""),
        ({"type": "http.request", "payload": {"headers": ["José"]}}, ""),
        ({"type": "own.step", "payload": {"headers": {"X-Name": "José"}}}, ""),
    ],
)
def test_a_header_that_no_request_can_carry_is_a_mistake(job: dict[str, Any], field: str) -> None:
    body = json.dumps({"assignment_id": "a", "request_id": "r", "job": job}).encode()
    found = read_assignment(body)

    assert (found.field if isinstance(found, InvalidMessage) else "") == field
