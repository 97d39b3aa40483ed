"""
What the book says when no file does.

Blocks have built in only the global default and the table of codes and statuses; connectors and operations have an
entry each. The baseline is a preset of the same engine, not a second loop.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.retry.book import Book, CategoryEntry, StatusRules, TargetEntry
from reefknot.core.retry.classify import retryable_code
from reefknot.core.retry.connectors import CONNECTORS, OTHER_CONNECTORS, ConnectorDefaults
from reefknot.core.retry.layers import Layer, Patch, Said, patch
from reefknot.core.retry.operations import OPERATIONS, UNLISTED, OperationDefaults
from reefknot.core.retry.policy import LONGEST_WAIT, Jitter, RetryPolicy, RetryStrategy

DEFAULT_TIMEOUT = 30.0
"""Seconds that a step has when its request does not say."""
BASELINE_RETRIES = 3

_EVERYWHERE: dict[str, Any] = {
    "strategy": RetryStrategy.EXPONENTIAL_BACKOFF,
    "multiplier": 2.0,
    "jitter_factor": 0.1,
    "time_budget": None,
    "attempt_timeout": None,
    "max_retry_after": 300.0,
    "retryable": True,
}


def _said(source: str, fields: Mapping[str, Any]) -> Patch:
    return patch(Layer.BUILTIN, f"built-in: {source}", fields)


BASE: dict[str, tuple[Patch, ...]] = {
    "block": (
        _said(
            "worker default",
            _EVERYWHERE
            | {
                "max_attempts": 4,
                "base_delay": 0.1,
                "max_delay": 30.0,
                "jitter": Jitter.FULL,
                "time_budget": DEFAULT_TIMEOUT,
            },
        ),
    ),
    "connector": (_said("connector default", _EVERYWHERE | {"jitter": Jitter.PROPORTIONAL, "whole_seconds": True}),),
    "operation": (_said("operation default", _EVERYWHERE | {"jitter": Jitter.PROPORTIONAL}),),
}


def _connector(name: str, defaults: ConnectorDefaults) -> TargetEntry:
    source = f"connector {name}"
    overrides = {FailureType.PERMANENT: _said(source, {"retryable": False})}
    if defaults.transient_max_attempts is not None:
        overrides[FailureType.TRANSIENT] = _said(source, {"max_attempts": defaults.transient_max_attempts + 1})
    if defaults.rate_limit_delay_seconds is not None:
        overrides[FailureType.RATE_LIMITED] = _said(source, {"base_delay": float(defaults.rate_limit_delay_seconds)})
    policy = _said(
        source,
        {
            "max_attempts": defaults.max_attempts + 1,
            "base_delay": float(defaults.base_delay_seconds),
            "max_delay": float(defaults.max_delay_seconds),
            "jitter_factor": defaults.jitter_factor,
        },
    )
    return TargetEntry(policy, overrides)  # type: ignore[arg-type]  # a failure type is a condition


def _operation(name: str, defaults: OperationDefaults) -> TargetEntry:
    fields = {
        "max_attempts": defaults.max_attempts,
        "base_delay": defaults.base_delay,
        "max_delay": defaults.max_delay,
        "attempt_timeout": defaults.timeout,
    }
    return TargetEntry(_said(f"operation {name}", fields))


def connector_entry(name: str) -> TargetEntry:
    """What is built in for a connector, known or not."""
    known: dict[str, ConnectorDefaults] = {job_type.value: defaults for job_type, defaults in CONNECTORS.items()}
    return _connector(name, known.get(name, OTHER_CONNECTORS))


def operation_entry(target: str) -> TargetEntry:
    """What is built in for an operation's target, listed or not."""
    known = {category.target: defaults for category, defaults in OPERATIONS.items()}
    return _operation(target.partition(":")[2], known.get(target, UNLISTED))


TARGETS: dict[str, tuple[TargetEntry, ...]] = {
    **{f"connector:{job_type.value}": (connector_entry(job_type.value),) for job_type in CONNECTORS},
    **{category.target: (operation_entry(category.target),) for category in OPERATIONS},
}
OTHERS: dict[str, TargetEntry] = {
    "connector": _connector("default", OTHER_CONNECTORS),
    "operation": _operation("default", UNLISTED),
}
"""For connectors and operations that nobody spoke of."""


def _flag(code: ErrorCode) -> bool | str:
    return "conditional" if code is ErrorCode.http_error else retryable_code(code)


CATEGORIES: dict[ErrorCategory, CategoryEntry] = {
    category: CategoryEntry(
        codes={
            code: Said(_flag(code), Layer.BUILTIN, "built-in: error codes")
            for code in ErrorCode
            if code.category is category
        }
    )
    for category in ErrorCategory
}

_STATUS_SOURCE = "built-in: HTTP statuses"
STATUSES = StatusRules(
    # 1xx to 3xx are not failures; who reports one as such will not get another answer by asking again.
    hundreds={hundred: Said(hundred == 5, Layer.BUILTIN, _STATUS_SOURCE) for hundred in range(1, 6)},
    statuses={
        408: Said(True, Layer.BUILTIN, _STATUS_SOURCE),
        429: Said(True, Layer.BUILTIN, _STATUS_SOURCE),
    },
)


def builtin_book(hash: str = "builtin") -> Book:  # noqa: A002 - as in Book
    """The book without any file."""
    return Book(
        base=BASE,
        categories={category: (entry,) for category, entry in CATEGORIES.items()},
        statuses=(STATUSES,),
        targets=TARGETS,
        others=OTHERS,
        sources={},
        hash=hash,
    )


def as_the_baseline_sees(failure: Failure) -> Failure:
    """The baseline retries every failure after its own wait: it does not hear how long a server asks it to wait."""
    return failure if failure.retry_after is None else replace(failure, retry_after=None)


def baseline(
    retry_count: int = BASELINE_RETRIES, *, timeout: float = DEFAULT_TIMEOUT, retryable: bool = True
) -> RetryPolicy:
    """
    The behaviour with the gate off: 100, 200, 300 ms, no jitter, every failure retried, no time budget.

    `timeout` bounds each attempt. Cancellation is not retried here either: the caller says so with `retryable`.
    """
    return RetryPolicy(
        retry_count + 1,
        0.1,
        max_delay=LONGEST_WAIT,
        strategy=RetryStrategy.LINEAR_BACKOFF,
        jitter=Jitter.NONE,
        attempt_timeout=timeout,
        retryable=retryable,
    )
