"""
The spans of a stored piece of work: one for the job, and a child for each of its attempts.

The attempts of a job are separate claims, perhaps of several processes, with waits of hours between them. So the span
of the job has an identity that is computed from the record: every attempt names it as its parent, and the process that
stores the end of the job records it, from the beginning of the first attempt. Its own parent is the span that the job
was submitted in (`traceparent`). A process that dies loses the span of its current attempt, and nothing else.

A job that ends without an attempt has a span as well: the time that it waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from msgspec import structs

from reefknot.core.decide import Again, Decision
from reefknot.core.failure import Failure
from reefknot.queue.model.messages import (
    LARGEST_MESSAGE,
    Correlation,
    ExecAssignment,
    ExecResult,
    ResultStatus,
    encode,
    trace_of,
)
from reefknot.queue.model.results import assignment_of
from reefknot.queue.model.work import WorkItem
from reefknot.runtime.log import error_text, printable
from reefknot.runtime.redactor import redact
from reefknot.runtime.tracing import ATTEMPT, failure_attributes, tracing

if TYPE_CHECKING:
    from reefknot.runtime.tracing import Tracer, TraceSpan

LONGEST_TEXT = 300


class WorkTrace:
    """The spans of one claim of a job. Everything may be called at any time; what has ended ends once."""

    __slots__ = ("_about", "_attempts", "_began_ms", "_first_ms", "_name", "_operation", "_parent", "_span", "_tracer")

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        key: str,
        *,
        since_ms: int,
        about: dict[str, Any],
        first_ms: int | None = None,
        attempts: int = 0,
    ) -> None:
        """
        Begin to trace a claim; `key` is the same for every claim of the job.

        The job was accepted at `since_ms`, and its first attempt began at `first_ms`, if there was one before. `about`
        is `parent`, `trace_id` and attributes.
        """
        parent, trace_id = about.pop("parent", None), about.get("trace_id")
        self._tracer = tracer
        self._name = _text(name, 100)
        self._parent: str | None = parent
        self._operation = tracer.operation(key, parent, trace_id)
        self._began_ms = since_ms if first_ms is None else first_ms
        self._first_ms = first_ms
        self._attempts = attempts
        if trace_id == self.trace_id:
            del about["trace_id"]  # only another one is worth an attribute
        self._about = {f"reefknot.{field}": _text(str(value)) for field, value in about.items() if value is not None}
        self._span: TraceSpan | None = None

    @property
    def trace_id(self) -> str:
        return self._operation[3:35]

    @property
    def traceparent(self) -> str | None:
        """The span of the attempt, for those whom the step calls."""
        return None if self._span is None else self._span.traceparent

    def attempt_started(self, number: int, wall: float) -> None:
        """Begin the span of an attempt and make it current."""
        if self._first_ms is None:
            self._began_ms = self._first_ms = int(wall * 1000)
        self._attempts = number
        self._span = self._tracer.start(ATTEMPT, {"reefknot.attempt": number}, parent=self._operation)
        self._span.enter()

    def attempt_succeeded(self) -> None:
        if self._span is not None:
            self._span.set({"reefknot.outcome": "succeeded"})
            self.attempt_ended()

    def attempt_failed(self, failure: Failure, decision: Decision) -> None:
        """End the span of an attempt with its failure and the decision that follows."""
        if self._span is not None:
            wait, reason = (decision.delay, None) if isinstance(decision, Again) else (None, decision.reason)
            self._span.set(failure_attributes(failure, wait=wait, reason=reason))
            self._span.failed(failure)
            self.attempt_ended()

    def attempt_ended(self) -> None:
        """End the span of an attempt that says nothing: put off, cancelled, or over already."""
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def ended(self, outcome: str, *, error_code: str | None = None, error: str = "") -> None:
        """Record the job, which ends now."""
        attributes = {
            **self._about,
            "reefknot.outcome": outcome,
            "reefknot.attempts": self._attempts,
            "reefknot.error_code": error_code,
        }
        began, text = self._began_ms / 1000, _text(error)
        self._tracer.record(self._operation, self._name, attributes, parent=self._parent, began=began, error=text)

    def succeeded(self) -> None:
        """Record the job, which ends well now."""
        self.ended("succeeded" if self._attempts <= 1 else "recovered")

    def ended_with(self, result: ExecResult, *, quarantined: bool = False) -> None:
        """Record the job of an assignment that ends now with this result."""
        if result.status is ResultStatus.SUCCESS:
            self.succeeded()
            return
        outcome = "quarantined" if quarantined else result.status.value
        text = result.error_message or result.status.value
        self.ended(outcome, error_code=result.error_code, error=text)


def submitting(assignment: ExecAssignment) -> AbstractContextManager[ExecAssignment]:
    """A scope in a span of the caller; yields the assignment with the `traceparent` that its worker continues."""
    return nullcontext(assignment) if tracing.tracer is None else _submitting(tracing.tracer, assignment)


@contextmanager
def _submitting(tracer: Tracer, assignment: ExecAssignment) -> Iterator[ExecAssignment]:
    attributes = {"reefknot.job_id": _text(assignment.assignment_id)}
    name = _text(f"reefknot.submit {assignment.job.type}", 100)
    span = tracer.start(name, attributes, kind="producer", parent=assignment.traceparent)
    with _within(span):
        parent = span.traceparent
        correlation = Correlation(assignment.trace_id or trace_of(parent), parent)
        traced = structs.replace(assignment, correlation=correlation)
        yield traced if len(encode(traced)) <= LARGEST_MESSAGE else assignment


@contextmanager
def spanned(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    """A scope in a span of its own, below the current one; without tracing it costs next to nothing."""
    with nullcontext() if tracing.tracer is None else _within(tracing.tracer.start(name, attributes)):
        yield


@contextmanager
def _within(span: TraceSpan) -> Iterator[None]:
    span.enter()
    try:
        yield
    except Exception as error:
        span.failed(error_text(error))
        raise
    finally:
        span.end()


def assignment_trace(item: WorkItem, assignment: ExecAssignment) -> WorkTrace | None:
    """The trace of an assignment that a worker has claimed; None while tracing is off."""
    tracer = tracing.tracer
    if tracer is None:
        return None
    key = f"{item.id}\0{assignment.request_id}\0{item.generation}"
    return WorkTrace(tracer, f"reefknot.job {assignment.job.type}", key, **_spent(item), about=_about(assignment))


def record_cancelled(item: WorkItem, result: ExecResult) -> None:
    """Record the job of an item that was just ended in the store, by a caller or a deadline."""
    trace = assignment_trace(item, assignment_of(item))
    if trace is not None:
        trace.ended_with(result)


def routed_trace(assignment: ExecAssignment, fence: int, since_ms: int) -> WorkTrace | None:
    """The trace of an assignment that a router ends by itself; None while tracing is off."""
    tracer = tracing.tracer
    if tracer is None:
        return None
    key = f"{assignment.record_id}\0{assignment.request_id}\0router {fence}"
    name, about = f"reefknot.job {assignment.job.type}", _about(assignment)
    return WorkTrace(tracer, name, key, since_ms=since_ms, about=about)


def source_trace(item: WorkItem) -> WorkTrace | None:
    """The trace of a job of a source, which syncs it or fetches one item; None while tracing is off."""
    tracer = tracing.tracer
    if tracer is None:
        return None
    key = f"{item.id}\0{item.created_at}\0{item.generation}"
    noun = "item" if item.assignment_id.startswith(f"{item.source}/") else "sync"  # see `item_job_id`
    about = {"job_id": item.assignment_id, "source": item.source, "trace_id": item.trace_id}
    return WorkTrace(tracer, f"reefknot.{noun} {item.kind}", key, **_spent(item), about=about)


def _spent(item: WorkItem) -> dict[str, Any]:
    return {"since_ms": item.created_at, "first_ms": item.budget.first_attempt_at, "attempts": item.attempts}


def _about(assignment: ExecAssignment) -> dict[str, Any]:
    return {
        "job_id": assignment.assignment_id,
        "tenant_id": assignment.tenant_id,
        "trace_id": assignment.trace_id,
        "parent": assignment.traceparent,
    }


def _text(given: str, most: int = LONGEST_TEXT) -> str:
    """A text as a span may hold it: bounded, without secrets and control characters."""
    return printable(redact(given), most=most) if given else ""
