"""
Unique work: one job for each key of a tenant, while that is open and for a time after its creation.

The job that was kept first holds the key: pending, running or in quarantine, and, however it ended, for as long after
its creation as its submission asked for. A submission with a key that is held makes no job. It is decided in the
transaction that keeps the work. Every engine finds jobs by their keys, and asks `holds_key` of the job itself.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from reefknot.core import checks
from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.queue.model.work import ENDED, NO_EXTRA, Extra, WorkItem, record_id

LONGEST_KEY = 256
LONGEST_FOR_S = 30 * 86_400.0
_KEY = f"printable text of 1 to {LONGEST_KEY} characters"


class Unique(Struct, frozen=True):
    """The key of a submission, and for how long after its creation its job holds it although it has ended."""

    key: str = ""
    for_ms: int = 0


NOT_UNIQUE = Unique()


def unique_of(options: Mapping[str, Any]) -> Unique:
    """The options `unique` and `for_` of a submission, checked."""
    key, given = options.get("unique"), options.get("for_")
    if key is None and given is None:
        return NOT_UNIQUE
    if key is None:
        raise ParameterError("for_", given, "only together with unique, the key of the job")
    if not isinstance(key, str):
        raise ParameterTypeError("unique", key, _KEY)
    if not 0 < len(key) <= LONGEST_KEY or not key.isprintable():
        raise ParameterError("unique", key, _KEY)
    seconds = 0.0 if given is None else checks.seconds("for_", given, or_zero=True, most=LONGEST_FOR_S)
    return Unique(key, round(seconds * 1000))


def extra_of(after: tuple[str, ...], key: Unique) -> Extra:
    """The fields of a submission that waits for the records `after`, and has this key."""
    return Extra(after=after, unique=key.key, unique_ms=key.for_ms) if after or key.key else NO_EXTRA


def unique_name(item: WorkItem) -> str:
    """The key of an item with its tenant, like the id of a record; empty without a key."""
    return record_id(item.extra.unique, item.tenant_id) if item.extra.unique else ""


def left_ms(item: WorkItem, wall: int) -> int:
    """The time for which an item that has ended still holds its key."""
    return max(0, item.created_at + item.extra.unique_ms - wall)


def holds_key(item: WorkItem, wall: int) -> bool:
    """Whether an item with a key holds it now."""
    return item.state not in ENDED or left_ms(item, wall) > 0
