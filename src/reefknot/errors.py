"""
The error tree: every exception that reefknot raises.

    ReefknotError
    ├── ParameterError (ValueError)        an argument has a value that cannot be used
    │   └── ParameterTypeError (TypeError) an argument is of a type that cannot be used
    ├── RetryAfter                         raised by *your* code: "retry, but not before"
    ├── AttemptTimeoutError (TimeoutError) one attempt exceeded its time limit
    ├── DeadlineExceededError (TimeoutError)  the deadline over all attempts passed
    ├── RejectedError                      the work was refused before it ran
    │   ├── BreakerOpenError               a circuit breaker is open
    │   ├── LimitReachedError              a limit does not let the call begin in time
    │   └── QueueFullError                 a bounded queue is full
    ├── OperationError                     an operator's request cannot be fulfilled
    ├── NameTakenError                     a worker or router of this name is running already
    ├── ResultPendingError (TimeoutError)  submitted work has no result yet and continues
    ├── UnknownJobError (LookupError)      no job has this id
    ├── LoopMisuseError (RuntimeError)     a retry loop was used in a way that cannot work
    ├── AsyncioOnlyError (RuntimeError)    a part that needs asyncio was used under Trio
    ├── EventLoopRunningError (RuntimeError)  a blocking call was made in the thread of a running event loop
    ├── VirtualDeadlockError (RuntimeError)  in virtual time, every task waits forever
    ├── JobsStuckError (RuntimeError)      jobs of a system under test cannot end on their own
    ├── NotJsonError (ValueError)          a value cannot be written as canonical JSON
    ├── StoreError                         a store cannot do what it was asked for
    │   ├── StoreUnavailableError          the store cannot be opened or reached, or was closed after an error
    │   │   ├── StoreLockedError           another process kept the store locked for too long
    │   │   ├── StorePermissionError       this user may not read or write the store
    │   │   ├── StoreMissingError          there is no store at the address
    │   │   └── StoreReplacedError         the store was deleted, replaced or restored while it was open
    │   ├── StoreFullError                 the disk or the store is full
    │   ├── StoreCorruptError              the stored data is damaged
    │   ├── StoreVersionError              the store has another version, or is not a reefknot store
    │   └── StoreMovedError                the store was moved to another one, or is being moved
    ├── NoStoreError (RuntimeError)        a store is needed but none is in scope
    ├── IdempotencyError                   an idempotency key cannot be used in this way
    │   ├── KeyConflictError               the key was used with another payload
    │   ├── KeyInProgressError             another owner holds the key
    │   ├── KeyTooLongError (ValueError)   the key is too long
    │   ├── KeyQuotaError                  the store's limit of keys is reached
    │   ├── ResultTooLargeError (ValueError)  the result is too large to be recorded
    │   ├── RecordedFailureError           the key is recorded as permanently failed
    │   ├── OutcomeUnknownError            the effect may or may not have happened
    │   └── LeaseLostError                 another owner took over; the late write was refused
    ├── SourceError                        raised by connectors: the source cannot be read
    ├── StalePositionError                 another sync has moved the source's cursor; the late page was refused
    ├── ChangesLostError                   changes after a cursor are no longer kept; the consumer starts over
    ├── AuditUnavailableError              events cannot be stored, and the setting is fail_closed
    ├── RetryError                         an operation of a RetryManager, or its result, was given up
    ├── IllegalMoveError (RuntimeError)    a state transition of work is not allowed
    └── ConfigurationError (ValueError)    the configuration is invalid; lists every mistake
        └── ConfigurationMissingError      a named configuration file does not exist

A class per fact, numbers as fields. All of them can be pickled, because user code sends them between processes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import timedelta
    from typing import Any


def _rebuild(cls: type[ReefknotError], args: tuple[Any, ...], state: dict[str, Any]) -> ReefknotError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ReefknotError(Exception):
    """The root of the tree: `except ReefknotError` catches every error that reefknot defines."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ParameterError(ReefknotError, ValueError):
    """A parameter has a value that is not accepted."""

    def __init__(self, parameter: str, given: object, accepted: str) -> None:
        self.problem = f"{shown(given)} is not accepted: {accepted}"
        super().__init__(f"{parameter}={self.problem}")
        self.parameter = parameter
        self.accepted = accepted


class ParameterTypeError(ParameterError, TypeError):
    """A parameter has a value of the wrong type."""


class RetryAfter(ReefknotError):  # noqa: N818 - a promise of the public surface; it reads as what it asks for
    """
    Raised by user code to ask for another attempt, not before `seconds` have passed.

    It is retried whatever `on=` says, and its delay is capped like a server's own hint.
    """

    def __init__(self, seconds: float | timedelta, message: str = "") -> None:
        if not isinstance(seconds, int | float) and hasattr(seconds, "total_seconds"):
            seconds = seconds.total_seconds()
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ParameterTypeError("seconds", seconds, "a number of seconds, 0 or more")
        if not 0 <= seconds <= 1.7976931348623157e308:  # an int may be too large for a float
            raise ParameterError("seconds", seconds, "a finite number of seconds, 0 or more")
        super().__init__(message or f"asked to try again after {seconds:g} s")
        self.retry_after = float(seconds)


class AttemptTimeoutError(ReefknotError, TimeoutError):
    """An attempt exceeded its own time limit."""

    def __init__(self, *, seconds: float, abandoned: bool = False) -> None:
        tail = "; its thread was abandoned and may still be running" if abandoned else ""
        super().__init__(f"the attempt did not finish within {seconds:g} s{tail}")
        self.seconds = seconds
        self.abandoned = abandoned


class DeadlineExceededError(ReefknotError, TimeoutError):
    """The deadline over all attempts passed while one of them was running. A note names the failure before it."""

    def __init__(self, *, seconds: float, abandoned: bool = False) -> None:
        tail = "; its thread was abandoned and may still be running" if abandoned else ""
        super().__init__(f"the deadline of {seconds:g} s passed during an attempt{tail}")
        self.seconds = seconds
        self.abandoned = abandoned


class RejectedError(ReefknotError):
    """The work was refused before it ran."""


class BreakerOpenError(RejectedError):
    """A circuit breaker is open: calls to the destination are refused for now."""

    def __init__(self, *, name: str, retry_after: float) -> None:
        super().__init__(f"circuit breaker {name!r} is open; it may be tried again in {retry_after:.3g} s")
        self.name = name
        self.retry_after = retry_after


class LimitReachedError(RejectedError):
    """A limit does not let a call begin within the time that it may wait."""

    def __init__(self, *, name: str, retry_after: float) -> None:
        super().__init__(f"limit {name!r} is reached; a call may begin in {retry_after:.3g} s at the earliest")
        self.name = name
        self.retry_after = retry_after


class QueueFullError(RejectedError):
    """A queue is full, by count or by waiting time; try again in `retry_after` seconds."""

    def __init__(self, *, depth: int, limit: int, retry_after: float = 1.0, reason: str = "queue is full") -> None:
        super().__init__(f"{reason}: {depth} of {limit} places taken; try again in {retry_after:.3g} s")
        self.reason = reason
        self.depth = depth
        self.limit = limit
        self.retry_after = retry_after


class OperationError(ReefknotError):
    """
    An operator's request cannot be fulfilled; the message says why and what to do.

    `kind` is one of `invalid`, `not_found`, `conflict`, `forbidden`, `unreachable`, `temporary`, `misconfigured`: the
    command line turns it into an exit code, and the HTTP API into a status. `advice` says what to do with a
    `parameter`; it is not part of the message, because the two call the parameter by different names.
    """

    def __init__(self, message: str, kind: str, *, advice: str = "", parameter: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.advice = advice
        self.parameter = parameter


class NameTakenError(ReefknotError):
    """A worker or router of this name is already running on the same store."""

    def __init__(self, *, kind: str, name: str, holder: str) -> None:
        super().__init__(f"{kind} {name} is running already ({holder}); stop that one, or choose another name")
        self.kind = kind
        self.name = name
        self.holder = holder


class ResultPendingError(ReefknotError, TimeoutError):
    """Submitted work has no result yet. It is stored and continues; ask again."""

    def __init__(self, *, assignment_id: str, seconds: float) -> None:
        super().__init__(
            f"{assignment_id} has no result after {seconds:g} s; it is stored and continues: ask again later"
        )
        self.assignment_id = assignment_id
        self.seconds = seconds


class UnknownJobError(ReefknotError, LookupError):
    """No job of the store has this id: it was never submitted there, or its retention is over."""

    def __init__(self, assignment_id: str, *, tenant_id: str | None = None) -> None:
        of = "" if tenant_id is None else f" of tenant {shown(tenant_id)}"
        hint = "; for a job of a tenant, give tenant_id=" if tenant_id is None else ""
        super().__init__(
            f"no job{of} has the id {shown(assignment_id, 200)}: it was never submitted to this store, or is past its "
            f"retention{hint}"
        )
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id


class LoopMisuseError(ReefknotError, RuntimeError):
    """A retry loop was used in a way that cannot work."""


class AsyncioOnlyError(ReefknotError, RuntimeError):
    """A part of reefknot that needs asyncio was used under Trio."""

    def __init__(self, part: str) -> None:
        super().__init__(
            f"{part} runs on asyncio, and this is Trio; retries, waits, deadlines and breakers work here, "
            "stores, managers, routers and workers need asyncio.run, for example in a thread of their own"
        )
        self.part = part


class EventLoopRunningError(ReefknotError, RuntimeError):
    """A blocking call was made in a thread whose event loop is running, which it would block."""

    def __init__(
        self,
        what: str = "a call of a sync client would block it",
        instead: str = "use `async with rk.connect(url) as client:` here, or another thread",
    ) -> None:
        super().__init__(f"an event loop runs in this thread, and {what}; {instead}")


class VirtualDeadlockError(ReefknotError, RuntimeError):
    """Every task of a virtual loop waits, and no timer, socket or thread can wake any of them."""

    def __init__(self, waiting: str) -> None:
        super().__init__(f"deadlock in virtual time: nothing can wake these tasks: {waiting}")
        self.waiting = waiting


class JobsStuckError(ReefknotError, RuntimeError):
    """Jobs of a system under test cannot end on their own. `jobs` maps each id to the reason why it waits."""

    def __init__(self, jobs: Mapping[str, str], *, seconds: float, most: int = 5) -> None:
        named = [f"{shown(one, 200)}: {why}" for one, why in list(jobs.items())[:most]]
        more = f" | and {len(jobs) - most} more" if len(jobs) > most else ""
        what = "1 job has" if len(jobs) == 1 else f"{len(jobs)} jobs have"
        super().__init__(f"{what} not ended after {seconds:g} s of virtual time: {' | '.join(named)}{more}")
        self.jobs = dict(jobs)
        self.seconds = seconds


class ConfigurationError(ReefknotError, ValueError):
    """The configuration is invalid. `problems` holds every mistake that was found; nothing was applied."""

    def __init__(self, problems: Iterable[object]) -> None:
        self.problems = tuple(problems)
        lines = [" ".join(str(problem).splitlines()) for problem in self.problems[:50]]
        if len(self.problems) > 50:
            lines.append(f"… and {len(self.problems) - 50} more")
        super().__init__("\n".join(lines) or "the configuration cannot be used")


class ConfigurationMissingError(ConfigurationError):
    """A named configuration file does not exist."""


class NotJsonError(ReefknotError, ValueError):
    """A value has no canonical JSON form."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the value'} is not JSON: {problem}")
        self.path = path
        self.problem = problem


class StoreError(ReefknotError):
    """A store cannot do what it was asked for. The message says what to do."""

    def __init__(self, store: str, problem: str, way_out: str) -> None:
        super().__init__(f"store {store}: {problem}; {way_out}")
        self.store = store
        self.problem = problem
        self.way_out = way_out


class StoreUnavailableError(StoreError):
    """The store cannot be opened or reached, or was closed after an error that must not be retried."""


class StoreLockedError(StoreUnavailableError):
    """Another process kept the store locked for too long. It may be free later."""


class StorePermissionError(StoreUnavailableError):
    """The user of this process may not read or write the store's file, or its folder."""


class StoreMissingError(StoreUnavailableError):
    """There is no store at the address, and this call does not create one."""


class StoreReplacedError(StoreUnavailableError):
    """The store was deleted, moved, replaced or restored while it was open; no further write is made."""


class StoreFullError(StoreError):
    """The disk or the store is full; no part of the write was stored."""


class StoreCorruptError(StoreError):
    """The stored data is damaged."""


class StoreVersionError(StoreError):
    """The store was written by a newer version, or is not a reefknot store."""


class StoreMovedError(StoreError):
    """The store was moved to another one, or a move to or from it is under way: nothing may work on it."""


class NoStoreError(ReefknotError, RuntimeError):
    """No store is in scope."""

    def __init__(self) -> None:
        super().__init__(
            "no store is in scope: run this inside `async with reefknot.open_store(url) as store:`, a plain function "
            "inside `with reefknot.connect_sync(url) as client:`, or pass store="
        )


class SourceError(ReefknotError):
    """
    A source cannot be read. The message says what to do.

    `failure_type` is a `FailureType`; `retry_after` is the wait in seconds that the source asked for. `forbidden` says
    that the source exists but refuses this user: `source test` then exits with 77. `unreachable` says that no
    connection was made: the source itself failed, even if it was asked for one item only.
    """

    def __init__(
        self,
        message: str,
        failure_type: Any,
        *,
        retry_after: float | None = None,
        forbidden: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message, failure_type)
        self.failure_type = failure_type
        self.forbidden = forbidden
        self.unreachable = unreachable
        if retry_after is not None:
            self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class StalePositionError(ReefknotError):
    """Another sync has moved the source's cursor in the meantime. The late page was discarded."""

    def __init__(self, source: str) -> None:
        super().__init__(f"{source}: another sync has moved the cursor meanwhile; nothing of this page was kept")
        self.source = source


class ChangesLostError(ReefknotError):
    """Document changes after this cursor are no longer kept: the consumer has to start over."""

    def __init__(self, after: object, reason: str) -> None:
        super().__init__(
            f"the changes behind {shown(after)} are not known any more: {reason}; start over: forget what was taken "
            "over, and read the changes from the beginning, with after=0"
        )
        self.after = after


class AuditUnavailableError(ReefknotError):
    """The audit log cannot be written, and the setting is `fail_closed`: no work without its events."""

    def __init__(self, *, events: int) -> None:
        super().__init__(
            f"{events} events could not be written to the audit log, and audit is set to fail_closed; "
            "repair the log, or set fail_open to work without it"
        )
        self.events = events


class RetryError(ReefknotError):
    """
    An operation was given up. `attempts` lists every failed execution as data; the last error is the cause.

    `category` is a `RetryCategory`, or the text of one that is not built in; None, and `value` the last result, for a
    function whose `on_result=` refused every result.
    """

    def __init__(
        self,
        category: str | None,
        attempts: list[Any],
        operation: str,
        *,
        reason: str = "attempts_spent",
        value: Any = None,
    ) -> None:
        count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
        last = f": {attempts[-1].failure}" if attempts and hasattr(attempts[-1], "failure") else ""
        kind = "" if category is None else f" ({category})"
        super().__init__(f"{operation}{kind} was given up after {count}, {reason}{last}")
        self.category = category
        self.attempts = attempts
        self.operation = operation
        self.reason = reason
        self.value = value


class IdempotencyError(ReefknotError):
    """An idempotency key cannot be used in this way."""


class KeyConflictError(IdempotencyError):
    """A key was used again with another payload, or the id of a job with another job."""

    def __init__(self, key: str, *, recorded: str, given: str, is_job: bool = False) -> None:
        what, name = ("job", "id") if is_job else ("payload", "key")
        super().__init__(
            f"{name} {shown(key)} was used with another {what} (fingerprint {recorded}, now {given}); "
            f"give the new {what} {'an id' if is_job else 'a key'} of its own"
            f"{'' if is_job else '; to correct a call that had no effect: reefknot idempotency forget KEY'}"
        )
        self.key = key
        self.recorded = recorded
        self.given = given


class KeyInProgressError(IdempotencyError):
    """Another owner holds the key."""

    def __init__(self, key: str, *, owner: str, retry_after: float) -> None:
        lease = f"; its lease expires in {retry_after:.3g} s" if retry_after else ""  # a transaction has none
        super().__init__(f"key {shown(key)} is in progress at {owner}{lease}")
        self.key = key
        self.owner = owner
        self.retry_after = retry_after


class KeyTooLongError(IdempotencyError, ValueError):
    """The key is too long."""

    def __init__(self, *, length: int, limit: int) -> None:
        super().__init__(f"the key has {length} bytes, {limit} are allowed; use a hash of it")
        self.length = length
        self.limit = limit


class KeyQuotaError(IdempotencyError):
    """The store's limit of keys is reached, and no key is past its retention."""

    def __init__(self, *, keys: int, limit: int) -> None:
        super().__init__(
            f"the store holds {keys} of {limit} keys, none of them past its retention; "
            "raise the limit or shorten the retention"
        )
        self.keys = keys
        self.limit = limit


class ResultTooLargeError(IdempotencyError, ValueError):
    """The result is too large to be recorded."""

    def __init__(self, *, size: int, limit: int) -> None:
        super().__init__(f"the result has {size} bytes, {limit} are allowed; store it elsewhere and record where")
        self.size = size
        self.limit = limit


class RecordedFailureError(IdempotencyError):
    """The work of this key is recorded as permanently failed: every caller gets this answer."""

    def __init__(self, key: str, *, failure: str) -> None:
        super().__init__(f"key {shown(key)} is recorded as failed: {failure}")
        self.key = key
        self.failure = failure


class OutcomeUnknownError(IdempotencyError):
    """The owner failed or vanished; its effect may have happened and must not happen twice."""

    def __init__(self, key: str, *, owner: str) -> None:
        super().__init__(
            f"key {shown(key)}: it is not known whether the effect that {owner} began has happened; find out, then "
            "resolve the key (reefknot idempotency resolve)"
        )
        self.key = key
        self.owner = owner


class LeaseLostError(IdempotencyError):
    """The lease expired and another owner took over: the late write was refused."""

    def __init__(self, key: str, *, owner: str, fence: int) -> None:
        super().__init__(
            f"{shown(key)} is no longer held by {owner} (fence {fence}); discard the work, its write was refused"
        )
        self.key = key
        self.owner = owner
        self.fence = fence


class IllegalMoveError(ReefknotError, RuntimeError):
    """A state transition of work is not allowed."""

    def __init__(self, *, old: str, new: str) -> None:
        super().__init__(f"work that is {old} cannot become {new}")
        self.old = old
        self.new = new


def shown(value: object, most: int = 60) -> str:
    """The `repr` of a value for an error message, cut to `most` characters; never raises."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"
