"""
Classification: from class names, status, code and message to a `Failure` with its failure type.

Evidence counts in one order: a rate limit first, then what the work itself declared (a code, a type), then the
exception's class, then the HTTP status, and the words of the message last. Pure: exceptions do not get here, only their
class names, numbers and shortened text.
"""

import re
from typing import NamedTuple

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import LONGEST_TEXT

_TERMS: dict[FailureType, tuple[str, ...]] = {
    FailureType.PERMANENT: (
        *("permission denied", "access denied", "authentication failed"),
        *("invalid credentials", "not found", "unauthorized", "forbidden", "401", "403"),
    ),
    FailureType.RATE_LIMITED: ("rate limit", "too many", "throttle", "quota exceeded", "429"),
    FailureType.TRANSIENT: (
        *("timeout", "connection refused", "temporary", "unavailable", "network", "503", "502"),
        *("timed out", "connection reset", "deadline exceeded", "connection failed", "connection error"),
        *("connection closed", "no route to host"),
    ),
}
"""The words in a message that indicate a failure type. The first type with a match decides."""

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BORDER = re.compile(r"[_\-\s]+")
_STATUS = re.compile(
    r"\b(?:status(?:[ _]code)?|HTTP(?:/\d(?:\.\d)?)?)\s{0,8}[:=]?\s{0,8}([1-5]\d\d)\b", re.IGNORECASE | re.ASCII
)


class Kind(NamedTuple):
    """The code and the failure type that a piece of evidence stands for."""

    code: ErrorCode
    failure_type: FailureType


_TIMEOUT = Kind(ErrorCode.connection_timeout, FailureType.TRANSIENT)
_NETWORK = Kind(ErrorCode.network_error, FailureType.TRANSIENT)
_DENIED = Kind(ErrorCode.permission_denied, FailureType.PERMANENT)
_MISSING = Kind(ErrorCode.execution_failed, FailureType.PERMANENT)
_BUSY = Kind(ErrorCode.resource_unavailable, FailureType.TRANSIENT)

KNOWN_CLASSES: dict[str, Kind] = {
    **{f"errno.{name}": _NETWORK for name in ("EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN")},
    "builtins.TimeoutError": _TIMEOUT,
    "builtins.ConnectionError": _NETWORK,
    "builtins.PermissionError": _DENIED,
    "builtins.FileNotFoundError": _MISSING,
    "builtins.BlockingIOError": _BUSY,
    "socket.gaierror": _NETWORK,
    "ssl.SSLCertVerificationError": _DENIED,
    "ssl.SSLError": _NETWORK,
    "http.client.RemoteDisconnected": _NETWORK,
    "http.client.IncompleteRead": _NETWORK,
    **{
        f"{module}.{name}": kind
        for module in ("httpx", "httpx2", "httpx._exceptions", "httpx2._exceptions")
        for name, kind in (
            ("TimeoutException", _TIMEOUT),
            ("NetworkError", _NETWORK),
            ("RemoteProtocolError", _NETWORK),
            ("ProxyError", _NETWORK),
        )
    },
    "requests.exceptions.Timeout": _TIMEOUT,
    "requests.exceptions.SSLError": _DENIED,
    "requests.exceptions.ConnectionError": _NETWORK,
    "requests.exceptions.ChunkedEncodingError": _NETWORK,
    "urllib3.exceptions.TimeoutError": _TIMEOUT,
    "urllib3.exceptions.NewConnectionError": _NETWORK,
    "urllib3.exceptions.ProtocolError": _NETWORK,
    "aiohttp.client_exceptions.ServerTimeoutError": _TIMEOUT,
    "aiohttp.client_exceptions.ClientConnectorCertificateError": _DENIED,
    "aiohttp.client_exceptions.ClientConnectionError": _NETWORK,
    "aiohttp.client_exceptions.ClientPayloadError": _NETWORK,
    "botocore.exceptions.ConnectTimeoutError": _TIMEOUT,
    "botocore.exceptions.ReadTimeoutError": _TIMEOUT,
    "botocore.exceptions.SSLError": _DENIED,
    "botocore.exceptions.ConnectionError": _NETWORK,
    "botocore.exceptions.HTTPClientError": _NETWORK,
    "botocore.exceptions.ResponseStreamingError": _NETWORK,
    "botocore.exceptions.IncompleteReadError": _NETWORK,
    "trio.TooSlowError": _TIMEOUT,
    "trio.BrokenResourceError": _NETWORK,
    "anyio.BrokenResourceError": _NETWORK,
    "reefknot.errors.StoreFullError": _BUSY,
    "reefknot.errors.StoreUnavailableError": _BUSY,
    "reefknot.errors.StorePermissionError": _DENIED,
}
"""Exception classes that are known by name, without importing them. The first one in the MRO decides."""

_LIMITED = Kind(ErrorCode.quota_exceeded, FailureType.RATE_LIMITED)

AWS_CODES: dict[str, Kind] = {
    **dict.fromkeys(
        (
            *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottledException"),
            *("TooManyRequestsException", "ProvisionedThroughputExceededException", "RequestLimitExceeded"),
            *("BandwidthLimitExceeded", "LimitExceededException", "RequestThrottled", "SlowDown"),
            *("EC2ThrottledException", "TransactionInProgressException", "PriorRequestNotComplete"),
        ),
        _LIMITED,
    ),
    **dict.fromkeys(("RequestTimeout", "RequestTimeoutException"), _TIMEOUT),
    **dict.fromkeys(("InternalError", "InternalFailure", "ServiceUnavailable", "ServiceUnavailableException"), _BUSY),
}
"""Error codes of AWS that its own clients retry. They count before the status, which often is 400."""

GRPC_STATUSES: dict[str, Kind] = {
    "UNAVAILABLE": _BUSY,
    "DEADLINE_EXCEEDED": _TIMEOUT,
    "RESOURCE_EXHAUSTED": _LIMITED,
    **dict.fromkeys(("PERMISSION_DENIED", "UNAUTHENTICATED"), _DENIED),
    **dict.fromkeys(
        (
            *("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION"),
            *("OUT_OF_RANGE", "UNIMPLEMENTED"),
        ),
        _MISSING,
    ),
}
"""
Status names of gRPC and their kinds. The others say nothing about another try of the same call: ABORTED, for one, asks
for a retry of the transaction around it.
"""

_TYPE_OF_CODE: dict[ErrorCode, FailureType] = {
    ErrorCode.none: FailureType.UNKNOWN,
    ErrorCode.invalid_input: FailureType.PERMANENT,
    ErrorCode.missing_required_field: FailureType.PERMANENT,
    ErrorCode.invalid_format: FailureType.PERMANENT,
    ErrorCode.execution_failed: FailureType.UNKNOWN,
    ErrorCode.resource_unavailable: FailureType.TRANSIENT,
    ErrorCode.permission_denied: FailureType.PERMANENT,
    ErrorCode.quota_exceeded: FailureType.RATE_LIMITED,
    ErrorCode.network_error: FailureType.TRANSIENT,
    ErrorCode.connection_timeout: FailureType.TRANSIENT,
    ErrorCode.http_error: FailureType.TRANSIENT,
    ErrorCode.internal_error: FailureType.UNKNOWN,
    ErrorCode.system_overload: FailureType.TRANSIENT,
    ErrorCode.cancelled_by_user: FailureType.PERMANENT,
    ErrorCode.cancelled_by_timeout: FailureType.PERMANENT,
}
_CODE_OF_TYPE: dict[FailureType, ErrorCode] = {
    FailureType.TRANSIENT: ErrorCode.network_error,
    FailureType.RATE_LIMITED: ErrorCode.resource_unavailable,
    FailureType.PERMANENT: ErrorCode.execution_failed,
    FailureType.UNKNOWN: ErrorCode.execution_failed,
}


def classify(
    message: str = "",
    *,
    code: ErrorCode | None = None,
    failure_type: FailureType | None = None,
    exceptions: tuple[str, ...] = (),
    http_status: int | None = None,
    retry_after: float | None = None,
    limit_reached: bool = False,
) -> Failure:
    """
    The `Failure` that follows from all evidence.

    `message` is already shortened and redacted. A status in it is not looked for here (`status_in` does that), because
    only the caller knows whether the text is about its own request. `limit_reached` says that the headers of the
    response showed a spent rate limit.
    """
    kind = _kind(message, code, failure_type, exceptions, http_status, retry_after is not None or limit_reached)
    return Failure(kind.code, kind.failure_type, message, http_status, retry_after, exceptions)


def _kind(
    message: str,
    code: ErrorCode | None,
    failure_type: FailureType | None,
    exceptions: tuple[str, ...],
    status: int | None,
    must_wait: bool,
) -> Kind:
    if status == 429 or (status == 403 and (must_wait or _any_of(_TERMS[FailureType.RATE_LIMITED], _words(message)))):
        return Kind(code or ErrorCode.http_error, FailureType.RATE_LIMITED)
    if failure_type is not None:
        return Kind(code or (ErrorCode.http_error if status else _CODE_OF_TYPE[failure_type]), failure_type)
    if code is not None:
        by_status = kind_of_status(status) if code is ErrorCode.http_error else None
        return Kind(code, by_status.failure_type if by_status else _TYPE_OF_CODE[code])
    return kind_of_class(exceptions) or kind_of_status(status) or kind_of_text(message)


def kind_of_class(exceptions: tuple[str, ...]) -> Kind | None:
    """The kind of the most specific known class; None when none is known."""
    return next((KNOWN_CLASSES[name] for name in exceptions if name in KNOWN_CLASSES), None)


def kind_of_status(status: int | None) -> Kind | None:
    """The kind of an HTTP status; None for 1xx to 3xx, which are no failures."""
    if status is None or status < 400:
        return None
    if status == 429:
        return Kind(ErrorCode.http_error, FailureType.RATE_LIMITED)
    return Kind(ErrorCode.http_error, FailureType.TRANSIENT if retryable_status(status) else FailureType.PERMANENT)


def kind_of_text(message: str) -> Kind:
    """The kind that the words of a message stand for; unknown when there is no known word."""
    found = type_in(message)
    return Kind(_CODE_OF_TYPE[found], found)


def type_in(message: str) -> FailureType:
    """The failure type of a message's words: permanent before rate limited before transient."""
    text = _words(message)
    if _any_of(("403", "forbidden"), text) and _any_of(_TERMS[FailureType.RATE_LIMITED], text):
        return FailureType.RATE_LIMITED  # as a status 403 with these words is
    return next((failure_type for failure_type, terms in _TERMS.items() if _any_of(terms, text)), FailureType.UNKNOWN)


def status_in(message: str) -> int | None:
    """The HTTP status that a message names as one: `status: 503`, `status 503`, `HTTP 503`; None without one."""
    found = _STATUS.search(message, 0, LONGEST_TEXT)
    return int(found[1]) if found else None


RETRYABLE_4XX = (408, 429)
"""The client errors among the HTTP statuses that are retried by default; of the others, 5xx are and the rest is not."""


def retryable_status(status: int) -> bool:
    """The default table of HTTP statuses: 4xx no, except `RETRYABLE_4XX`; 5xx yes."""
    return status >= 500 or status in RETRYABLE_4XX


def retryable_code(code: ErrorCode, http_status: int | None = None) -> bool:
    """Whether a code is retried by default: those of transient failures are. `http_error` asks the status, if any."""
    if code is ErrorCode.http_error and http_status is not None:
        return retryable_status(http_status)
    return _TYPE_OF_CODE[code] is FailureType.TRANSIENT


def is_transient(failure: Failure) -> bool:
    """
    Whether the library retries this failure by default: connection errors, time-outs, HTTP 408, 429 and 5xx.

    Words in a message do not count here: `ValueError("timeout must be positive")` is not an outage.
    """
    kind = kind_of_class(failure.exceptions)
    if kind is None:
        if failure.failure_type is FailureType.RATE_LIMITED and failure.http_status is not None:
            return True
        kind = kind_of_status(failure.http_status)
    return kind is not None and kind.failure_type is not FailureType.PERMANENT


def _words(message: str) -> str:
    """The message in lower case with one space between words; `_`, `-` and CamelCase humps separate words."""
    return " " + _BORDER.sub(" ", _HUMP.sub(" ", message[:LONGEST_TEXT])).lower()


def _any_of(terms: tuple[str, ...], text: str) -> bool:
    # Most texts have none of the terms, and a plain search is the cheapest way to know.
    return any(term in text and _STANDING[term].search(text) is not None for term in terms)


def _standing(term: str) -> re.Pattern[str]:
    """A pattern for a term at the beginning of a word ("timeouts", not "subnetwork"), and for a number on its own."""
    if term.isdigit():  # not inside "4291", "v1.429", "429.5" or "429.pdf"
        return re.compile(rf"{term}(?<![\w.,]{term})(?!\w|[.,]\w)")
    return re.compile(rf"{term}(?<!\w{term})")


_STANDING = {term: _standing(term) for terms in _TERMS.values() for term in terms}
