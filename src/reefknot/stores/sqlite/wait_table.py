"""
`WaitTable`: which processes wait for which topics of a store, in memory that they share; a commit calls only those.

The memory is a small file next to the database, mapped by every process that has the store open. A process has a slot
in it, and a datagram socket whose address is in that slot. After a commit its process looks which slots wait for one of
the topics it has touched, notes these topics there, and sends an empty datagram; the one who is called wakes the
waiters of the noted topics. Nothing in it has to be kept: whatever is lost, a rare look at the file makes good.

Slots are locked by their processes, and the system drops such a lock with its process, also in another container. The
sockets are Linux's abstract ones, which leave no file. Where they do not reach every process of the store, or the file
cannot be made, there is no table, and processes watch the database's log instead.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from errno import EAGAIN, EWOULDBLOCK
from mmap import mmap
from zlib import crc32

from reefknot.queue.model.messages import ACK, HEARTBEAT, RESULT
from reefknot.queue.model.work import ROUTER
from reefknot.stores.wakeups import CLASS_TOPIC, END_TOPIC, LEASES_TOPIC

ENDING = "-wait"
"""What follows the name of the database."""
SLOTS = 128
"""The most processes that are called; further ones watch the log."""
BUCKETS = 1024
"""Topics are known by a number below this. Two that share one cost a look now and then."""
AUDIT_TOPIC = "audit"
CONTROL_TOPIC = "control"
KEY_TOPIC = "key:"
"""Prefix of an idempotency key."""
MESSAGE_TOPIC = "message "
"""Prefix of a subject: the topic of listeners to messages on it."""
ROOM_TOPIC = "room for messages"
"""The topic of senders whose messages were refused: a listener has read on, is new, or has left."""
WORK_TOPIC = "work"
"""A topic that no task waits for: what touches it is news to those who wait for any change."""
COMMON_TOPICS = (
    AUDIT_TOPIC,
    CONTROL_TOPIC,
    WORK_TOPIC,
    LEASES_TOPIC,
    ROOM_TOPIC,
    *(MESSAGE_TOPIC + subject for subject in (ACK, HEARTBEAT, RESULT)),
)
FOR_ONE = CLASS_TOPIC + ROUTER
"""The topic of which one waiting process is enough: whichever comes claims all that there is."""

_KNOWN = {topic: number for number, topic in enumerate((FOR_ONE, "", *COMMON_TOPICS))}
"""What many commits touch shares its number with nothing else."""
_ONE, _ANY = _KNOWN[FOR_ONE], _KNOWN[""]
_FIRST, _FIRST_OF_MANY = len(_KNOWN), 256
_OF_MANY = (END_TOPIC, KEY_TOPIC)
"""There are many of these, and others must not share their numbers with them."""
_MAGIC = b"reefknot wait 1\n"
_TOKEN = 16
_ENTRY = struct.Struct(f"{_TOKEN}sQ8x")
"""The name of a process's socket, and the network namespace in which it is known."""
_USED = 64
_CALLED = _USED + SLOTS
_WANTS = _CALLED + SLOTS
_ENTRIES = _WANTS + SLOTS
_WAITS = _ENTRIES + SLOTS * _ENTRY.size
_TOUCHED = _WAITS + BUCKETS * SLOTS
_SIZE = _TOUCHED + SLOTS * BUCKETS
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", -1)
"""A lock of an open file, not of a process: two stores of one process have two."""
_LOCK = struct.Struct("hhqqi")
_TRIES = 5
_TURN = b"-turn"


def bucket_of(topic: str) -> int:
    """The number by which processes know a topic."""
    known = _KNOWN.get(topic)
    if known is not None:
        return known
    number = crc32(topic.encode(errors="replace"))
    if topic.startswith(_OF_MANY):
        return _FIRST_OF_MANY + number % (BUCKETS - _FIRST_OF_MANY)
    return _FIRST + number % (_FIRST_OF_MANY - _FIRST)


class WaitTable:
    """The slot of one open store, and its view of all others. `open` says whether there is a table."""

    def __init__(self, path: str) -> None:
        """`path` is that of the database."""
        self._database = os.path.realpath(path)
        self.path = self._database + ENDING
        self._file = -1
        self._memory: mmap | None = None
        self._slot = -1
        self._socket: socket.socket | None = None
        self._turns: socket.socket | None = None
        """What wakes the thread that waits for the file's lock."""
        self._counts = [0] * BUCKETS
        self._turn = 0

    def open(self) -> bool:
        """Take a slot. False where that is not possible: another system, a folder that may not be written, no slot."""
        try:
            return any(self._opened() for _ in range(_TRIES))
        except (OSError, ValueError):
            self.close()
            return False

    def _opened(self) -> bool:
        if _SET_LOCK == -1:
            raise OSError("no locks of open files")
        mode = os.stat(self._database).st_mode & 0o666
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, mode)
        about = os.fstat(self._file)
        if about.st_uid == os.geteuid() and about.st_mode & 0o777 != mode:
            os.fchmod(self._file, mode)
        slot = next((one for one in range(SLOTS) if self._locked(one)), None)
        if slot is None or not self._is_in_place():  # full, or the last one to leave has just removed it
            self._let_go_of_file()
            return False
        if about.st_size < _SIZE:
            os.posix_fallocate(self._file, 0, _SIZE)  # a hole could not be filled on a full disk
        self._memory = memory = mmap(self._file, _SIZE)
        if memory[: len(_MAGIC)] not in (_MAGIC, bytes(len(_MAGIC))):
            raise ValueError("a table of another form")
        memory[: len(_MAGIC)] = _MAGIC
        self._clear(slot)
        self._slot, token = slot, os.urandom(_TOKEN // 2).hex().encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(_address(token))
        self._turns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._turns.bind(_address(token, _TURN))
        at = _ENTRIES + slot * _ENTRY.size
        memory[at : at + _ENTRY.size] = _ENTRY.pack(token, _network())
        memory[_USED + slot] = 1
        return True

    def _locked(self, slot: int, length: int = 1) -> bool:
        """Whether this process has now the lock of a slot."""
        with suppress(OSError):
            fcntl.fcntl(self._file, _SET_LOCK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot, length, 0))
            return True
        return False

    def _is_gone(self, slot: int) -> bool:
        """Whether the process of a slot has ended; then the slot is free."""
        if not self._locked(slot):
            return False
        self._clear(slot)
        with suppress(OSError):
            fcntl.fcntl(self._file, _SET_LOCK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, slot, 1, 0))
        return True

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return False

    def _clear(self, slot: int) -> None:
        """Forget everything of a slot."""
        memory = self._memory
        assert memory is not None
        memory[_USED + slot] = memory[_CALLED + slot] = memory[_WANTS + slot] = 0
        for bucket in range(BUCKETS):
            memory[_WAITS + bucket * SLOTS + slot] = 0
        memory[_TOUCHED + slot * BUCKETS : _TOUCHED + (slot + 1) * BUCKETS] = bytes(BUCKETS)

    # ---- the one who waits -------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """The descriptor that becomes readable when this process is called."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def is_in_order(self) -> bool:
        """Whether every process of the table can call every other one."""
        memory = self._memory
        if memory is None:
            return False
        own = self._entry(self._slot)[1]
        strangers = [slot for slot in _set(memory[_USED:_CALLED]) if self._entry(slot)[1] != own]
        return all(self._is_gone(slot) for slot in strangers)

    @property
    def is_lost(self) -> bool:
        """Whether the file was removed or replaced: processes that come now have another one."""
        return self._memory is not None and not self._is_in_place()

    def open_again(self) -> None:
        """Move to the file that has the name now."""
        self.let_go()
        if self.open() and self._memory is not None:
            for bucket, number in enumerate(self._counts):
                self._memory[_WAITS + bucket * SLOTS + self._slot] = number > 0

    def wait_for(self, bucket: int) -> None:
        """Note one more waiter for a topic of this number."""
        self._counts[bucket] += 1
        if self._counts[bucket] == 1 and self._memory is not None:
            self._memory[_WAITS + bucket * SLOTS + self._slot] = 1

    def leave(self, bucket: int) -> None:
        """Note one waiter less."""
        self._counts[bucket] -= 1
        if not self._counts[bucket] and self._memory is not None:
            self._memory[_WAITS + bucket * SLOTS + self._slot] = 0

    def take(self) -> list[int]:
        """The numbers of the topics that others have touched since the last call, while they were waited for."""
        memory = self._memory
        if memory is None or self._socket is None:
            return []
        with suppress(OSError):
            for _ in range(SLOTS):
                self._socket.recv(1)
        # After the datagrams, lest one that comes meanwhile is taken here and its mark stays. Before the look, so that
        # a process that touches something after it calls again.
        memory[_CALLED + self._slot] = 0
        at = _TOUCHED + self._slot * BUCKETS
        touched = list(_set(memory[at : at + BUCKETS]))
        for bucket in touched:
            memory[at + bucket] = 0
        return touched

    # ---- the one who commits -----------------------------------------------------------------------------------------

    def post(self, topics: AbstractSet[str]) -> None:
        """Call the processes that wait for one of these topics, which this one has touched. From any thread."""
        memory = self._memory
        if memory is None or not topics or memory[_USED:_CALLED].count(1) < 2:
            return
        called = set[int]()
        for bucket in {_ANY, *map(bucket_of, topics)}:
            at = _WAITS + bucket * SLOTS
            waiting = [slot for slot in _set(memory[at : at + SLOTS]) if slot != self._slot]
            if bucket == _ONE and len(waiting) > 1:
                waiting = [self._next_of(waiting)]
            for slot in waiting:
                memory[_TOUCHED + slot * BUCKETS + bucket] = 1
            called.update(waiting)
        for slot in called:
            if not memory[_CALLED + slot]:
                self._call(slot)

    def _next_of(self, waiting: list[int]) -> int:
        """The next of these slots in turn. One that has not come since its last call may be frozen, and comes last."""
        memory = self._memory
        assert memory is not None
        waiting = [slot for slot in waiting if not memory[_CALLED + slot]] or waiting
        self._turn += 1
        return waiting[self._turn % len(waiting)]

    def _call(self, slot: int) -> None:
        memory = self._memory
        assert memory is not None
        memory[_CALLED + slot] = 1
        if not self._send(slot):
            memory[_CALLED + slot] = 0

    def _send(self, slot: int, which: bytes = b"") -> bool:
        """Send a datagram to a process. False when it was not sent; one that is gone is forgotten."""
        own, memory = self._socket, self._memory
        if own is None or memory is None:
            return False
        try:
            own.sendto(b"", _address(self._entry(slot)[0], which))
        except OSError as error:
            if error.errno not in (EAGAIN, EWOULDBLOCK):
                self._is_gone(slot)
            return False
        return True

    # ---- the turns at the file's lock --------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether another process waits for the file's lock."""
        memory = self._memory
        return memory is not None and memory.find(b"\1", _WANTS, _ENTRIES) >= 0

    def wait_for_turn(self, seconds: float) -> bool:
        """Wait until another process passes its turn on to this one, at most this long. False without a table."""
        memory, turns = self._memory, self._turns
        if memory is None or turns is None:
            return False
        memory[_WANTS + self._slot] = 1
        turns.settimeout(seconds)
        with suppress(OSError):
            turns.recv(1)
        memory[_WANTS + self._slot] = 0
        return True

    def pass_on(self) -> None:
        """Wake the next process that waits for the file's lock, which this one has just released."""
        memory = self._memory
        if memory is None:
            return
        wanting = memory[_WANTS:_ENTRIES]
        for slot in [*_set(wanting[self._slot + 1 :], self._slot + 1), *_set(wanting[: self._slot])]:
            memory[_WANTS + slot] = 0  # one that is frozen is called once
            if self._send(slot, _TURN):
                return

    def _entry(self, slot: int) -> tuple[bytes, int]:
        assert self._memory is not None
        token, network = _ENTRY.unpack_from(self._memory, _ENTRIES + slot * _ENTRY.size)
        return token, network

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the slot up. The last one to leave removes the file."""
        if self._memory is not None:
            self._clear(self._slot)
            with suppress(OSError):
                if self._locked(0, SLOTS) and self._is_in_place():
                    os.unlink(self.path)
        self.let_go()

    def let_go(self) -> None:
        """
        Close everything, and change nothing: in a fork the slot is the parent's.

        The memory goes when no thread has it in use.
        """
        self._memory = None
        for one in (self._socket, self._turns):
            if one is not None:
                one.close()
        self._socket = self._turns = None
        self._let_go_of_file()

    def _let_go_of_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _set(numbers: bytes, first: int = 0) -> Iterator[int]:
    """The places of ones; `first` is that of the first number."""
    at = numbers.find(1)
    while at >= 0:
        yield first + at
        at = numbers.find(1, at + 1)


def _address(token: bytes, which: bytes = b"") -> bytes:
    return b"\0reefknot-wait-" + token + which


def _network() -> int:
    """The network namespace of this process: abstract sockets are known in it alone."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0
