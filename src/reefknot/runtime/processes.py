"""
Marks of processes: whether the one that holds something still exists.

A mark names a process for good: its machine and boot, its number, and when it began. It stands in the names under which
a process holds leases and in the status that it reports, and any process of the same machine can look whether the
marked one is still there. Of another machine's processes only their silence can be noticed. A frozen process exists.
"""

import hashlib
import os
import socket
from functools import cache
from pathlib import Path

from msgspec import Struct


def process_mark(pid: int | None = None) -> str:
    """A mark of this process, or of another one of this machine, that no other process ever had or will have."""
    return _own_mark(os.getpid()) if pid is None else _mark(pid)


@cache  # by number, because a fork has another one
def _own_mark(pid: int) -> str:
    return _mark(pid)


def _mark(pid: int) -> str:
    return f"{_machine()}.{pid}.{_began(pid) or 0}"


class ProcessIdentity(Struct, frozen=True):
    """The user, the host and the number of a process, for people who read who did something.

    The user is the one that the system knows, not the one that a variable of the environment names.
    """

    user: str
    host: str
    process: int


def own_identity() -> ProcessIdentity:
    """The identity of this process by its operating system."""
    return _identity(os.getpid())


@cache  # by number, because a fork has another one
def _identity(pid: int) -> ProcessIdentity:
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run a user without a name
        user = str(os.getuid())
    return ProcessIdentity(user, socket.gethostname(), pid)


def is_gone(marked: str) -> bool:
    """Whether the process of this mark is known to have ended. False as well when nothing can be known."""
    machine, _, rest = marked.partition(".")
    number, _, began = rest.partition(".")
    if machine != _machine() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, and so it is there
        return False
    now = _began(int(number))
    return now == "" or (began.isdecimal() and began != "0" and now is not None and now != began)


def owner_exists(owner: str) -> bool:
    """Whether the process that holds leases under this name is known to exist, on this machine."""
    marked = owner.rpartition("@")[2] if "@" in owner else ""
    return marked.partition(".")[0] == _machine() and not is_gone(marked)


def marked_owner(name: str) -> str:
    """The name of an owner of leases, with the mark of this process."""
    return f"{name}@{process_mark()}"


def owner_is_gone(owner: str) -> bool:
    """Whether the process that holds leases under this name has ended. False for a name without a mark."""
    _, at, marked = owner.rpartition("@")
    return bool(at) and is_gone(marked)


@cache
def boot_name() -> str:
    """A name of this boot of this machine, and of the namespace of its steady clock; empty when it is not known."""
    boot_id = _boot_id()
    try:
        return boot_id and f"{boot_id} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without such namespaces
        return boot_id


@cache
def _machine() -> str:
    """A hash of this boot of this machine and of the namespace of process numbers: a container has its own."""
    known = [socket.gethostname(), _boot_id()]
    if known[-1]:
        known.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # another system than Linux
        return ""


def _began(pid: int) -> str | None:
    """Start time of a process in kernel ticks; empty when only its exit code is left, None when it is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in ("Z", "X") else fields[19]
