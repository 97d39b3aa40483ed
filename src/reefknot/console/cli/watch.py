"""
Views that are redrawn until the user quits: `--watch` of the commands that list, and `reefknot top`.

On a terminal each view replaces the last one, and q or Ctrl-C quits; the terminal is then restored, whatever ended the
command. Elsewhere the views are printed one after the other, until the reader closes the stream.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from time import sleep
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import Parameter

from reefknot.console.cli.app import CommandError, Exit, exit_for
from reefknot.console.cli.options import arg, check_number
from reefknot.console.cli.output import OutputError, reader_is_gone, say, wrapped
from reefknot.console.operations.values import plural
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from cyclopts import Token

SHORTEST_S, LONGEST_S = 0.1, 3600.0
_ACCEPTED = f"seconds from {SHORTEST_S:g} to {LONGEST_S:g}"


def seconds_arg(text: str, *names: str) -> Parameter:
    """A parameter that is the time between two views. What is no number is refused as a number out of range is."""
    return arg(text, *names, converter=_seconds, allow_leading_hyphen=True)


def _seconds(hint: object, tokens: Sequence[Token]) -> float:
    try:
        return float(tokens[0].value)
    except ValueError:
        flag, given = tokens[0].keyword, printable(tokens[0].value, most=60)
        raise CommandError(f"{flag}: {given!r} is not accepted: {_ACCEPTED}, such as {flag} 5") from None


Watch = Annotated[float | None, seconds_arg("Redraw every SECONDS until q or Ctrl-C. Default: 2.", "--watch")]

_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def repeated(watch: float | None, draw: Callable[[], None]) -> None:
    """Print one view, or with `watch` one every `watch` seconds. Only a first view that fails ends the command."""
    if watch is None:
        draw()
        return
    check_every("--watch", watch)
    if sys.stdout.isatty():
        _on_screen(draw, watch)
        return
    draw()
    sys.stdout.flush()
    while not reader_is_gone():
        sleep(watch)
        try:
            draw()
        except (OutputError, BrokenPipeError):  # no later view could be seen either
            raise
        except Exception as error:
            for line in exit_for(error)[1]:
                say(line)
        sys.stdout.flush()


def check_every(flag: str, seconds: float) -> None:
    """Refuse a time between two views that is too short or too long."""
    check_number(flag, seconds, SHORTEST_S, LONGEST_S, _ACCEPTED)


def _on_screen(draw: Callable[[], None], every: float) -> None:
    """Draw in place until q is typed."""
    page = _drawn(draw, first=True)
    with _screen() as typed:
        while True:
            sys.stdout.write(_HOME + "".join(f"{line}{_END_OF_LINE}\n" for line in _fitting(page)) + _END_OF_SCREEN)
            sys.stdout.flush()
            if typed(every):
                return
            page = _drawn(draw)


class _Page(StringIO):
    """The text of one view for a terminal: it counts as one, so that colours and width are the terminal's."""

    def isatty(self) -> bool:
        return True


def _drawn(draw: Callable[[], None], *, first: bool = False) -> str:
    """The lines that one view prints on both streams. A later one that fails is the error's sentence: it may pass."""
    page = _Page()
    try:
        with redirect_stdout(page), redirect_stderr(page):
            draw()
    except Exception as error:
        if first:
            raise
        page.writelines(f"{line}\n" for line in exit_for(error)[1])
    return page.getvalue()


def _fitting(page: str) -> list[str]:
    """The lines that fit on the screen; the last one says how many do not."""
    size = os.get_terminal_size(sys.stdout.fileno())
    columns, height = size.columns or 80, max(2, (size.lines or 24) - 1)  # 0: a terminal that has no size
    # A table's lines fit already, and have colours.
    lines = [part for line in page.splitlines() for part in ([line] if "\x1b" in line else wrapped(line, columns))]
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"… {plural(len(lines) - height + 1, 'more line')}; a taller terminal shows them"]


@contextmanager
def _screen() -> Iterator[Callable[[float], bool]]:
    """A screen of its own, and a function that waits for `q`. Whatever ends it, the terminal is left as it was."""
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _without_echo(keyboard):
            sys.stdout.write(_ENTER)
            try:
                yield lambda seconds: _is_left(keyboard, seconds)
            finally:
                sys.stdout.write(_LEAVE)
                sys.stdout.flush()
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(int(Exit.TERMINATED))


@contextmanager
def _without_echo(keyboard: int | None) -> Iterator[None]:
    """Keys arrive at once and unseen. Ctrl-Z does nothing: a stopped view would leave its screen behind."""
    if keyboard is None:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        inside = termios.tcgetattr(keyboard)
        inside[6][termios.VSUSP] = b"\x00"
        termios.tcsetattr(keyboard, termios.TCSADRAIN, inside)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _is_left(keyboard: int | None, seconds: float) -> bool:
    """Wait this long for a key, and tell whether it was `q`. Another key draws the next view at once."""
    if keyboard is None:
        sleep(seconds)
        return False
    ready, _, _ = select.select([keyboard], [], [], seconds)
    return bool(ready) and os.read(keyboard, 64)[:1] in (b"q", b"Q", b"")
