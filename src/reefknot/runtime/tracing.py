"""
The interface of tracing: where spans begin and end, independent of any tracing library.

`tracing.tracer` is None until `reefknot.console.traces` puts one there, and while it is None a call pays for one
comparison. A `CallTrace` is the spans of one call: an operation, and a child for each of its attempts. Only the span of
an attempt is current, so that spans of the work itself are its children, and nothing is current during a wait.

The text in a span is that of a `Failure`, which is redacted: no span ever holds an exception.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Protocol, TypeAlias

    from reefknot.core.failure import Failure

    Attributes: TypeAlias = Mapping[str, str | int | float | bool | None]
    """Attributes of a span; those that are None are left out."""

    class TraceSpan(Protocol):
        """A span that has begun."""

        @property
        def traceparent(self) -> str:
            """The identity of this span, as W3C Trace Context writes it."""

        def enter(self) -> None:
            """Make this span the current one, until `end`."""

        def set(self, attributes: Attributes) -> None: ...

        def failed(self, failure: Failure | str) -> None:
            """Mark this span as failed, with the failure as an event."""

        def end(self) -> None: ...

    class Tracer(Protocol):
        """A tracing library, as the rest of the code sees it."""

        def start(
            self, name: str, attributes: Attributes, *, kind: str = "internal", parent: TraceSpan | str | None = None
        ) -> TraceSpan:
            """Begin a span below `parent`; without one, below the current span."""

        def current(self) -> str | None:
            """The `traceparent` of the current span."""

        def operation(self, key: str, parent: str | None, trace_id: str | None) -> str:
            """
            The `traceparent` of an operation that several processes may share, always the same for one `key`.

            Its trace is that of `parent`, else `trace_id` if that can be one, else one that follows from the key.
            """

        def record(
            self, operation: str, name: str, attributes: Attributes, *, parent: str | None, began: float, error: str
        ) -> None:
            """Record an operation that has ended now. It began at `began`, wall time, and failed if `error` says so."""


class Tracing:
    """The tracer of this process."""

    __slots__ = ("tracer",)

    def __init__(self) -> None:
        self.tracer: Tracer | None = None


tracing = Tracing()

RETRY = "reefknot.retry"
ATTEMPT = "reefknot.attempt"
LONGEST_NAME = 100


class CallTrace:
    """Spans of one call. Every method may be called at any time; a span ends once."""

    __slots__ = ("_attempt", "_name", "_operation", "_tracer")

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name[:LONGEST_NAME]
        self._operation: TraceSpan | None = None
        self._attempt: TraceSpan | None = None

    def attempt_started(self, number: int) -> None:
        """Begin the span of an attempt, and before the first one that of the operation."""
        if self._operation is None:
            self._operation = self._tracer.start(f"{RETRY} {self._name}", {"reefknot.name": self._name})
        self._attempt = self._tracer.start(ATTEMPT, {"reefknot.attempt": number}, parent=self._operation)
        self._attempt.enter()

    def succeeded(self, attempts: int) -> None:
        """End both spans well."""
        if self._attempt is not None:
            self._attempt.set({"reefknot.outcome": "succeeded"})
        if self._operation is not None:
            outcome = "succeeded" if attempts == 1 else "recovered"
            self._operation.set({"reefknot.outcome": outcome, "reefknot.attempts": attempts})
        self.end()

    def attempt_failed(
        self, number: int, failure: Failure | None, *, wait: float | None, reason: str | None, is_asked: bool
    ) -> None:
        """End the attempt's span with its failure and what follows from it. `is_asked`: it asked for another one."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.set(failure_attributes(failure, wait=wait, reason=reason))
            if not is_asked:
                attempt.failed(failure or "unreadable")
            attempt.end()
        if wait is None:
            self.gave_up(number, failure, reason)

    def gave_up(self, attempts: int, failure: Failure | None, reason: str | None) -> None:
        """End the operation's span with the failure that its caller gets."""
        if self._operation is not None:
            self._operation.set(
                {"reefknot.outcome": "failed", "reefknot.reason": reason, "reefknot.attempts": attempts}
            )
            self._operation.failed(failure or "unreadable")
        self.end()

    def end(self) -> None:
        """End what has not ended: an attempt that was cancelled, a loop that was left."""
        attempt, self._attempt = self._attempt, None
        operation, self._operation = self._operation, None
        if attempt is not None:
            attempt.end()
        if operation is not None:
            operation.end()


def failure_attributes(failure: Failure | None, *, wait: float | None, reason: str | None) -> dict[str, Any]:
    """Attributes of an attempt that failed: how the failure was classified, and the decision."""
    return {
        "reefknot.outcome": "retried" if wait is not None else "failed",
        "reefknot.wait_s": wait,
        "reefknot.reason": reason,
        "reefknot.error_code": None if failure is None else failure.code.wire,
        "reefknot.failure_type": None if failure is None else failure.failure_type.value,
        "http.response.status_code": None if failure is None else failure.http_status,
    }


def current_traceparent() -> str | None:
    """The `traceparent` of the current span; None while tracing is off."""
    return None if tracing.tracer is None else tracing.tracer.current()


def current_trace_id() -> str | None:
    """The id of the current trace, for a log line."""
    current = current_traceparent()
    return None if current is None else current[3:35]
