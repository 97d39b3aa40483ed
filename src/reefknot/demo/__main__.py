"""Command line of the demos: which of the two, how fast, and where its folder is."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo and return its exit code."""
    parser = ArgumentParser(prog="python -m reefknot.demo", description="Eight short scenes, about 25 seconds.")
    parser.add_argument("--retry", action="store_true", help="a tour of retries instead, about ten seconds")
    parser.add_argument("--fast", action="store_true", help="without the pauses, in a few seconds")
    parser.add_argument("--keep", metavar="FOLDER", help="folder of configuration, store and log; default: a new one")
    options = parser.parse_args(arguments)
    if options.retry:
        from reefknot.demo import tour

        return tour.main(fast=options.fast)
    from reefknot.demo import show

    return show.main(fast=options.fast, keep=options.keep)


if __name__ == "__main__":
    sys.exit(main())
