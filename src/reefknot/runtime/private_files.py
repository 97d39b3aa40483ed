"""
Files for this user alone, whatever the umask says: payloads, results and events may hold what others must not read.

A file that somebody made beforehand, with `touch` or a redirection, loses the rights of others when it is opened. Only
regular files of this user are changed: never a device, never another user's file.
"""

import os
import stat

PRIVATE = 0o600
_GROUP_SHARES = 0o060


def private_opener(name: str, flags: int) -> int:
    """The `opener` of `open` for a file that only its owner may read and write."""
    handle = os.open(name, flags | getattr(os, "O_CLOEXEC", 0), PRIVATE)
    try:
        make_private(handle)
    except BaseException:
        os.close(handle)
        raise
    return handle


def make_private(file: int | str) -> None:
    """Take the rights of group and others from a file, given by its handle or its path."""
    _restrict(file, os.stat(file), PRIVATE)


def make_store_private(path: str) -> None:
    """
    Take the rights of others from a store and the files that SQLite keeps beside it.

    A store that its group may read and write is shared on purpose, and stays shared with the group.
    """
    for name in (path, f"{path}-wal", f"{path}-shm"):
        try:
            state = os.stat(name)
        except FileNotFoundError:
            continue
        is_shared = state.st_size > 0 and state.st_mode & _GROUP_SHARES == _GROUP_SHARES
        _restrict(name, state, PRIVATE | _GROUP_SHARES if is_shared else PRIVATE)


def _restrict(file: int | str, state: os.stat_result, allowed: int) -> None:
    is_own = stat.S_ISREG(state.st_mode) and (not hasattr(os, "geteuid") or state.st_uid == os.geteuid())
    if is_own and state.st_mode & 0o777 & ~allowed:
        os.chmod(file, state.st_mode & allowed)
