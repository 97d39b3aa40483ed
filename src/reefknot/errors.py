"""
Everything reefknot raises.

    ReefknotError
    ├── ParameterError (ValueError)        an argument has a value that cannot be used
    │   └── ParameterTypeError (TypeError) an argument is of a kind that cannot be used
    ├── RetryAfter                         raised by *your* code: "again, but not before"
    ├── AttemptTimeoutError (TimeoutError) one attempt ran longer than it may
    ├── DeadlineExceededError (TimeoutError)  the whole piece of work ran out of time
    ├── RejectedError                      the work was refused before it ran
    │   ├── BreakerOpenError               the destination is being left alone
    │   └── QueueFullError                 a bounded queue has no free place
    ├── NameTakenError                     a worker or router of this name is running already
    ├── ResultPendingError (TimeoutError)  submitted work has no result yet; it goes on
    ├── LoopMisuseError (RuntimeError)     a retry loop was driven in a way that cannot work
    ├── VirtualDeadlockError (RuntimeError)  in virtual time, nothing can ever happen again
    ├── NotJsonError (ValueError)          a value cannot be written as canonical JSON
    ├── StoreError                         a store cannot do what it was asked for
    │   ├── StoreUnavailableError          it cannot be opened or reached, or was given up
    │   ├── StoreFullError                 there is no room for the write
    │   ├── StoreCorruptError              what is stored is damaged
    │   └── StoreVersionError              it is of another version, or no store of ours
    ├── NoStoreError (RuntimeError)        a store is needed, and none is open around this code
    ├── IdempotencyError                   an idempotency key cannot be used in this way
    │   ├── KeyConflictError               the key was used with another payload
    │   ├── KeyInProgressError             somebody else holds the key right now
    │   ├── KeyTooLongError (ValueError)   the key is longer than a key may be
    │   ├── KeyQuotaError                  the store holds as many keys as it may
    │   ├── ResultTooLargeError (ValueError)  the result is larger than a record may be
    │   ├── RecordedFailureError           the key is on record as failed for good
    │   ├── OutcomeUnknownError            nobody knows whether the effect happened
    │   └── LeaseLostError                 somebody else owns it by now; the late write was refused
    ├── AuditUnavailableError              events cannot be kept, and the setting says that work stops then
    ├── RetryError                         an operation of a RetryManager was given up; it holds the history
    ├── IllegalMoveError (RuntimeError)    a piece of work cannot go from this state to that
    └── ConfigurationError                 what was configured cannot be used; it lists every mistake
        └── ConfigurationMissingError      a configuration file that was named is not there

A class per fact, numbers as fields. All of them survive pickling, because user code sends them between processes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def _rebuild(cls: type[ReefknotError], args: tuple[Any, ...], state: dict[str, Any]) -> ReefknotError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ReefknotError(Exception):
    """The root: `except ReefknotError` catches whatever reefknot itself has to say."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class ParameterError(ReefknotError, ValueError):
    """A parameter was given a value that is not accepted."""

    def __init__(self, parameter: str, given: object, accepted: str) -> None:
        super().__init__(f"{parameter}={shown(given)} is not accepted: {accepted}")
        self.parameter = parameter
        self.accepted = accepted


class ParameterTypeError(ParameterError, TypeError):
    """A parameter was given something of the wrong kind."""


class RetryAfter(ReefknotError):  # noqa: N818 - a promise of the public surface; it reads as what it asks for
    """
    Raise it to ask for another attempt, not before `seconds` have passed.

    It is heard whatever `on=` says, and is bounded like a server's own hint.
    """

    def __init__(self, seconds: float, message: str = "") -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ParameterTypeError("seconds", seconds, "a number of seconds, 0 or more")
        if not 0 <= seconds <= 1.7976931348623157e308:  # an int may be larger, and then is no float
            raise ParameterError("seconds", seconds, "a finite number of seconds, 0 or more")
        super().__init__(message or f"asked to try again after {seconds:g} s")
        self.retry_after = float(seconds)


class AttemptTimeoutError(ReefknotError, TimeoutError):
    """One attempt ran into its own time limit."""

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
    """A circuit breaker is open: the destination gets no calls for now."""

    def __init__(self, *, name: str, retry_after: float) -> None:
        super().__init__(f"circuit breaker {name!r} is open; it may be tried again in {retry_after:.3g} s")
        self.name = name
        self.retry_after = retry_after


class QueueFullError(RejectedError):
    """A queue that is bounded in count and in time cannot take it; `retry_after` says when to come back."""

    def __init__(self, *, depth: int, limit: int, retry_after: float = 1.0, reason: str = "queue is full") -> None:
        super().__init__(f"{reason}: {depth} of {limit} places taken; come back in {retry_after:.3g} s")
        self.reason = reason
        self.depth = depth
        self.limit = limit
        self.retry_after = retry_after


class NameTakenError(ReefknotError):
    """A worker or router of this name is running over the same store already."""

    def __init__(self, *, kind: str, name: str, holder: str) -> None:
        super().__init__(f"{kind} {name} is running already ({holder}); stop that one, or choose another name")
        self.kind = kind
        self.name = name
        self.holder = holder


class ResultPendingError(ReefknotError, TimeoutError):
    """Submitted work has no result yet. It is kept and goes on; ask again."""

    def __init__(self, *, assignment_id: str, seconds: float) -> None:
        super().__init__(f"{assignment_id} has no result after {seconds:g} s; it is kept and goes on: ask again later")
        self.assignment_id = assignment_id
        self.seconds = seconds


class LoopMisuseError(ReefknotError, RuntimeError):
    """A retry loop was driven in a way that can never end well."""


class VirtualDeadlockError(ReefknotError, RuntimeError):
    """Every task of a virtual loop waits for something that no timer, socket or thread will bring."""

    def __init__(self, waiting: str) -> None:
        super().__init__(f"nothing can ever happen again in this virtual loop; what waits: {waiting}")
        self.waiting = waiting


class ConfigurationError(ReefknotError):
    """The configuration cannot be used. `problems` holds every mistake that was found; nothing was applied."""

    def __init__(self, problems: Iterable[object]) -> None:
        self.problems = tuple(problems)
        lines = [" ".join(str(problem).splitlines()) for problem in self.problems[:50]]
        if len(self.problems) > 50:
            lines.append(f"… and {len(self.problems) - 50} more")
        super().__init__("\n".join(lines) or "the configuration cannot be used")


class ConfigurationMissingError(ConfigurationError):
    """A configuration file was named, and there is none at that place."""


class NotJsonError(ReefknotError, ValueError):
    """A value has no canonical JSON form."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the value'} is not JSON: {problem}")
        self.path = path
        self.problem = problem


class StoreError(ReefknotError):
    """A store cannot do what it was asked for. The message says the way out."""

    def __init__(self, store: str, problem: str, way_out: str) -> None:
        super().__init__(f"store {store}: {problem}; {way_out}")
        self.store = store
        self.problem = problem
        self.way_out = way_out


class StoreUnavailableError(StoreError):
    """The store cannot be opened or reached, or was given up after an error that must not be retried."""


class StoreFullError(StoreError):
    """There is no room for the write. Nothing of it was kept."""


class StoreCorruptError(StoreError):
    """What is stored is damaged."""


class StoreVersionError(StoreError):
    """The store was written by a newer version, or is no store of ours."""


class NoStoreError(ReefknotError, RuntimeError):
    """No store is in scope."""

    def __init__(self) -> None:
        super().__init__(
            "no store is in scope: run this inside `async with reefknot.open_store(url) as store:`, or pass store="
        )


class AuditUnavailableError(ReefknotError):
    """The audit log cannot be written, and the setting is `fail_closed`: no work without its record."""

    def __init__(self, *, events: int) -> None:
        super().__init__(
            f"{events} events could not be put on record, and audit is set to fail_closed; "
            "mend the log, or set fail_open to work without it"
        )
        self.events = events


class RetryError(ReefknotError):
    """An operation was given up. `attempts` lists every failed execution as data; the last error is the cause."""

    def __init__(self, category: str, attempts: list[Any], operation: str, *, reason: str = "attempts_spent") -> None:
        count = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
        last = f": {attempts[-1].failure}" if attempts and hasattr(attempts[-1], "failure") else ""
        super().__init__(f"{operation} ({category}) was given up after {count}, {reason}{last}")
        self.category = category
        self.attempts = attempts
        self.operation = operation
        self.reason = reason


class IdempotencyError(ReefknotError):
    """An idempotency key cannot be used in this way."""


class KeyConflictError(IdempotencyError):
    """The same key came with another payload."""

    def __init__(self, key: str, *, recorded: str, given: str) -> None:
        super().__init__(
            f"key {shown(key)} was used with another payload (fingerprint {recorded}, now {given}); "
            "give the new payload a key of its own"
        )
        self.key = key
        self.recorded = recorded
        self.given = given


class KeyInProgressError(IdempotencyError):
    """Somebody else holds the key right now."""

    def __init__(self, key: str, *, owner: str, retry_after: float) -> None:
        lease = f"; its lease runs out in {retry_after:.3g} s" if retry_after else ""  # a transaction has none
        super().__init__(f"key {shown(key)} is in progress at {owner}{lease}")
        self.key = key
        self.owner = owner
        self.retry_after = retry_after


class KeyTooLongError(IdempotencyError, ValueError):
    """The key is longer than a key may be."""

    def __init__(self, *, length: int, limit: int) -> None:
        super().__init__(f"the key has {length} bytes, {limit} are allowed; use a hash of it")
        self.length = length
        self.limit = limit


class KeyQuotaError(IdempotencyError):
    """The store holds as many keys as it may, and all of them are live."""

    def __init__(self, *, keys: int, limit: int) -> None:
        super().__init__(
            f"the store holds {keys} of {limit} keys, none of them past its retention; "
            "raise the limit or shorten the retention"
        )
        self.keys = keys
        self.limit = limit


class ResultTooLargeError(IdempotencyError, ValueError):
    """The result is larger than a record may be."""

    def __init__(self, *, size: int, limit: int) -> None:
        super().__init__(f"the result has {size} bytes, {limit} are allowed; keep it elsewhere and record where")
        self.size = size
        self.limit = limit


class RecordedFailureError(IdempotencyError):
    """The work of this key failed for good, and that is on record: every caller gets this answer."""

    def __init__(self, key: str, *, failure: str) -> None:
        super().__init__(f"key {shown(key)} is on record as failed: {failure}")
        self.key = key
        self.failure = failure


class OutcomeUnknownError(IdempotencyError):
    """The owner failed or vanished, its effect may have happened, and it must not happen twice."""

    def __init__(self, key: str, *, owner: str) -> None:
        super().__init__(
            f"key {shown(key)}: nobody knows whether what {owner} began has happened; find out, then resolve the key "
            "(reefknot idempotency resolve)"
        )
        self.key = key
        self.owner = owner


class LeaseLostError(IdempotencyError):
    """The lease ran out and somebody else took over: the late write was refused."""

    def __init__(self, key: str, *, owner: str, fence: int) -> None:
        super().__init__(
            f"{shown(key)} is no longer held by {owner} (fence {fence}); discard the work, its write was refused"
        )
        self.key = key
        self.owner = owner
        self.fence = fence


class IllegalMoveError(ReefknotError, RuntimeError):
    """A piece of work cannot go from this state to that."""

    def __init__(self, *, old: str, new: str) -> None:
        super().__init__(f"work that is {old} cannot become {new}")
        self.old = old
        self.new = new


def shown(value: object, most: int = 60) -> str:
    """A value as an error message may show it: short, and never raising."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"
