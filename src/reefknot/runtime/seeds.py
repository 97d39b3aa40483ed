"""
Seeds and keys of random draws, and ids that no other process makes.

The seed is random per process, and new after a fork, so that no two processes of a fleet draw the same jitter. A call
that brings no key of its own takes the next number; together with the seed it is unique, and so is an id.
"""

import os
from itertools import count

next_key = count(1).__next__
process_seed = 0

_next_number = count(1).__next__


def new_id() -> str:
    """An id that is unique across processes. Ids have no order."""
    return f"{process_seed:016x}-{_next_number():x}"


def _reseed() -> None:
    global process_seed
    process_seed = int.from_bytes(os.urandom(8), "big")


_reseed()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)
