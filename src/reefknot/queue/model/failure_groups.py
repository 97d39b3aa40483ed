"""
Fingerprints of failures: failures with one cause share a fingerprint, whatever ids, numbers, names and paths they
mention.

A fingerprint is made of the failure's type, code, HTTP status and exception, and of its message without what differs
from job to job. It is stable: the same failure has it in every process and in the next version of a job.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from string import ascii_uppercase

import msgspec
from msgspec import Struct, structs

from reefknot.queue.model.work import WorkItem, vanished_reason

DIGITS = 12
LONGEST_MESSAGE = 2000
"""Characters of a message that count."""
LONGEST_EXAMPLE = 300
MOST_GROUPS = 1000
MOST_SOURCES = 20

# In this order at every position, so that a time is not taken for a number, nor an address for a path.
_VARIABLE = re.compile(
    r"""
    (?P<time>\d{4}-\d\d-\d\d(?:[T\ ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?
        |(?<!\d)\d\d?:\d\d(?::\d\d)?(?!\d))
    |(?P<address>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s'"<>`]+
        |(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)*
        |\[[0-9a-fA-F:.]{2,45}\](?::\d+)?
        |(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?!\w)
        |(?<![\w.-])[A-Za-z][\w-]*(?:\.[\w-]+)*:\d{2,5}(?!\w))
    |(?P<name>(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`|“[^”\n]*”|«[^»\n]*»)
    |(?P<path>(?<![\w/])(?:[A-Za-z]:[\\/]|\\\\)[^\s;,'"()]+
        |(?<![\w./~@+%-])[\w.~@+%-]*/(?:[^\s:;,'"()]*[^\s:;,'"().])?)
    |(?P<id>0[xX][0-9a-fA-F]+
        |(?<![A-Za-z0-9])(?=[0-9a-fA-F-]*\d)[0-9a-fA-F]{7,}(?:-[0-9a-fA-F]{4,}){0,8}(?![A-Za-z0-9]))
    |(?P<n>\d+(?:[.,]\d+)*)
    """,
    re.VERBOSE,
)


def normalised(message: str) -> str:
    """A message with times, addresses, quoted names, paths, ids and numbers replaced by the name of their kind."""
    return _normalised(message[:LONGEST_MESSAGE])


@lru_cache(maxsize=1024)  # most failures of one cause have one message
def _normalised(message: str) -> str:
    found = _VARIABLE.sub(lambda match: f"<{match.lastgroup}>", message)
    return " ".join(found.split())


class FailureSummary(Struct, frozen=True):
    """The failure of an item in a few words. Without a stored failure only the message is known."""

    failure_type: str = ""
    code: str = ""
    message: str = ""
    http_status: int | None = None
    exceptions: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        exception = self.exceptions[0] if self.exceptions else ""
        parts = (self.failure_type, self.code, str(self.http_status or ""), exception, normalised(self.message))
        return sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:DIGITS]


_summaries = msgspec.json.Decoder(FailureSummary)


def _kept(item: WorkItem) -> FailureSummary:
    """The stored failure of an item; an empty one where none can be read."""
    try:
        return FailureSummary() if item.failure is None else _summaries.decode(item.failure)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return FailureSummary()


def failure_summary(item: WorkItem) -> FailureSummary:
    """The failure for which an item is in quarantine. The reason is its message where no failure has one."""
    if item.crashes and item.reason == vanished_reason(item.crashes):
        return FailureSummary(message=item.reason)  # an owner that vanished left the failure of an attempt before
    found = _kept(item)
    return found if found.message else structs.replace(found, message=item.reason)


def has_error(item: WorkItem, text: str) -> bool:
    """Whether the reason of an item, or the code, type or message of its last failure, contains this text. Capital and
    small letters of ASCII are the same."""
    found = _kept(item)
    texts = (item.reason, found.code, found.failure_type, found.message)
    return any(in_small(text) in in_small(one) for one in texts)


_SMALL = {ord(letter): letter.lower() for letter in ascii_uppercase}


def in_small(text: str) -> str:
    """A text with ASCII capital letters as small ones, which every store can do."""
    return text.translate(_SMALL)


def fingerprint_of(item: WorkItem) -> str:
    """The fingerprint of the failure for which an item is in quarantine."""
    return failure_summary(item).fingerprint


class FailureGroup(Struct, frozen=True):
    """Items with one fingerprint; the message is that of the newest."""

    fingerprint: str
    count: int
    failure_type: str
    code: str
    message: str
    oldest_at: int
    newest_at: int
    kinds: tuple[str, ...]
    sources: tuple[str, ...]
    """At most `MOST_SOURCES` of them, as of kinds."""


class FailureGroups:
    """The groups of items that are added one by one, in bounded memory."""

    def __init__(self, items: Iterable[WorkItem] = ()) -> None:
        self._groups: dict[str, FailureGroup] = {}
        self.ungrouped = 0
        """Items whose fingerprints came after `MOST_GROUPS` others."""
        for item in items:
            self.add(item)

    def add(self, item: WorkItem) -> None:
        failure = failure_summary(item)
        fingerprint = failure.fingerprint
        known = self._groups.get(fingerprint)
        if known is None and len(self._groups) >= MOST_GROUPS:
            self.ungrouped += 1
            return
        at, message = item.updated_at, failure.message[:LONGEST_EXAMPLE]
        if known is None:
            known = FailureGroup(fingerprint, 0, failure.failure_type, failure.code, message, at, at, (), ())
        self._groups[fingerprint] = structs.replace(
            known,
            count=known.count + 1,
            message=message if at > known.newest_at else known.message,
            oldest_at=min(known.oldest_at, at),
            newest_at=max(known.newest_at, at),
            kinds=_with(known.kinds, item.kind),
            sources=_with(known.sources, item.source),
        )

    def groups(self) -> list[FailureGroup]:
        """The groups, the largest first."""
        return sorted(self._groups.values(), key=lambda one: (-one.count, -one.newest_at, one.fingerprint))


def _with(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    if not name or name in names or len(names) >= MOST_SOURCES:
        return names
    return tuple(sorted((*names, name)))
