"""
Output of a command: JSON for programs, tables and sentences for people on stdout, messages on stderr.

No control character from outside reaches a terminal, and no line break: a message of others cannot forge a line.
Colours are for terminals, and off when `NO_COLOR` is set; elsewhere the width is bounded, so that a table in a log
stays a table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from errno import EIO
from io import BufferedWriter, FileIO, TextIOWrapper
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

from reefknot.core.retry.policy import LONGEST_WAIT
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]
Cell = str | list[str]
WIDTH = 120
"""Columns where neither a terminal nor `COLUMNS` says how many there are."""
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


# ---- stdout ----------------------------------------------------------------------------------------------------------


class OutputError(OSError):
    """Stdout cannot be written: the disk is full, or the device fails."""


class StdoutFile(FileIO):
    """
    The descriptor of stdout. After its reader has gone, or the terminal was closed, output is dropped.

    A command goes on, so that its exit code tells what it found: `audit verify | head -1` is 65 when events differ.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "wb", closefd=False)
        self._stream = stream  # collected, it would close the descriptor
        self.reader_is_gone = False
        self._was_terminal = self.isatty()

    def write(self, data: Any, /) -> int:
        try:
            return len(memoryview(data).cast("B")) if self.reader_is_gone else super().write(data) or 0
        except BrokenPipeError:
            self.reader_is_gone = True
        except OSError as error:
            if error.errno != EIO or not self._was_terminal:
                raise OutputError(error.errno, error.strerror, "stdout") from error
            self.reader_is_gone = True
        return len(memoryview(data).cast("B"))


def guard_stdout() -> None:
    """Put a `StdoutFile` under `sys.stdout`. A stream without a descriptor stays as it is."""
    stream: Any = sys.stdout
    try:
        file = StdoutFile(stream)
    except (AttributeError, OSError, ValueError):
        return
    stream.flush()
    sys.stdout = TextIOWrapper(
        BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def reader_is_gone() -> bool:
    """Whether nobody reads stdout any more: a command that only shows what happens may end."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, StdoutFile) and raw.reader_is_gone


def flush_stdout() -> None:
    """Write what is buffered. When that fails, the buffer goes to the null device, and `OutputError` is raised."""
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        if not isinstance(error, BrokenPipeError):
            raise OutputError(error.errno, error.strerror, "stdout") from error


def drop_output() -> None:
    """Send buffered output to the null device: the interpreter must not fail flushing it at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it lasts as long as the process


# ---- lines -----------------------------------------------------------------------------------------------------------


_message_form: Callable[[str], str] = printable


@contextmanager
def messages_as(form: Callable[[str], str]) -> Iterator[None]:
    """Write messages in this form while the block lasts, such as lines of JSON."""
    global _message_form
    before, _message_form = _message_form, form
    try:
        yield
    finally:
        _message_form = before


def say(text: str) -> None:
    """Write a message to stderr. A closed stderr is ignored: the exit code still tells how the command ended."""
    try:
        print(_message_form(text), file=sys.stderr)
    except OSError:
        return


def put(text: str = "") -> None:
    """Write one line of data to stdout; a line break inside is shown as an escape."""
    print(printable(text))


def put_document(text: str) -> None:
    """Write a text of several lines to stdout, such as a file that the command would write."""
    print(printable(text.rstrip("\n"), keep="\n"))


def relative(source: str) -> str:
    """A path or source position, without the current folder in front."""
    return source.removeprefix(os.getcwd() + os.sep)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def show(data: object, text: Callable[[], None], *, json: bool) -> None:
    """Print `data` as JSON with `--json`; else call `text`, which prints the same for people."""
    if json:
        put_json(data)
    else:
        text()


def put_json(value: object, *, first: Mapping[str, Iterable[str]] | None = None) -> None:
    """
    A JSON document, in which a control character is an escape.

    `first` are fields before those of an object, each value as pieces of JSON: it may be larger than memory.
    """
    from json import dumps

    text = dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii():
        text = "".join(char if char.isprintable() or char == "\n" else dumps(char)[1:-1] for char in text)
    for name, pieces in (first or {}).items():
        sys.stdout.write(f"{text[0]}\n  {dumps(name)}: ")
        sys.stdout.writelines(pieces)
        text = "," + text[1:]
    print(text)


def jsonable(value: object) -> Any:
    """The value in JSON's types: enums as text, infinity as null."""
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


def json_text(value: object) -> str:
    """A value in a table's cell: text as it is, everything else as JSON on one line."""
    from json import dumps

    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)


# ---- tables and progress ---------------------------------------------------------------------------------------------


def put_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, styles: Sequence[str] = (), whole: Sequence[str] = ()
) -> None:
    """
    A table for people. `styles` are colours by column; the `whole` columns are not broken into lines.

    A cell is text, in which a line break is shown as an escape, or a list of lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        style = styles[number] if number < len(styles) else ""
        table.add_column(column, style=style, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text("\n".join(map(printable, [cell] if isinstance(cell, str) else cell))) for cell in row))
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def put_jobs(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    tenants: Sequence[str],
    *,
    styles: Sequence[str],
    whole: Sequence[str],
) -> None:
    """A table of jobs, whose ids come first. A column beside the ids shows the tenants, if any job has one."""
    if not any(tenants):
        put_table(columns, rows, styles=styles, whole=whole)
        return
    beside = [(row[0], tenant, *row[1:]) for row, tenant in zip(rows, tenants, strict=True)]
    styles = (*styles[:1], "", *styles[1:])
    put_table((columns[0], "tenant", *columns[1:]), beside, styles=styles, whole=(*whole, "tenant"))


def put_fields(fields: Mapping[str, object]) -> None:
    """A table with a row per field that has a value."""
    rows = [(name, json_text(value)) for name, value in fields.items() if value is not None and value != ""]
    put_table(("field", "value"), rows, whole=("field",))


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _width(), highlight=False, markup=False, emoji=False)


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return min(max(int(columns), 40), 400) if columns.isascii() and columns.isdigit() else WIDTH


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """A progress bar on stderr; yields a function that takes how much more is done. Draws only on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=max(total, 1))
        yield lambda done: bar.advance(task, done)


# ---- times and counts in words ---------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """`100 ms`, `1.5 s`, `1800 s`; `no limit` for none."""
    if value is None or value >= LONGEST_WAIT:
        return "no limit"
    if 0 < value < 1:
        return f"{value * 1000:.4g} ms"
    return f"{value:.3f}".rstrip("0").rstrip(".") + " s"


def long_seconds(value: float) -> str:
    """A computed duration in the largest fitting unit: `30 min` for 1800 s."""
    for size, unit in _UNITS:
        if value >= 2 * size:
            return f"{value / size:.3g} {unit}"
    return seconds(float(f"{value:.4g}"))


def age(value: float) -> str:
    """`3.2 s`, `4 min`: time since, or time left."""
    return long_seconds(max(0.0, round(value, 1)))


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as ISO 8601 in UTC, to the millisecond."""
    if milliseconds is None:
        return None
    from datetime import UTC, datetime

    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 retry`, `3 retries`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def queue_depth(depth: int, size: int | None) -> str:
    """
    `3 of 10`: the taken places of a queue.

    A step that is to be retried returns to the queue whether there is room or not: a queue may hold as many more as its
    class has slots, and those are counted apart.
    """
    if size is None:
        return f"{depth}, unbounded"
    return f"{depth} of {size}" if depth <= size else f"{size} of {size} and {depth - size} back for a retry"
