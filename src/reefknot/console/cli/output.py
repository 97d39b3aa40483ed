"""
Output of a command: JSON for programs, tables and sentences for people on stdout, messages on stderr.

No control character from outside reaches a terminal, and no line break: a message of others cannot forge a line.
Colours are for terminals, and off when `NO_COLOR` is set; elsewhere the width is bounded, so that a table in a log
stays a table.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from errno import EIO
from io import BufferedWriter, FileIO, TextIOWrapper
from select import select
from typing import Any, TextIO

from reefknot.console.operations.values import jsonable
from reefknot.runtime.log import printable

STDOUT, STDERR = 1, 2
"""Numbers of the descriptors that every process inherits."""
Advance = Callable[[int], None]
Cell = str | list[str]
WIDTH = 120
"""Columns where neither a terminal nor `COLUMNS` says how many there are."""
STACKED_BELOW = 80
"""Columns below which no column of a table is left out: rather, each row becomes a block of lines."""
LONGEST_WORD = 16
"""Columns from which on a word may be broken into lines."""
WIDEST = 100_000
"""Columns of a table that is wanted whole."""
GAP = 3
"""Blanks between two columns of a table."""
STYLES = {"bold": "1", "dim": "2", "cyan": "36"}
"""Styles of a table's column, as terminals know them."""


# ---- streams ---------------------------------------------------------------------------------------------------------


class OutputError(OSError):
    """Stdout cannot be written: the disk is full, or the device fails."""


class StandardStream(FileIO):
    """
    The descriptor of stdout or stderr. After its reader has gone, or its terminal was closed, output is dropped.

    A command goes on, so that its exit code tells what it found: `audit verify | head -1` is 65 when events differ.
    With `forgiving`, as for messages, no error of the device is raised at all. The descriptor is a duplicate: what the
    number of stdout means to others can be changed meanwhile.
    """

    def __init__(self, stream: TextIO, *, forgiving: bool) -> None:
        super().__init__(os.dup(stream.fileno()), "wb", closefd=False)  # it lasts as long as the process
        self._stream = stream  # collected, it would close the descriptor, and the next opened file had its number
        self.reader_is_gone = False
        self._forgiving = forgiving
        self._was_terminal = self.isatty()

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        if self.reader_is_gone:
            return size
        try:
            while (written := super().write(data)) is None:  # it does not block, and its reader is slow
                select([], [self], [])
            return written
        except OSError as error:
            is_gone = isinstance(error, BrokenPipeError) or (error.errno == EIO and self._was_terminal)
            if not is_gone and not self._forgiving:
                raise OutputError(error.errno, error.strerror, "stdout") from error
            self.reader_is_gone = is_gone
        return size


def guard_streams() -> None:
    """Put a `StandardStream` under `sys.stdout` and `sys.stderr`. A stream without a descriptor stays as it is."""
    sys.stdout, sys.stderr = _guarded(sys.stdout, forgiving=False), _guarded(sys.stderr, forgiving=True)


def _guarded(stream: Any, *, forgiving: bool) -> Any:
    try:
        file = StandardStream(stream, forgiving=forgiving)
        stream.flush()
    except (AttributeError, OSError, ValueError):
        return stream
    return TextIOWrapper(
        BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=forgiving or stream.line_buffering or stream.write_through,
    )


_data: TextIO | None = None


def data() -> TextIO:
    """The stream of a command's data: stdout, also inside `prints_to_stderr`."""
    return sys.stdout if _data is None else _data


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what one's own steps and their child processes print to stderr while the block lasts: stdout is for the
    command's data."""
    global _data
    _data = sys.stdout
    try:
        with redirect_stdout(sys.stderr), _children_print_to_stderr():
            yield
    finally:
        _data = None


@contextmanager
def _children_print_to_stderr() -> Iterator[None]:
    """Point the descriptor that child processes and libraries know as stdout to stderr. Only in a process of our own:
    elsewhere stdout is not guarded."""
    own = getattr(getattr(_data, "buffer", None), "raw", None)
    if not isinstance(own, StandardStream):
        yield
        return
    with suppress(OSError):  # stderr was closed
        os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        os.dup2(own.fileno(), STDOUT)


def reader_is_gone() -> bool:
    """Whether the reader of stdout has closed it: a command that only shows what happens may then end."""
    raw = getattr(getattr(data(), "buffer", None), "raw", None)
    return isinstance(raw, StandardStream) and raw.reader_is_gone


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


MessageForm = Callable[[str, str | None, str], str]
"""Makes a line of a message, its address and its level."""


def _plain(text: str, url: str | None, _level: str) -> str:
    """The message as a line for people, and the address at its end."""
    return printable(text if url is None else f"{text}: {url}")


_message_form: MessageForm = _plain


@contextmanager
def messages_as(form: MessageForm) -> Iterator[None]:
    """Write messages in this form while the block lasts, such as lines of JSON. After an error the form stays, for the
    messages that tell of it, until `plain_messages` is called."""
    global _message_form
    before, _message_form = _message_form, form
    yield
    _message_form = before


def plain_messages() -> None:
    """Write messages as plain lines again."""
    global _message_form
    _message_form = _plain


def say(text: str, *, url: str | None = None, level: str = "info") -> None:
    """
    Write a message to stderr. A closed stderr is ignored: the exit code still tells how the command ended.

    `url` is an address that is shown as it is, with the token that the command has made: behind the message, and as
    JSON in a field of its own. `level` is that of a log line, for messages that are JSON: `info`, `warning`, `error`.
    """
    try:
        print(_message_form(text, url, level), file=sys.stderr)
    except OSError:
        return


def put(text: str = "") -> None:
    """Write one line of data to stdout; a line break inside is shown as an escape."""
    print(printable(text), file=data())


def put_document(text: str) -> None:
    """Write a text of several lines to stdout, such as a file that the command would write."""
    print(printable(text.rstrip("\n"), keep="\n"), file=data())


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


def json_text(value: object) -> str:
    """A value in a table's cell: text as it is, everything else as JSON on one line."""
    from json import dumps

    return value if isinstance(value, str) else dumps(value, ensure_ascii=False)


# ---- tables and progress ---------------------------------------------------------------------------------------------


def put_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    styles: Sequence[str] = (),
    whole: Sequence[str] = (),
    optional: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """
    A table for people, no wider than the terminal. `styles` are colours by column.

    The `whole` columns are not broken into lines. Where the table does not fit, `optional` columns are left out, the
    first named first, and a message says which; below 80 columns, and where that is not enough, each row is a block of
    lines with all of its columns. `wide` is the whole table, however wide. A cell is text, in which a line break is
    shown as an escape, or a list of lines.
    """
    cells = [[list(map(printable, [cell] if isinstance(cell, str) else cell)) for cell in row] for row in rows]
    width = WIDEST if wide else table_width()
    shown = fitting_columns(columns, cells, width=width, whole=whole, optional=optional)
    if shown is None:
        _put_blocks(columns, cells, styles, width)
        return
    numbers, widths = list(shown), _widths(columns, cells, shown, width)
    styled = [styles[number] if number < len(styles) else "" for number in numbers]
    _put_lines([[[columns[number]] for number in numbers]], widths, ["bold"] * len(numbers))
    print("─" * (sum(widths) + GAP * (len(widths) - 1)))
    _put_lines([[row[number] for number in numbers] for row in cells], widths, styled)
    left_out = [
        name for number, name in enumerate(columns) if number not in shown and any(any(r[number]) for r in cells)
    ]
    if left_out:
        say(f"left out, to fit {width} columns: {', '.join(left_out)}; --wide shows all")


def fitting_columns(
    columns: Sequence[str],
    rows: Sequence[Sequence[Sequence[str]]],
    *,
    width: int,
    whole: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> dict[int, int] | None:
    """
    The columns of a table of this width, by number, and the least width of each; None when they do not fit.

    Empty columns go first, which loses nothing. Before a column goes, words beyond `LONGEST_WORD` are broken. A whole
    column needs its longest line.
    """
    lines = [[name, *(line for row in rows for line in row[number])] for number, name in enumerate(columns)]
    unbroken = [
        max(map(cell_len, texts if name in whole else (word for text in texts for word in text.split())), default=0)
        for name, texts in zip(columns, lines, strict=True)
    ]
    broken = [
        size if name in whole else min(size, max(LONGEST_WORD, cell_len(name)))
        for name, size in zip(columns, unbroken, strict=True)
    ]
    empty = [name for name, texts in zip(columns, lines, strict=True) if name in optional and not any(texts[1:])]
    shown = list(range(len(columns)))
    for name in ("", *empty, *(optional if width >= STACKED_BELOW else ())):
        shown = [number for number in shown if not name or columns[number] != name]
        for needed in (unbroken, broken):
            if sum(needed[number] + GAP for number in shown) - GAP <= width:
                return {number: needed[number] for number in shown}
    return None


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[Sequence[str]]], least: Mapping[int, int], width: int
) -> list[int]:
    """The widths of these columns: what each needs at least, and a fair share of the rest up to its longest line."""
    widths = dict(least)
    longest = {n: max(map(cell_len, [columns[n], *(line for row in rows for line in row[n])])) for n in least}
    room = width - GAP * (len(widths) - 1)
    if sum(longest.values()) <= room:
        return list(longest.values())
    for _ in range(room - sum(widths.values())):
        narrowest = min((n for n in widths if widths[n] < longest[n]), key=widths.__getitem__)
        widths[narrowest] += 1
    return list(widths.values())


def _put_lines(
    rows: Iterable[Sequence[Sequence[str]]], widths: Sequence[int], styles: Sequence[str], *, gap: int = GAP
) -> None:
    """Rows of cells, each cell broken into lines of its column's width."""
    from itertools import zip_longest

    codes = [STYLES[style] if style and _has_colours() else "" for style in styles]
    for row in rows:
        cells = [
            [part for line in lines for part in wrapped(line, width)] for lines, width in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            line, blanks = "", 0
            for part, width, code in zip(parts, widths, codes, strict=True):
                if part:
                    line += " " * blanks + (f"\x1b[{code}m{part}\x1b[0m" if code else part)
                    blanks = 0
                blanks += width + gap - cell_len(part)
            print(line)


def wrapped(line: str, width: int) -> list[str]:
    """The line in parts of at most this width, broken between words, or within a word that is too long for a line."""
    if cell_len(line) <= width:
        return [line.rstrip()]
    parts, part = list[str](), ""
    for token in re.findall(r"\s*\S+", line):
        word = token
        if cell_len(part + word) > width:
            parts += [part] if part.strip() else []
            part, word = "", word.lstrip()
        while cell_len(word) > width:
            size = next(n for n in range(len(word), 0, -1) if n == 1 or cell_len(word[:n]) <= width)
            parts.append(word[:size])
            word = word[size:]
        part += word
    return [*parts, part] if part.strip() or not parts else parts


def cell_len(text: str) -> int:
    """The columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _has_colours() -> bool:
    """Whether tables have colours: on a terminal that knows them, unless `NO_COLOR` is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def _put_blocks(
    columns: Sequence[str], rows: Sequence[Sequence[Sequence[str]]], styles: Sequence[str], width: int
) -> None:
    """A block of lines for each row: a line for each column that is not empty."""
    label = max(map(len, columns))
    for row_number, row in enumerate(rows):
        if row_number:
            print()
        for number, lines in enumerate(row):
            if any(lines):
                style = styles[number] if number < len(styles) else ""
                _put_lines([[[columns[number]], lines]], (label, max(1, width - label - 2)), ("bold", style), gap=2)


def put_jobs(
    columns: Sequence[str], rows: Iterable[Sequence[str]], tenants: Sequence[str], *, styles: Sequence[str], **more: Any
) -> None:
    """A table of jobs, whose ids come first. If any job has a tenant, the second column shows the tenants."""
    if not any(tenants):
        put_table(columns, rows, styles=styles, **more)
        return
    beside = [(row[0], tenant, *row[1:]) for row, tenant in zip(rows, tenants, strict=True)]
    put_table((columns[0], "tenant", *columns[1:]), beside, styles=(*styles[:1], "", *styles[1:]), **more)


def put_fields(fields: Mapping[str, object]) -> None:
    """A table with a row per field that has a value."""
    rows = [(name, json_text(value)) for name, value in fields.items() if value is not None and value != ""]
    put_table(("field", "value"), rows, whole=("field",))


def table_width() -> int:
    """Columns of the terminal, or those that `COLUMNS` names where there is none."""
    if sys.stdout.isatty():
        from shutil import get_terminal_size

        return max(get_terminal_size((80, 24)).columns, 20)
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
