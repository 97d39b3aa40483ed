"""
Exceptions read as `Failure`s, and which of them are retried by default.

The only place that looks into a live exception: class names, status, the server's hints, redacted text. The exception
itself is not kept. Third-party classes are recognised by name and attributes, never imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reefknot import clock
from reefknot.core.checks import is_number
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import redact
from reefknot.core.retry.classify import (
    AWS_CODES,
    GRPC_STATUSES,
    Kind,
    classify,
    is_transient,
    kind_of_class,
    kind_of_text,
    retryable_code,
    status_in,
)
from reefknot.core.retry.policy import class_name
from reefknot.retrying.functions import every_leaf

if TYPE_CHECKING:
    from reefknot.retrying.functions import Verdict

EXHAUSTED_MARK = "__reefknot_exhausted__"
_MAX_CAUSES = 8
_MAX_CLASSES = 1024
_ATTRIBUTES = (
    *("retry_after", "response", "status_code", "status", "headers", "error_code", "failure_type"),
    *("grpc_status_code", "details"),
)
"""Attributes of an exception class that say more than its name and message."""

_ClassTraits = tuple[tuple[str, ...], Kind | None, bool]
"""Class names along the MRO, the kind they determine, and whether the class has none of `_ATTRIBUTES`."""
_traits_of: dict[type, _ClassTraits] = {}
_last_failure: dict[type, Failure] = {}
"""The last failure of each class that is read by its text alone: an outage repeats itself. The kept message is
redacted, so a text with a secret in it never equals it and is read anew."""


# ---- retried by default ----------------------------------------------------------------------------------------------


def retryable_by_default(error: Exception, failure: Failure) -> Verdict:
    """
    The rule without `on=`: connection errors, timeouts, HTTP 408, 429 and 5xx, and what an exception declares itself.

    A group is retried only if every leaf is.
    """
    if isinstance(error, BaseExceptionGroup):
        return every_leaf(error, lambda leaf: retryable_by_default(leaf, failure_from(leaf)))
    declared = _declared_retryable(error, failure)
    return is_transient(failure) if declared is None else declared


def _declared_retryable(error: Exception, failure: Failure) -> bool | None:
    """
    Declaration of the exception: retryable or not; None when there is none.

    By `error_code` or `failure_type`, else by the status of the service that answered with it.
    """
    try:
        code, kind = _declared(error)
        service = _kind_of_service(error)
    except Exception:  # an attribute that raises when it is read declares nothing
        return None
    if code is not None:
        return retryable_code(code, failure.http_status)
    if kind is None and service is not None:
        kind = service.failure_type
    return None if kind is None else kind in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)


def _declared(error: BaseException) -> tuple[ErrorCode | None, FailureType | None]:
    code, kind = getattr(error, "error_code", None), getattr(error, "failure_type", None)
    return code if isinstance(code, ErrorCode) else None, kind if isinstance(kind, FailureType) else None


def _kind_of_service(error: BaseException) -> Kind | None:
    """The kind of an error that AWS or a gRPC service answered with, by its shape; None for any other."""
    traits = _traits_of.get(type(error))
    if traits is not None and traits[2] and not error.__dict__:
        return None
    answer = _aws_answer(error)
    if answer is not None:
        return AWS_CODES.get(str(_item(answer.get("Error"), "Code")))
    status = getattr(error, "grpc_status_code", None)  # google-api-core
    if status is None and type(error).__module__.startswith("grpclib"):
        status = getattr(error, "status", None)
    # A method of grpc.RpcError; looked for in the class, because reading aiohttp's property of that name warns.
    if status is None and callable(getattr(type(error), "code", None)) and hasattr(error, "details"):
        status = error.code()  # type: ignore[attr-defined]
    name = getattr(status, "name", None)
    return GRPC_STATUSES.get(name) if isinstance(name, str) else None


def _aws_answer(error: object) -> dict[str, object] | None:
    """The response of a botocore `ClientError`, which is a dictionary; None for any other error."""
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) and "ResponseMetadata" in response else None


def _item(mapping: object, key: str) -> object:
    return mapping.get(key) if isinstance(mapping, dict) else None


def http_errors(error: Exception) -> Verdict:
    """
    `on=rk.http_errors`: transport errors, HTTP 408, 429, 5xx of httpx, requests, aiohttp, urllib and boto3, and gRPC's.

    The library's default as a predicate, for use inside a predicate of one's own.
    """
    return retryable_by_default(error, failure_from(error))


# ---- an exception as a failure ---------------------------------------------------------------------------------------


def failure_from(error: BaseException, since: int = 0) -> Failure:
    """
    `error` as a `Failure`.

    `since` is the count of exhausted retries when the call began: an older mark on a re-used exception object belongs
    to another call.
    """
    cls = type(error)
    try:
        text = str(error)
        last = _last_failure.get(cls)
        if last is not None and last.message == text and error.__cause__ is None and not error.__dict__:
            return last
        message = redact(text)
    except Exception:
        message = f"<{cls.__name__} cannot be shown>"
    names, kind, has_no_attributes = _traits_of.get(cls) or _class_traits(cls)
    if has_no_attributes and not error.__dict__:
        exhausted = error.__cause__ is not None and _exhausted(error, since)
        if kind is None:
            kind = kind_of_text(message)
        failure = Failure(kind.code, kind.failure_type, message, None, None, names, exhausted)
        if not exhausted:
            _last_failure[cls] = failure
        return failure
    try:
        failure = _failure_from_attributes(error, message, names)
    except Exception:  # an attribute that raises when it is read; class and message still count
        failure = classify(message, exceptions=names)
    return replace(failure, exhausted=True) if _exhausted(error, since) else failure


def _failure_from_attributes(
    error: BaseException, message: str, names: tuple[str, ...], *, text_status: int | None = None, limited: bool = False
) -> Failure:
    """The failure of an exception whose attributes count; `text_status` and `limited` are known without them."""
    code, kind = _declared(error)
    if code is None and kind is None:
        code, kind = _kind_of_service(error) or (None, None)
    status, hint, limit_reached = read_hints(error)
    return classify(
        message,
        code=code,
        failure_type=kind,
        exceptions=names + _reason_names(error, names),
        http_status=status or text_status,
        retry_after=hint,
        limit_reached=limit_reached or limited,
    )


def _reason_names(error: BaseException, names: tuple[str, ...]) -> tuple[str, ...]:
    """Class names of the reason of a `URLError`, which is only urllib's wrapper around it."""
    reason = getattr(error, "reason", None)
    if not isinstance(reason, BaseException) or "urllib.error.URLError" not in names:
        return ()
    cls = type(reason)
    return (_traits_of.get(cls) or _class_traits(cls))[0]


def _class_traits(cls: type) -> _ClassTraits:
    names = tuple(class_name(c) for c in cls.__mro__ if c is not object and c is not BaseException)
    has_no_attributes = not issubclass(cls, BaseExceptionGroup) and not any(hasattr(cls, name) for name in _ATTRIBUTES)
    if len(_traits_of) >= _MAX_CLASSES:
        _traits_of.clear()
        _last_failure.clear()
    traits = _traits_of[cls] = (names, kind_of_class(names), has_no_attributes)
    return traits


def _exhausted(error: BaseException, since: int) -> bool:
    """Whether this error, or one it was raised from, already ended a retry inside this call."""
    link: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if link is None:
            return False
        if link.__dict__.get(EXHAUSTED_MARK, 0) > since:
            return True
        if isinstance(link, BaseExceptionGroup) and any(_exhausted(leaf, since) for leaf in link.exceptions):
            return True
        link = link.__cause__
    return False


def read_hints(error: object) -> tuple[int | None, float | None, bool]:
    """HTTP status, seconds to wait, and whether a rate limit is spent by its headers; of a group, the longest wait."""
    if isinstance(error, BaseExceptionGroup):
        hints = [hint for _, hint, _ in map(read_hints, error.exceptions) if hint is not None]
        return None, max(hints, default=None), False
    answer = _aws_answer(error)
    if answer is not None:
        found, metadata = _item(answer["ResponseMetadata"], "HTTPStatusCode"), answer["ResponseMetadata"]
        hint = _delay(_headers(metadata, _item(metadata, "HTTPHeaders")).get("retry-after"))
        return found if type(found) is int and 100 <= found <= 599 else None, hint, False
    response = getattr(error, "response", None)
    status = _status(error) or _status(response)
    headers = _headers(error) or _headers(response)
    hint = _delay(getattr(error, "retry_after", None))
    if hint is None:
        hint = _delay(getattr(response, "retry_after", None))
    if hint is None and headers:
        hint = _delay(headers.get("retry-after"))
    limit_reached = bool(headers) and headers.get("x-ratelimit-remaining", "").strip() == "0"
    if hint is None and limit_reached:
        hint = _until_reset(headers.get("x-ratelimit-reset"))
    return status, hint, limit_reached


def _status(source: object) -> int | None:
    if source is None:
        return None
    for name in ("status_code", "status", "code"):
        value = getattr(source, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or not 100 <= value <= 599:
            continue
        if name != "code" or hasattr(source, "headers") or hasattr(source, "grpc_status_code"):
            return int(value)
    return None


def _headers(source: object, given: object = None) -> dict[str, str]:
    headers: Any = getattr(source, "headers", None) if given is None else given
    if headers is None or not hasattr(headers, "items"):
        return {}
    try:
        return {str(name).lower(): str(value) for name, value in list(headers.items())[:200]}
    except Exception:
        return {}


def _delay(value: object) -> float | None:
    """Seconds from a number, a timedelta, a text of digits, or an HTTP date; None for anything else."""
    if is_number(value):
        return float(value) if 0 <= value < float("inf") else None
    if hasattr(value, "total_seconds"):
        return max(0.0, float(value.total_seconds()))
    if not isinstance(value, str):
        return None
    text = value.strip()[:64]
    return float(text) if text.isascii() and text.replace(".", "", 1).isdigit() else _until_date(text)


def _until_date(text: str) -> float | None:
    from datetime import UTC
    from email.utils import parsedate_to_datetime

    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - clock.wall())


def _until_reset(text: str | None) -> float | None:
    if text is None or not text.strip().isdigit():
        return None
    return max(0.0, int(text.strip()[:12]) - clock.wall())


def classify_failure(message: str, exception: BaseException | None = None) -> FailureType:
    """
    Transient, rate limited, permanent or unknown: by the exception if it says so, else by the words of the message.

    Without a message, the words are the exception's own.
    """
    words = redact(message)
    if exception is None:
        return classify(words, http_status=status_in(words)).failure_type
    seen = failure_from(exception)
    words = words or seen.message
    limited, status = seen.failure_type is FailureType.RATE_LIMITED, status_in(words)
    known = _failure_from_attributes(exception, words, seen.exceptions, text_status=status, limited=limited)
    return known.failure_type
