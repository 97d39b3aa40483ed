"""Error texts of connectors, and what each of them means: S3's words with those of decision B3."""

import errno
from urllib.error import URLError

import pytest

import reefknot as rk
from reefknot.core.classify import is_transient
from reefknot.retrying.failures import failure_from

TEXTS = {
    rk.FailureType.PERMANENT: (
        "unauthorized",
        "Unauthorized: token expired",
        "forbidden",
        "403 Forbidden",
        "Error 401: bad credentials",
        "Error 403: no access to this repository",
        "authentication failed",
        "AuthenticationFailed",
        "permission denied",
        "access denied",
        "invalid credentials",
        "file not found",
    ),
    rk.FailureType.RATE_LIMITED: (
        "throttled by the server",
        "ThrottlingException: throttle",
        "too many connections",
        "too many requests",
        "rate limit exceeded",
        "403: rate limit exceeded for this token",
        "quota exceeded",
        "HTTP 429",
    ),
    rk.FailureType.TRANSIENT: (
        "deadline exceeded",
        "connection failed",
        "connection error",
        "connection closed by peer",
        "no route to host",
        "network is unreachable",
        "connection refused",
        "connection reset by peer",
        "timed out",
        "503 Service Unavailable",
    ),
    rk.FailureType.UNKNOWN: ("report-4013.pdf is damaged", "folder 403abc", "unauthorizable"),
}


def test_every_text_means_what_the_documents_say() -> None:
    wrong = {
        text: rk.classify_failure(text).value
        for kind, texts in TEXTS.items()
        for text in texts
        if rk.classify_failure(text) is not kind
    }
    assert wrong == {}


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
    by = [
        book.resolve("block:http", code=code).max_attempts
        for code in (3003, "3003", "http_error", rk.ErrorCode.http_error)
    ]
    assert len(set(by)) == 1
    with pytest.raises(rk.ParameterError, match="code"):
        book.resolve("block:http", code=9999)


def test_a_connector_of_ones_own_begins_with_the_generic_defaults() -> None:
    book = rk.PolicyBook.loads("retry_policies: {carrier_pigeon: {max_attempts: 2, max_retry_after_seconds: 7200}}")
    policy = book.resolve("connector:carrier_pigeon")
    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.max_retry_after) == (3, 60, 1800, 7200)
    assert (
        rk.PolicyBook.loads("operations: {KV_GET: {max_retry_after: 9}}").resolve("operation:KV_GET").max_retry_after
        == 9
    )
    with pytest.raises(rk.ConfigurationError, match="did you mean 'imap_mailbox'"):
        rk.PolicyBook.loads("retry_policies: {imap_mailbx: {}}")
