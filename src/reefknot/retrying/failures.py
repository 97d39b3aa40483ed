"""
What is worth another try when nobody said: connection errors, time-outs, HTTP 408, 429 and 5xx; and what an exception
declares of itself.

An exception, read.

The only place that looks into a live exception: class names, status, the server's hints, redacted text. What comes out
is a `Failure`; the exception itself is not kept. Third-party classes are known by shape and name, never imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reefknot import clock as timing
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import redact
from reefknot.core.retry.classify import (
    Kind,
    classify,
    is_transient,
    kind_of_class,
    kind_of_text,
    retryable_code,
    status_in,
)
from reefknot.core.retry.policy import class_name
from reefknot.retrying.plan import every_leaf

if TYPE_CHECKING:
    from reefknot.retrying.plan import Answer


def by_nature(error: Exception, failure: Failure) -> Answer:
    """The library's own judge; of a group it asks for every leaf."""
    if isinstance(error, BaseExceptionGroup):
        return every_leaf(error, lambda leaf: by_nature(leaf, read_failure(leaf)))
    declared = _declared(error, failure)
    return is_transient(failure) if declared is None else declared


def _declared(error: Exception, failure: Failure) -> bool | None:
    """What the exception says of itself by `error_code` or `failure_type`; None when it says nothing."""
    try:
        code, kind = getattr(error, "error_code", None), getattr(error, "failure_type", None)
    except Exception:  # an attribute that raises when it is looked at says nothing
        return None
    if isinstance(code, ErrorCode):
        return retryable_code(code, failure.http_status)
    if isinstance(kind, FailureType):
        return kind in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)
    return None


def http_errors(error: Exception) -> Answer:
    """
    `on=rk.http_errors`: transport errors and HTTP 408, 429, 5xx of httpx, requests, aiohttp and urllib.

    It is the library's default, by name, for use inside a predicate of one's own.
    """
    return by_nature(error, read_failure(error))


EXHAUSTED_MARK = "__reefknot_exhausted__"
_CAUSES_FOLLOWED = 8
_TYPES_KEPT = 1024
_TELLING = ("retry_after", "response", "status_code", "status", "headers", "error_code", "failure_type")

_Shape = tuple[tuple[str, ...], Kind | None, bool]
_shapes: dict[type, _Shape] = {}
_last_read: dict[type, Failure] = {}
"""The last failure of each class that is told by its text alone: an outage says the same again and again. What is kept
was redacted, so a text with a secret in it never equals it and is read anew."""


def read_failure(error: BaseException, since: int = 0) -> Failure:
    """
    The failure that `error` tells of.

    `since` is the count of exhausted retries when the attempt began: an older mark on a re-used exception object
    belongs to another piece of work.
    """
    cls = type(error)
    try:
        text = str(error)
        last = _last_read.get(cls)
        if last is not None and last.message == text and error.__cause__ is None and not error.__dict__:
            return last
        message = redact(text)
    except Exception:
        message = f"<{cls.__name__} cannot be shown>"
    names, kind, plain = _shapes.get(cls) or _shape(cls)
    if plain and not error.__dict__:
        exhausted = error.__cause__ is not None and _exhausted(error, since)
        if kind is None:
            kind = kind_of_text(message)
        failure = Failure(kind.code, kind.failure_type, message, None, None, names, exhausted)
        if not exhausted:
            _last_read[cls] = failure
        return failure
    try:
        failure = _read_closely(error, message, names)
    except Exception:  # a foreign attribute that raises when it is looked at tells nothing; class and words still do
        failure = classify(message, exceptions=names)
    return replace(failure, exhausted=True) if _exhausted(error, since) else failure


def _read_closely(error: BaseException, message: str, names: tuple[str, ...]) -> Failure:
    status, hint, limit_reached = read_hints(error)
    return classify(
        message,
        code=_enum(ErrorCode, getattr(error, "error_code", None)),
        failure_type=_enum(FailureType, getattr(error, "failure_type", None)),
        exceptions=names + _names_of_reason(error, names),
        http_status=status,
        retry_after=hint,
        limit_reached=limit_reached,
    )


def _names_of_reason(error: BaseException, names: tuple[str, ...]) -> tuple[str, ...]:
    """urllib wraps what happened: its `URLError` means what its reason means."""
    reason = getattr(error, "reason", None)
    if not isinstance(reason, BaseException) or "urllib.error.URLError" not in names:
        return ()
    cls = type(reason)
    return (_shapes.get(cls) or _shape(cls))[0]


def _shape(cls: type) -> _Shape:
    names = tuple(class_name(c) for c in cls.__mro__ if c is not object and c is not BaseException)
    plain = not issubclass(cls, BaseExceptionGroup) and not any(hasattr(cls, name) for name in _TELLING)
    if len(_shapes) >= _TYPES_KEPT:
        _shapes.clear()
        _last_read.clear()
    shape = _shapes[cls] = (names, kind_of_class(names), plain)
    return shape


def _enum(kind: type[Any], value: object) -> Any:
    return value if isinstance(value, kind) else None


def _exhausted(error: BaseException, since: int) -> bool:
    """Whether this error, or one it was raised from, already ended a retry inside this attempt."""
    link: BaseException | None = error
    for _ in range(_CAUSES_FOLLOWED):
        if link is None:
            return False
        if link.__dict__.get(EXHAUSTED_MARK, 0) > since:
            return True
        if isinstance(link, BaseExceptionGroup) and any(_exhausted(leaf, since) for leaf in link.exceptions):
            return True
        link = link.__cause__
    return False


def read_hints(error: object) -> tuple[int | None, float | None, bool]:
    """Status, retry-after in seconds, whether the headers say that a limit is spent. Of a group, the longest hint."""
    if isinstance(error, BaseExceptionGroup):
        hints = [hint for _, hint, _ in map(read_hints, error.exceptions) if hint is not None]
        return None, max(hints, default=None), False
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
        if type(value) is int and 100 <= value <= 599 and (name != "code" or hasattr(source, "headers")):
            return value
    return None


def _headers(source: object) -> dict[str, str]:
    headers = getattr(source, "headers", None)
    if headers is None or not hasattr(headers, "items"):
        return {}
    try:
        return {str(name).lower(): str(value) for name, value in list(headers.items())[:200]}
    except Exception:
        return {}


def _delay(value: object) -> float | None:
    """Seconds from a number, a timedelta, a text of digits, or an HTTP date. Not understood: no hint."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 <= value < float("inf") else None
    if hasattr(value, "total_seconds"):
        return max(0.0, float(value.total_seconds()))
    if isinstance(value, str):
        text = value.strip()[:64]
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return float(text)
        return _until_date(text)
    return None


def _until_date(text: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if when.tzinfo is None:
        from datetime import UTC

        when = when.replace(tzinfo=UTC)
    return max(0.0, when.timestamp() - timing.wall())


def _until_reset(text: str | None) -> float | None:
    if text is None or not text.strip().isdigit():
        return None
    return max(0.0, int(text.strip()[:12]) - timing.wall())


def classify_failure(message: str, exception: BaseException | None = None) -> FailureType:
    """
    Transient, rate limited, permanent or unknown: by the exception if it tells, else by the message's words.

    An empty message leaves the words to the exception.
    """
    words = redact(message)
    if exception is None:
        return classify(words, http_status=status_in(words)).failure_type
    seen = read_failure(exception)
    words = words or seen.message
    status, hint, limit_reached = read_hints(exception)
    return classify(
        words,
        code=_enum(ErrorCode, getattr(exception, "error_code", None)),
        failure_type=_enum(FailureType, getattr(exception, "failure_type", None)),
        exceptions=seen.exceptions,
        http_status=status or status_in(words),
        retry_after=hint,
        limit_reached=limit_reached or seen.failure_type is FailureType.RATE_LIMITED,
    ).failure_type
