"""
A folder of a disk, read safely: the files in it, in order, and their contents.

Folders and files are opened part by part beneath the root, and no part may be a symbolic link that is not followed by
the settings: a person who can write to the folder cannot lead a sync out of it, not even between a look and the read
behind it. Special files are never opened. Files come in the order of their locations. Everything here blocks, and runs
in a thread.
"""

import errno
import fcntl
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from reefknot import clock
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError
from reefknot.ingest.connectors.file_selection import FolderSettings, Parts, Patterns, location_of, name_of, parts_of
from reefknot.runtime.files import is_open_here

DEEPEST = 100
"""Folders within each other; a deeper one is not read."""
LONGEST_FOLDER = 4000
"""Characters of the location of a folder."""
MOST_LISTED = 10_000
"""Names of one folder that are held at a time; a larger one is listed again for the next ones."""
LAST = "\U0010ffff"
"""Sorts behind every name."""
TAKEN_S = 1.0
"""Longest time in which a walk looks for files before it reports."""
MOST_CHAINED_LINKS = 2
"""Links to folders on the way to one file."""
SETTLED_NS = 2_000_000_000
"""Age from which a change shows in a file's times, whatever their granularity: FAT's is 2 s."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
_GET_VERSION = 0x80047601 if struct.calcsize("l") == 4 else 0x80087601
"""`FS_IOC_GETVERSION` of Linux."""
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})

# ---- the root --------------------------------------------------------------------------------------------------------


class Presence(Enum):
    """The answer to whether a file that was read once is still there."""

    THERE = "there"
    GONE = "gone"
    UNWANTED = "unwanted"
    UNKNOWN = "unknown"
    """It cannot be looked at: a folder on the way to it may not be read."""


class LinkLeadsOutsideError(OSError):
    """A symbolic link leads out of the folder, to where it may not be followed."""


class FileContent(NamedTuple):
    """A file that was read. `content` is None when it is larger than the limit."""

    state: os.stat_result
    content: bytes | None
    is_settled: bool
    """Whether a later change shows in the file's times for certain."""
    generation: str
    """Tells a file from a later one that was given its inode; empty where the file system does not say."""


class FileOnDisk(Struct, frozen=True):
    """A file that was read, for `LocalFiles.describe`."""

    location: str
    parts: Parts
    version: str
    read: FileContent

    @property
    def name(self) -> str:
        return name_of(self.parts[-1])


class Child(NamedTuple):
    """An entry of a folder. `location` sorts it; that of a folder ends with a slash."""

    location: str
    parts: Parts
    error: OSError | None = None

    @property
    def is_folder(self) -> bool:
        return self.location.endswith("/")


class Folder:
    """A folder that is read, by its settings."""

    def __init__(self, settings: FolderSettings, patterns: Patterns) -> None:
        self.settings = settings
        self.patterns = patterns

    @contextmanager
    def opened(self, expected: str = "") -> "Iterator[OpenFolder]":
        """The folder, open. One that is another folder than `expected` is a `SourceError`."""
        path = self.settings.path
        try:
            descriptor = os.open(path, _FOLDER & ~os.O_NOFOLLOW)
        except OSError as error:
            raise root_error(error, path) from error
        root = OpenFolder(self, descriptor)
        try:
            if expected not in ("", root.identity):
                message = (
                    f"the folder {path} was replaced or unmounted while it was read; it is read again from the start"
                )
                raise SourceError(message, FailureType.TRANSIENT)
            yield root
        finally:
            root.close()


class OpenFolder:
    """The root, held open, and the files beneath it."""

    def __init__(self, folder: Folder, descriptor: int) -> None:
        self._settings = folder.settings
        self._patterns = folder.patterns
        about = os.fstat(descriptor)
        self.identity = f"{about.st_dev}:{about.st_ino}"
        """Device and inode: another one when a disk is mounted or unmounted here, or the folder is made again."""
        self._bases = {"": descriptor}
        self._last: tuple[str, Parts, int] | None = None

    def close(self) -> None:
        if self._last is not None:
            os.close(self._last[2])
        for descriptor in self._bases.values():
            os.close(descriptor)

    def state(self, parts: Parts) -> os.stat_result:
        """The state of a file or a folder. A link that is not followed is itself what is looked at."""
        base, rest = self._place(parts)
        if not rest:
            return os.fstat(self._bases[base])
        return os.stat(rest[-1], dir_fd=self._folder(base, rest[:-1]), follow_symlinks=False)

    def presence(self, location: str) -> Presence:
        parts = parts_of(location)
        if parts is None or not self._patterns.wants(parts):
            return Presence.UNWANTED
        try:
            about = self.state(parts)
        except OSError as error:
            return Presence.GONE if is_gone(error) else Presence.UNKNOWN
        return Presence.THERE if stat.S_ISREG(about.st_mode) else Presence.GONE

    def changed_since(self, location: str, since_ns: int) -> bool:
        """Whether the nearest folder that is left on the way to `location` has changed since then."""
        parts = parts_of(location) or ()
        while parts:
            parts = parts[:-1]
            try:
                about = self.state(parts) if parts else os.fstat(self._bases[""])
            except OSError:
                continue
            if stat.S_ISDIR(about.st_mode):
                return about.st_mtime_ns >= since_ns
        return True

    def read(self, parts: Parts) -> FileContent | None:
        """The content of a file, read once more when it changed meanwhile; None where there is no `file`."""
        descriptor = self.file(parts)
        if descriptor is None:
            return None
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                return None
            begun_ns = time.time_ns()  # compared with the file system's times, which no virtual clock knows
            content, after = self._content(descriptor, before)
            if times_of(after) != times_of(before):
                before = after
                content, after = self._content(descriptor, before)
            is_settled = times_of(after) == times_of(before) and before.st_ctime_ns < begun_ns - SETTLED_NS
            return FileContent(after, content, is_settled, generation_of(descriptor))
        finally:
            os.close(descriptor)

    def file(self, parts: Parts) -> int | None:
        """A descriptor of a file, which the caller closes; None for what is no regular file, and for the store that is
        open here."""
        base, rest = self._place(parts)
        if not rest:
            return None
        folder = self._folder(base, rest[:-1])
        about = os.stat(rest[-1], dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(about.st_mode) or is_open_here(about):
            return None
        return os.open(rest[-1], _FILE, dir_fd=folder)

    def _content(self, descriptor: int, about: os.stat_result) -> tuple[bytes | None, os.stat_result]:
        most = self._settings.max_bytes
        if about.st_size > most:
            return None, about
        os.lseek(descriptor, 0, os.SEEK_SET)
        chunks: list[bytes] = []
        left = most + 1
        while left and (chunk := os.read(descriptor, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks) if left else None, os.fstat(descriptor)

    def children(self, parts: Parts, after: str) -> tuple[list[Child], bool]:
        """The next wanted entries behind a location in order, and whether these are all."""
        prefix = location_of(parts) + "/" if parts else ""
        found: list[Child] = []
        is_all = True
        descriptor = self._folder(*self._place(parts))
        with os.scandir(descriptor) as entries:
            for entry in entries:
                child = self._child(entry, parts, prefix)
                if child is None or not _is_behind(child, after):
                    continue
                found.append(child)
                if len(found) >= 2 * MOST_LISTED:
                    found.sort()
                    del found[MOST_LISTED:]
                    is_all = False
        found.sort()
        return (found, True) if is_all else (found[:MOST_LISTED], False)

    def _child(self, entry: "os.DirEntry[str]", above: Parts, prefix: str) -> Child | None:
        parts = (*above, entry.name)
        location = prefix + name_of(entry.name)
        if entry.is_symlink():
            return self._linked(parts, location) if self._settings.follow_symlinks else None
        if entry.is_dir(follow_symlinks=False):
            return Child(location + "/", parts) if self._patterns.may_hold(parts) else None
        if entry.is_file(follow_symlinks=False):
            return Child(location, parts) if self._patterns.wants(parts) else None
        return None

    def _linked(self, parts: Parts, location: str) -> Child | None:
        """The entry that a followed link stands for; none for one that dangles, or leads back to where it is."""
        if not (self._patterns.wants(parts) or self._patterns.may_hold(parts)):
            return None
        try:
            about = self.state(parts)
        except LinkLeadsOutsideError as error:
            return Child(location, parts, error)
        except OSError:
            return None
        if stat.S_ISREG(about.st_mode):
            return Child(location, parts) if self._patterns.wants(parts) else None
        if not stat.S_ISDIR(about.st_mode) or not self._patterns.may_hold(parts) or self._leads_back(parts):
            return None
        return Child(location + "/", parts)

    def _leads_back(self, parts: Parts) -> bool:
        root = os.fspath(self._settings.path)
        target = os.path.realpath(os.path.join(root, *parts))
        here = os.path.realpath(os.path.join(root, *parts[:-1]))
        links = sum(os.path.islink(os.path.join(root, *parts[:number])) for number in range(1, len(parts)))
        return _is_beneath(here, target) or links >= MOST_CHAINED_LINKS

    def _place(self, parts: Parts) -> tuple[str, Parts]:
        """The open folder that `parts` is beneath, and the way from there; links are resolved if they are followed."""
        if not self._settings.follow_symlinks or not parts:
            return "", parts
        root = os.path.realpath(self._settings.path)
        real = os.path.realpath(os.path.join(root, *parts), strict=True)
        for base in (root, *map(os.path.realpath, self._settings.link_targets)):
            if _is_beneath(real, base):
                key = "" if base == root else base
                if key not in self._bases:
                    self._bases[key] = os.open(base, _FOLDER)
                return key, tuple(real[len(base) :].strip("/").split("/")) if real != base else ()
        raise LinkLeadsOutsideError(errno.ELOOP, "the link leads out of the folder", location_of(parts))

    def _folder(self, base: str, parts: Parts) -> int:
        """A descriptor of a folder, owned by this object until another one is asked for."""
        if not parts:
            return self._bases[base]
        if self._last is not None:
            if self._last[:2] == (base, parts):
                return self._last[2]
            os.close(self._last[2])
            self._last = None
        descriptor = os.dup(self._bases[base])
        try:
            for part in parts:
                found = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = found
        except BaseException:
            os.close(descriptor)
            raise
        self._last = (base, parts, descriptor)
        return descriptor


def check_depth(parts: Parts, location: str) -> None:
    """Refuse a folder that is nested too deep."""
    if len(parts) > DEEPEST or len(location) > LONGEST_FOLDER:
        raise OSError(errno.ENAMETOOLONG, "nested too deep", location)


def _is_behind(child: Child, after: str) -> bool:
    """Whether the entry, or something in it, comes behind a location."""
    place = child.location
    return place > after or (child.is_folder and after.startswith(place) and after not in (place, place + LAST))


def _is_beneath(path: str, base: str) -> bool:
    return path == base or path.startswith(base.rstrip("/") + "/")


# ---- the state of files ----------------------------------------------------------------------------------------------


def times_of(about: os.stat_result) -> str:
    """Size, times and inode in one text. A change of the file changes its ctime, which cannot be set back."""
    return f"{about.st_size}-{about.st_mtime_ns}-{about.st_ctime_ns}-{about.st_ino}"


def generation_of(descriptor: int) -> str:
    """The generation of an inode, where the file system tells it: inodes of deleted files are used again."""
    number = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _GET_VERSION, number)
    except OSError:
        return ""
    return number.rstrip(b"\0").hex()


def file_clock_ns() -> int:
    """The time that a file changed now would get. On Linux it ticks every few milliseconds."""
    if hasattr(time, "CLOCK_REALTIME_COARSE"):
        return time.clock_gettime_ns(time.CLOCK_REALTIME_COARSE)
    return time.time_ns() - 10_000_000


# ---- the walk --------------------------------------------------------------------------------------------------------


class Sighting(NamedTuple):
    """A file that was met on a walk, or the file or folder that could not be looked at."""

    location: str
    parts: Parts
    state: os.stat_result | None
    error: SourceError | None = None


class FolderWalk:
    """
    The wanted files of a folder in the order of their locations, from one on.

    Between two calls of `take` no descriptor is open. Of each folder on the way at most `MOST_LISTED` names are held. A
    walk that raised an error is over.
    """

    def __init__(self, folder: Folder, after: str, *, opens: bool = False) -> None:
        """With `opens` each file is opened, and nothing of it read: one that can be listed may be shut to this user."""
        self.is_done = False
        self._opens = opens
        self._passed = after
        self._folder = folder
        self._root: OpenFolder | None = None
        self._met = self._children((), after)
        self._waiting: deque[Sighting] = deque()

    @property
    def passed(self) -> str:
        """The location up to which nothing more comes; empty while sightings were put back."""
        return "" if self._waiting else self._passed

    def take(self, number: int, expected: str) -> list[Sighting]:
        """The next ones; fewer at the end, and after a second. `expected` is the identity of the root."""
        taken = [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]
        ends = clock.now() + TAKEN_S
        with self._folder.opened(expected) as root:
            self._root = root
            while len(taken) < number:
                child = next(self._met, None)
                if child is None:
                    self.is_done = True
                    break
                if isinstance(child, str):
                    self._passed = child
                elif (sighting := self._sighting(child)) is not None:
                    taken.append(sighting)
                if clock.now() >= ends:
                    break
        return taken

    def put_back(self, sightings: Sequence[Sighting]) -> None:
        """Return what was taken and not used, in order."""
        self._waiting.extendleft(reversed(sightings))
        self.is_done = self.is_done and not sightings

    def _children(self, parts: Parts, after: str) -> Iterator[Child | Sighting | str]:
        """Files, what cannot be read, and after each folder the location behind everything in it."""
        is_all = False
        while not is_all:
            assert self._root is not None
            try:
                children, is_all = self._root.children(parts, after)
            except OSError as error:
                if not is_gone(error):
                    yield self._failed(parts, error)
                return
            for child in children:
                if not child.is_folder:
                    yield child
                else:
                    yield from self._beneath(child, after)
                after = max(after, child.location)

    def _beneath(self, child: Child, after: str) -> Iterator[Child | Sighting | str]:
        try:
            check_depth(child.parts, child.location)
        except OSError as error:
            yield self._failed(child.parts, error)
            return
        yield from self._children(child.parts, after if after.startswith(child.location) else "")
        yield child.location + LAST

    def _sighting(self, child: Child | Sighting) -> Sighting | None:
        if isinstance(child, Sighting):
            return child
        if child.error is not None:
            return Sighting(child.location, child.parts, None, item_error(child.error, child.location))
        assert self._root is not None
        try:
            about = self._root.state(child.parts)
            if self._opens and (descriptor := self._root.file(child.parts)) is not None:
                os.close(descriptor)
        except OSError as error:
            if is_gone(error):
                return None
            return Sighting(child.location, child.parts, None, item_error(error, child.location))
        return Sighting(child.location, child.parts, about) if stat.S_ISREG(about.st_mode) else None

    def _failed(self, parts: Parts, error: OSError) -> Sighting:
        if not parts:
            raise root_error(error, self._folder.settings.path) from error
        assert self._root is not None
        location = location_of(parts) + "/"
        about = None
        with suppress(OSError):
            about = self._root.state(parts)
        return Sighting(location, parts, about, item_error(error, location))


# ---- errors ----------------------------------------------------------------------------------------------------------


def is_gone(error: OSError) -> bool:
    """Whether the error says that there is no such file, or that only a link that is not followed leads to it."""
    return isinstance(error, LinkLeadsOutsideError) or error.errno in _GONE


def root_error(error: OSError, path: Path) -> SourceError:
    """The failure of the whole source that an error of its folder is."""
    forbidden = isinstance(error, PermissionError)
    match error:
        case FileNotFoundError():
            problem = "does not exist: create it, mount its disk, or correct `path`; its documents are kept"
        case NotADirectoryError():
            problem = "is no folder: `path` has to name a folder"
        case PermissionError():
            problem = "may not be read by this user: allow it, or run as a user who may"
        case _ if error.errno == errno.ELOOP:
            problem = "is a symbolic link that leads back to itself: correct `path`"
        case _:
            message = f"the folder {path} cannot be read now: {error.strerror or error}; it is tried again"
            return SourceError(message, FailureType.TRANSIENT)
    return SourceError(f"the folder {path} {problem}", FailureType.PERMANENT, forbidden=forbidden)


def item_error(error: OSError, location: str) -> SourceError:
    """The failure of one file or folder. One that would repeat itself for every other file is raised."""
    if error.errno in _EXHAUSTED:
        message = (
            f"this process can open no more files: {error.strerror}; raise its limit (ulimit -n), or run less at once"
        )
        raise SourceError(message, FailureType.TRANSIENT) from error
    if isinstance(error, LinkLeadsOutsideError):
        problem = "is a symbolic link that leads out of the folder: add its target to `link_targets`, or `exclude` it"
    elif isinstance(error, PermissionError):
        problem = "permission denied: allow this user to read it, or `exclude` it"
    elif error.errno == errno.ENAMETOOLONG:
        problem = f"is nested too deep: {DEEPEST} folders within each other are read; `exclude` it, or make it a source"
    else:
        message = f"{location}: cannot be read now: {error.strerror or error}"
        return SourceError(message, FailureType.TRANSIENT)
    return SourceError(f"{location}: {problem}", FailureType.PERMANENT, forbidden=isinstance(error, PermissionError))
