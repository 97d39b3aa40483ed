"""
The command line: `reefknot NOUN VERB`, data on stdout, messages on stderr.

This module is the entry point and loads nothing itself: `--version` is answered at once, and a noun is imported when it
is named.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        _prepare_process()
    if words in (["--version"], ["-V"]):
        from reefknot import __version__

        return _put(f"reefknot {__version__}\n")
    from reefknot.console.cli.app import run

    if argv is not None:
        return run(words)
    from reefknot.console.cli.output import guard_streams

    guard_streams()
    code = run(words)
    gc.freeze()  # the process ends: the interpreter would look through all objects once more, for a tenth of the time
    return code


def _put(text: str) -> int:
    """Write to stdout and return the exit code. `cli.output`, which does the same for all commands, is not loaded."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        code = 0
    except OSError as error:
        code = 74
        try:  # noqa: SIM105 - contextlib is not loaded for the version
            sys.stderr.write(f"reefknot: stdout: {(error.strerror or 'cannot be written').lower()}\n")
        except OSError:
            pass  # the exit code still tells
    else:
        return 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
    return code


def _prepare_process() -> None:
    """Tune the collector and the streams of a process of our own; a process that calls `main` is left as it is."""
    gc.set_threshold(120_000)  # start-up makes many objects and drops few: collecting would take a tenth of it
    # A stream that was closed before the start becomes the null device; else the next opened file takes its number.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # A character that the terminal's encoding lacks becomes an escape, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
