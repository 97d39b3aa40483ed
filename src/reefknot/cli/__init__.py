"""
The command line: noun, then verb.

Data goes to stdout, talk to stderr. Here is only the door: the version is answered without loading anything, everything
else is loaded when it is asked for.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # a plain name, so that typing is not imported for it
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and answer its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words == ["--version"]:
        from reefknot import __version__

        print(f"reefknot {__version__}")
        return 0
    from reefknot.cli.app import run

    return run(words)
