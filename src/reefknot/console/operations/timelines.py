"""
Stories: the attempts of one job, put together from its audited events, for a timeline.

An attempt ends when the decision about its failure is taken, or with the job: both are audited, and the decision says
how long the execution took; the attempt that runs now began with its claim. Events of earlier versions do not say it:
there, only the start of the first attempt (its decision counts the time from it) and of the last one (a result has its
milliseconds) is known, and `started_at` of any other is None: a start that was made up would hide the time in a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.audit.assignments import ORCHESTRATOR_VANISHED, WORKER_VANISHED
from reefknot.audit.model.event import (
    Admission,
    AnyEvent,
    BreakerEvent,
    Completed,
    DecisionRecord,
    IdempotencyEvent,
    Quarantined,
    Requeued,
    RetryAttempt,
    RetryExhausted,
    RetryRefused,
    Routing,
    TimeoutOccurred,
    timestamp_ms,
)
from reefknot.audit.port import AuditQuery
from reefknot.console.operations.values import time_text
from reefknot.console.words.events import event_fields, in_words
from reefknot.core.backoff import delay_before
from reefknot.core.decide import DECIDING_FIELD
from reefknot.core.failure import ErrorCode
from reefknot.errors import ReefknotError
from reefknot.policy.model.book import Layer, Request
from reefknot.queue.model.messages import DEFAULT_TIMEOUT_MS, InvalidMessage, read_assignment
from reefknot.queue.model.transitions import is_replaced, next_version
from reefknot.queue.model.work import WorkItem, WorkState, attempts_begun, is_ingestion, is_over, runs_now, step_key

if TYPE_CHECKING:
    from reefknot.audit.port import AuditLog, KeptEntry
    from reefknot.core.redaction import Redactor
    from reefknot.policy.model.book import Book


OWN_BACKOFF, SERVER_HINT = "own backoff", "server hint"
CRASHED = "crashed"
MOST_ACTIONS = 200
"""Operators' actions before the end of a job, among which its cancellation is looked for."""
CLOCKS_APART_MS = 60_000
"""How far the clock of an operator's machine may differ from that of the store."""


class AttemptStory(Struct, kw_only=True):
    """An attempt of a job, as far as its events tell."""

    number: int
    generation: int
    """Counts how often an operator, or a lost worker, returned the job to the queue before."""
    due_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    duration_s: float | None = None
    outcome: str = "running"
    """`retried`, `failed`, `succeeded`, `cancelled`, `crashed` or `running`. One that crashed spends no attempt: the
    next has its number. Its end is not on record, but when it was noticed is: `ended_at`."""
    timed_out_after_s: float | None = None
    code: str | None = None
    failure_type: str | None = None
    classification: str | None = None
    """The category of the code, such as `network`."""
    http_status: int | None = None
    message: str | None = None
    decision: str | None = None
    """`again` or `stop`; None where nothing had to be decided."""
    reason: str | None = None
    layer: str | None = None
    """The policy layer that the decisive field comes from, or `server hint`; None when it is unknown."""
    field: str | None = None
    source: str | None = None
    """The file and line of the step's `@rk.block`, where that sets the decisive field."""
    wait_s: float | None = None
    wait_from: str | None = None
    """`own backoff` or `server hint`; None when it is unknown."""
    put_off_s: float | None = None
    """The wait for the open breaker of the destination, after that one."""
    worker_id: str | None = None


class Storyteller:
    """Reads the events of a job in their order, and keeps its attempts."""

    def __init__(self, item: WorkItem, book: Book | None, *, runs: bool) -> None:
        """`book` has the policies that are configured here; a decision by other ones is shown without its layer.
        `runs`: an attempt of the job runs now."""
        self.attempts: list[AttemptStory] = []
        self.idempotency_key: str | None = None
        self.worker_id: str | None = None
        self._item = item
        self._book = book
        self._runs = runs
        self._generation = 0
        self._due_ms: int | None = item.due_at if item.history and item.history[0].what == "due" else None
        self._timed_out: dict[int, float] = {}

    def hear(self, event: AnyEvent) -> None:
        """Take the next event into account."""
        match event:
            case Admission(status="accepted" | "degraded", worker_id=str(worker)) | Routing(worker_id=str(worker)):
                self.worker_id = worker
            case IdempotencyEvent(idempotency_key=key):
                self.idempotency_key = self.idempotency_key or key
            case TimeoutOccurred(attempt_number=number, timeout_seconds=seconds):
                self._timed_out[number] = seconds
            case RetryAttempt(attempt_number=number, decision=record):
                self._failed(event.timestamp, number, record, "retried", event.attempt_seconds)
            case (
                RetryExhausted(total_attempts=number, decision=record)
                | RetryRefused(total_attempts=number, decision=record)
            ):
                self._failed(event.timestamp, number, record, "failed", event.attempt_seconds)
            case BreakerEvent(wait_seconds=float(seconds)):
                self._put_off(event.timestamp, seconds)
            case Quarantined(inputs={"crashes": int()}):
                self._crashed(event.timestamp, event.reason)
            case Requeued(generation=generation):
                if event.reason in (WORKER_VANISHED, ORCHESTRATOR_VANISHED):
                    self._crashed(event.timestamp, event.reason, event.attempt_seconds)
                self._generation = self._generation + 1 if generation is None else generation
                self._due_ms = timestamp_ms(event.timestamp)
            case Completed():
                self._ended(event)
            case _:
                pass

    def _failed(self, at: str, number: int, record: DecisionRecord, outcome: str, took_s: float | None) -> None:
        """An attempt that failed, and the decision about it; none when the job was refused without another attempt."""
        if took_s is None and self._is_known(number):
            return  # an attempt that was made has its seconds, and after progress the number of the one before
        failure = record.failure
        attempt = self._new(at, number, outcome)
        attempt.code, attempt.failure_type = failure.code, failure.failure_type.value
        attempt.classification = _category(failure.code)
        attempt.http_status, attempt.message = failure.http_status, failure.message
        attempt.decision = "again" if record.answer == "again" else "stop"
        attempt.reason = None if record.answer == "again" else record.answer
        attempt.wait_s, attempt.wait_from = record.delay, _wait_from(record)
        attempt.field, attempt.layer = self._origin(record, attempt.wait_from)
        if attempt.layer == Layer.STEP and attempt.field and record.set_by_step:
            attempt.source = record.set_by_step[attempt.field]
        ended_ms = timestamp_ms(at)
        if took_s is None and record.history.attempts == 1:  # written by an earlier version
            took_s = record.history.elapsed or None
        if took_s is not None and ended_ms is not None:
            _begin(attempt, ended_ms, took_s)
        if record.delay is not None:
            self._due_ms = None if ended_ms is None else ended_ms + round(record.delay * 1000)

    def _put_off(self, at: str, seconds: float) -> None:
        """The job waits for a breaker, which spends no attempt; perhaps again, when others were let through first."""
        last, at_ms = self.attempts[-1] if self.attempts else None, timestamp_ms(at)
        if last is not None and last.generation == self._generation:
            last.put_off_s = round((last.put_off_s or 0.0) + seconds, 6)
        self._due_ms = None if at_ms is None else at_ms + round(seconds * 1000)

    def _ended(self, event: Completed) -> None:
        """Record the end of the job. Its last attempt is known already when a decision was taken about it; the duration
        of a stopped attempt comes from this event."""
        ended_ms = timestamp_ms(event.timestamp)
        if event.attempt_seconds is not None and ended_ms is not None:
            _begin(self._new(event.timestamp, event.attempts or 0, "cancelled"), ended_ms, event.attempt_seconds)
        elif event.status in ("success", "error") and not self._is_known(event.attempts or 0):
            self._new(event.timestamp, event.attempts or 0, "succeeded" if event.status == "success" else "failed")

    def _crashed(self, at: str, why: str, seconds: float | None = None) -> None:
        """Record an attempt whose process vanished, which was noticed `seconds` after its start. Its effects may have
        happened."""
        spent = [one for one in self.attempts if (one.generation, one.outcome == CRASHED) == (self._generation, False)]
        attempt, noticed_ms = self._new(at, spent[-1].number + 1 if spent else 1, CRASHED), timestamp_ms(at)
        attempt.message = why
        if seconds is not None and noticed_ms is not None:
            attempt.started_at = time_text(noticed_ms - round(seconds * 1000))

    def _is_known(self, number: int) -> bool:
        """Whether the attempt of this number is known. There is none of number 0: the job ended without one."""
        spent = [one for one in self.attempts if one.outcome != CRASHED]
        return number == 0 or (bool(spent) and (spent[-1].generation, spent[-1].number) == (self._generation, number))

    def _new(self, at: str, number: int, outcome: str) -> AttemptStory:
        attempt = AttemptStory(
            number=number,
            generation=self._generation,
            due_at=time_text(self._due_ms),
            ended_at=at,
            outcome=outcome,
            timed_out_after_s=self._timed_out.pop(number, None),
            worker_id=self.worker_id,
        )
        self.attempts.append(attempt)
        return attempt

    def finish(self) -> None:
        """Add what only the stored job knows: the attempt that runs now, and how long the last one took."""
        item = self._item
        if self._runs:
            running = self._new("", attempts_begun(item), "running")
            running.started_at, running.ended_at = time_text(item.updated_at), None
            return
        if runs_now(item):  # its process is gone, and no other one has noticed yet
            lost = self._new("", attempts_begun(item), CRASHED)
            lost.started_at, lost.ended_at = time_text(item.updated_at), None
            lost.message = ORCHESTRATOR_VANISHED if is_ingestion(item) else WORKER_VANISHED
            return
        last = self.attempts[-1] if self.attempts else None
        took = _last_execution_ms(item)
        if last is not None and last.ended_at and took is not None and last.outcome in ("succeeded", "failed"):
            ended_ms = timestamp_ms(last.ended_at)
            if last.started_at is None and ended_ms is not None:
                _begin(last, ended_ms, took / 1000)

    def _origin(self, record: DecisionRecord, wait_from: str | None) -> tuple[str | None, str | None]:
        """The field that decided, with its layer: of the policy, or the hint of the server."""
        if wait_from == SERVER_HINT:
            return "retry_after", SERVER_HINT
        return (None, None) if record.answer == "again" and wait_from is None else self._layer(record)

    def _layer(self, record: DecisionRecord) -> tuple[str | None, str | None]:
        """The field of the policy that decided, and its layer in the configured policies, if they are those of the
        decision and give the same value."""
        field = DECIDING_FIELD.get(record.answer)
        if field is not None and record.set_by_step and field in record.set_by_step:
            return field, Layer.STEP.value
        if field is None or self._book is None or record.book_hash != self._book.hash:
            return field, None
        request, failure = _request(self._item), record.failure.failure
        by_default = field == "time_budget" and request.time_budget is None and not is_ingestion(self._item)
        try:
            origins = self._book.origins(
                f"{'connector' if is_ingestion(self._item) else 'block'}:{self._item.kind}",
                None if by_default else failure(),  # a worker takes the time of a step before anything failed
                source=self._item.source or None,
                request=request,
            )
        except (ReefknotError, KeyError):  # a source that is not configured here, or a code of another version
            return field, None
        layer, value = origins[field].layer, origins[field].value
        if by_default and value in (None, inf):
            layer, value = Layer.BUILTIN, DEFAULT_TIMEOUT_MS / 1000
        recorded = inf if (found := getattr(record.policy, field)) is None else found
        if field == "time_budget" and self._item.deadline_at is not None and recorded < value:
            return "deadline", Layer.REQUEST.value
        return field, layer.value if value == recorded else None


def _request(item: WorkItem) -> Request:
    """The retry options of an assignment; none for a job of a source."""
    found = None if is_ingestion(item) else read_assignment(item.payload)
    if found is None or isinstance(found, InvalidMessage):
        return Request()
    retry, limit_ms = found.options.retry, found.options.attempt_timeout_ms
    return Request(
        retries=found.retries,
        base_delay=None if retry is None or retry.backoff_ms is None else retry.backoff_ms / 1000,
        time_budget=None if found.given_timeout_ms is None else found.given_timeout_ms / 1000,
        attempt_timeout=None if limit_ms is None else limit_ms / 1000,
    )


def _category(code: str) -> str | None:
    """The category of an error code; None for a code of another version."""
    found = ErrorCode.__members__.get(code.lower())
    return None if found is None else found.category.name.lower()


def _wait_from(record: DecisionRecord) -> str | None:
    """The origin of a wait; None without a wait, and for a policy that cannot be followed here, as one with a strategy
    of another package."""
    hint, history = record.failure.retry_after, record.history
    if record.delay is None:
        return None
    if not hint:
        return OWN_BACKOFF
    try:
        policy = record.policy.policy()
        own = delay_before(history.attempts - 1, policy, draw=record.draw, previous=history.previous_delay)
    except ReefknotError:
        return None
    return SERVER_HINT if hint > own else OWN_BACKOFF


def _begin(attempt: AttemptStory, ended_ms: int, seconds: float) -> None:
    attempt.started_at, attempt.duration_s = time_text(ended_ms - round(seconds * 1000)), round(seconds, 6)


class _Latency(Struct):
    latency_ms: float | None = None


def _last_execution_ms(item: WorkItem) -> float | None:
    """The milliseconds of the last execution, which the stored result of an assignment has."""
    if item.result is None or not is_over(item):
        return None
    try:
        return msgspec.json.decode(item.result, type=_Latency).latency_ms
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def attempts_of(item: WorkItem, events: Sequence[AnyEvent], book: Book | None, *, runs: bool) -> Storyteller:
    """The story of a job, from its events in their order."""
    teller = Storyteller(item, book, runs=runs)
    for event in events:
        teller.hear(event)
    teller.finish()
    return teller


# ---- the story around the attempts -----------------------------------------------------------------------------------


def key_of(item: WorkItem, guarded: str | None, assignment: Any) -> tuple[str | None, str | None]:
    """The idempotency key of a job, and where it is used. One that a request sends in a header of its own comes before
    the one that every step is handed."""
    if guarded is not None:
        return guarded, "guarded"
    if is_ingestion(item):
        return None, None
    try:
        headers = assignment["job"]["payload"]["headers"].items() if item.kind == "http.request" else ()
        sent = [str(value) for name, value in headers if name.lower() == "idempotency-key"]
    except (AttributeError, KeyError, TypeError):  # not what the block accepts: it never sent anything
        sent = []
    return (sent[0], "header") if sent else (step_key(item.id, item.generation), "step")


def versions_of(item: WorkItem) -> dict[str, str | None]:
    """The version of the job that runs instead of it, and the one that it replaces."""
    name = item.assignment_id
    before = [one.why.partition(": ")[0] for one in item.history if one.what == "replaces"]
    replaces = next((one for one in before if next_version(one) == name), None)
    return {"replaced_by": next_version(name) if is_replaced(item) else None, "replaces": replaces}


async def cancellation_of(log: AuditLog, item: WorkItem) -> list[KeptEntry]:
    """The event of the operator who had the job cancelled. It is not filed under the job: what is, is the event of the
    router or the worker that carried it out."""
    if item.state is not WorkState.CANCELLED:
        return []
    wanted = AuditQuery(
        event_type="operator_action",
        since=item.created_at - CLOCKS_APART_MS,
        until=item.updated_at + CLOCKS_APART_MS,
        limit=MOST_ACTIONS,
        newest_first=True,
    )
    asked = "job.cancel", item.assignment_id, item.tenant_id or None
    for one in await log.read(wanted):
        fields = event_fields(one.entry.body)
        if (fields.get("action"), fields.get("subject"), fields.get("tenant_id") or None) == asked:
            return [one]
    return []


def untold(history: list[dict[str, Any]], event_types: Iterable[str | None]) -> list[dict[str, Any]]:
    """The entries of a job's history that no event of these types tells."""
    known = {"retry" if one == "retry_attempt" else one for one in event_types}
    return [one for one in history if one["what"] not in known]


_FIRST = ("submitted", "routing", "admission")
"""What comes first among events of the same millisecond: a worker writes its admission, then the router its choice."""


def lines_of(
    history: list[dict[str, Any]], kept: list[KeptEntry], events: list[dict[str, Any]], redactor: Redactor
) -> list[dict[str, Any]]:
    """History and events in the order of time, each in a sentence, events with their fields. A history entry that an
    event repeats is left out."""
    lines = [
        {
            "at": one["at"],
            "what": one["what"],
            "sentence": ": ".join(part for part in (f"by {one['who']}" if one["who"] else "", one["why"]) if part),
            "event": None,
        }
        for one in untold(history, (one.get("event_type") for one in events))
    ]
    for entry, fields in zip(kept, events, strict=True):
        _, words = in_words(entry.entry.body)
        at, what = str(fields.get("timestamp", "")), str(fields.get("event_type", ""))
        lines.append({"at": at, "what": what, "sentence": redactor(words), "event": fields})
    return sorted(lines, key=lambda one: (one["at"], _FIRST.index(one["what"]) if one["what"] in _FIRST else 9))
