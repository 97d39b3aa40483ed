"""
A bar on stderr while something long goes on, if somebody watches.

Policies in words.

Attempts are always said both ways, because the documents people bring count differently: "4 attempts (1 + 3 retries)".

What a command shows: JSON for programs, tables for people, talk on stderr.

Nothing that comes from outside reaches a terminal as a control character. Colours are for terminals, and not when
`NO_COLOR` is set; elsewhere the width is bounded, so that a table in a log stays a table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from reefknot.core.failure import Failure
from reefknot.core.retry.explain import PlannedWait
from reefknot.core.retry.policy import LONGEST_WAIT, Jitter, RetryPolicy, RetryStrategy

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """Call what it gives with how much more is done. Without a terminal nothing is drawn."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=max(total, 1))
        yield lambda done: bar.advance(task, done)


_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def seconds(value: float | None) -> str:
    """`100 ms`, `1.5 s`, `1800 s`; no number is no limit."""
    if value is None or value >= LONGEST_WAIT:
        return "no limit"
    if 0 < value < 1:
        return f"{value * 1000:.4g} ms"
    return f"{value:.3f}".rstrip("0").rstrip(".") + " s"


def long_seconds(value: float) -> str:
    """`1800 s` as `30 min`: for sums that nobody wrote."""
    for size, unit in _UNITS:
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return seconds(float(f"{value:.4g}"))


def span(low: float, high: float) -> str:
    """`0.5–1 s`, or one number when there is no choice."""
    if low == high:
        return seconds(low)
    first, second = seconds(low), seconds(high)
    number, _, unit = first.rpartition(" ")
    return f"{number if unit == second.rpartition(' ')[2] else first}–{second}"


def attempts(executions: int) -> str:
    """Executions, said both ways."""
    number, _, rest = count(executions).partition(" ")
    return f"{number} {'attempt' if executions == 1 else 'attempts'} {rest}"


def count(executions: int) -> str:
    """Executions, said both ways, where a column's head says what is counted."""
    if executions == 1:
        return "1 (no retries)"
    return f"{executions} (1 + {executions - 1} {'retry' if executions == 2 else 'retries'})"


def growth(policy: RetryPolicy) -> str:
    """How the waits go: `100 ms ×2 up to 30 s, full jitter`."""
    match policy.strategy:
        case RetryStrategy.NO_RETRY:
            return "never retried"
        case RetryStrategy.IMMEDIATE:
            return "at once"
        case RetryStrategy.FIXED_DELAY:
            shape = f"{seconds(policy.base_delay)} each"
        case RetryStrategy.LINEAR_BACKOFF:
            shape = f"{seconds(policy.base_delay)} more each time, up to {seconds(policy.max_delay)}"
        case RetryStrategy.EXPONENTIAL_BACKOFF:
            shape = f"{seconds(policy.base_delay)} ×{policy.multiplier:g} up to {seconds(policy.max_delay)}"
        case own:
            shape = f"as {own} says, up to {seconds(policy.max_delay)}"
    return f"{shape}, {jitter(policy)}"


def jitter(policy: RetryPolicy) -> str:
    if policy.jitter is Jitter.NONE:
        return "no jitter"
    if policy.jitter is Jitter.PROPORTIONAL:
        return f"±{policy.jitter_factor * 100:g} %"
    return f"{policy.jitter.value} jitter"


def limits(policy: RetryPolicy) -> str:
    """The bounds in time: of one attempt, and of all."""
    parts = []
    if policy.attempt_timeout != inf:
        parts.append(f"{seconds(policy.attempt_timeout)} an attempt")
    if policy.time_budget != inf:
        parts.append(f"{seconds(policy.time_budget)} in all")
    return ", ".join(parts) or "no limit"


def field_value(name: str, value: object) -> str:
    """One field of a policy, as a table shows it."""
    if name == "max_attempts" and isinstance(value, int):
        return attempts(value)
    if name in ("base_delay", "max_delay", "time_budget", "attempt_timeout", "max_retry_after"):
        return seconds(value if isinstance(value, int | float) else None)
    return plain(value)


def plain(value: object) -> str:
    """A value without Python's accent."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def failure(happened: Failure) -> str:
    """`http_error 429 (rate_limited)`."""
    status = "" if happened.http_status is None else f" {happened.http_status}"
    name = f"{happened.exception}, " if happened.exception else ""
    return f"{name}{happened.code.name}{status} ({happened.failure_type.value})"


def waits(schedule: tuple[PlannedWait, ...]) -> str:
    """The first waits in a row: `0.5–1 s, 1–2 s, …`."""
    shown = [span(wait.min, wait.max) for wait in schedule[:3]]
    return ", then ".join(shown) + (", …" if len(schedule) > 3 else "")


WIDTH = 120
"""Columns when nobody says how many there are."""


def printable(text: str, *, keep: str = "") -> str:
    """The text without anything that steers a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def say(text: str) -> None:
    """A line of talk. When nobody hears it, the exit code still says how it ended."""
    try:
        print(printable(text), file=sys.stderr)
    except OSError:
        return


def put(text: str = "") -> None:
    """Lines of data."""
    print(printable(text, keep="\n"))


def where(source: str) -> str:
    """A place, without the folder that the reader is in."""
    return source.removeprefix(os.getcwd() + os.sep)


def jsonable(value: object) -> Any:
    """A value as JSON has it: enums as text, no limit as null."""
    match value:
        case Enum():
            return value.value
        case float():
            return value if isfinite(value) else None
        case dict():
            return {str(key): jsonable(one) for key, one in value.items()}
        case list() | tuple():
            return [jsonable(one) for one in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def put_json(value: object) -> None:
    """A JSON document, in which a control character is an escape."""
    from json import dumps

    text = dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        text = "".join(char if char.isprintable() or char == "\n" else dumps(char)[1:-1] for char in text)
    print(text)


def console() -> Console:
    """Where tables are drawn."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _width(), highlight=False, markup=False, emoji=False)


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), 400) if columns.isascii() and columns.isdigit() else WIDTH


def put_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """A table for people. `styles` are colours by column; the `whole` columns are not broken into lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        style = styles[number] if number < len(styles) else ""
        table.add_column(column, style=style, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(printable(cell, keep="\n")) for cell in row))
    _trimmed(table)


def _trimmed(table: Any) -> None:
    """Without the blanks that pad the last column when nobody sees its edge."""
    here = console()
    if here.is_terminal:
        here.print(table)
        return
    with here.capture() as captured:
        here.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
