"""
The operations of a coordination layer, and what is built in for each.

A category travels as its value. `nats.publish` is how a target spells it: `operation:nats.publish`.
"""

from enum import StrEnum
from typing import NamedTuple


class RetryCategory(StrEnum):
    """What kind of operation is being retried. Two values say REPLAY twice; they are kept as they were given."""

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
        """As a target spells it: `nats.stream_create`."""
        group, _, rest = self.name.lower().partition("_")
        return f"{group}.{rest}"

    @property
    def target(self) -> str:
        return f"operation:{self.spelled}"

    @classmethod
    def _missing_(cls, value: object) -> "RetryCategory | None":
        return _SPELLINGS.get(value.lower()) if isinstance(value, str) else None


class OperationDefaults(NamedTuple):
    """A row of the matrix, and the time that one attempt may take."""

    max_attempts: int
    base_delay: float
    max_delay: float
    timeout: float


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
