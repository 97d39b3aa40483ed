"""
What a worker counts about its retries, and shows as one frozen snapshot.

Plain numbers of this process; events are the record. Nothing here is on any decision's path.
"""

from collections import Counter

from msgspec import Struct


class RetryCounts(Struct, frozen=True):
    """Retries of one worker since it started."""

    executions: int
    succeeded: int
    """Assignments that ended well, the first try included."""
    failed: int
    retries: int
    retries_by_code: dict[str, int]
    """By the error code of the failure that is retried."""
    retries_by_block: dict[str, int]
    recovered: int
    """Assignments that succeeded after at least one retry."""
    given_up: int
    """Assignments that failed although they were retried."""
    mean_backoff_s: float
    budget_exhaustions: int
    throttled: int
    expired: int
    retry_success_rate: float | None
    """Of the assignments that were retried and have ended, how many succeeded. None while there is none."""


class Counters:
    """Counts."""

    def __init__(self) -> None:
        self.executions = 0
        self.succeeded = 0
        self.failed = 0
        self.recovered = 0
        self.given_up = 0
        self.budget_exhaustions = 0
        self.throttled = 0
        self.expired = 0
        self._backoff = 0.0
        self._by_code: Counter[str] = Counter()
        self._by_block: Counter[str] = Counter()

    def retry(self, code: str, block: str, delay: float) -> None:
        """Another attempt was granted, after `delay` seconds."""
        self._by_code[code] += 1
        self._by_block[block] += 1
        self._backoff += delay

    def ended(self, *, ok: bool, retried: bool) -> None:
        """An assignment ended."""
        if ok:
            self.succeeded += 1
            self.recovered += retried
        else:
            self.failed += 1
            self.given_up += retried

    def snapshot(self) -> RetryCounts:
        retries, ended = self._by_code.total(), self.recovered + self.given_up
        return RetryCounts(
            executions=self.executions,
            succeeded=self.succeeded,
            failed=self.failed,
            retries=retries,
            retries_by_code=dict(self._by_code),
            retries_by_block=dict(self._by_block),
            recovered=self.recovered,
            given_up=self.given_up,
            mean_backoff_s=self._backoff / retries if retries else 0.0,
            budget_exhaustions=self.budget_exhaustions,
            throttled=self.throttled,
            expired=self.expired,
            retry_success_rate=self.recovered / ended if ended else None,
        )
