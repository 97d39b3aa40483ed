"""
The built-in policies, which apply where no file sets a value.

Blocks have built in only the global default and the table of codes and statuses; connectors and operations have an
entry each. Connectors count retries and whole seconds. An operation's category is recorded by its value;
`operation:nats.publish` is its target. The baseline is a preset of the same engine, not a second loop.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec.structs import replace

from reefknot.core.classify import RETRYABLE_4XX, retryable_code, retryable_status
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.policy import LONGEST_WAIT, Jitter, RetryPolicy, RetryStrategy
from reefknot.policy.model.book import Book, CategoryEntry, FieldValue, Layer, Patch, StatusRules, TargetEntry, patch


class JobType(StrEnum):
    """The built-in connectors, by the type of job that reads a source."""

    LOCAL_FILES = "local_files"
    OBSIDIAN_VAULT = "obsidian_vault"
    IMAP_MAILBOX = "imap_mailbox"
    GITHUB_REPOSITORY = "github_repository"


class ConnectorDefaults(NamedTuple):
    max_attempts: int = 3
    base_delay_seconds: int = 60
    max_delay_seconds: int = 1800
    jitter_factor: float = 0.2
    transient_max_attempts: int | None = None
    rate_limit_delay_seconds: int | None = None


OTHER_CONNECTORS = ConnectorDefaults()
CONNECTORS: dict[str, ConnectorDefaults] = {
    JobType.LOCAL_FILES: ConnectorDefaults(3, 30, 300),
    JobType.OBSIDIAN_VAULT: ConnectorDefaults(3, 30, 300),
    JobType.IMAP_MAILBOX: ConnectorDefaults(5, 120, 1800, 0.3, transient_max_attempts=7, rate_limit_delay_seconds=600),
    JobType.GITHUB_REPOSITORY: ConnectorDefaults(5, 300, 3600, 0.25, rate_limit_delay_seconds=900),
}


class RetryCategory(StrEnum):
    """The built-in operations. Two values contain REPLAY twice; they are part of the contract."""

    NATS_CONNECT = "RETRY_NATS_CONNECT"
    NATS_PUBLISH = "RETRY_NATS_PUBLISH"
    NATS_SUBSCRIBE = "RETRY_NATS_SUBSCRIBE"
    NATS_STREAM_CREATE = "RETRY_NATS_STREAM_CREATE"
    KV_CREATE = "RETRY_KV_CREATE"
    KV_GET = "RETRY_KV_GET"
    KV_PUT = "RETRY_KV_PUT"
    KV_DELETE = "RETRY_KV_DELETE"
    EXECUTION_INTENT = "RETRY_EXECUTION_INTENT"
    EXECUTION_CONTAINMENT = "RETRY_EXECUTION_CONTAINMENT"
    EXECUTION_EXPIRATION = "RETRY_EXECUTION_EXPIRATION"
    APPROVAL_CHECK = "RETRY_APPROVAL_CHECK"
    APPROVAL_GRANT = "RETRY_APPROVAL_GRANT"
    REPLAY_PROCESSING = "REPLAY_REPLAY_PROCESSING"
    REPLAY_VALIDATION = "REPLAY_REPLAY_VALIDATION"
    API_REQUEST = "RETRY_API_REQUEST"
    API_VALIDATION = "RETRY_API_VALIDATION"

    @property
    def spelled(self) -> str:
        """The name of the category in a target: `nats.stream_create`."""
        group, _, rest = self.name.lower().partition("_")
        return f"{group}.{rest}"

    @property
    def target(self) -> str:
        return f"operation:{self.spelled}"

    @classmethod
    def _missing_(cls, value: object) -> "RetryCategory | None":
        return _SPELLINGS.get(value.lower()) if isinstance(value, str) else None


class OperationDefaults(NamedTuple):
    """A row of the matrix of operations: attempts, delays, and the time limit of one attempt."""

    max_attempts: int
    base_delay: float
    max_delay: float
    attempt_timeout: float


UNLISTED = OperationDefaults(3, 1.0, 30.0, 30.0)
OPERATIONS: dict[RetryCategory, OperationDefaults] = {
    RetryCategory.NATS_CONNECT: OperationDefaults(5, 1.0, 30.0, 10.0),
    RetryCategory.NATS_PUBLISH: OperationDefaults(3, 0.5, 10.0, 5.0),
    RetryCategory.NATS_SUBSCRIBE: OperationDefaults(3, 0.5, 10.0, 5.0),
    RetryCategory.NATS_STREAM_CREATE: OperationDefaults(2, 2.0, 60.0, 15.0),
    RetryCategory.KV_CREATE: OperationDefaults(2, 1.0, 30.0, 10.0),
    RetryCategory.KV_GET: OperationDefaults(3, 0.5, 10.0, 5.0),
    RetryCategory.KV_PUT: OperationDefaults(3, 0.5, 10.0, 5.0),
    RetryCategory.KV_DELETE: OperationDefaults(2, 1.0, 30.0, 5.0),
    RetryCategory.EXECUTION_INTENT: OperationDefaults(2, 2.0, 60.0, 30.0),
    RetryCategory.EXECUTION_CONTAINMENT: OperationDefaults(2, 2.0, 60.0, 60.0),
    RetryCategory.EXECUTION_EXPIRATION: OperationDefaults(1, 1.0, 30.0, 120.0),
    RetryCategory.APPROVAL_CHECK: OperationDefaults(3, 1.0, 30.0, 5.0),
    RetryCategory.APPROVAL_GRANT: OperationDefaults(2, 2.0, 60.0, 10.0),
    RetryCategory.REPLAY_PROCESSING: OperationDefaults(1, 1.0, 30.0, 300.0),
    RetryCategory.REPLAY_VALIDATION: OperationDefaults(2, 1.0, 30.0, 60.0),
    RetryCategory.API_REQUEST: OperationDefaults(3, 1.0, 30.0, 30.0),
    RetryCategory.API_VALIDATION: OperationDefaults(2, 0.5, 10.0, 10.0),
}

_SPELLINGS: dict[str, RetryCategory] = {
    spelling.lower(): category
    for category in RetryCategory
    for spelling in (category.value, category.name, category.spelled, f"RETRY_{category.name}")
}


def operation_target(name: str) -> str:
    """The target of an operation given by any of its spellings; a name that is not built in stays as it is."""
    category = _SPELLINGS.get(name.lower())
    return category.target if category is not None else f"operation:{name.lower()}"


DEFAULT_TIMEOUT = 30.0
"""The time budget of a step whose request sets none, in seconds."""
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
_FOR_BLOCKS = {
    "max_attempts": 4,
    "base_delay": 0.1,
    "max_delay": 30.0,
    "jitter": Jitter.FULL,
    "time_budget": DEFAULT_TIMEOUT,
}


def _patch(source: str, fields: Mapping[str, Any]) -> Patch:
    return patch(Layer.BUILTIN, f"built-in: {source}", fields)


BASE: dict[str, tuple[Patch, ...]] = {
    "block": (_patch("worker default", _EVERYWHERE | _FOR_BLOCKS),),
    "connector": (_patch("connector default", _EVERYWHERE | {"jitter": Jitter.PROPORTIONAL, "whole_seconds": True}),),
    "operation": (_patch("operation default", _EVERYWHERE | {"jitter": Jitter.PROPORTIONAL}),),
}


def connector_entry(name: str) -> TargetEntry:
    """The built-in entry of a connector, known or not."""
    source, defaults = f"connector {name}", CONNECTORS.get(name, OTHER_CONNECTORS)
    overrides = {FailureType.PERMANENT: _patch(source, {"retryable": False})}
    if defaults.transient_max_attempts is not None:
        overrides[FailureType.TRANSIENT] = _patch(source, {"max_attempts": defaults.transient_max_attempts + 1})
    if defaults.rate_limit_delay_seconds is not None:
        overrides[FailureType.RATE_LIMITED] = _patch(source, {"base_delay": float(defaults.rate_limit_delay_seconds)})
    policy = _patch(
        source,
        {
            "max_attempts": defaults.max_attempts + 1,
            "base_delay": float(defaults.base_delay_seconds),
            "max_delay": float(defaults.max_delay_seconds),
            "jitter_factor": defaults.jitter_factor,
        },
    )
    return TargetEntry(policy, overrides)  # type: ignore[arg-type]  # a failure type is a condition


def operation_entry(target: str) -> TargetEntry:
    """The built-in entry of an operation's target, listed or not."""
    name = target.partition(":")[2]
    category = _SPELLINGS.get(name)
    defaults = UNLISTED if category is None else OPERATIONS[category]
    return TargetEntry(_patch(f"operation {name}", defaults._asdict()))


TARGETS: dict[str, tuple[TargetEntry, ...]] = {
    **{f"connector:{name}": (connector_entry(name),) for name in CONNECTORS},
    **{category.target: (operation_entry(category.target),) for category in OPERATIONS},
}
BLOCK_LIMITS = {"block:http.request": _patch("block http.request", {"attempt_timeout": 10.0})}
"""The time limits of standard blocks, beneath what a file says of them."""
OTHERS = {"connector": connector_entry("default"), "operation": operation_entry("operation:default")}
"""The built-in entries of connectors and operations that are neither listed nor configured."""


def _flag(code: ErrorCode) -> bool | str:
    return "conditional" if code is ErrorCode.http_error else retryable_code(code)


CATEGORIES: dict[ErrorCategory, CategoryEntry] = {
    category: CategoryEntry(
        codes={
            code: FieldValue(_flag(code), Layer.BUILTIN, "built-in: error codes")
            for code in ErrorCode
            if code.category is category
        }
    )
    for category in ErrorCategory
}

_STATUS_SOURCE = "built-in: HTTP statuses"
STATUSES = StatusRules(
    # 1xx to 3xx are no failures; a block that reports one as such gets the same answer again.
    hundreds={
        hundred: FieldValue(retryable_status(100 * hundred), Layer.BUILTIN, _STATUS_SOURCE) for hundred in range(1, 6)
    },
    statuses={status: FieldValue(True, Layer.BUILTIN, _STATUS_SOURCE) for status in RETRYABLE_4XX},
)


def builtin_book(hash: str = "builtin") -> Book:  # noqa: A002 - as in Book
    """The policy book without any file."""
    return Book(
        base=BASE,
        categories={category: (entry,) for category, entry in CATEGORIES.items()},
        statuses=(STATUSES,),
        targets=TARGETS,
        others=OTHERS,
        own=BLOCK_LIMITS,
        sources={},
        hash=hash,
    )


def without_retry_after(failure: Failure) -> Failure:
    """The failure without the server's hint: the baseline retries after its own wait, whatever the server asks for."""
    return failure if failure.retry_after is None else replace(failure, retry_after=None)


def baseline(
    retry_count: int = BASELINE_RETRIES, *, timeout: float = DEFAULT_TIMEOUT, retryable: bool = True
) -> RetryPolicy:
    """
    The policy with the gate off: waits of 100, 200, 300 ms, no jitter, every failure retried, no time budget.

    `timeout` bounds each attempt. Cancellation is not retried here either: the caller passes `retryable=False`.
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
