"""
Small files, read whole and never more than was allowed.

It reads regular files only: a pipe may never end, and a device has no size.
"""

import os
import stat


class UnreadableError(Exception):
    """A file cannot be read. The text says why and shows nothing of what is in it."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


_REASONS: dict[type[OSError], str] = {
    FileNotFoundError: "there is no such file",
    NotADirectoryError: "there is no such file",
    PermissionError: "may not be read: permission denied",
    IsADirectoryError: "is a directory, not a file",
}


def _reason(error: OSError) -> UnreadableError:
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return UnreadableError(reason, is_missing=reason == _REASONS[FileNotFoundError])
    return UnreadableError(f"cannot be read: {error.strerror or type(error).__name__}")


def _open(path: str | os.PathLike[str]) -> int:
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except IsADirectoryError as error:
        raise _reason(error) from None
    except OSError as error:
        if os.path.isdir(path):  # some systems say "permission denied" of a folder
            raise UnreadableError(_REASONS[IsADirectoryError]) from None
        raise _reason(error) from None
    except ValueError:
        raise UnreadableError("is not a possible file name") from None


def read_small(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a regular file of at most so many bytes."""
    descriptor = _open(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise UnreadableError(_REASONS[IsADirectoryError])
        if not stat.S_ISREG(mode):
            raise UnreadableError("is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise _reason(error) from None
    finally:
        os.close(descriptor)
    if len(data) > most:
        raise UnreadableError(f"is larger than the limit of {most // 1024} kB")
    return data
