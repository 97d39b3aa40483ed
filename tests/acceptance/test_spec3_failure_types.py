"""
Per-connector retry policies: what a failure means, by its words and by its exception.

The words are S3's, with those of decision B3. Every word in every frame, every status and the order of evidence are in
`tests/unit/core/test_classify.py`; here they are heard by the public function.
"""

from __future__ import annotations

import errno
from urllib.error import URLError

import pytest

import reefknot as rk
from reefknot.core.classify import is_transient
from reefknot.core.failure import FailureType
from reefknot.retrying.failures import failure_from

PERMANENT, RATE_LIMITED = FailureType.PERMANENT, FailureType.RATE_LIMITED
TRANSIENT, UNKNOWN = FailureType.TRANSIENT, FailureType.UNKNOWN

TEXTS = {
    PERMANENT: "unauthorized|Unauthorized: token expired|forbidden|403 Forbidden|Error 401: bad credentials"
    "|Error 403: no access to this repository|authentication failed|AuthenticationFailed|permission denied"
    "|access denied|invalid credentials|file not found|HTTP 404 on a network share",
    RATE_LIMITED: "throttled by the server|ThrottlingException: throttle|too many connections|too many requests"
    "|rate limit exceeded|403: rate limit exceeded for this token|quota exceeded|HTTP 429",
    TRANSIENT: "deadline exceeded|connection failed|connection error|connection closed by peer|no route to host"
    "|network is unreachable|connection refused|connection reset by peer|timed out|503 Service Unavailable",
    UNKNOWN: "report-4013.pdf is damaged|folder 403abc|unauthorizable",
}


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


@pytest.mark.parametrize("kind", TEXTS)
def test_every_text_means_what_the_documents_say_also_when_an_exception_says_it_or_nothing(kind: FailureType) -> None:
    for text in TEXTS[kind].split("|"):
        assert rk.classify_failure(text) is kind, text
        assert rk.classify_failure(text, RuntimeError("oops")) is kind, text
        assert rk.classify_failure("", RuntimeError(text)) is kind, text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "Permission denied"), PERMANENT),
        (TimeoutError(), TRANSIENT),
        (ConnectionResetError(), TRANSIENT),
        (ConnectionRefusedError(), TRANSIENT),
        (BrokenPipeError(), TRANSIENT),
        (ForbiddenError(Retry_After="60"), RATE_LIMITED),
        (ForbiddenError(X_RateLimit_Remaining="0"), RATE_LIMITED),
        (ForbiddenError("API rate limit exceeded"), RATE_LIMITED),
        (ForbiddenError(X_RateLimit_Remaining="12"), PERMANENT),
        *((DeclaredError(kind), kind) for kind in (TRANSIENT, RATE_LIMITED, PERMANENT)),
    ],
)
@pytest.mark.parametrize("message", ["", "sync failed", "network timeout", "permission denied", "not found"])
def test_what_an_exception_is_or_declares_beats_the_words(
    error: Exception, expected: FailureType, message: str
) -> None:
    assert rk.classify_failure(message, error) is expected


@pytest.mark.parametrize("name", ["EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN"])
def test_an_unreachable_network_is_transient_also_as_a_plain_os_error(name: str) -> None:
    error = OSError(getattr(errno, name), "what the system says")
    calls = []

    @rk.retry(attempts=2, base_delay=0)
    def fetch() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return "fine"

    assert fetch() == "fine"
    assert is_transient(failure_from(URLError(error)))
    assert not is_transient(failure_from(OSError(errno.ENOSPC, "no space left")))


def test_codes_are_taken_by_number_name_and_member() -> None:
    book = rk.PolicyBook.loads("{}")
    spelled = (3003, "3003", "http_error", rk.ErrorCode.http_error)
    assert len({book.resolve("block:http", code=code).max_attempts for code in spelled}) == 1
    with pytest.raises(rk.ParameterError, match="code"):
        book.resolve("block:http", code=9999)


def test_a_connector_of_ones_own_begins_with_the_generic_defaults() -> None:
    book = rk.PolicyBook.loads("retry_policies: {carrier_pigeon: {max_attempts: 2, max_retry_after_seconds: 7200}}")
    policy = book.resolve("connector:carrier_pigeon")
    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.max_retry_after) == (3, 60, 1800, 7200)
    kv = rk.PolicyBook.loads("operations: {KV_GET: {max_retry_after: 9}}").resolve("operation:KV_GET")
    assert kv.max_retry_after == 9
    with pytest.raises(rk.ConfigurationError, match="did you mean 'imap_mailbox'"):
        rk.PolicyBook.loads("retry_policies: {imap_mailbx: {}}")
