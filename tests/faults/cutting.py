"""
What a disk holds after the power went.

Given the recorded calls up to the cut: what was synced is there; of what was written since, nothing, or any of it, in
pieces of a sector, in any order. A file exists for sure once it was synced. A removal is sure once the folder was
synced: SQLite does that at the first sync of a journal or a log that it has opened.
Bytes next to a torn write stay as they were, as disks of this century promise.
"""

import random
from collections.abc import Iterable
from itertools import pairwise

from tests.faults.vfs import Call

SECTOR = 512
Image = dict[str, bytes]


class _File:
    """One file: its surely kept content (None: not surely there), and what happened to it since."""

    def __init__(self) -> None:
        self.kept: bytearray | None = None
        self.pending: list[Call] = []
        self.syncs_folder = False

    def folder_synced(self) -> None:
        """What was removed is gone for good, with all that was written before."""
        for place, call in reversed(list(enumerate(self.pending))):
            if call.kind == "delete":
                self.kept, self.pending = None, self.pending[place + 1 :]
                return


class Disk:
    """Follows the calls one by one; `image` cuts the power after the last of them."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}

    def follow(self, calls: Iterable[Call]) -> None:
        for call in calls:
            file = self._files.setdefault(call.file, _File())
            match call.kind:
                case "open":
                    file.syncs_folder = call.file in ("-wal", "-journal")
                case "sync":
                    if file.syncs_folder:
                        file.syncs_folder = False
                        for one in self._files.values():
                            one.folder_synced()
                    file.kept = _applied(file.kept, file.pending)
                    file.pending = []
                case "lost":  # an fsync that failed: the system takes its pages for written
                    file.pending = []
                case "delete" if call.offset:  # together with its folder's sync
                    file.kept, file.pending = None, []
                case "write" | "truncate" | "delete":
                    file.pending.append(call)
                case _:
                    pass  # nothing that lasts

    def image(self, dice: random.Random | None = None) -> Image:
        """The files after the cut; without dice nothing is kept that was not synced."""
        found: Image = {}
        for name, file in self._files.items():
            content = file.kept
            if dice is not None:
                content = _applied(content, _survivors(file.pending, dice))
            if content is not None:
                found[name] = bytes(content)
        return found


def _applied(content: bytearray | None, calls: Iterable[Call]) -> bytearray | None:
    result = None if content is None else bytearray(content)
    for call in calls:
        if call.kind == "delete":
            result = None
            continue
        result = bytearray() if result is None else result
        if call.kind == "truncate":
            del result[call.offset :]
        else:
            result.extend(bytes(max(0, call.offset + len(call.data) - len(result))))
            result[call.offset : call.offset + len(call.data)] = call.data
    return bytearray() if result is None and content is None else result


def _survivors(pending: list[Call], dice: random.Random) -> list[Call]:
    """Any of the unsynced calls, a write in sectors, mostly in order and sometimes not."""
    chance = dice.choice((0.1, 0.5, 0.9, 1.0))
    kept = [part for call in pending for part in _sectors(call) if dice.random() < chance]
    if dice.random() < 0.5:
        dice.shuffle(kept)
    return kept


def _sectors(call: Call) -> list[Call]:
    if call.kind != "write":
        return [call]
    first = SECTOR - call.offset % SECTOR
    borders = [0, *range(first, len(call.data), SECTOR), len(call.data)]
    pieces = pairwise(borders)
    return [Call("write", call.file, call.offset + begin, call.data[begin:end]) for begin, end in pieces if end > begin]
