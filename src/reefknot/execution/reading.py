"""
An exception, read.

The only place that looks into a live exception: class names, status, the server's hints, redacted text. What comes out
is a `Failure`; the exception itself is not kept. Third-party classes are known by shape and name, never imported.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.redaction import redact
from reefknot.core.retry.classify import Kind, classify, kind_of_class, kind_of_text, status_in
from reefknot.core.retry.policy import class_name
from reefknot.execution import timing

EXHAUSTED_MARK = "__reefknot_exhausted__"
_CAUSES_FOLLOWED = 8
_TYPES_KEPT = 1024
_TELLING = ("retry_after", "response", "status_code", "status", "headers", "error_code", "failure_type")

_Shape = tuple[tuple[str, ...], Kind | None, bool]
_shapes: dict[type, _Shape] = {}


def read_failure(error: BaseException, since: int = 0) -> Failure:
    """
    The failure that `error` tells of.

    `since` is the count of exhausted retries when the attempt began: an older mark on a re-used exception object
    belongs to another piece of work.
    """
    cls = type(error)
    names, kind, plain = _shapes.get(cls) or _shape(cls)
    try:
        message = redact(str(error))
    except Exception:
        message = f"<{cls.__name__} cannot be shown>"
    if plain and not error.__dict__:
        exhausted = error.__cause__ is not None and _exhausted(error, since)
        if kind is None:
            kind = kind_of_text(message)
        return Failure(kind.code, kind.failure_type, message, None, None, names, exhausted)
    status, hint, limit_reached = read_hints(error)
    failure = classify(
        message,
        code=_enum(ErrorCode, getattr(error, "error_code", None)),
        failure_type=_enum(FailureType, getattr(error, "failure_type", None)),
        exceptions=names,
        http_status=status,
        retry_after=hint,
        limit_reached=limit_reached,
    )
    return replace(failure, exhausted=True) if _exhausted(error, since) else failure


def _shape(cls: type) -> _Shape:
    names = tuple(class_name(c) for c in cls.__mro__ if c is not object and c is not BaseException)
    plain = not any(hasattr(cls, name) for name in _TELLING)
    if len(_shapes) >= _TYPES_KEPT:
        _shapes.clear()
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
        if getattr(link, EXHAUSTED_MARK, 0) > since:
            return True
        link = link.__cause__
    return False


def read_hints(error: object) -> tuple[int | None, float | None, bool]:
    """Status, retry-after in seconds, and whether the headers say that a rate limit is spent."""
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
    """Transient, rate limited, permanent or unknown: by the exception if there is one, else by the message's words."""
    text = redact(message)
    if exception is None:
        return classify(text, http_status=status_in(text)).failure_type
    seen = read_failure(exception)
    if seen.failure_type is not FailureType.UNKNOWN and not text:
        return seen.failure_type
    status, hint, limit_reached = read_hints(exception)
    return classify(
        text or seen.message,
        exceptions=seen.exceptions,
        http_status=status or status_in(text),
        retry_after=hint,
        limit_reached=limit_reached,
    ).failure_type
