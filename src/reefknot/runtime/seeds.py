"""
Where draws get their seed and their keys.

The seed is random per process, and anew after a fork, so that a fleet never draws alike. A call without a key of its
own gets one from a nonce and a counter.
"""

import os
from itertools import count

next_key = count(1).__next__
"""A key for one call that brought none. The process seed is the nonce: two processes never share a pair."""
process_seed = 0


def _reseed() -> None:
    global process_seed
    process_seed = int.from_bytes(os.urandom(8), "big")


_reseed()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)
