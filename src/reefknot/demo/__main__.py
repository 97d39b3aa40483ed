"""Command line of the demos: which of the two, and for how long."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

SHORTEST_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo and return its exit code."""
    parser = ArgumentParser(prog="python -m reefknot.demo", description="The whole system at work, within a minute.")
    parser.add_argument("--retry", action="store_true", help="a tour of retries instead, about ten seconds")
    parser.add_argument("--fast", action="store_true", help="run it in a few seconds")
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="duration; default: 50")
    parser.add_argument("--keep", metavar="FOLDER", help="keep configuration, files and store in this folder")
    parser.add_argument("--seed", type=int, default=1, help="seed of jitter; default: 1")
    options = parser.parse_args(arguments)
    if options.retry:
        from reefknot.demo import tour

        return tour.main(fast=options.fast)
    from reefknot.demo import show

    seconds = options.seconds if options.seconds is not None else (show.FAST_S if options.fast else show.USUAL_S)
    if not SHORTEST_S <= seconds <= 3600:
        parser.error(f"argument --for: {seconds:g} is not accepted: from {SHORTEST_S:g} to 3600")
    return show.main(seconds, keep=options.keep, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
