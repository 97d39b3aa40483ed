"""
The command line: `reefknot NOUN VERB`, data on stdout, messages on stderr.

This module is the entry point and loads nothing itself: `--version` is answered at once, and a noun is imported when it
is named.
"""

from __future__ import annotations

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

        print(f"reefknot {__version__}")
        return 0
    from reefknot.cli.app import run

    return run(words)


def _prepare_process() -> None:
    """Tune the collector and the streams of a process of our own; a process that calls `main` is left as it is."""
    import gc

    gc.set_threshold(50_000)  # start-up makes many objects and drops few: collecting would take a tenth of it
    # A stream that was closed before the start becomes the null device; else the next opened file takes its number.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # A character that the terminal's encoding lacks becomes an escape, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
