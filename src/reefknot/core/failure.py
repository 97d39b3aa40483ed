"""
What went wrong, as data.

A `Failure` is cut and redacted when it is built. Whoever decides, records or repeats a decision sees this record and
nothing else, so a decision repeated next year sees what the first one saw.
"""

from enum import IntEnum, StrEnum

from msgspec import Struct


class ErrorCategory(StrEnum):
    """The thousands of an `ErrorCode`."""

    NONE = "none"
    VALIDATION = "validation"
    EXECUTION = "execution"
    NETWORK = "network"
    SYSTEM = "system"
    CANCELLATION = "cancellation"


class ErrorCode(IntEnum):
    """What a step can fail with. The numbers are part of the wire and never change."""

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
        """The name as messages carry it."""
        return self.name.upper()


_CATEGORIES = tuple(ErrorCategory)


class FailureType(StrEnum):
    """How a failure bears on another try."""

    TRANSIENT = "transient"
    RATE_LIMITED = "rate_limited"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


class Failure(Struct, frozen=True, gc=False):
    """One failed execution, ready to be judged, stored and judged again."""

    code: ErrorCode
    failure_type: FailureType
    message: str = ""
    http_status: int | None = None
    retry_after: float | None = None
    exceptions: tuple[str, ...] = ()
    """The exception's class names, qualified, most specific first."""
    exhausted: bool = False
    """An inner retry already gave up on this very failure."""

    @property
    def category(self) -> ErrorCategory:
        return self.code.category

    @property
    def exception(self) -> str:
        """The bare name of the exception's class, or an empty string."""
        return self.exceptions[0].rpartition(".")[2] if self.exceptions else ""

    def __str__(self) -> str:
        name = self.exception or self.code.name
        return f"{name}: {self.message}" if self.message else name
