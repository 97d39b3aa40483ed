"""
A disk that can be watched, broken and cut off.

Every storage call of SQLite goes through a hook before it reaches the real file system. A hook counts, ends the
process, freezes it, fails, or writes down what was asked. Shared memory is out of reach: SQLite does not hand those
calls to Python. Nothing in `src` knows this file; a store is given it as its opener.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import apsw

T = TypeVar("T")

Name = str | apsw.URIFilename | None


class Call(NamedTuple):
    """One storage call: what, on which file (by its suffix: "" is the database), where, and with which bytes."""

    kind: str
    file: str
    offset: int = 0
    data: bytes = b""


class Hook:
    """Lets everything pass."""

    def around(self, call: Call, run: Callable[[], T]) -> T:
        return run()

    def tear(self, call: Call, write: Callable[[bytes], None]) -> None:
        """A write, which may be cut short."""
        self.around(call, lambda: write(call.data))


class Counter(Hook):
    """Counts, and remembers what was what."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def around(self, call: Call, run: Callable[[], T]) -> T:
        self.calls.append(call._replace(data=b""))
        return run()


class Fuse(Hook):
    """Sends this process a signal instead of the call with this number, or in the middle of it if that is a write."""

    def __init__(self, at: int, *, torn: bool = False, sends: signal.Signals = signal.SIGKILL) -> None:
        self._at = at
        self._torn = torn
        self._sends = sends
        self._numbers = count(1)

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if next(self._numbers) == self._at:
            os.kill(os.getpid(), self._sends)
        return run()

    def tear(self, call: Call, write: Callable[[bytes], None]) -> None:
        if next(self._numbers) == self._at:
            if self._torn:
                write(call.data[: len(call.data) // 2])
            os.kill(os.getpid(), self._sends)
        write(call.data)


class Recorder(Hook):
    """Writes down everything that changes a file or makes it durable, in order."""

    def __init__(self) -> None:
        self.log: list[Call] = []

    def around(self, call: Call, run: Callable[[], T]) -> T:
        result = run()
        if call.kind in ("open", "write", "truncate", "sync", "delete"):
            self.log.append(call)
        return result


class DroppingRecorder(Recorder):
    """A recorder whose next fsync of the log fails when it is told to: the disk then never gets what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_next = False

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if self.fails_next and (call.kind, call.file) == ("sync", "-wal"):
            self.fails_next = False
            self.log.append(call._replace(kind="lost"))
            raise disk_error()
        return super().around(call, run)


class Failing(Hook):
    """Fails the calls of these kinds from the one with this number on, until it is mended."""

    def __init__(self, kinds: Sequence[str], at: int, error: Callable[[], Exception], *, lasts: int = 1) -> None:
        self._kinds = frozenset(kinds)
        self._at = at
        self._error = error
        self._lasts = lasts
        self._numbers = count(1)
        self.failed: list[Call] = []
        self.mended = False

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if call.kind in self._kinds and self._at <= next(self._numbers) < self._at + self._lasts and not self.mended:
            self.failed.append(call._replace(data=b""))
            raise self._error()
        return run()


class FailingWhile(Hook):
    """Fails every call of a kind while a file exists."""

    def __init__(self, flag: Path, kind: str, error: Callable[[], Exception]) -> None:
        self._flag, self._kind, self._error = flag, kind, error

    def around(self, call: Call, run: Callable[[], T]) -> T:
        if call.kind == self._kind and self._flag.exists():
            raise self._error()
        return run()


def disk_full() -> Exception:
    """What SQLite makes of ENOSPC."""
    return apsw.FullError(os.strerror(errno.ENOSPC))


def disk_error() -> Exception:
    """What SQLite makes of EIO."""
    return apsw.IOError(os.strerror(errno.EIO))


class FaultyDisk(apsw.VFS):
    """A VFS over SQLite's own. `lazy` counts syncs but leaves them out: a process's death does not need them."""

    def __init__(self, hook: Hook, *, name: str = "faulty", lazy: bool = False, default: bool = False) -> None:
        """`default`: every connection of this process is on this disk."""
        self.hook = hook
        self.lazy = lazy
        self.name = name
        self.real = apsw.vfs_names()[0]
        super().__init__(name, self.real, makedefault=default)

    def opener(self, *, autocheckpoint: int | None = None) -> Callable[[str, int], apsw.Connection]:
        """How a store opens its connections on this disk."""

        def opened(path: str, flags: int) -> apsw.Connection:
            connection = apsw.Connection(path, flags=flags, vfs=self.name)
            if autocheckpoint is not None:
                connection.wal_autocheckpoint(autocheckpoint)
            return connection

        return opened

    def excepthook(self, *given: object) -> bool:
        return True  # SQLite hears of it by the result; no need to print it as well

    def xOpen(self, name: Name, flags: list[int]) -> "FaultyFile":
        return self.hook.around(Call("open", _suffix(name)), lambda: FaultyFile(self, name, flags))

    def xDelete(self, filename: str, syncdir: bool) -> None:
        call = Call("delete", _suffix(filename), int(syncdir))
        self.hook.around(call, lambda: super(FaultyDisk, self).xDelete(filename, syncdir))

    def xAccess(self, pathname: str, flags: int) -> bool:
        return self.hook.around(
            Call("access", _suffix(pathname)), lambda: super(FaultyDisk, self).xAccess(pathname, flags)
        )


@contextmanager
def lazy_disk(hook: Hook) -> Iterator[FaultyDisk]:
    """A disk that is there for a while, for processes that do not die."""
    made = FaultyDisk(hook, lazy=True)
    try:
        yield made
    finally:
        made.unregister()


class FaultyFile(apsw.VFSFile):
    """A file on a faulty disk."""

    def __init__(self, disk: FaultyDisk, name: Name, flags: list[int]) -> None:
        self._disk = disk
        self._file = _suffix(name)
        super().__init__(disk.real, name, flags)

    def excepthook(self, *given: object) -> bool:
        return True

    def xRead(self, amount: int, offset: int) -> bytes:
        return self._around("read", offset, lambda: super(FaultyFile, self).xRead(amount, offset))

    def xWrite(self, data: bytes, offset: int) -> None:
        call = Call("write", self._file, offset, bytes(data))
        self._disk.hook.tear(call, lambda part: super(FaultyFile, self).xWrite(part, offset))

    def xTruncate(self, newsize: int) -> None:
        self._around("truncate", newsize, lambda: super(FaultyFile, self).xTruncate(newsize))

    def xSync(self, flags: int) -> None:
        self._around("sync", 0, lambda: None if self._disk.lazy else super(FaultyFile, self).xSync(flags))

    def xFileSize(self) -> int:
        return self._around("size", 0, super().xFileSize)

    def xLock(self, level: int) -> None:
        self._around("lock", level, lambda: super(FaultyFile, self).xLock(level))

    def xUnlock(self, level: int) -> None:
        self._around("unlock", level, lambda: super(FaultyFile, self).xUnlock(level))

    def xClose(self) -> None:
        self._around("close", 0, super().xClose)

    def _around(self, kind: str, offset: int, run: Callable[[], T]) -> T:
        return self._disk.hook.around(Call(kind, self._file, offset), run)


def _suffix(name: Name) -> str:
    text = name.filename() if isinstance(name, apsw.URIFilename) else name or "-temporary"
    return next((end for end in ("-wal", "-journal", "-shm", "-temporary") if text.endswith(end)), "")
