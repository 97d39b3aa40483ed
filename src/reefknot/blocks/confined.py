"""
Opening files beneath a folder, and nowhere else.

The kernel does the confining: `openat2` with "beneath, no symbolic links", or, where there is none, a walk that opens
one folder at a time and follows no link. A check of the path before opening it would be a race, and is not made.
"""

import ctypes
import errno
import os
import platform
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

BENEATH = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS
_OPENAT2 = 437  # the same on every architecture but Alpha
_SOME_TRIES = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_OFFERED = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL)
LINKS = (errno.ELOOP, errno.EXDEV)
"""What the kernel says when the way leads out, or over a link."""


class _How(ctypes.Structure):
    """`struct open_how`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(folder: int, parts: Sequence[str], flags: int, mode: int = 0o666) -> int:
    """
    A descriptor of the file at `parts`, seen from the open folder. No part is `..`.

    It never blocks on a FIFO, and never becomes the controlling terminal.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    if has_openat2():
        return _by_kernel(folder, parts, flags, mode)
    return open_by_walking(folder, parts, flags, mode)


def _by_kernel(folder: int, parts: Sequence[str], flags: int, mode: int) -> int:
    path = os.fsencode("/".join(parts))
    how = _How(flags, mode if flags & os.O_CREAT else 0, BENEATH)
    for _ in range(_SOME_TRIES):
        found: int = _libc().syscall(_OPENAT2, folder, path, ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed on the way
            raise OSError(number, os.strerror(number), "/".join(parts))
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "/".join(parts))


def open_by_walking(folder: int, parts: Sequence[str], flags: int, mode: int = 0o666) -> int:
    """The same without the kernel's help: one part at a time, and none of them a link."""
    with _held(os.dup(folder)) as held:
        for part in parts[:-1]:
            held.move(_folder_in(held.descriptor, part))
        return os.open(parts[-1], flags | os.O_NOFOLLOW, mode, dir_fd=held.descriptor)


@contextmanager
def folder_beneath(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """The folder at `parts`, open; with `make`, missing ones are made on the way."""
    with _held(os.dup(root)) as held:
        for part in parts:
            try:
                found = _folder_in(held.descriptor, part)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, 0o777, dir_fd=held.descriptor)
                found = _folder_in(held.descriptor, part)
            held.move(found)
        yield held.descriptor


def _folder_in(folder: int, name: str) -> int:
    """One step down. A name is one part, so not following it is all the confining there is to do."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


class _Held:
    """One descriptor at a time."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def move(self, descriptor: int) -> None:
        os.close(self.descriptor)
        self.descriptor = descriptor


@contextmanager
def _held(descriptor: int) -> Iterator[_Held]:
    held = _Held(descriptor)
    try:
        yield held
    finally:
        os.close(held.descriptor)


_library: ctypes.CDLL | None = None
_offered: bool | None = None


def _libc() -> ctypes.CDLL:
    global _library
    if _library is None:
        _library = ctypes.CDLL(None, use_errno=True)
    return _library


def has_openat2() -> bool:
    """Whether this kernel, and whatever filters its calls, offers it. Asked once."""
    global _offered
    if _offered is None:
        _offered = sys.platform == "linux" and platform.machine() != "alpha" and _answers()
    return _offered


def _answers() -> bool:
    try:
        folder = os.open("/", _FOLDER)
    except OSError:
        return False
    try:
        os.close(_by_kernel(folder, (".",), _FOLDER, 0))
    except OSError as error:
        return error.errno not in _NOT_OFFERED
    finally:
        os.close(folder)
    return True
