"""
The command line: noun, then verb.

Data goes to stdout, talk to stderr. Here is only the door: the version is answered without loading anything, everything
else is loaded when it is asked for.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        _settle_in()
    if words == ["--version"]:
        from reefknot import __version__

        print(f"reefknot {__version__}")
        return 0
    from reefknot.cli.app import run

    return run(words)


def _settle_in() -> None:
    """What only a process of our own may do: it is not done to somebody who calls `main` in theirs."""
    import gc

    gc.set_threshold(50_000)  # starting makes many objects and drops few: looking for garbage would be a tenth of it
    # A stream that was closed before we began goes nowhere; else the next file opened would take its place.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # What the terminal's encoding cannot show is shown as an escape, not as a traceback.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
