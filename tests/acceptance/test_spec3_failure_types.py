"""Per-connector retry policies: transient, rate limited, permanent or unknown, by words and by exception."""

from __future__ import annotations

import asyncio

import pytest

import reefknot as rk
from reefknot.core.failure import FailureType
from tests.acceptance.steps import HttpError

PERMANENT, RATE_LIMITED = FailureType.PERMANENT, FailureType.RATE_LIMITED
TRANSIENT, UNKNOWN = FailureType.TRANSIENT, FailureType.UNKNOWN

TERMS = [
    ("permission denied", PERMANENT),
    ("access denied", PERMANENT),
    ("authentication failed", PERMANENT),
    ("invalid credentials", PERMANENT),
    ("not found", PERMANENT),
    ("rate limit", RATE_LIMITED),
    ("too many requests", RATE_LIMITED),
    ("quota exceeded", RATE_LIMITED),
    ("429", RATE_LIMITED),
    ("timeout", TRANSIENT),
    ("connection refused", TRANSIENT),
    ("temporary", TRANSIENT),
    ("unavailable", TRANSIENT),
    ("network", TRANSIENT),
    ("503", TRANSIENT),
    ("502", TRANSIENT),
]
STATUSES = [
    (429, RATE_LIMITED),
    (502, TRANSIENT),
    (503, TRANSIENT),
    (504, TRANSIENT),
    (401, PERMANENT),
    (403, PERMANENT),
    (404, PERMANENT),
]


class ForbiddenError(Exception):
    """A 403 with the headers of the answer."""

    def __init__(self, message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status_code = 403
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class DeclaredError(Exception):
    """An exception that says itself what it is."""

    def __init__(self, failure_type: FailureType) -> None:
        super().__init__("")
        self.failure_type = failure_type


def test_the_four_types_are_written_as_the_document_writes_them() -> None:
    assert [kind.value for kind in FailureType] == ["transient", "rate_limited", "permanent", "unknown"]


@pytest.mark.parametrize(("term", "expected"), TERMS)
@pytest.mark.parametrize("around", ["{}", "Sync stopped: {}.", "({})", "{}: mailbox 7"])
def test_every_term_of_the_lists_is_recognised(term: str, expected: FailureType, around: str) -> None:
    assert rk.classify_failure(around.format(term)) is expected
    assert rk.classify_failure(around.format(term.upper())) is expected


@pytest.mark.parametrize(("status", "expected"), STATUSES)
@pytest.mark.parametrize("message", ["", "sync failed"])
def test_an_exceptions_status_code_decides(status: int, expected: FailureType, message: str) -> None:
    assert rk.classify_failure(message, HttpError(status)) is expected


def test_an_exceptions_status_beats_the_words_of_the_message() -> None:
    assert rk.classify_failure("network unavailable", HttpError(404)) is PERMANENT
    assert rk.classify_failure("permission denied", HttpError(503)) is TRANSIENT


def test_of_the_statuses_that_the_document_leaves_open_408_and_5xx_pass_and_other_4xx_do_not() -> None:
    types = {status: rk.classify_failure("", HttpError(status)) for status in range(400, 600)}

    assert {status for status, kind in types.items() if kind is TRANSIENT} == {408, *range(500, 600)}
    assert {status for status, kind in types.items() if kind is RATE_LIMITED} == {429}
    assert {status for status, kind in types.items() if kind is UNKNOWN} == set()


@pytest.mark.parametrize("message", ["", "sync failed", "network timeout"])
def test_a_permission_error_is_permanent(message: str) -> None:
    assert rk.classify_failure(message, PermissionError(13, "Permission denied")) is PERMANENT


@pytest.mark.parametrize("error", [TimeoutError, asyncio.TimeoutError])
@pytest.mark.parametrize("message", ["", "sync failed", "permission denied"])
def test_a_timeout_error_is_transient(error: type[Exception], message: str) -> None:
    assert rk.classify_failure(message, error()) is TRANSIENT


@pytest.mark.parametrize("error", [ConnectionResetError(), ConnectionRefusedError(), BrokenPipeError()])
def test_a_connection_error_is_transient(error: Exception) -> None:
    assert rk.classify_failure("", error) is TRANSIENT


@pytest.mark.parametrize(("term", "expected"), TERMS)
def test_an_exception_that_says_nothing_leaves_it_to_the_message(term: str, expected: FailureType) -> None:
    assert rk.classify_failure(term, RuntimeError("oops")) is expected
    assert rk.classify_failure("", RuntimeError(term)) is expected


@pytest.mark.parametrize(
    "error",
    [
        ForbiddenError(Retry_After="60"),
        ForbiddenError(X_RateLimit_Remaining="0"),
        ForbiddenError("API rate limit exceeded"),
    ],
    ids=["retry-after", "remaining-0", "the words"],
)
@pytest.mark.parametrize("message", ["", "sync failed"])
def test_a_403_that_tells_of_a_limit_is_rate_limited(error: Exception, message: str) -> None:
    assert rk.classify_failure(message, error) is RATE_LIMITED


def test_a_403_with_a_limit_still_open_is_permanent() -> None:
    assert rk.classify_failure("", ForbiddenError(X_RateLimit_Remaining="12")) is PERMANENT


@pytest.mark.parametrize("declared", [TRANSIENT, RATE_LIMITED, PERMANENT])
@pytest.mark.parametrize("message", ["", "sync failed", "not found", "timeout"])
def test_what_an_exception_declares_beats_the_words(declared: FailureType, message: str) -> None:
    assert rk.classify_failure(message, DeclaredError(declared)) is declared


def test_a_status_in_the_words_counts_alike_whoever_says_them() -> None:
    assert rk.classify_failure("HTTP 404 on a network share") is PERMANENT
    assert rk.classify_failure("", RuntimeError("HTTP 404 on a network share")) is PERMANENT
    assert rk.classify_failure("HTTP 404 on a network share", RuntimeError("oops")) is PERMANENT
