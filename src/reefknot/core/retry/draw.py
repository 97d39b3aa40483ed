"""
Chance without state.

A draw is a function of (seed, key of the work, retry index). Nothing is remembered, so a forked child, a thousand tasks
and a replay years later each get the number that belongs to them, and a fleet with different seeds never draws alike.
"""

_MASK = (1 << 64) - 1
_BY_KEY = 0x9E3779B97F4A7C15
_BY_INDEX = 0xD1B54A32D192ED03


def draw(seed: int, key: int, index: int) -> float:
    """A number in [0, 1) that belongs to this retry of this work under this seed."""
    z = (seed + key * _BY_KEY + (index + 1) * _BY_INDEX) & _MASK
    # The finaliser of splitmix64: every input bit reaches every output bit.
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) / 9007199254740992.0


def key_number(key: str) -> int:
    """A text key as the number `draw` takes; the same in every process."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
