"""The door: which of the two demos, and for how long."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

SHORTEST_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a demo; the answer is the exit code."""
    parser = ArgumentParser(prog="python -m reefknot.demo", description="The whole system at work, within a minute.")
    parser.add_argument("--retry", action="store_true", help="the tour of retrying instead, about ten seconds")
    parser.add_argument("--fast", action="store_true", help="the same in a few seconds")
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="how long, 50 unless said")
    parser.add_argument("--keep", metavar="FOLDER", help="leave configuration, files and store in this folder")
    parser.add_argument("--seed", type=int, default=1, help="what chance draws")
    asked = parser.parse_args(arguments)
    if asked.retry:
        from reefknot.demo import tour

        return tour.main(fast=asked.fast)
    from reefknot.demo import show

    seconds = asked.seconds if asked.seconds is not None else (show.FAST_S if asked.fast else show.USUAL_S)
    if not SHORTEST_S <= seconds <= 3600:
        parser.error(f"argument --for: {seconds:g} is not accepted: from {SHORTEST_S:g} to 3600")
    return show.main(seconds, keep=asked.keep, seed=asked.seed)


if __name__ == "__main__":
    sys.exit(main())
