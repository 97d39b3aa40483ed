"""Which kind of failure: the documents' lists word for word, the traps in them, and the order of evidence."""

import re
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.classify import (
    KNOWN_CLASSES,
    Kind,
    classify,
    is_transient,
    kind_of_class,
    kind_of_status,
    kind_of_text,
    retryable_code,
    retryable_status,
    status_in,
    type_in,
)
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import class_name
from reefknot.core.redaction import LONGEST_TEXT
from tests.pace import fastest
from tests.rows import for_each_row

TRANSIENT, LIMITED = FailureType.TRANSIENT, FailureType.RATE_LIMITED
PERMANENT, UNKNOWN = FailureType.PERMANENT, FailureType.UNKNOWN
DOCUMENTED: dict[FailureType, list[str]] = {
    PERMANENT: ["permission denied", "access denied", "authentication failed", "invalid credentials", "not found"],
    LIMITED: ["rate limit", "too many requests", "quota exceeded", "429", "throttled", "too many calls"],
    TRANSIENT: [
        *("timeout", "connection refused", "temporary", "unavailable", "network", "503", "502"),
        *("timed out", "connection reset"),
    ],
}
TERMS = [(term, kind) for kind, terms in DOCUMENTED.items() for term in terms]


# --- words --------------------------------------------------------------------------------------------------------


@for_each_row(("term", "kind"), TERMS)
@for_each_row("frame", ["{}", "{}: /data/x", "while reading: {}", "Error ({}) again", "[{}]", "«{}»", "\n{}\t"])
def test_the_documents_words_classify_as_the_documents_say(term: str, kind: FailureType, frame: str) -> None:
    assert type_in(frame.format(term)) is kind
    assert type_in(frame.format(term).upper()) is kind
    assert type_in(frame.format(term.title())) is kind


@for_each_row(("term", "kind"), [(term, kind) for term, kind in TERMS if " " in term])
def test_words_may_be_joined_by_any_border(term: str, kind: FailureType) -> None:
    joined = [*(term.replace(" ", border) for border in ("_", "-", " \n ")), term.title().replace(" ", "")]
    assert {type_in(f"got {one}") for one in joined} == {kind}


RATE_LIMITS = ("rate limited", "RateLimitExceeded", "RATE_LIMIT_EXCEEDED", "secondary-rate-limit", "status=429")
FALSE_STARTS = ("4291 and 429", "4294291 and 14291, 429", "429 and 4291", "4291, 429, 4291")
PASSING = (
    *("timeouts", "ReadTimeout", "read_timeout", "SOCKETTimeout", "NetworkError", "HTTPNetworkError", "networking"),
    *("ServiceUnavailableError", "temporary_failure", "HTTP 503", "HTTP/1.1 502 Bad Gateway", "(503)"),
    *("503, then silence", "It was a 503.", "error503x 503", "x" * (LONGEST_TEXT - 8) + " timeout"),
    # a false start does not hide a true one
    *("subnetwork of the network", "subnetwork, subnetwork, network", "network of subnetworks"),
    "subnetwork, network, subnetwork",
)
NOTHING = (
    *("", " ", "report-4291.pdf", "report-429.pdf", "14291", "4290", "v1.429", "429.5 MB", "1,429 rows"),
    "429,000 rows",
    *("x429", "429th", "503rd", "1502", "5020", "subnetwork", "subnetwork and subnetwork", "nottimeout", "Subnetwork"),
    *("xnetwork", "42 9", "rate of change", "limit rate", "unrate limit", "denied", "ordinary words", "é429"),
    # only the beginning of a text is read
    *("Error429Retry", "x" * (LONGEST_TEXT - 7) + " timeout"),
)


@for_each_row(
    ("message", "kind"),
    [
        *((message, LIMITED) for message in (*RATE_LIMITS, "code:429;", "429Retry later", "err-429", *FALSE_STARTS)),
        *((message, TRANSIENT) for message in PASSING),
        *((message, UNKNOWN) for message in NOTHING),
        # permanent is heard before rate limited before transient
        ("timeout, too many requests, access denied", PERMANENT),
        ("timeout, too many requests", LIMITED),
        # a forbidden answer with the words of a rate limit is one in a text as well
        ("403: rate limit exceeded for this token", LIMITED),
        ("Forbidden, too many requests", LIMITED),
        ("Forbidden", PERMANENT),
        ("quota exceeded", LIMITED),
    ],
)
def test_a_word_or_a_number_counts_where_it_begins_and_stands_alone(message: str, kind: FailureType) -> None:
    assert type_in(message) is kind


def test_words_also_give_a_code_and_below_400_nothing_failed() -> None:
    assert kind_of_text("timeout") == Kind(ErrorCode.network_error, TRANSIENT)
    assert kind_of_text("rate limit") == Kind(ErrorCode.resource_unavailable, LIMITED)
    assert kind_of_text("not found") == Kind(ErrorCode.execution_failed, PERMANENT)
    assert kind_of_text("oops") == Kind(ErrorCode.execution_failed, UNKNOWN)

    assert {kind_of_status(status) for status in (None, 100, 200, 204, 301, 399)} == {None}


# --- statuses -----------------------------------------------------------------------------------------------------


@for_each_row(
    ("message", "status"),
    [
        *((f"{name}503", 503) for name in ("status: ", "status ", "HTTP ", "Status:", "status : ")),
        ("status" + " " * 8 + ":" + " " * 8 + "503", 503),
        *(("http 404 from upstream", 404), ("HTTP/1.1 502 Bad Gateway", 502), ("HTTP/2 429", 429)),
        *(("HTTP request failed with status: 500", 500), ("status_code=418", 418), ("status code 418", 418)),
        *(("status=100", 100), ("it took 500 ms, status 404", 404), ("status: 5031, status: 502", 502)),
        *((message, None) for message in ("503", "status 600", "status 99", "status 5031", "mystatus: 503", "")),
        *((message, None) for message in ("status was 503", "HTTP/1.1", "status: ٥٠٣")),
        # in the beginning only
        ("." * (LONGEST_TEXT - 10) + "status 503", 503),
        ("." * (LONGEST_TEXT - 9) + "status 503", None),
    ],
)
def test_a_status_is_read_where_the_text_calls_it_one(message: str, status: int | None) -> None:
    assert status_in(message) == status


RETRYABLE_STATUSES = {408, 429, *range(500, 600)}


@for_each_row("status", range(400, 600))
def test_the_default_table_of_statuses(status: int) -> None:
    """4xx no, except 408 and 429; 5xx yes."""
    expected = LIMITED if status == 429 else TRANSIENT if status in RETRYABLE_STATUSES else PERMANENT

    assert retryable_status(status) is (status in RETRYABLE_STATUSES)
    assert retryable_code(ErrorCode.http_error, status) is (status in RETRYABLE_STATUSES)
    assert kind_of_status(status) == Kind(ErrorCode.http_error, expected)


# --- codes --------------------------------------------------------------------------------------------------------

RETRYABLE_CODES = {"network_error", "connection_timeout", "http_error", "resource_unavailable", "system_overload"}


@for_each_row("code", list(ErrorCode))
def test_the_default_table_of_codes_in_which_a_status_speaks_for_http_errors_alone(code: ErrorCode) -> None:
    assert retryable_code(code) is (code.name in RETRYABLE_CODES)
    assert retryable_code(ErrorCode.network_error, 404) is True
    assert retryable_code(ErrorCode.invalid_input, 503) is False


TYPES_OF_CODES = {
    **dict.fromkeys(("none", "execution_failed", "internal_error"), UNKNOWN),
    **dict.fromkeys(("invalid_input", "missing_required_field", "invalid_format", "permission_denied"), PERMANENT),
    **dict.fromkeys(("cancelled_by_user", "cancelled_by_timeout"), PERMANENT),
    **dict.fromkeys(("resource_unavailable", "network_error", "connection_timeout", "http_error"), TRANSIENT),
    "system_overload": TRANSIENT,
    "quota_exceeded": LIMITED,
}


@for_each_row("code", list(ErrorCode))
def test_a_declared_code_implies_its_type(code: ErrorCode) -> None:
    failure = classify("whatever", code=code)

    assert (failure.code, failure.failure_type) == (code, TYPES_OF_CODES[code.name])


# --- the order of evidence ----------------------------------------------------------------------------------------

TIMEOUT = ("app.Slow", "builtins.TimeoutError", "builtins.OSError", "builtins.Exception")


def kind_of(failure: Failure) -> tuple[ErrorCode, FailureType]:
    return failure.code, failure.failure_type


def test_each_piece_of_evidence_beats_the_ones_after_it() -> None:
    """A rate limit, a declared type, a declared code, the class, the status, the words."""
    evidence: dict[str, Any] = {"http_status": 429, "failure_type": UNKNOWN, "code": ErrorCode.invalid_input}
    evidence["exceptions"] = TIMEOUT
    words = "access denied"

    assert kind_of(classify(words, **evidence)) == (ErrorCode.invalid_input, LIMITED)
    evidence["http_status"] = 404
    assert kind_of(classify(words, **evidence)) == (ErrorCode.invalid_input, UNKNOWN)
    del evidence["failure_type"]
    assert kind_of(classify(words, **evidence)) == (ErrorCode.invalid_input, PERMANENT)
    del evidence["code"]
    assert kind_of(classify(words, **evidence)) == (ErrorCode.connection_timeout, TRANSIENT)
    evidence["exceptions"] = ("app.Oops", "builtins.Exception")
    evidence["http_status"] = 503
    assert kind_of(classify(words, **evidence)) == (ErrorCode.http_error, TRANSIENT)
    evidence["http_status"] = 200
    assert kind_of(classify(words, **evidence)) == (ErrorCode.execution_failed, PERMANENT)
    assert kind_of(classify("?", **evidence)) == (ErrorCode.execution_failed, UNKNOWN)


@for_each_row(
    ("evidence", "limited"),
    [
        ({"http_status": 429}, True),
        ({"http_status": 429, "code": ErrorCode.permission_denied}, True),
        ({"http_status": 403}, False),
        ({"http_status": 403, "retry_after": 5.0}, True),
        ({"http_status": 403, "retry_after": 0.0}, True),
        ({"http_status": 403, "limit_reached": True}, True),
        ({"http_status": 403, "message": "You have exceeded a secondary rate limit"}, True),
        ({"http_status": 403, "message": "quota exceeded"}, True),
        ({"http_status": 403, "message": "no such rate"}, False),
        ({"http_status": 401, "retry_after": 5.0}, False),
        ({"http_status": 503, "retry_after": 5.0}, False),
        ({"http_status": 503, "limit_reached": True}, False),
        ({"http_status": 404, "message": "rate limit"}, False),
        ({"retry_after": 5.0}, False),
        ({"limit_reached": True}, False),
    ],
)
def test_a_rate_limit_beats_permission(evidence: dict[str, Any], limited: bool) -> None:
    failure = classify(**evidence)

    assert (failure.failure_type is LIMITED) is limited
    assert failure.code is evidence.get("code", ErrorCode.http_error if "http_status" in evidence else failure.code)


def test_a_declared_type_brings_a_code_and_a_declared_http_error_asks_its_status() -> None:
    assert classify(failure_type=PERMANENT).code is ErrorCode.execution_failed
    assert classify(failure_type=UNKNOWN).code is ErrorCode.execution_failed
    assert classify(failure_type=TRANSIENT).code is ErrorCode.network_error
    assert classify(failure_type=LIMITED).code is ErrorCode.resource_unavailable
    assert classify(failure_type=PERMANENT, http_status=503).code is ErrorCode.http_error
    assert classify(failure_type=PERMANENT, http_status=503).failure_type is PERMANENT
    assert classify(failure_type=PERMANENT, code=ErrorCode.system_overload).code is ErrorCode.system_overload

    assert classify(code=ErrorCode.http_error, http_status=404).failure_type is PERMANENT
    assert classify(code=ErrorCode.http_error, http_status=500).failure_type is TRANSIENT
    assert classify(code=ErrorCode.http_error, http_status=200).failure_type is TRANSIENT
    assert classify(code=ErrorCode.internal_error, http_status=404).failure_type is UNKNOWN


def test_all_evidence_is_kept_and_the_first_known_class_in_the_mro_speaks() -> None:
    failure = classify("slow down", exceptions=TIMEOUT, http_status=403, retry_after=2.0)
    assert failure == Failure(ErrorCode.http_error, LIMITED, "slow down", 403, 2.0, TIMEOUT)
    assert classify() == Failure(ErrorCode.execution_failed, UNKNOWN)

    assert kind_of_class(mro(ConnectionResetError)) == Kind(*NETWORK)
    assert kind_of_class(("ssl.SSLCertVerificationError", "ssl.SSLError")) == Kind(*DENIED)
    assert kind_of_class(("ssl.SSLError", "ssl.SSLCertVerificationError")) == Kind(*NETWORK)
    assert kind_of_class(mro(ValueError)) is None
    assert kind_of_class(()) is None


# --- classes ------------------------------------------------------------------------------------------------------

TIMED_OUT = (ErrorCode.connection_timeout, TRANSIENT)
NETWORK = (ErrorCode.network_error, TRANSIENT)
DENIED = (ErrorCode.permission_denied, PERMANENT)
UNAVAILABLE = (ErrorCode.resource_unavailable, TRANSIENT)
CLASSES_BY_KIND = {
    TIMED_OUT: "builtins.TimeoutError httpx.TimeoutException requests.exceptions.Timeout",
    NETWORK: "builtins.ConnectionError socket.gaierror ssl.SSLError httpx2._exceptions.NetworkError"
    " urllib3.exceptions.ProtocolError",
    DENIED: "builtins.PermissionError ssl.SSLCertVerificationError requests.exceptions.SSLError"
    " aiohttp.client_exceptions.ClientConnectorCertificateError reefknot.errors.StorePermissionError",
    (ErrorCode.execution_failed, PERMANENT): "builtins.FileNotFoundError",
    UNAVAILABLE: "builtins.BlockingIOError reefknot.errors.StoreFullError reefknot.errors.StoreUnavailableError",
}


@for_each_row(("kind", "names"), CLASSES_BY_KIND.items())
def test_a_class_is_known_by_name(kind: tuple[ErrorCode, FailureType], names: str) -> None:
    assert {name: kind_of_class((name,)) for name in names.split()} == dict.fromkeys(names.split(), Kind(*kind))
    assert {known.failure_type for known in KNOWN_CLASSES.values()} == {TRANSIENT, PERMANENT}


def mro(cls: type[BaseException]) -> tuple[str, ...]:
    return tuple(class_name(c) for c in cls.__mro__)


# --- the library's own answer -------------------------------------------------------------------------------------


@for_each_row(
    ("failure", "passing"),
    [
        *((classify(exceptions=mro(cls)), True) for cls in (ConnectionResetError, TimeoutError)),
        *((classify(exceptions=mro(cls)), False) for cls in (PermissionError, ValueError)),
        *((classify(text, exceptions=mro(ValueError)), False) for text in ("timeout must be positive", "429")),
        *((classify(http_status=status), True) for status in (408, 429, 500)),
        *((classify(http_status=status), False) for status in (404, 403, None)),
        (classify(http_status=403, retry_after=1.0), True),
        (classify(exceptions=mro(PermissionError), http_status=503), False),
    ],
)
def test_without_a_rule_only_connections_time_outs_and_statuses_are_worth_a_retry(
    failure: Failure, passing: bool
) -> None:
    assert is_transient(failure) is passing


# --- hostile text -------------------------------------------------------------------------------------------------

TEN_MEGABYTES = 10_000_000
HOSTILE = [
    *(" ", "status", "status ", "HTTP", "HTTP/1.", "aA", "A", "_-", "subnetwork", "4294", "429429 ", "xrate limi"),
    *("\u0130", "é\n"),
]


@for_each_row("piece", HOSTILE)
@for_each_row("read", [type_in, status_in, lambda text: classify(text, http_status=403)])
def test_ten_megabytes_of_hostile_text_are_classified_in_ten_milliseconds(
    piece: str, read: Callable[[str], object]
) -> None:
    text = (piece * (TEN_MEGABYTES // len(piece) + 1))[:TEN_MEGABYTES]

    assert fastest(lambda: read(text)) < 0.010
    assert fastest(lambda: read("status" + text)) < 0.010


def test_the_limit_notices_a_pattern_that_looks_back_at_every_step() -> None:
    """The control: two unbounded gaps beside each other, on a text of the length that is read."""
    slow = re.compile(r"status\s*[:=]?\s*(\d)")

    assert fastest(lambda: slow.search("status" + " " * LONGEST_TEXT), times=1) > 0.010


alphabet = st.sampled_from([*" _-\n.,", "4", "2", "9", "5", "0", "3", "A", "a", "é", *(term for term, _ in TERMS)])


@given(st.lists(alphabet, max_size=12).map("".join), st.none() | st.integers(100, 599))
def test_any_text_and_status_give_a_failure(text: str, status: int | None) -> None:
    failure = classify(text, http_status=status)

    assert failure.failure_type in FailureType
    assert failure.message == text
    assert (failure.failure_type is LIMITED) >= (status == 429)
