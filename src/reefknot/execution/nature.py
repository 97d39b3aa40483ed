"""
What is worth another try when nobody said: connection errors, time-outs, HTTP 408, 429 and 5xx; and what an exception
declares of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.classify import passing_by_nature, retryable_code
from reefknot.execution.judge import every_leaf
from reefknot.execution.reading import read_failure

if TYPE_CHECKING:
    from reefknot.execution.judge import Answer


def by_nature(error: Exception, failure: Failure) -> Answer:
    """The library's own judge; of a group it asks for every leaf."""
    if isinstance(error, BaseExceptionGroup):
        return every_leaf(error, lambda leaf: by_nature(leaf, read_failure(leaf)))
    declared = _declared(error, failure)
    return passing_by_nature(failure) if declared is None else declared


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
