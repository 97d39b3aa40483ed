"""
Notes of a step: the checkpoint it goes on from, how far it has come, and its lines of log.

A step says them while it runs. The record of its job has what is counted or listed (`Noted`); the checkpoint and the
lines are parts that a store keeps by the job's id, and reads only where they are asked for.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from reefknot.core.canonical import canonical
from reefknot.core.time import Moment
from reefknot.errors import ParameterError, ParameterTypeError

CHECKPOINT, LINES = "checkpoint", "lines"
"""The parts that are kept outside of the record."""
LARGEST_CHECKPOINT = 64 * 1024
MOST_LINES = 200
LARGEST_LOG = 32 * 1024
"""Bytes of all lines of one job."""
LONGEST_LINE = 2_000
LONGEST_TEXT = 200
"""Characters of the text of a progress."""


class StepProgress(Struct, frozen=True, gc=False, omit_defaults=True):
    """Progress of a step: so much is `done`, `of` so much where that is known, and a text about what it does now."""

    done: int | float
    of: int | float | None = None
    text: str = ""

    @classmethod
    def checked(cls, done: float, of: float | None, text: str) -> "StepProgress":
        """The progress that a step gave; numbers that are none are refused."""
        for name, given in (("done", done), ("of", 0 if of is None else of)):
            if isinstance(given, bool) or not isinstance(given, int | float):
                raise ParameterTypeError(name, given, "a number")
            if not 0 <= given < 1e300:
                raise ParameterError(name, given, "a number that is 0 or more")
        if not isinstance(text, str):
            raise ParameterTypeError("text", text, "a text")
        return cls(done, of, text)

    @property
    def percent(self) -> int | None:
        """The share that is done; None where the whole is unknown, and 100 at most."""
        return None if not self.of else min(100, int(100 * self.done / self.of))

    def __str__(self) -> str:
        """The progress in words: `3 of 10 (30 %), resizing`."""
        whole = "" if self.of is None else f" of {_plain(self.of)}"
        share = "" if self.percent is None else f" ({self.percent} %)"
        return f"{_plain(self.done)}{whole}{share}{', ' if self.text else ''}{self.text}"


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.2f}".rstrip("0").rstrip(".")


class Notes(Struct, frozen=True):
    """Notes of a step that are not stored yet."""

    checkpoints: int = 0
    """The checkpoints of the job, from its beginning to now."""
    progress: StepProgress | None = None
    """The latest, if there is a new one."""
    parts: Mapping[str, bytes] = {}
    """The parts that have changed, as a whole."""


class Noted(Struct, frozen=True, gc=False, omit_defaults=True):
    """The notes of a job as far as its record has them."""

    checkpoints: int = 0
    checkpoint_at: int = 0
    """When the last one was stored, ms UTC."""
    spent_ms: int = 0
    """The running time that led to a checkpoint: what was lost with a worker is not in it."""
    at_crash: int = 0
    """The checkpoints there were when the job crashed last."""
    progress: StepProgress | None = None

    def after(self, notes: Notes, now: Moment, *, began_at: int) -> "Noted":
        """The notes with newer ones, of an attempt that began then (ms UTC)."""
        kept = structs.replace(self, progress=notes.progress or self.progress)
        if notes.checkpoints <= self.checkpoints:
            return kept
        spent_ms = self.spent_ms + max(0, now.wall - max(self.checkpoint_at, began_at))
        return structs.replace(kept, checkpoints=notes.checkpoints, checkpoint_at=now.wall, spent_ms=spent_ms)


def checkpoint_text(value: object) -> bytes:
    """The JSON text of a checkpoint; a value that is not JSON, or is too large, is refused."""
    text = canonical(value, CHECKPOINT)
    if len(text) > LARGEST_CHECKPOINT:
        accepted = f"at most {LARGEST_CHECKPOINT} bytes as JSON, and it has {len(text)}; keep large data elsewhere"
        raise ParameterError(CHECKPOINT, value, accepted)
    return text


class StepLine(Struct, frozen=True, gc=False, array_like=True):
    """A line that a step logged: when (ms UTC), in which attempt, and its text."""

    at: int
    attempt: int
    text: str


class StepLog(Struct, frozen=True, omit_defaults=True):
    """The latest lines of a job. The oldest ones go when there are too many; `dropped` counts them."""

    lines: tuple[StepLine, ...] = ()
    dropped: int = 0

    def with_lines(self, new: list[StepLine]) -> "StepLog":
        """The log with these lines at its end, within the bounds."""
        lines, dropped = [*self.lines, *new], self.dropped
        size = sum(len(one.text.encode()) for one in lines)
        gone = 0
        while lines[gone:] and (len(lines) - gone > MOST_LINES or size > LARGEST_LOG):
            size -= len(lines[gone].text.encode())
            gone += 1
        return StepLog(tuple(lines[gone:]), dropped + gone)

    @classmethod
    def read(cls, part: bytes | None) -> "StepLog":
        """The lines of a stored part; none where there is no part, or a damaged one."""
        try:
            return cls() if part is None else msgspec.json.decode(part, type=cls)
        except msgspec.DecodeError:
            return cls()
