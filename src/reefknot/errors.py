"""
Everything reefknot raises.

    ReefknotError
    ├── ParameterError (ValueError)        an argument has a value that cannot be used
    │   └── ParameterTypeError (TypeError) an argument is of a kind that cannot be used
    ├── RetryAfter                         raised by *your* code: "again, but not before"
    ├── AttemptTimeoutError (TimeoutError) one attempt ran longer than it may
    ├── DeadlineExceededError (TimeoutError)  the whole piece of work ran out of time
    ├── RejectedError                      the work was refused before it ran
    │   └── BreakerOpenError               the destination is being left alone
    └── LoopMisuseError (RuntimeError)     a retry loop was driven in a way that cannot work

A class per fact, numbers as fields. All of them survive pickling, because user code sends them between processes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
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
        if not 0 <= seconds < float("inf"):
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
    """The deadline over all attempts passed while one of them was running. The last real error is its cause."""

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


class LoopMisuseError(ReefknotError, RuntimeError):
    """A retry loop was driven in a way that can never end well."""


def shown(value: object, most: int = 60) -> str:
    """A value as an error message may show it: short, and never raising."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else text[: most - 1] + "…"
