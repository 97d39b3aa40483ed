"""A log written out: the events as lines, the head beside them. A file is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from reefknot.cli.evidence import exported
from reefknot.cli.progress import progress

if TYPE_CHECKING:
    from reefknot.core.audit.chain import Head
    from reefknot.ports.audit_log import AuditLog


async def export_to(file: Path, head_file: Path, log: AuditLog) -> tuple[int, Head]:
    """Write both files, the head last: with it there, the export is complete."""
    head = await log.head()
    count = -1  # the opening line is no event
    with _whole(file) as stream, progress("exporting", head.sequence) as advance:
        async for lines in exported(log, head):
            stream.write(lines)
            written = lines.count(b"\n")
            count += written
            advance(written)
    with _whole(head_file) as stream:
        stream.write(msgspec.json.encode(head) + b"\n")
    return count, head


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears when it is complete, readable by its owner only."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
