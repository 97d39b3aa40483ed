"""The frozen wire: what is accepted, what is refused and how, its exact bytes and its JSON Schemas."""

import json
import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reefknot.core.failure import ErrorCode
from reefknot.queue.model import messages
from reefknot.queue.model.admission import OverloadStatus
from reefknot.queue.model.message_schema import (
    WIRE,
    assignment_schema,
    result_schema,
    value_at,
    wire_schemas,
    written_assignment,
)
from reefknot.queue.model.messages import LONGEST_MS, AckStatus, ExecAssignment, InvalidMessage, encode, read_assignment
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
def test_a_deadline_by_the_workers_clock_counts_the_way(deadline_ms: Any, header: str, wall_ms: Any, left: Any) -> None:
    options = {} if deadline_ms is None else {"deadline_ms": deadline_ms}
    found = read_assignment(body(options=options), {"deadline_at": header}, wall_ms)
    assert isinstance(found, ExecAssignment)
    assert found.options.deadline_ms == left
    never = read_assignment(body(options={"deadline_ms": 0}), {"deadline_at": header}, wall_ms)
    assert isinstance(never, InvalidMessage), "a header makes no invalid deadline valid"


def test_the_subjects_are_frozen() -> None:
    assert (messages.ASSIGN, messages.ACK) == ("caf.exec.assign.v1", "caf.exec.assign.v1.ack")
    assert (messages.RESULT, messages.CANCEL) == ("caf.exec.result.v1", "caf.exec.cancel.v1")
    assert (messages.HEARTBEAT, messages.FLEET) == ("caf.worker.heartbeat.v1", "caf.worker.fleet.v1")
    assert messages.assign_subject("w1") == "caf.exec.assign.v1.w.w1"
    assert (messages.VERSION, messages.LARGEST_MESSAGE, messages.LONGEST_ID) == ("1", 1048576, 256)
    assert (messages.DEFAULT_TIMEOUT_MS, LONGEST_MS, messages.HIGHEST_PRIORITY) == (30_000, 315_360_000_000, 1_000_000)


def test_the_least_assignment_is_read_with_its_defaults() -> None:
    assert read() == ExecAssignment("a", "r", messages.Job("http.request"))
    assert (read().version, read().trace_id) == ("1", None)
    assert read().options == messages.AssignmentOptions(0, None, None, None, False, None)


def test_every_field_is_read_and_unknown_ones_are_ignored() -> None:
    times = {"priority": "high", "deadline_ms": 5, "timeout_ms": 6, "retry_count": 7}
    found = read(
        version="1",
        tenant_id="t",
        job={"type": "x", "payload": {"a": 1}, "resources": {"class": "gpu"}, "later": 1},
        executor={"provider_id": "p", "channel": "nats"},
        options={**times, "skip_circuit_breaker": True, "retry": {"max_attempts": 2, "backoff_ms": 50}},
        resource_class="io",
        correlation={"trace_id": "tr"},
        decision={"why": "cheap"},
        metadata={"k": "v"},
        invented_later={"x": 1},
    )
    job, executor = messages.Job("x", {"a": 1}, None, {"class": "gpu"}), messages.Executor("p", "nats")
    options = messages.AssignmentOptions("high", 5, 6, 7, True, messages.RetryOptions(2, 50))
    first, last = ("a", "r", job, "1", "t", executor, options, "io"), ({"why": "cheap"}, {"k": "v"})
    assert found == ExecAssignment(*first, messages.Correlation("tr"), *last)


def test_a_priority_is_a_number_or_a_word() -> None:
    given = ("low", "normal", "high", "critical", 7, -3)
    assert [read(options={"priority": one}).priority for one in given] == [-10, 0, 10, 20, 7, -3]


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
def test_the_timeout_is_of_options_or_payload(options: dict[str, Any], payload: dict[str, Any], timeout: int) -> None:
    assert read(options=options, job={"type": "x", "payload": payload}).timeout_ms == timeout


def test_the_pool_is_the_one_said_else_the_types() -> None:
    def pools(*types: str, said: str | None = None, **job: Any) -> set[str]:
        return {messages.resource_class(read(job={"type": one, **job}, resource_class=said)) for one in types}

    assert pools("http.request", "fs.blob_put", "http", "fs_blob_get") == {"io"}
    assert pools("ai.embed", "media.cut") == {"gpu"}
    assert pools("sql.query", "sql", "invoice.render", "https.x") == {"cpu"}
    assert pools("http.request", said="gpu") == {"gpu"}
    assert pools("http.request", resources={"class": "cpu"}) == {"cpu"}
    assert pools("http.request", resources={"class": "cpu"}, said="gpu") == {"gpu"}
    for resources in ({"class": 5}, {"class": ""}, {}):
        assert pools("http.request", resources=resources) == {"io"}, resources


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
    told = [(one.trace_id, one.traceparent) for one in found if isinstance(one, ExecAssignment)]
    assert told == [("tp", own), ("th", own), (TRACE, TRACEPARENT)]
    alone = read(correlation={"traceparent": TRACEPARENT})
    assert (alone.trace_id, alone.traceparent) == (TRACE, TRACEPARENT), "it gives the id where none is said"
    assert messages.trace_of(f"01-{TRACE}-{SPAN}-01-what-a-later-version-says") == TRACE


@for_each_row("text", NOT_TRACEPARENTS)
def test_a_traceparent_that_is_not_valid_is_ignored(text: str) -> None:
    by_header = read_assignment(body(), {"traceparent": text})
    assert isinstance(by_header, ExecAssignment)
    for found in (by_header, read(correlation={"traceparent": text})):
        assert (found.trace_id, found.traceparent) == (None, None)


def test_headers_beat_the_version_of_the_payload_both_ways_and_have_the_same_bounds() -> None:
    assert isinstance(read_assignment(body(version="9"), {"version": "1"}), ExecAssignment)
    assert refused(body(version="1"), {"version": "2"}).field == "version"
    assert refused(body(), {"tenant_id": "x" * 257}).field == "tenant_id"
    assert refused(body(), {"trace_id": "a\tb"}).field == "correlation.trace_id"


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
    ("field", "given"),
    [
        ("assignment_id", [None, 5, "", "x" * 257, "a\nb"]),
        ("request_id", [[], ""]),
        ("job", ["x"]),
        ("job.type", [..., "", 5]),
        ("job.payload", [[]]),
        ("job.payload_ref", [5]),
        ("job.payload.timeout_ms", [0]),
        ("version", ["2", 1]),
        ("options.priority", ["urgent", 1.5, 1_000_001, -1_000_001]),
        ("options.deadline_ms", [0, -1, "5", True, 10**30, LONGEST_MS + 1]),
        ("options.timeout_ms", [0, LONGEST_MS + 1]),
        ("options.retry_count", [-1, 101]),
        ("options.retry.max_attempts", [-1, 101]),
        ("options.retry.backoff_ms", [-1, 86_400_001]),
        ("tenant_id", [5]),
        ("resource_class", [[]]),
    ],
)
def test_a_wrong_field_is_named(field: str, given: list[Any]) -> None:
    for value in given:
        found = refused(json.dumps(with_field(field, value)).encode())
        assert found.field == field
        assert found.message.startswith(f"{field}: ")
        assert found.ack_status is AckStatus.REJECTED
        assert field == "assignment_id" or found.assignment_id == "a"


def with_field(path: str, value: Any) -> dict[str, Any]:
    """The least assignment with this field; without it, if the value is `...`."""
    *outer, last = path.split(".")
    found: dict[str, Any] = {**LEAST, "job": {"type": "x"}}
    inner = found
    for name in outer:
        inner = inner.setdefault(name, {})
    inner[last] = value
    if value is ...:
        del inner[last]
    return found


@for_each_row("field", ["assignment_id", "request_id", "job"])
def test_a_missing_field_is_named(field: str) -> None:
    found = refused(json.dumps(with_field(field, ...)).encode())
    assert (found.message, found.field) == (f"{field}: missing", field)


def test_the_bounds_themselves_are_accepted() -> None:
    most = {"max_attempts": 100, "backoff_ms": 86_400_000}
    least = {"deadline_ms": 1, "timeout_ms": 1, "retry_count": 0, "retry": dict.fromkeys(most, 0)}
    assert read(options={**least, "priority": -1_000_000}).options.deadline_ms == 1
    largest = {"deadline_ms": LONGEST_MS, "timeout_ms": LONGEST_MS, "retry_count": 100, "retry": most}
    assert read(options={**largest, "priority": 1_000_000}).options.deadline_ms == LONGEST_MS
    assert read(assignment_id="x" * 256).assignment_id == "x" * 256


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


@for_each_row("field", ["version", "options.priority", "assignment_id"])
def test_an_answer_is_short_however_long_the_mistake_is(field: str) -> None:
    found = refused(json.dumps(with_field(field, "9" * 900_000)).encode())
    assert len(found.message) < 300
    assert len(found.assignment_id) <= 256
    assert refused(body(assignment_id="a\x00b")).assignment_id == ""


def test_ten_megabytes_are_refused_and_the_sender_is_told_which_it_was() -> None:
    found = refused(body(metadata={"text": "x" * 10_000_000}))
    assert (found.assignment_id, found.ack_status) == ("a", AckStatus.REJECTED)
    assert found.message.startswith("the message: it has 1000")
    assert found.message.endswith("accepted: at most 1048576")


def test_the_largest_message_is_accepted_and_one_byte_more_is_not() -> None:
    room = messages.LARGEST_MESSAGE - len(body(metadata={"t": ""}))
    assert isinstance(read_assignment(body(metadata={"t": "x" * room})), ExecAssignment)
    assert isinstance(read_assignment(body(metadata={"t": "x" * (room + 1)})), InvalidMessage)


@for_each_row(
    ("raw", "name", "status"),
    [
        (b"x" * (messages.LARGEST_MESSAGE + 1), "", AckStatus.ERROR),
        (b'{"assignment_id": 5, "pad": "' + b"x" * messages.LARGEST_MESSAGE + b'"}', "", AckStatus.REJECTED),
        (b'{"assignment_id": "a\\nb", "pad": "' + b"x" * messages.LARGEST_MESSAGE + b'"}', "", AckStatus.REJECTED),
        (b'{"assignment_id": "' + b"y" * messages.LARGEST_MESSAGE + b'"}', "y" * 256, AckStatus.REJECTED),
        (b'{"assignment_id": 5, "x": ', "", AckStatus.REJECTED),
        (b'{"assignment_id": "a", "job": 5, "x": ', "", AckStatus.ERROR),
    ],
)
def test_an_id_is_told_only_if_it_can_be_found(raw: bytes, name: str, status: AckStatus) -> None:
    found = refused(raw)
    assert (found.assignment_id, found.ack_status) == (name, status)


@for_each_row("number", [b"1e999", b"1" * 5000])
def test_a_number_that_no_machine_holds_is_refused(number: bytes) -> None:
    found = refused(b'{"assignment_id":"a","request_id":"r","job":{"type":"x","payload":{"a":' + number + b"}}}")
    assert (found.field, found.assignment_id) == ("job.payload[...]", "a")


@given(st.binary(max_size=300))
def test_no_bytes_at_all_raise(raw: bytes) -> None:
    assert isinstance(read_assignment(raw), ExecAssignment | InvalidMessage)


def test_an_assignment_that_was_built_here_is_checked_the_same_way() -> None:
    good = ExecAssignment("a", "r", messages.Job("x"))
    assert messages.checked(good) is good
    bad = messages.checked(ExecAssignment("", "r", messages.Job("x")))
    assert isinstance(bad, InvalidMessage)
    assert (bad.field, bad.readable) == ("assignment_id", True)


def test_the_baselines_ack_has_no_new_field_and_version_2s_has_each_even_when_it_is_nothing() -> None:
    ack = messages.ExecAssignmentAck("a", AckStatus.ACCEPTED, "Assignment queued")
    assert encode(ack) == b'{"assignment_id":"a","status":"accepted","message":"Assignment queued"}'
    ack = structs.replace(ack, status=AckStatus.REJECTED, message="Queue full", overload_status=OverloadStatus.HEALTHY)
    ack = structs.replace(ack, queue_depth=0, worker_id="w1", reason="queue_full", retry_after_ms=0)
    assert encode(ack) == (
        b'{"assignment_id":"a","status":"rejected","message":"Queue full","overload_status":"healthy","queue_depth":0,'
        b'"worker_id":"w1","reason":"queue_full","retry_after_ms":0}'
    )


def test_the_baselines_result_has_only_what_always_goes_and_version_2s_every_field() -> None:
    job, R = messages.ResultJob("x"), messages.ResultStatus
    result = messages.ExecResult("a", "r", R.SUCCESS, "p", job, 0, 0, retries_used=0)
    assert encode(result) == (
        b'{"assignment_id":"a","request_id":"r","status":"success","provider_id":"p","job":{"type":"x"},"latency_ms":0,'
        b'"cost":0,"retries_used":0}'
    )
    first, ended = ("a", "r", R.ERROR, "p", job), ("HTTP_ERROR", "boom", {"k": 1})
    whole = messages.ExecResult(*first, 1.5, 0.25, "tr", "te", 1700000000000, 0, OverloadStatus.HEALTHY, "w", 2, *ended)
    assert encode(whole) == (
        b'{"assignment_id":"a","request_id":"r","status":"error","provider_id":"p","job":{"type":"x"},"latency_ms":1.5,'
        b'"cost":0.25,"trace_id":"tr","tenant_id":"te","timestamp":1700000000000,"queue_depth":0,'
        b'"overload_status":"healthy","worker_id":"w","retries_used":2,"error_code":"HTTP_ERROR","error_message":"boom",'
        b'"output":{"k":1}}'
    )


def test_an_assignment_survives_the_wire() -> None:
    options, correlation = messages.AssignmentOptions("high", 5), messages.Correlation("t")
    sent = ExecAssignment("a", "r", messages.Job("x", {"n": 1}), options=options, correlation=correlation)
    assert read_assignment(encode(sent)) == sent


def test_an_assignment_is_written_with_its_version_and_without_what_is_not_set() -> None:
    written = b'{"assignment_id":"a","request_id":"r","job":{"type":"x"},"version":"1"}'
    assert encode(ExecAssignment("a", "r", messages.Job("x"))) == written
    assert encode(read(job={"type": "x"})) == written


def test_the_small_messages() -> None:
    health = messages.ClassHealth(OverloadStatus.HEALTHY, 0, 1, 8)
    assert encode(messages.Heartbeat("w", 5, {"io": health}, incarnation="w#1", store="5f")) == (
        b'{"worker_id":"w","timestamp":5,"classes":{"io":{"status":"healthy","queue_depth":0,"active":1,"capacity":8}},'
        b'"draining":false,"incarnation":"w#1","store":"5f","leaving":false}'
    )
    assert encode(messages.Cancel("a")) == b'{"assignment_id":"a"}'
    assert encode(messages.Cancel("a", "why")) == b'{"assignment_id":"a","reason":"why"}'
    assert encode(messages.Fleet(3)) == b'{"workers":3}'


def test_a_steps_request_and_result_have_the_documented_defaults() -> None:
    assert messages.StepRequest("x") == messages.StepRequest("x", {}, {}, 30_000, None)
    ok, load = messages.StepStatus.OK, OverloadStatus.HEALTHY
    assert messages.StepResult() == messages.StepResult(ok, ErrorCode.none, {}, "", {}, 0.0, 0, 0, load)
    assert [status.value for status in messages.StepStatus] == ["ok", "error", "timeout", "cancelled"]
    assert [status.value for status in messages.ResultStatus] == ["success", "error", "timeout", "cancelled"]
    assert (messages.StepResult().ok, messages.StepResult(messages.StepStatus.TIMEOUT).ok) == (True, False)


def test_a_steps_request_is_what_its_assignment_asks_for_by_either_name() -> None:
    job = {"type": "x", "payload": {"a": 1, "timeout_ms": 700}, "resources": {"class": "gpu"}}
    asked = read(job=job, options={"retry_count": 1, "retry": {"max_attempts": 4}})
    wanted = messages.StepRequest("x", {"a": 1, "timeout_ms": 700}, {"class": "gpu"}, 700, 4)
    assert messages.StepRequest.of(asked) == wanted
    assert messages.StepRequest.of(read()) == messages.StepRequest("http.request")


def test_a_degraded_request_asks_for_less() -> None:
    request = messages.StepRequest("x", timeout_ms=1000, retry_count=5)
    asked = [(False, 1.0, 1000, 5), (True, 0.8, 800, 0), (False, 0.0001, 1, 5)]
    for skip, factor, timeout_ms, retries in asked:
        less = request.degraded(skip_retries=skip, timeout_factor=factor)
        assert less == messages.StepRequest("x", timeout_ms=timeout_ms, retry_count=retries)


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
def test_a_status_is_metadata_or_output(metadata: dict[str, Any], outputs: dict[str, Any], status: int | None) -> None:
    assert messages.StepResult(metadata=metadata, outputs=outputs).http_status == status


def test_a_part_is_called_what_a_subject_and_a_queue_can_hold() -> None:
    names = ("worker-1", "ü", "", "a b", "a.b", "a>", "a\n")
    assert [messages.can_name_a_part(name) for name in names] == [True, True, *[False] * 5]


@for_each_row(
    ("kind", "headers", "field"),
    [
        ("http.request", {"A": "fine", "X-Name": "José"}, "job.payload.headers.X-Name"),
        ("http", {"X-Name": "José"}, "job.payload.headers.X-Name"),
        ("http.request", {"X-Name": 'a; b="José"', "N": 1}, ""),
        ("http.request", ["José"], ""),
        ("own.step", {"X-Name": "José"}, ""),
    ],
)
def test_a_header_that_no_request_can_carry_is_a_mistake(kind: str, headers: Any, field: str) -> None:
    found = read_assignment(body(job={"type": kind, "payload": {"headers": headers}}))
    assert (found.field if isinstance(found, InvalidMessage) else "") == field


KINDS: dict[str, Any] = {"object": dict, "string": str, "integer": int, "boolean": bool, "null": type(None)}
KINDS |= {"number": (int, float)}
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "enum", "anyOf"),
    *("additionalProperties", "minimum", "maximum", "minLength", "maxLength", "items"),
}


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether the value matches, by the keywords that these schemas use; any other keyword is an error of the test."""
    assert set(schema) <= KNOWN, set(schema) - KNOWN
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(is_valid(value, one, root) for one in schema["anyOf"]):
        return False
    if "type" in schema:
        kind = KINDS[schema["type"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and schema["type"] != "boolean"):
            return False
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if not isinstance(value, dict) or "properties" not in schema:
        return True
    fields = schema["properties"]
    if not set(schema.get("required", ())) <= set(value):
        return False
    if schema.get("additionalProperties") is False and not set(value) <= set(fields):
        return False
    return all(is_valid(one, fields[name], root) for name, one in value.items() if name in fields)


JOB: dict[str, Any] = {"type": "t"}
SAMPLES: list[tuple[dict[str, Any], bool]] = [
    ({"job": JOB}, True),
    ({"job": {"type": "t", "payload": {"any": [1, None, {"x": "y"}]}, "resources": {"class": "gpu"}}}, True),
    ({"job": JOB, "assignment_id": "x", "request_id": "y", "tenant_id": None, "version": "1"}, True),
    ({"job": JOB, "options": {"priority": "high", "deadline_ms": 1, "timeout_ms": LONGEST_MS}}, True),
    ({"job": JOB, "options": {"priority": -5, "attempt_timeout_ms": 9, "retry_count": 0}}, True),
    ({"job": JOB, "options": {"retry": {"max_attempts": 100, "backoff_ms": 0}, "skip_circuit_breaker": True}}, True),
    ({"job": JOB, "executor": {"provider_id": "p"}, "correlation": {"trace_id": "t"}, "metadata": {"a": 1}}, True),
    ({}, False),
    ({"job": {}}, False),
    ({"job": {"type": ""}}, False),
    ({"job": {"type": "t" * (messages.LONGEST_ID + 1)}}, False),
    ({"job": {"type": "t", "inputs": {}}}, False),
    ({"job": JOB, "assigment_id": "x"}, False),
    ({"job": JOB, "assignment_id": ""}, False),
    ({"job": JOB, "assignment_id": 5}, False),
    ({"job": JOB, "version": "2"}, False),
    ({"job": JOB, "options": {"priority": "urgent"}}, False),
    ({"job": JOB, "options": {"priority": 10**7}}, False),
    ({"job": JOB, "options": {"deadline_ms": 0}}, False),
    ({"job": JOB, "options": {"deadline_ms": "5"}}, False),
    ({"job": JOB, "options": {"timeout_ms": LONGEST_MS + 1}}, False),
    ({"job": JOB, "options": {"retry_count": 101}}, False),
    ({"job": JOB, "options": {"retry": {"backoff": 5}}}, False),
]


@for_each_row(("value", "accepted"), SAMPLES)
def test_the_schema_of_an_assignment_accepts_what_a_file_may_have_alone(value: dict[str, Any], accepted: bool) -> None:
    schema = assignment_schema()
    is_read = not isinstance(written_assignment(value, "a", "r"), InvalidMessage)
    assert (is_valid(value, schema, schema), is_read) == (accepted, accepted)


def test_every_field_of_both_records_is_described() -> None:
    for schema, kind in ((assignment_schema(), ExecAssignment), (result_schema(), messages.ExecResult)):
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        parts = [schema, *(one for one in schema["$defs"].values() if "properties" in one)]
        assert [name for part in parts for name, one in part["properties"].items() if not one.get("description")] == []


def test_results_match_their_schema() -> None:
    schema = result_schema()
    job, load, R = messages.ResultJob("t"), OverloadStatus.HEALTHY, messages.ResultStatus
    least = messages.ExecResult("a", "r", R.SUCCESS, "w", job)
    whole = messages.ExecResult("a", "r", R.ERROR, "w", job, 1.5, 0, "trace", "acme", 1, 2, load, "w", 3)
    whole = structs.replace(whole, error_code="HTTP_ERROR", error_message="500", output={"status_code": 500})
    for one in (least, whole):
        assert is_valid(json.loads(encode(one)), schema, schema)
    wrong: dict[str, Any]
    for wrong in ({"status": "done"}, {"error_code": "http_error"}, {"retries_used": "3"}, {"job": {}}):
        assert not is_valid({**json.loads(encode(whole)), **wrong}, schema, schema), wrong


def test_the_command_prints_each_schema_and_refuses_other_words() -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "reefknot", "config", "schema", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert json.loads(command("--of", "assignment").stdout) == assignment_schema()
    assert json.loads(command("--of", "result").stdout) == result_schema()
    refused = command("--of", "asignment")
    assert (refused.returncode, "did you mean 'assignment'?" in refused.stderr) == (2, True)


def test_the_schemas_of_the_wire_are_all_there_described_and_open_to_fields_of_newer_versions() -> None:
    parts = wire_schemas("#/$defs/{name}")
    root = {"$defs": parts}
    assert {one.__name__ for one in WIRE} <= parts.keys()
    assert [name for name, part in parts.items() if part.get("additionalProperties") is False] == []
    assert "comes back in the result" in parts["ExecAssignment"]["properties"]["request_id"]["description"]
    assignment = {"assignment_id": "a", "request_id": "r", "job": {"type": "own.step"}, "later": 1}
    assert is_valid(assignment, parts["ExecAssignment"], root)
    assert not is_valid(assignment | {"request_id": "x" * (messages.LONGEST_ID + 1)}, parts["ExecAssignment"], root)
    result = messages.ExecResult("a", "r", messages.ResultStatus.SUCCESS, "w1", messages.ResultJob("own.step"))
    assert is_valid(json.loads(encode(result)), parts["ExecResult"], root)


def test_a_value_is_found_by_its_path_in_a_record_and_in_what_it_holds() -> None:
    assignment = messages.ExecAssignment("a", "r", messages.Job("own.step", {"n": {"m": 1}}))
    found = [
        value_at(assignment, path) for path in ("job.type", "job.payload.n.m", "job.payload.n.m.o", "nothing.there")
    ]
    assert (found, value_at(assignment, "")) == (["own.step", 1, None, None], assignment)
