"""
What is worth another try when nobody said: connection errors, time-outs, HTTP 408, 429 and 5xx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reefknot.core.failure import Failure
from reefknot.core.retry.classify import passing_by_nature
from reefknot.execution.judge import every_leaf
from reefknot.execution.reading import read_failure

if TYPE_CHECKING:
    from reefknot.execution.judge import Answer


def by_nature(error: Exception, failure: Failure) -> Answer:
    """The library's own judge; of a group it asks for every leaf."""
    if isinstance(error, BaseExceptionGroup):
        return every_leaf(error, lambda leaf: by_nature(leaf, read_failure(leaf)))
    return passing_by_nature(failure)


def http_errors(error: Exception) -> Answer:
    """
    `on=rk.http_errors`: transport errors and HTTP 408, 429, 5xx of httpx, requests, aiohttp and urllib.

    It is the library's default, by name, for use inside a predicate of one's own.
    """
    return by_nature(error, read_failure(error))
