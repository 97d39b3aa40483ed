"""Work that fails as told, and a retrier that asks the worker's own table of error codes (`retryable_code`)."""

from collections.abc import Callable

import reefknot as rk
from reefknot.core.classify import retryable_code
from reefknot.core.failure import ErrorCode, Failure

V2 = rk.RetryPolicy(4, 0.1, max_delay=30.0, jitter="none")
"""The CP2 defaults, 1 + 3 retries, without jitter so that waits can be compared."""


class StepError(Exception):
    """A step failed with a code of the worker's, and a status when it was HTTP."""

    def __init__(self, code: ErrorCode, *, http_status: int | None = None) -> None:
        super().__init__("the step failed")
        self.error_code = code
        if http_status is not None:
            self.status_code = http_status


class HttpError(Exception):
    """What an HTTP client raises: a status and nothing else."""

    def __init__(self, status: int) -> None:
        super().__init__("the request failed")
        self.status_code = status


class Work:
    """Fails with `error` the first `times` executions (always, unless told), then succeeds."""

    def __init__(self, error: Exception, *, times: int = 1_000_000) -> None:
        self._error = error
        self._times = times
        self.executions = 0

    def __call__(self) -> str:
        self.executions += 1
        if self.executions <= self._times:
            raise self._error
        return "done"


def worker(policy: rk.RetryPolicy) -> rk.Retrier:
    """The engine as a worker drives it: the error code, and the status behind it, say whether to retry."""
    return rk.Retrier.following(by_code(policy), policy, name="step")


def by_code(policy: rk.RetryPolicy) -> Callable[[Failure], rk.RetryPolicy]:
    """The policy for a failure: the given one, retryable or not by the table of error codes."""
    return lambda failure: policy.replace(retryable=retryable_code(failure.code, failure.http_status))
