"""
Retention of events and ended work: what was asked for, and its note in a file next to the store.

The note lets a process without a setting of its own keep what another one was configured to keep, and lets
`audit verify` judge which events a log may have lost.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import EllipsisType

import msgspec
from msgspec import Struct

from reefknot.core import checks
from reefknot.runtime.files import whole_file

KEEP_EVENTS_S = 90 * 86_400.0
KEEP_WORK_S = 7 * 86_400.0
MOST_NOTE_BYTES = 4096


class Retention(Struct, frozen=True):
    """Seconds that events and ended work are kept; None keeps them for ever. Keys carry their own expiry."""

    events: float | None = KEEP_EVENTS_S
    work: float | None = KEEP_WORK_S


class _Noted(Struct, frozen=True):
    retention: Retention | None = None
    last_round_at: float = msgspec.field(default=0.0, name="tidied_at")


class RetentionNote:
    """A small file next to a store: the configured retention, and the time of the last round."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(f"{path}-retention")
        self._noted = _Noted()

    def read(self) -> _Noted:
        """The note as it stands; one that cannot be read counts as empty."""
        if self._path is not None:
            with suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
                self._noted = msgspec.json.decode(file.read(MOST_NOTE_BYTES), type=_Noted)
        return self._noted

    def write(self, **changes: object) -> None:
        """Replace the file atomically. A folder that cannot be written is reported by the store itself."""
        self._noted = msgspec.structs.replace(self.read(), **changes)
        if self._path is None:
            return
        with suppress(OSError), whole_file(self._path, durable=False) as file:
            file.write(msgspec.json.encode(self._noted))


def retention_given(
    events: checks.Seconds | EllipsisType | None, work: checks.Seconds | EllipsisType | None
) -> Retention | None:
    """The retention that a caller of `open_store` gave, with defaults for the rest; None when it gave none."""
    if events is ... and work is ...:
        return None
    built_in = Retention()
    return Retention(
        built_in.events if events is ... else checks.seconds_or_none("audit_retention", events, meaning="for ever"),
        built_in.work if work is ... else checks.seconds_or_none("work_retention", work, meaning="for ever"),
    )
