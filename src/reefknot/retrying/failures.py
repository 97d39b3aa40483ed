"""
Exceptions read as `Failure`s, and which of them are retried by default.

This is the only place that looks into a live exception: class names, status, the server's hints, redacted text. The
exception itself is not kept. Third-party classes are recognised by name and attributes, never imported.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from reefknot import clock
from reefknot.core.checks import is_number
from reefknot.core.classify import (
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
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import class_name
from reefknot.retrying.exhaustion import is_exhausted
from reefknot.retrying.functions import UNREADABLE, every_leaf, is_group, leaves_of
from reefknot.runtime.redactor import on_other_secrets, process_redactor, redact

if TYPE_CHECKING:
    from reefknot.retrying.functions import Verdict

_MOST_SECONDS = 1e300
_MAX_CLASSES = 1024
_ATTRIBUTES = (
    *("retry_after", "response", "status_code", "status", "headers", "error_code", "failure_type"),
    *("grpc_status_code", "details"),
)
"""Attributes of an exception class that say more than its name and message."""

_UNREACHABLE: dict[int | None, str] = {
    number: f"errno.{name}"
    for number, name in errno.errorcode.items()
    if name in ("EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN")
}
"""Network errors that Python raises as a plain `OSError`, recognised by their number."""
_ClassTraits = tuple[tuple[str, ...], Kind | None, bool]
"""Class names along the MRO, the kind they determine, and whether the class has none of `_ATTRIBUTES`."""
_traits_of: dict[type, _ClassTraits] = {}
_last_failure: dict[type, Failure] = {}
"""
The last failure of each class that is read by its text alone, because an outage repeats itself. The kept message is
redacted, so a text with a secret in it never equals it and is read again; so are all of them with other secrets.
"""
on_other_secrets(_last_failure.clear)


# ---- retried by default ----------------------------------------------------------------------------------------------


def retryable_by_default(error: Exception, failure: Failure) -> Verdict:
    """
    The rule without `on=`: connection errors, timeouts, HTTP 408, 429 and 5xx, and whatever an exception declares.

    A group is retried only if every leaf is.
    """
    if is_group(error):
        return every_leaf(error, lambda leaf: retryable_by_default(leaf, failure_from(leaf)))
    declared = _declared_retryable(error, failure)
    return is_transient(failure) if declared is None else declared


def _declared_retryable(error: Exception, failure: Failure) -> bool | None:
    """
    Whether the exception declares itself retryable; None without a declaration.

    By `error_code` or `failure_type`, else by the status of the service that answered with it.
    """
    code, kind = _declared(error)
    if code is not None:
        return retryable_code(code, failure.http_status)
    service = None if kind is not None else _kind_of_service(error)
    if service is not None:
        kind = service.failure_type
    return None if kind is None else kind in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)


def _declared(error: BaseException) -> tuple[ErrorCode | None, FailureType | None]:
    code, kind = _read(error, "error_code"), _read(error, "failure_type")
    return code if type(code) is ErrorCode else None, kind if type(kind) is FailureType else None


def _kind_of_service(error: BaseException) -> Kind | None:
    """The kind of an error that AWS or a gRPC service answered with, by its shape; None for any other."""
    cls = type(error)
    traits = _traits_of.get(cls)
    try:
        if traits is not None and traits[2] and not error.__dict__:
            return None
        answer = _aws_answer(error)
        if answer is not None:
            return AWS_CODES.get(str(_item(answer.get("Error"), "Code")))
        status = _read(error, "grpc_status_code")  # google-api-core
        if status is None and str(cls.__module__).startswith("grpclib"):
            status = _read(error, "status")
        # A method of grpc.RpcError; looked for in the class, because reading aiohttp's property of that name warns.
        if status is None and callable(_read(cls, "code")) and _read(error, "details") is not None:
            status = error.code()  # type: ignore[attr-defined]
        name = _read(status, "name")
        return GRPC_STATUSES.get(name) if type(name) is str else None
    except UNREADABLE:  # a method or a dictionary that raises
        return None


def _aws_answer(error: object) -> dict[str, object] | None:
    """The response of a botocore `ClientError`, which is a dictionary; None for any other error."""
    response = _read(error, "response")
    return response if type(response) is dict and "ResponseMetadata" in response else None


def _aws_hints(answer: dict[str, object]) -> tuple[int | None, float | None]:
    """HTTP status and seconds to wait, of botocore's response."""
    metadata = answer["ResponseMetadata"]
    status = _item(metadata, "HTTPStatusCode")
    hint = _delay(_headers(metadata, _item(metadata, "HTTPHeaders")).get("retry-after"))
    return status if type(status) is int and 100 <= status <= 599 else None, hint


def _item(mapping: object, key: str) -> object:
    return mapping.get(key) if type(mapping) is dict else None


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
        if type(text) is not str:
            text = str.__str__(text)  # a plain text, whatever class of text it was
        last = _last_failure.get(cls)
        if last is not None and last.message == text and error.__cause__ is None and not error.__dict__:
            return last
        redactor = process_redactor()
        message = redactor(text)
    except UNREADABLE:
        redactor, message = None, f"<{cls.__name__} cannot be shown>"
    names, kind, has_no_attributes = _traits_of.get(cls) or _class_traits(cls)
    try:
        number = getattr(error, "errno", None) if kind is None and issubclass(cls, OSError) else None
        if number in _UNREACHABLE:
            names = (_UNREACHABLE[number], *names)
            kind = kind_of_class(names)
        if has_no_attributes and not error.__dict__:
            exhausted = error.__cause__ is not None and is_exhausted(error, since)
            if kind is None:
                kind = kind_of_text(message)
            failure = Failure(kind.code, kind.failure_type, message, None, None, names, exhausted)
            if not exhausted and redactor is process_redactor():
                _last_failure[cls] = failure
            return failure
        failure = _failure_from_attributes(error, message, names)
        return replace(failure, exhausted=True) if is_exhausted(error, since) else failure
    except UNREADABLE:  # an attribute that raises when it is read; class and message still count
        return classify(message, exceptions=names)


def _read(source: object, name: str) -> Any:
    """An attribute, or None: one that raises when it is read says nothing, and hides none of the others."""
    try:
        return getattr(source, name, None)
    except UNREADABLE:
        return None


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
    reason = _read(error, "reason")
    if not isinstance(reason, BaseException) or "urllib.error.URLError" not in names:
        return ()
    cls = type(reason)
    inner = (_traits_of.get(cls) or _class_traits(cls))[0]
    number = reason.errno if isinstance(reason, OSError) else None
    return (_UNREACHABLE[number], *inner) if number in _UNREACHABLE else inner


def _class_traits(cls: type) -> _ClassTraits:
    names = tuple(class_name(c) for c in cls.__mro__ if c is not object and c is not BaseException)
    has_no_attributes = not issubclass(cls, BaseExceptionGroup) and not any(hasattr(cls, name) for name in _ATTRIBUTES)
    if len(_traits_of) >= _MAX_CLASSES:
        _traits_of.clear()
        _last_failure.clear()
    traits = _traits_of[cls] = (names, kind_of_class(names), has_no_attributes)
    return traits


def read_hints(error: object) -> tuple[int | None, float | None, bool]:
    """HTTP status, seconds to wait, and whether a rate limit is spent by its headers; of a group, the longest wait."""
    if issubclass(type(error), BaseExceptionGroup):
        hints = [hint for _, hint, _ in map(read_hints, leaves_of(error)) if hint is not None]  # type: ignore[arg-type]
        return None, max(hints, default=None), False
    answer = _aws_answer(error)
    if answer is not None:
        return *_aws_hints(answer), False
    response = _read(error, "response")
    status = _status(error) or _status(response)
    headers = _headers(error) or _headers(response)
    hint = _delay(_read(error, "retry_after"))
    if hint is None:
        hint = _delay(_read(response, "retry_after"))
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
        value = _read(source, name)
        if not issubclass(type(value), int) or type(value) is bool:
            continue
        status = int.__index__(value)  # also of an `HTTPStatus`; a class of numbers may have changed everything else
        if 100 <= status <= 599 and (name != "code" or _has_status_code(source)):
            return status
    return None


def _has_status_code(source: object) -> bool:
    """Whether `code` of this object is a status: of urllib's and google-api-core's errors it is."""
    if _read(source, "headers") is not None:
        return True
    try:
        return hasattr(source, "grpc_status_code")  # None for those that came by HTTP
    except UNREADABLE:
        return False


def _headers(source: object, given: object = None) -> dict[str, str]:
    headers: Any = _read(source, "headers") if given is None else given
    if headers is None or _read(headers, "items") is None:
        return {}
    try:
        return {str(name).lower(): str(value) for name, value in list(headers.items())[:200]}
    except UNREADABLE:
        return {}


def _delay(value: object) -> float | None:
    """Seconds from a number, a timedelta, a text of digits, or an HTTP date; None for anything else."""
    if is_number(value):
        return float(value) if 0 <= value <= _MOST_SECONDS else None
    if _read(value, "total_seconds") is not None:
        try:
            return max(0.0, float(value.total_seconds()))  # type: ignore[attr-defined]
        except UNREADABLE:
            return None
    if not isinstance(value, str):
        return None
    text = value.strip()[:64]
    return float(text) if text.isascii() and text.replace(".", "", 1).isdigit() else _until_date(text)


def _until_date(text: str) -> float | None:
    from datetime import UTC
    from email.utils import parsedate_to_datetime

    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - clock.wall())


def _until_reset(text: str | None) -> float | None:
    text = "" if text is None else text.strip()
    if not (text.isascii() and text.isdigit()):  # a superscript two is a digit but not a number
        return None
    return max(0.0, int(text[:12]) - clock.wall())


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
