"""
`fs.blob_put`, `fs.blob_get`, `fs.delete`: whole files beneath configured folders, and nowhere else.

A file is written under another name and renamed, so that a reader never sees half of one. Regular files only; no
symbolic link is followed. The work runs in threads of its own, and is waited for until the attempt ends.

The kernel confines: `openat2` with "beneath, no symbolic links", or, without it, a walk that opens one folder at a time
and follows no link. The path is not checked before it is opened, because that would be a race.
"""

import asyncio
import ctypes
import errno
import os
import platform
import re
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from msgspec import Struct

from reefknot.core.failure import ErrorCode
from reefknot.queue.model.messages import StepResult
from reefknot.runtime.files import is_open_here, is_ours, remove_left
from reefknot.steps.inputs import Inputs, Refusal, answers_refusals, invalid, text_or_base64, time_limit
from reefknot.steps.port import BlockContext

BENEATH = 0x08 | 0x04 | 0x02  # RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_MAGICLINKS
_OPENAT2 = 437  # the same on every architecture but Alpha
_MOST_TRIES = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_OFFERED = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL)
LINKS = (errno.ELOOP, errno.EXDEV)
"""Errors of the kernel for a path that leads out of the folder, or over a link."""

LONGEST_PATH = 4096
MOST_SWEPT = 100_000
SPARE_BYTES = 100
"""Bytes of a file's name that its spare file is named by."""
_SPARE = re.compile(rf"\..{{0,{SPARE_BYTES}}}\.[0-9a-f]{{16}}\.part", re.DOTALL)
_PATH = "a path beneath one of blocks.fs.roots"
_TRANSIENT = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ESTALE),
    *(errno.ETIMEDOUT, errno.EINTR, errno.ENOMEM),
)
_CODES = {
    **dict.fromkeys(_TRANSIENT, ErrorCode.resource_unavailable),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, *LINKS), ErrorCode.permission_denied),
    **dict.fromkeys((errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL), ErrorCode.invalid_input),
}


class FsSettings(Struct, frozen=True):
    """The folders that the blocks may touch, and the largest file."""

    roots: tuple[Path, ...] = ()
    max_bytes: int = 1024 * 1024


class FsPath(Struct, frozen=True):
    """A file by its root and the parts beneath it. `shown` is the path as it was given."""

    root: Path
    parts: tuple[str, ...]
    shown: str


class Folders:
    """The roots that the three blocks share, and the threads that do their work."""

    def __init__(self, settings: FsSettings | None = None) -> None:
        self.settings = settings or FsSettings()
        self._threads = ThreadPoolExecutor(8, "reefknot-files")
        # Resolved once: a file system that hangs later must not delay the reading of a path.
        self._known = [(root, name) for root in self.settings.roots for name in (str(root), os.path.realpath(root))]

    def locate(self, path: str) -> FsPath:
        """The root and parts of a path, by its text alone; the kernel keeps it beneath the root."""
        roots = self.settings.roots
        if not roots:
            raise Refusal(ErrorCode.permission_denied, "path: no folder is open to this block; set blocks.fs.roots")
        if not path or len(path) > LONGEST_PATH or not _is_encodable(path) or path.endswith("/"):
            raise invalid("path", path, _PATH)
        root, rest = roots[0], path
        if path.startswith("/"):
            root, rest = self._root_of(path)
        parts = tuple(part for part in rest.split("/") if part not in ("", "."))
        if ".." in parts:
            raise _outside(path)
        if not parts:
            raise invalid("path", path, _PATH)
        return FsPath(root, parts, path)

    def _root_of(self, path: str) -> tuple[Path, str]:
        for root, name in self._known:
            if path.startswith(name.rstrip("/") + "/"):
                return root, path.removeprefix(name)
        raise _outside(path)

    async def run(self, seconds: float, file: FsPath, work: Callable[[], dict[str, Any]]) -> StepResult:
        """The result of `work`, run in a thread and bounded in time. An abandoned thread ends by itself."""
        loop = asyncio.get_running_loop()
        try:
            async with time_limit(seconds, "the file system did not answer"):
                return StepResult(outputs=await loop.run_in_executor(self._threads, work))
        except OSError as error:
            code = _CODES.get(error.errno or 0, ErrorCode.execution_failed)
            raise Refusal(code, _message(error, file.shown), errno=error.errno) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class _FsBlock(ABC):
    """The part that the three blocks share: reading the inputs, and running the work."""

    _names: tuple[str, ...] = ("path",)

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def destination(self, inputs: Mapping[str, Any]) -> str:
        try:
            return f"fs:{self._folders.locate(str(inputs.get('path', ''))).root}"
        except Refusal:
            return "fs"

    @answers_refusals
    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        asked = Inputs(inputs, *self._names)
        file = self._folders.locate(asked.text("path", accepted=_PATH))
        work = self._work(file, asked)
        return await self._folders.run(asked.seconds(context.seconds), file, work)

    @abstractmethod
    def _work(self, file: FsPath, inputs: Inputs) -> Callable[[], dict[str, Any]]:
        """The work of a step, which runs in a thread and returns the outputs."""

    async def close(self) -> None:
        self._folders.close()


class BlobPut(_FsBlock):
    """The block `fs.blob_put`: writes a whole file, or leaves everything as it was."""

    type = "fs.blob_put"
    _names = ("path", "content", "base64", "overwrite")

    def _work(self, file: FsPath, inputs: Inputs) -> Callable[[], dict[str, Any]]:
        return partial(_put, file, self._content(inputs), overwrite=inputs.flag("overwrite", default=True))

    def _content(self, inputs: Inputs) -> bytes:
        inputs.require("content", "base64", accepted="a text as content, or bytes as base64")
        if inputs.has("content") and inputs.has("base64"):
            raise Refusal(ErrorCode.invalid_input, "content: given together with base64; accepted: one of them")
        try:
            text = inputs.text("content", accepted="a text", default="")
            raw = inputs.base64_bytes("base64") if inputs.has("base64") else text.encode()
        except UnicodeEncodeError:
            raise Refusal(ErrorCode.invalid_input, "content: cannot be written as UTF-8; use base64") from None
        if len(raw) > self._folders.settings.max_bytes:
            raise Refusal(ErrorCode.invalid_input, f"content: {len(raw)} bytes; {_limit_text(self._folders)}")
        return raw


class BlobGet(_FsBlock):
    """The block `fs.blob_get`: reads a whole file."""

    type = "fs.blob_get"

    def _work(self, file: FsPath, inputs: Inputs) -> Callable[[], dict[str, Any]]:
        return partial(_get, file, self._folders)


class Delete(_FsBlock):
    """The block `fs.delete`: removes a file. A missing file is no error, so that a second attempt succeeds."""

    type = "fs.delete"

    def _work(self, file: FsPath, inputs: Inputs) -> Callable[[], dict[str, Any]]:
        return partial(_delete, file)


def _put(file: FsPath, content: bytes, *, overwrite: bool) -> dict[str, Any]:
    *folders, name = file.parts
    with _closing(_open_root(file.root)) as root, folder_beneath(root, folders, make=True) as folder:
        created = not _is_regular(folder, name, file.shown)
        if not created and not overwrite:
            raise FileExistsError(errno.EEXIST, "there is a file already, and overwrite is false", file.shown)
        with _spare(folder, name) as (spare, stream):
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if overwrite:
                os.rename(spare, name, src_dir_fd=folder, dst_dir_fd=folder)
            else:
                os.link(spare, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        os.fsync(folder)
    return {"path": file.shown, "size": len(content), "created": created}


@contextmanager
def _spare(folder: int, name: str) -> Iterator[tuple[str, IO[bytes]]]:
    """The name and the stream of a new spare file, which is removed if it still has that name afterwards."""
    while True:
        # A name has at most 255 bytes: the spare one has less, whatever the length of the file's own.
        spare = f".{os.fsencode(name)[:SPARE_BYTES].decode(errors='ignore')}.{token_hex(8)}.part"
        descriptor = open_beneath(folder, (spare,), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        if is_ours(descriptor):
            break
        os.close(descriptor)
    with open(descriptor, "wb") as stream:
        try:
            yield spare, stream
        finally:
            with suppress(FileNotFoundError):
                os.unlink(spare, dir_fd=folder)


def remove_spare_files(settings: FsSettings) -> int:
    """Remove what killed processes left beneath the roots. Follows no link; looks at `MOST_SWEPT` names at most."""
    removed = seen = 0
    for root in settings.roots:
        with suppress(OSError):
            for _, _, names, folder in os.fwalk(root, follow_symlinks=False):
                removed += remove_left(folder, filter(_SPARE.fullmatch, names))
                seen += len(names) + 1
                if seen > MOST_SWEPT:
                    return removed
    return removed


def _get(file: FsPath, folders: Folders) -> dict[str, Any]:
    most = folders.settings.max_bytes
    _refuse_store(file)
    with _closing(_open_root(file.root)) as root, _closing(open_beneath(root, file.parts, os.O_RDONLY)) as descriptor:
        about = os.fstat(descriptor)
        _check_regular(about.st_mode, file.shown)
        with open(descriptor, "rb", closefd=False) as source:
            content = source.read(most + 1)
    if len(content) > most:
        text = f"path: {file.shown} has {about.st_size} bytes; {_limit_text(folders)}"
        raise Refusal(ErrorCode.execution_failed, text)
    outputs = text_or_base64(content, text="content", base64="base64")
    modified = datetime.fromtimestamp(about.st_mtime, UTC).isoformat()
    return {"path": file.shown, **outputs, "size": len(content), "modified": modified}


def _refuse_store(file: FsPath) -> None:
    """Refuse a file of the store that this process has open: reading it would take its locks."""
    *folders, name = file.parts
    with _closing(_open_root(file.root)) as root, folder_beneath(root, folders) as folder:
        if is_open_here(os.stat(name, dir_fd=folder, follow_symlinks=False)):
            raise Refusal(ErrorCode.permission_denied, f"path: {file.shown} belongs to the store of this process")


def _delete(file: FsPath) -> dict[str, Any]:
    *folders, name = file.parts
    deleted = False
    with (
        suppress(FileNotFoundError),
        _closing(_open_root(file.root)) as root,
        folder_beneath(root, folders) as folder,
    ):
        if _is_regular(folder, name, file.shown):
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)
            deleted = True
    return {"path": file.shown, "deleted": deleted}


def _open_root(root: Path) -> int:
    try:
        return os.open(root, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        text = f"the folder {root} of blocks.fs.roots is not there; make it, or mend the configuration"
        raise Refusal(ErrorCode.resource_unavailable, text) from None


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_regular(folder: int, name: str, shown: str) -> bool:
    """Whether there is a file of this name; anything else under the name is refused."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    _check_regular(mode, shown)
    return True


def _check_regular(mode: int, shown: str) -> None:
    if not stat.S_ISREG(mode):
        raise Refusal(ErrorCode.permission_denied, f"path: {shown} is not a regular file")


def _is_encodable(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _outside(path: str) -> Refusal:
    return Refusal(ErrorCode.permission_denied, f"path: {path[:200]} is outside of blocks.fs.roots")


def _limit_text(folders: Folders) -> str:
    return f"accepted: at most {folders.settings.max_bytes} (blocks.fs.max_bytes)"


def _message(error: OSError, path: str) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"path: not found: {path}"
    if error.errno in LINKS:
        return f"path: {path} leads over a symbolic link, or outside of blocks.fs.roots"
    return f"path: {error.strerror or error}: {path}"


class _OpenHow(ctypes.Structure):
    """`struct open_how`."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(folder: int, parts: Sequence[str], flags: int, mode: int = 0o666) -> int:
    """
    A descriptor of the file at `parts` beneath the open folder. No part is `..`.

    Opening never blocks on a FIFO, and never takes a controlling terminal.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    if has_openat2():
        return _open_by_kernel(folder, parts, flags, mode)
    return open_by_walking(folder, parts, flags, mode)


def _open_by_kernel(folder: int, parts: Sequence[str], flags: int, mode: int) -> int:
    path = os.fsencode("/".join(parts))
    how = _OpenHow(flags, mode if flags & os.O_CREAT else 0, BENEATH)
    for _ in range(_MOST_TRIES):
        found: int = _libc().syscall(_OPENAT2, folder, path, ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something was renamed on the way
            raise OSError(number, os.strerror(number), "/".join(parts))
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "/".join(parts))


def open_by_walking(folder: int, parts: Sequence[str], flags: int, mode: int = 0o666) -> int:
    """`open_beneath` without the kernel's help: one part at a time, and none of them a link."""
    with folder_beneath(folder, parts[:-1]) as parent:
        return os.open(parts[-1], flags | os.O_NOFOLLOW, mode, dir_fd=parent)


@contextmanager
def folder_beneath(root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder at `parts`; with `make`, missing folders are made."""
    folder = os.dup(root)
    try:
        for part in parts:
            try:
                found = _folder_in(folder, part)
            except FileNotFoundError:
                if not make:
                    raise
                with suppress(FileExistsError):
                    os.mkdir(part, 0o777, dir_fd=folder)
                found = _folder_in(folder, part)
            os.close(folder)
            folder = found
        yield folder
    finally:
        os.close(folder)


def _folder_in(folder: int, name: str) -> int:
    """A descriptor of the folder `name`. A name is one part, so not following a link confines it."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


_openat2_offered: bool | None = None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def has_openat2() -> bool:
    """Whether this kernel, and whatever filters its calls, offers `openat2`. Probed once."""
    global _openat2_offered
    if _openat2_offered is None:
        _openat2_offered = sys.platform == "linux" and platform.machine() != "alpha" and _probe_openat2()
    return _openat2_offered


def _probe_openat2() -> bool:
    try:
        folder = os.open("/", _FOLDER)
    except OSError:
        return False
    with _closing(folder):
        try:
            os.close(_open_by_kernel(folder, (".",), _FOLDER, 0))
        except OSError as error:
            return error.errno not in _NOT_OFFERED
    return True
