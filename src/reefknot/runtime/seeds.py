"""
Seeds and keys of random draws.

The seed is random per process, and new after a fork, so that no two processes of a fleet draw the same jitter. A call
that brings no key of its own takes the next number; together with the seed it is unique.
"""

import os
from itertools import count

next_key = count(1).__next__
process_seed = 0


def _reseed() -> None:
    global process_seed
    process_seed = int.from_bytes(os.urandom(8), "big")


_reseed()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)
