"""
The state of a store in this process: the records that it knows, each with its revision, and what it mirrors of the
others.

A process knows what it has written or read itself. That is all that a worker or a client needs. A process that
decides about the work of others mirrors it, from its first such question on: all open work with the statuses and
resource classes (a router, a list), or the open work of one pool (a queue that several processes serve). A feed of the
state stream keeps a mirror up to date; `Commits` changes the state first, then the server. While a batch is on its way
the state is frozen: messages that arrive in the meantime are applied when its outcome is known.

A revision is the sequence of a record's message, which the server compares with each change. So the state may be
behind: a decision on old facts is refused by the server, and made again on the record as it is then.

Ended work is not mirrored. It is read on request, and a few ended items stay in the table.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from math import inf

import msgspec
from msgspec import Struct, json, structs

from reefknot.core.clock import Clock
from reefknot.core.time import Moment, Timeline, milliseconds
from reefknot.errors import StoreCorruptError, StoreFullError
from reefknot.queue.model.notes import CHECKPOINT, LINES
from reefknot.queue.model.submission import Capacity, ServiceTime, SubmissionRules
from reefknot.queue.model.unique import left_ms, unique_name
from reefknot.queue.model.work import ENDED, WorkItem, WorkState
from reefknot.queue.port.control import SILENT_KEPT_S, Command, StatusReport
from reefknot.runtime.changes import Waiters
from reefknot.runtime.log import logger, printable
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.mirror import TOMBSTONE_S, Mirror
from reefknot.stores.jetstream.reads import (
    DirectReads,
    StreamMessage,
    gathered,
    last_message,
)
from reefknot.stores.jetstream.streams import OPEN, Names, token_of
from reefknot.stores.wakeups import END_TOPIC
from reefknot.stores.work_in_memory.table import WorkTable

MOST_ENDED = 1000
INLINE_PAYLOAD, INLINE_RESULT, PART = 4096, 64 << 10, 512 << 10
MOST_TOGETHER = 880
"""Records of one submission; a batch has room for 900, with those of classes and events."""
Kept = tuple[str, int, int]


class Message(Struct, gc=False):
    """A message of a batch. `expected` is the sequence of the last one on its subject, or on those of `over`."""

    subject: str
    body: bytes = b""
    expected: int | None = None
    over: str = ""
    ttl: int | None = None
    parts: int = 1
    """How many messages the record has; the others hold its parts."""

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.expected is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(self.expected)
            if self.over:
                headers["Nats-Expected-Last-Subject-Sequence-Subject"] = self.over
        if self.ttl is not None:
            headers["Nats-TTL"] = f"{max(1, self.ttl)}s"
        if self.parts > 1:
            headers["Reefknot-Parts"] = str(self.parts)
        return headers


class StoredItem(Struct, frozen=True, gc=False, array_like=True):
    """The record of a work item; a payload or result in parts is stored in further messages."""

    item: WorkItem
    order: int
    payload_parts: int = 0
    result_parts: int = 0


Record = tuple[StoredItem | None, int, str]
"""What was read of an item: its record, the revision and the subject. A tombstone has a revision too."""


class StoredStatus(Struct, frozen=True):
    """The record of a status; `first` is the sequence of the first report, 0 in that report itself."""

    name: str
    body: str
    at: int
    stale_at: int
    capacity: Capacity
    first: int = 0


class StoredCommand(Struct, frozen=True):
    name: str
    target: str
    body: str
    sender: str
    at: int
    stale_at: int


OTHERS_ADMIT_S = 30.0
"""How long a leading router compares its arrivals with those of others after it has heard of one."""
SERVICE_EVERY_S = 1.0
"""How often a process writes the mean service time of a resource class."""


class State(Waiters):
    """The records of a store that one process knows."""

    def __init__(self, connection: Connection, names: Names, clock: Clock, *, work_ttl: int | None) -> None:
        super().__init__()
        self.connection = connection
        self.names = names
        self.clock = clock
        self.timeline = Timeline(steady=clock.now(), wall=clock.wall())
        self.table = WorkTable(self.offered, most_ended=sys.maxsize)
        self.work_ttl = work_ttl
        self.revisions: dict[str, int] = {}
        """By work id: the sequence of its record."""
        self.kept: dict[str, Kept] = {}
        """By work id: the subject of its record, and the number of parts of payload and result."""
        self._ids: dict[str, str] = {}
        """By subject of a record that is here: its work id, which a tombstone does not name."""
        self.key_revisions: dict[str, int] = {}
        """By key of unique work: the last sequence of its entries, for the changes of one batch."""
        self.entered: dict[str, int] = {}
        """By resource class: the revision of its arrivals."""
        self.leads = False
        """Whether the router of this process admits what all submit."""
        self._others_admit_until = -inf
        self._mark = new_id().encode()
        """The content of arrivals that were admitted here."""
        self.statuses: dict[str, tuple[int, StoredStatus]] = {}
        self.commands: dict[int, StoredCommand] = {}
        self.last_command = 0
        self.direct = DirectReads(connection, names.state)
        self._held: list[tuple[Callable[[StreamMessage], None], StreamMessage]] | None = None
        self._served_at: dict[str, float] = {}
        self._mirrors: dict[str, Mirror] = {}
        """Those of all open work, of commands, and of single pools, by name."""
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        for mirror in self._mirrors.values():
            await mirror.feed.stop()
        self.wake_all()

    # ---- mirrors -----------------------------------------------------------------------------------------------------

    @property
    def mirrors_all(self) -> bool:
        """Whether all open work is mirrored."""
        return _ALL in self._mirrors

    def open_items(self) -> list[WorkItem]:
        """The open items that are known here."""
        return [item for item in self.table.items.values() if item.state in _OPEN]

    def is_mirrored(self, item: WorkItem) -> bool:
        """Whether changes of this item by other processes arrive here."""
        return any(one.holds(item) for one in self._mirrors.values())

    async def mirror(self) -> None:
        """Mirror all open work, statuses and resource classes from now on."""
        if not self.mirrors_all:
            branches = ("work.open.>", "status.*", "pool.>")
            filters = [f"{self.names.name}.{branch}" for branch in branches]
            await self._add_mirror(_ALL, Mirror(self, self.names.state, filters, self._apply, holds=lambda _: True))

    async def mirror_pool(self, pool: str) -> None:
        """Mirror the open work of a pool from now on."""
        if not self.mirrors_all and f"pool {pool}" not in self._mirrors:
            filters = [self.names.all_work(OPEN, token_of(pool))]
            mirror = Mirror(self, self.names.state, filters, self._apply, holds=lambda item: item.pool == pool)
            await self._add_mirror(f"pool {pool}", mirror)

    async def hear_commands(self) -> None:
        """Mirror the commands from now on."""
        if _COMMANDS not in self._mirrors:
            await self._add_mirror(_COMMANDS, Mirror(self, self.names.state, [self.names.commands], self._apply))

    async def _add_mirror(self, name: str, mirror: Mirror) -> None:
        async with self._starting:
            if name not in self._mirrors:
                await mirror.start()
                self._mirrors[name] = mirror

    def now(self) -> Moment:
        """The current moment by the server's time, for leases too, because their holders are on other machines."""
        wall = self.timeline.at(self.clock.now()).wall
        return Moment(wall, wall)

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hold back what arrives, until `release`."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for apply, message in held:
            apply(message)

    def arrived(self, apply: Callable[[StreamMessage], None], message: StreamMessage) -> None:
        """Apply a message of a mirror, now or when the batch that is on its way has its answer."""
        if self._held is not None:
            self._held.append((apply, message))
        else:
            apply(message)

    def id_at(self, subject: str) -> str:
        """The work id of the record that is known by this subject; empty for none."""
        return self._ids.get(subject, "")

    def _apply(self, message: StreamMessage) -> None:
        branch = message.subject.split(".", 3)[1]
        try:
            if branch == "work":
                self._apply_work(message)
            elif branch == "command":
                self._apply_command(message)
            elif branch == "status":
                self._apply_status(message)
            else:
                self._apply_pool(message)
        except msgspec.DecodeError as error:
            _warn_of(message.subject, message.sequence, str(error))
        self.wake("arrived")

    def _apply_work(self, message: StreamMessage) -> None:
        work_id = self._ids.get(message.subject)
        if work_id is not None and message.sequence <= self.revisions.get(work_id, 0):  # mostly a change of our own
            return
        if not message.body:
            if work_id is not None:
                self.forget(work_id)
            return
        stored = json.decode(message.body, type=StoredItem)
        if message.sequence > self.revisions.get(stored.item.id, 0):
            self.load(stored, message.sequence, message.subject)

    def load(self, stored: StoredItem, revision: int, subject: str) -> None:
        """Apply a record as it is stored."""
        item, known = stored.item, self.table.items.get(stored.item.id)
        if stored.payload_parts and known is not None and known.payload:
            item = structs.replace(item, payload=known.payload)
        self.table.put(item, self.now(), stored.order)
        self.keep(item.id, revision, (subject, stored.payload_parts, stored.result_parts))
        self.took()

    def keep(self, work_id: str, revision: int, kept: Kept) -> None:
        """Note the place of an item's record."""
        self._ids.pop(self.kept.get(work_id, ("",))[0], None)
        self.revisions[work_id], self.kept[work_id], self._ids[kept[0]] = revision, kept, work_id

    def _lose(self, work_id: str) -> None:
        self.revisions.pop(work_id, None)
        self._ids.pop(self.kept.pop(work_id, ("",))[0], None)

    def forget(self, work_id: str) -> None:
        """Note that a record has left its subject: another process has ended or moved it."""
        if work_id in self.table.items:
            self.table.remove(work_id)
        self._lose(work_id)
        self.took()
        self.wake(END_TOPIC + work_id)

    def took(self) -> None:
        """Mark the changes in the table as stored, and wake their waiters."""
        gone = [work_id for work_id in self.table.before if work_id not in self.table.items]
        self.table.clear_changes()
        self.table.parts.clear()
        self.table.take_events()
        topics = self.table.take_topics()
        for work_id in [*gone, *self.table.trim_ended(MOST_ENDED)]:
            self._lose(work_id)
        if self._waiting:
            self.wake(*sorted(topics), "")

    def _apply_command(self, message: StreamMessage) -> None:
        if not message.body or message.sequence in self.commands:
            return
        command, place = json.decode(message.body, type=StoredCommand), message.subject.split(".")[2]
        if place in (token_of(command.name), token_of(command.target)):  # that of its target in an earlier version
            self.add_command(message.sequence, command)
        else:  # the subject says what its sender may command
            logger().error("a command is not in its place and is ignored (%s)", printable(message.subject, most=200))

    def add_command(self, sequence: int, command: StoredCommand) -> None:
        wall = self.now().wall
        self.commands = {number: one for number, one in self.commands.items() if one.stale_at > wall}
        self.commands[sequence] = command
        self.last_command = max(self.last_command, sequence)
        self.wake("control")

    def _apply_status(self, message: StreamMessage) -> None:
        name = message.subject.rsplit(".", 1)[1]
        known = self.statuses.get(name)
        if known is not None and known[0] >= message.sequence:
            return
        if message.body:
            self.statuses[name] = message.sequence, json.decode(message.body, type=StoredStatus)
        else:
            self.statuses.pop(name, None)

    def _apply_pool(self, message: StreamMessage) -> None:
        _, _, pool, what = message.subject.split(".", 3)
        if what == "entered":
            self.entered[pool] = max(self.entered.get(pool, 0), message.sequence)
            if message.body != self._mark:
                self._others_admit_until = self.clock.now() + OTHERS_ADMIT_S
        elif message.body:
            name, service = json.decode(message.body, type=tuple[str, ServiceTime])
            self.table.service_times[name] = service

    def offered(self, pool: str, wall: int) -> tuple[int, SubmissionRules | None]:
        """The slots of a resource class in all systems, and the rules that a router has published."""
        offers = [status.capacity for _, status in self.statuses.values() if status.stale_at > wall]
        rules = next((one.rules for one in offers if one.rules is not None), None)
        return sum(one.slots.get(pool, 0) for one in offers), rules

    def reports(self, *, silent: bool = False) -> list[StatusReport]:
        """The statuses that are not stale; with `silent`, those that are, of which the longest silent are forgotten."""
        wall, forgotten = self.now().wall, self.now().wall - milliseconds(SILENT_KEPT_S)
        self.statuses = {name: one for name, one in self.statuses.items() if one[1].stale_at > forgotten}
        found = [(one.first or at, one) for at, one in self.statuses.values() if (one.stale_at <= wall) is silent]
        return [StatusReport(first, one.name, one.body, one.at) for first, one in sorted(found, key=lambda one: one[0])]

    def unread(self, targets: Collection[str], after: int, limit: int) -> list[Command]:
        wall = self.now().wall
        found = [
            Command(number, one.name, one.target, one.body, one.sender, one.at)
            for number, one in sorted(self.commands.items())
            if number > after and one.target in targets and one.stale_at > wall
        ]
        return found[:limit]

    async def read_statuses(self) -> None:
        """Read the last status of every system."""
        found = await self.direct.matching(self.names.statuses)
        self.statuses = {}
        for message in found:
            self._apply(message)

    async def read_status(self, name: str) -> None:
        """Read the last status of one system."""
        message = await last_message(self.connection, self.names.state, self.names.status(name))
        if message is not None:
            self._apply(message)

    async def catch_up(self, sequence: int, ids: Sequence[str], timeout: float) -> None:
        """
        Learn of the changes that other processes have made to these items, the last of them with this sequence.

        Mirrored ones arrive, and are waited for; the others are read.
        """
        mirror = self._mirrors.get(_ALL)
        if mirror is not None:
            feed = mirror.feed

            async def position() -> int:
                return feed.position

            await self.watch(
                position, "arrived", pause=lambda at: 0.0 if at >= sequence else float("inf"), timeout=timeout
            )
        else:
            self.take_records(ids, await gathered(self.read_if_readable, ids))

    async def read_directly(self, ids: Sequence[str]) -> list[Record]:
        """The records of these items as some server has them, which may be a moment behind the stream's leader."""
        messages = await self.direct.last([self.names.any_work(one) for one in ids])
        messages.sort(key=lambda message: message.sequence)  # of a tombstone and its record the record
        found = {message.subject.rpartition(".")[2]: message for message in messages}
        nothing: Record = None, 0, ""
        return [nothing if (one := found.get(token_of(work_id))) is None else _record(one) for work_id in ids]

    def take_records(self, ids: Sequence[str], records: Sequence[Record]) -> None:
        """Know these items by what was read of them; only while no batch is on its way."""
        for work_id, (stored, revision, subject) in zip(ids, records, strict=True):
            known = self.revisions.get(work_id, 0)
            if stored is not None and revision > known:
                self.load(stored, revision, subject)
            elif stored is None and revision >= known and (revision or work_id in self.table.items):
                self.forget(work_id)
                if revision:
                    self.revisions[work_id] = revision

    # ---- records -----------------------------------------------------------------------------------------------------

    def work_messages(self) -> tuple[list[Message], list[tuple[str, int, Kept]]]:
        """The messages that store what has changed in the table; and by id, which of them is its record."""
        messages: list[Message] = []
        records: list[tuple[str, int, Kept]] = []
        for work_id, before in self.table.before.items():
            item = self.table.items.get(work_id)
            if item == before or (item is None and (before is None or work_id not in self.revisions)):
                continue
            messages += key_messages(self.names, self.key_revisions, item, before, self.now())
            revision = self.revisions.get(work_id, 0)
            over = self.names.any_work(work_id)
            old_subject, payload_parts, result_parts = self.kept.get(work_id, ("", 0, 0))
            if item is None:
                messages.append(Message(old_subject, b"", revision, over, ttl=1))
                messages += self._no_blobs(work_id, payload_parts, result_parts)
                if before is not None and before.extra.notes is not None:
                    messages += [Message(self.names.blob(work_id, part, 0), ttl=1) for part in (CHECKPOINT, LINES)]
                continue
            subject = self.names.work(item)
            parts = self.table.parts.get(work_id, {}).items()
            messages += [Message(self.names.blob(work_id, part, 0), body) for part, body in parts]
            payload_parts = payload_parts or self.add_blob(messages, item, "payload", item.payload, INLINE_PAYLOAD)
            result_parts = self.add_blob(messages, item, "result", (item.result or "").encode(), INLINE_RESULT)
            if old_subject and old_subject != subject:
                is_mirrored = self.names.is_open(old_subject)
                messages.append(Message(old_subject, b"", revision, over, ttl=TOMBSTONE_S if is_mirrored else 1))
            if payload_parts or result_parts:
                payload, result = b"" if payload_parts else item.payload, None if result_parts else item.result
                item = structs.replace(item, payload=payload, result=result)
            stored = StoredItem(item, self.table.order_of(work_id), payload_parts, result_parts)
            is_ended = item.state not in _OPEN and item.state is not WorkState.QUARANTINED
            ttl = self.work_ttl if is_ended else None
            messages.append(Message(subject, json.encode(stored), revision, over, ttl=ttl))
            records.append((work_id, len(messages) - 1, (subject, payload_parts, result_parts)))
        self.key_revisions.clear()
        return messages, records

    def pool_messages(self) -> list[Message]:
        """
        The messages for resource classes whose service time changed, or that work was admitted to.

        A leading router alone need not compare arrivals, as long as no other process has admitted anything.
        """
        compares = not self.leads or self.clock.now() <= self._others_admit_until
        entered: list[Message] = []
        for pool in sorted(self.table.pools_entered) if compares else ():
            subject = self.names.pool(pool)
            revision = self.entered.get(subject.rpartition(".")[2], 0)
            entered.append(Message(f"{subject}.entered", self._mark, revision))
        now, served = self.clock.now(), list[Message]()
        for pool in sorted(self.table.pools_served):
            if now - self._served_at.get(pool, -SERVICE_EVERY_S) >= SERVICE_EVERY_S:
                self._served_at[pool] = now
                body = json.encode((pool, self.table.service_times[pool]))
                served.append(Message(f"{self.names.pool(pool)}.service", body))
        return entered + served

    def add_blob(self, messages: list[Message], item: WorkItem, field: str, value: bytes, inline: int) -> int:
        if len(value) <= inline:
            return 0
        parts = [value[at : at + PART] for at in range(0, len(value), PART)]
        messages += [Message(self.names.blob(item.id, field, number), part) for number, part in enumerate(parts)]
        return len(parts)

    def _no_blobs(self, work_id: str, payload_parts: int, result_parts: int) -> list[Message]:
        fields = [("payload", payload_parts), ("result", result_parts)]
        return [
            Message(self.names.blob(work_id, field, number), b"", ttl=1) for field, n in fields for number in range(n)
        ]

    async def whole(self, item: WorkItem, payload_parts: int, result_parts: int) -> WorkItem:
        """The item with its payload and result, read from their parts where necessary."""
        if payload_parts and not item.payload:
            item = structs.replace(item, payload=await self._blob(item.id, "payload", payload_parts))
        if result_parts and item.result is None:
            item = structs.replace(item, result=(await self._blob(item.id, "result", result_parts)).decode())
        return item

    async def _blob(self, work_id: str, field: str, parts: int) -> bytes:
        subjects = [self.names.blob(work_id, field, number) for number in range(parts)]
        found = [await last_message(self.connection, self.names.state, subject) for subject in subjects]
        missing = [subject for subject, one in zip(subjects, found, strict=True) if one is None or not one.body]
        if missing:
            shown = self.connection.options.shown
            raise StoreCorruptError(shown, f"{missing[0]} is missing", "requeue or discard the assignment")
        return b"".join(one.body for one in found if one is not None)

    async def notes(self, work_id: str) -> dict[str, bytes]:
        """The parts of an item's notes."""
        subjects = {part: self.names.blob(work_id, part, 0) for part in (CHECKPOINT, LINES)}
        found = {
            part: await last_message(self.connection, self.names.state, subject) for part, subject in subjects.items()
        }
        return {part: one.body for part, one in found.items() if one is not None and one.body}

    async def read_if_readable(self, work_id: str) -> Record:
        """The record of an item as the stream's leader has it; none for one that cannot be read."""
        message = await last_message(self.connection, self.names.state, self.names.any_work(work_id))
        return (None, 0, "") if message is None else _record(message)

    async def read_work(self, work_id: str) -> Record:
        """The record of an item as the stream's leader has it; an error for one that cannot be read."""
        message = await last_message(self.connection, self.names.state, self.names.any_work(work_id))
        if message is None:
            return None, 0, ""
        found = _record(message)
        if message.body and found[0] is None:
            raise unreadable(self.connection, message)
        return found


def key_messages(
    names: Names, revisions: dict[str, int], item: WorkItem | None, before: WorkItem | None, now: Moment
) -> list[Message]:
    """The messages that bring the entry of a changed item up to date; `revisions` are those of its key."""
    keyed = item or before
    if keyed is None or not keyed.extra.unique:
        return []
    name = unique_name(keyed)
    subject = names.keyed(name, keyed.id)
    if item is None:
        return [Message(subject, ttl=1)]
    if before is None:
        return [Message(subject, item.id.encode(), revisions.get(name), names.keyed(name, "*"), _ttl(item, now))]
    if (item.state in ENDED) == (before.state in ENDED):
        return []
    ttl = _ttl(item, now)
    return [Message(subject, b"" if ttl == 0 else item.id.encode(), ttl=ttl)]


def _ttl(item: WorkItem, now: Moment) -> int | None:
    """The seconds for which the entry of an item is kept; None while the item is open."""
    return -(-left_ms(item, now.wall) // 1000) if item.state in ENDED else None


def check_fits(items: Sequence[WorkItem], store: str) -> None:
    """Refuse items that no batch holds together: kept in several, they would not be one transaction."""
    large = [len(item.payload) for item in items if len(item.payload) > INLINE_PAYLOAD]
    records = len(items) + sum(bool(item.extra.unique) for item in items) + sum(size // PART + 1 for size in large)
    if records > MOST_TOGETHER:
        problem = (
            f"{len(items)} jobs have {records} records, and one transaction on NATS has at most {MOST_TOGETHER}: one "
            "for each job, and one for each 512 KiB of inputs that are larger than 4 KiB"
        )
        raise StoreFullError(store, problem, "make it in smaller parts, such as 500 jobs in each call")


@lru_cache(maxsize=256)
def _warn_of(subject: str, sequence: int, problem: str) -> None:
    """Say once that a record is left out."""
    text = "record %s (sequence %s) cannot be read and is left out (%s); reefknot store check names all of them"
    logger().warning(text, printable(subject, most=200), sequence, printable(problem, most=200))


def unreadable(connection: Connection, message: StreamMessage) -> StoreCorruptError:
    """The error of a record that is asked for by its name and cannot be read."""
    subject = printable(message.subject, most=200)
    problem = f"its record {subject} (sequence {message.sequence}) cannot be read"
    return StoreCorruptError(connection.options.shown, problem, f"reefknot store forget-record {subject} removes it")


def readable(message: StreamMessage) -> StoredItem | None:
    """The work in a message; None, and a warning, where it cannot be read."""
    try:
        return json.decode(message.body, type=StoredItem)
    except msgspec.DecodeError as error:
        _warn_of(message.subject, message.sequence, str(error))
        return None


def _record(message: StreamMessage) -> Record:
    """The record in a message. One that cannot be read counts as none, with its revision."""
    stored = readable(message) if message.body else None
    return stored, message.sequence, "" if stored is None else message.subject


_OPEN = (WorkState.PENDING, WorkState.RUNNING)
_ALL, _COMMANDS = "all", "commands"
