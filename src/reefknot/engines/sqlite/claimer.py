"""
Who does on this host what one process does for all: claims work, or tidies up.

A lock on a file beside the database. The operating system lets go of it when its process ends, however it ends.
"""

import fcntl
import os


class ClaimerLock:
    """Held by one process at a time. `role` names the file, and so what it is for."""

    def __init__(self, path: str, role: str = "claimer") -> None:
        self._path = f"{path}-{role}"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Take it without waiting. True as well when this store has it already."""
        if self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
