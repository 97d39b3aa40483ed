"""
Failures as data: error codes, failure types, and the record of one failed execution.

A `Failure` is cut and redacted when it is built. Deciding, recording and replaying use this record and nothing else, so
a decision that is replayed next year sees what the first one saw.
"""

from enum import IntEnum, StrEnum

from msgspec import Struct


class ErrorCategory(StrEnum):
    """The category of an `ErrorCode`: its thousands."""

    NONE = "none"
    VALIDATION = "validation"
    EXECUTION = "execution"
    NETWORK = "network"
    SYSTEM = "system"
    CANCELLATION = "cancellation"


class ErrorCode(IntEnum):
    """The codes that a step can fail with. The numbers are part of the wire format and never change."""

    none = 0
    invalid_input = 1001
    missing_required_field = 1002
    invalid_format = 1003
    execution_failed = 2001
    resource_unavailable = 2002
    permission_denied = 2003
    quota_exceeded = 2004
    network_error = 3001
    connection_timeout = 3002
    http_error = 3003
    internal_error = 4001
    system_overload = 4002
    cancelled_by_user = 5001
    cancelled_by_timeout = 5002

    @property
    def category(self) -> ErrorCategory:
        return _CATEGORIES[self // 1000]

    @property
    def wire(self) -> str:
        """The name of the code in messages."""
        return self.name.upper()


_CATEGORIES = tuple(ErrorCategory)


class FailureType(StrEnum):
    """The kind of a failure with regard to retrying."""

    TRANSIENT = "transient"
    RATE_LIMITED = "rate_limited"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


class Failure(Struct, frozen=True, gc=False):
    """A failed execution as data: the input of a decision, of its record, and of its replay."""

    code: ErrorCode
    failure_type: FailureType
    message: str = ""
    http_status: int | None = None
    retry_after: float | None = None
    exceptions: tuple[str, ...] = ()
    """The qualified class names of the exception, most specific first."""
    exhausted: bool = False
    """Whether an inner retry already gave up on this very failure."""

    @property
    def category(self) -> ErrorCategory:
        return self.code.category

    @property
    def exception(self) -> str:
        """The bare name of the exception's class, or an empty string."""
        return self.exceptions[0].rpartition(".")[2] if self.exceptions else ""

    def __str__(self) -> str:
        name = self.exception or self.code.name
        if self.message in ("", name) or self.message.startswith(f"{name}:"):
            return self.message or name
        return f"{name}: {self.message}"
