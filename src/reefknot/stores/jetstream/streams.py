"""
The streams of a store on JetStream, the subjects in them, and the check that they are unchanged.

A store NAME has one stream, `NAME_state`. It holds one message for each record, its latest version: work, idempotency
keys, commands, statuses, values; and every event, those of a batch in one message of the batch. Subjects:

    NAME.work.STATE.POOL.ID    an assignment, with the state of its record; `open` is pending or running
    NAME.blob.ID.FIELD.PART    what is too large for a record;   NAME.blob.KEY.unique.ID   see `remote_submissions`
    NAME.key.KEY               an idempotency key
    NAME.command.VERB.ID       a command of an operator;   NAME.status.SYSTEM   a system that runs
    NAME.value.NAME            a named value, read from the server on request
    NAME.pool.POOL             service time and arrivals of a resource class
    NAME.audit.CHAIN.NUMBER.ID a pack: the events of one batch, by the number of the first one in its chain. ID is the
                               work that all are about, else `_`; `@rare` if one is of a type with few events
    NAME.trim.events           how far retention has gone;   NAME.trim.restored   that the store was restored
    NAME.writer.CHAIN          the last batch of one process that has several messages and no events

A record that ends moves to another subject: in one batch its old subject gets a message without a body, a tombstone,
which the server removes after a while, and its new one the record, always in this order. So the last message of
`NAME.work.*.*.ID` is the record, and its sequence is the revision that every change is compared with.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, TypeVar

from msgspec import DecodeError, Struct, json

from reefknot.errors import (
    StoreFullError,
    StoreMissingError,
    StorePermissionError,
    StoreReplacedError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.log import error_text, logger, printable
from reefknot.stores.jetstream.connection import REQUEST_S, Connection
from reefknot.stores.jetstream.requests import NobodyThereError, RefusedError
from reefknot.stores.jetstream.wire import NOT_FOUND, PASSING

OPEN = "open"
ASKED_S = 1.0
OVERLAP, NO_MESSAGE = 10065, 10037
TOO_FEW = frozenset({10005, 10074})
"""JetStream's numbers for fewer servers than replicas."""
CLUSTER_REPLICAS = 3


class Names:
    """The names of the stream and subjects of one store."""

    SEVERAL, RARE = "_", "@rare"
    """In place of a work id in the subject of a pack: its events are about several or none, or one of them is rare."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = f"{name}_state"
        self.commands = f"{name}.command.>"
        self.statuses = f"{name}.status.*"
        self.over_any = f"{name}.over.*"
        self.submissions = f"{name}.submissions"
        """Core NATS: submissions for the router that leads."""
        self.packs = f"{name}.audit.>"
        self.first_packs = f"{name}.audit.*.1.*"
        self.rare_packs = f"{name}.audit.*.*.{self.RARE}"
        self.trim = f"{name}.trim.events"
        self.restored = f"{name}.trim.restored"
        """A note of a process whose store was replaced by an older copy, or by another store."""
        self.users = f"{name}.users"
        """Core NATS: a question that every process answers which works with the store."""

    def work(self, item: WorkItem) -> str:
        is_open = item.state in (WorkState.PENDING, WorkState.RUNNING)
        return f"{self.name}.work.{OPEN if is_open else item.state.value}.{token_of(item.pool)}.{token_of(item.id)}"

    def is_open(self, subject: str) -> bool:
        """Whether the subject of a record is that of open work."""
        return subject.startswith(f"{self.name}.work.{OPEN}.")

    def any_work(self, work_id: str) -> str:
        return f"{self.name}.work.*.*.{token_of(work_id)}"

    def all_work(self, state: str = "*", pool: str = "*") -> str:
        return f"{self.name}.work.{state}.{pool}.*"

    def over(self, work_id: str) -> str:
        """Core NATS: a message without content, once this work has its result."""
        return f"{self.name}.over.{token_of(work_id)}"

    def blob(self, owner: str, field: str, part: int | str) -> str:
        return f"{self.name}.blob.{token_of(owner)}.{field}.{part}"

    def keyed(self, key: str, work_id: str) -> str:
        """The entry of a job with this key of unique work; with `*` all entries of the key."""
        return f"{self.name}.blob.{token_of(key)}.unique.{work_id if work_id == '*' else token_of(work_id)}"

    def key(self, key: str) -> str:
        return f"{self.name}.key.{token_of(key)}"

    def command(self, name: str, command_id: str) -> str:
        return f"{self.name}.command.{token_of(name)}.{command_id}"

    def status(self, system: str) -> str:
        return f"{self.name}.status.{token_of(system)}"

    def value(self, value: str) -> str:
        return f"{self.name}.value.{token_of(value)}"

    def pool(self, pool: str) -> str:
        return f"{self.name}.pool.{token_of(pool)}"

    def writer(self, chain: str) -> str:
        return f"{self.name}.writer.{chain}"

    def pack(self, chain: str, number: int, about: str) -> str:
        return f"{self.name}.audit.{chain}.{number}.{about}"

    def chain(self, chain: str) -> str:
        """The packs of one chain."""
        return f"{self.name}.audit.{chain}.>"

    def packs_about(self, work_id: str) -> list[str]:
        """The packs that may have events about a piece of work."""
        tokens = dict.fromkeys((token_of(work_id) if work_id else self.SEVERAL, self.SEVERAL, self.RARE))
        return [f"{self.name}.audit.*.*.{one}" for one in tokens]


_is_token = re.compile(r"[A-Za-z0-9_-]{1,100}").fullmatch


@lru_cache(maxsize=1024)
def token_of(text: str) -> str:
    """
    A text as one token of a subject: unchanged where possible, else encoded, so that different texts have different
    tokens.
    """
    if _is_token(text):
        return text
    encoded = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    return f"={encoded}" if len(encoded) <= 160 else "~" + hashlib.sha256(text.encode()).hexdigest()


def state_stream(names: Names, replicas: int | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """
    The configuration of the stream of a store.

    A batch that does not fit into `max_bytes` is refused as a whole. One that does not fit into what the account or the
    server has left is not: the server stores the part of it that fits.
    """
    branches = ("work", "blob", "key", "command", "status", "value", "pool", "writer", "trim", "audit")
    return {
        "name": names.state,
        "subjects": [f"{names.name}.{branch}.>" for branch in branches],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": UNBOUNDED if max_bytes is None else max_bytes,
        "max_msgs_per_subject": 1,
        "num_replicas": replicas or 1,
        "allow_atomic": True,
        "allow_msg_ttl": True,
        "allow_direct": True,
    }


UNBOUNDED = -1
FREE = frozenset({"num_replicas", "max_bytes", "discard"})
"""
Settings that an operator may change: more replicas are safer, fewer are theirs to decide; so is a bound in bytes, as
long as the stream refuses what does not fit instead of discarding old records.
"""
LOSES = {"max_age": 0, "max_msgs": -1, "subject_delete_marker_ttl": 0, "sealed": False}
"""Settings under which a stream would lose records or break reads, with the values they must have."""


ELECTION_S, PATIENCE_S = 30.0, 5.0
"""How long a request is repeated while a cluster elects a leader, and elsewhere."""
R = TypeVar("R")


async def patiently(connection: Connection, ask: Callable[[], Awaitable[R]]) -> R:
    """Ask again while the server is away or a stream has no leader, for a while."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            return await ask()
        except StoreReplacedError:
            raise
        except StoreUnavailableError as error:
            if connection.failure is not None:
                raise connection.failure from None
            if isinstance(error, StorePermissionError | StoreMissingError) or connection.is_closed:
                raise
            # Whether a watched stream that is not found is gone, its watch says in a moment.
            is_passing = isinstance(error, RefusedError) and (
                error.number in PASSING or (error.number == NOT_FOUND and connection.is_watched)
            )
            if isinstance(error, RefusedError) and not is_passing:
                raise
            is_election = connection.is_up and connection.cluster is not None
            if loop.time() - began >= (ELECTION_S if is_election else PATIENCE_S):
                raise
        await connection.wait_until_up(PATIENCE_S)
        await asyncio.sleep(0.05)


class StreamInfo(Struct):
    """A stream as JetStream describes it. `ts` is the server's time."""

    config: dict[str, Any]
    state: dict[str, Any]
    ts: str = ""
    created: str = ""
    cluster: dict[str, Any] | None = None


async def ensure_stream(connection: Connection, wanted: dict[str, Any]) -> StreamInfo:
    """The stream as it is; created if it is missing, refused if it was changed."""
    name = wanted["name"]
    try:
        found = await patient_info(connection, name)
    except RefusedError as error:
        if error.number != NOT_FOUND:
            raise
        if connection.options.read_only or not connection.options.creates or connection.options.roles:
            raise _no_store(connection, name) from error
        in_use = await _stream_in_use(connection, name)
        found = in_use or await _create_copied(connection, wanted)
        if in_use is None and name == Names(connection.options.name).state:
            logger().info("there was no store at %s: a new one was made", connection.options.shown)
    if is_of_earlier_design(found.config):
        raise earlier_design(connection, name)
    may_edit = not (connection.options.read_only or connection.options.roles)
    is_older = lacks_subjects(found.config, wanted) and may_edit
    if is_older and not drift({**found.config, "subjects": wanted["subjects"]}, wanted):
        found = await _add_subjects(connection, found, wanted)
    problems = drift(found.config, wanted)
    if problems:
        problem = f"the stream {name} was changed: {'; '.join(problems)}"
        way_out = f"set it back (nats stream edit {name}), or use a store of another name"
        raise StoreVersionError(connection.options.shown, problem, way_out)
    return found


async def stream_info(connection: Connection, name: str, timeout: float = REQUEST_S) -> StreamInfo:
    return json.decode(await connection.api(f"STREAM.INFO.{name}", timeout=timeout), type=StreamInfo)


async def patient_info(connection: Connection, name: str) -> StreamInfo:
    """Information about a stream, asked for again while a cluster elects a leader, who alone can answer."""

    async def ask() -> StreamInfo | RefusedError:
        try:
            return await stream_info(connection, name, timeout=ASKED_S)
        except RefusedError as error:
            if error.number != NOT_FOUND:
                raise
            return error
        except NobodyThereError as error:
            if not connection.has_jetstream:  # no server there ever answers
                raise StoreVersionError(error.store, "JetStream is not enabled there", error.way_out) from error
            raise

    found = await patiently(connection, ask)
    if isinstance(found, RefusedError):
        raise found
    return found


def is_of_earlier_design(config: dict[str, Any]) -> bool:
    """Whether a stream has the subjects of the design that kept the events in a stream of their own."""
    return any(one.endswith(".outbox.>") for one in config.get("subjects") or [])


def earlier_design(connection: Connection, stream: str) -> StoreVersionError:
    name = connection.options.name
    problem = f"its stream {stream} was made by an earlier design"
    way_out = (
        "finish its work with the version that made it (`reefknot job list --state pending` and `--state running` show "
        f"none), then use a store of another name, or delete the streams {name}_state and {name}_audit"
    )
    return StoreVersionError(connection.options.shown, problem, way_out)


def lacks_subjects(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a stream lacks subjects and has none of its own: an earlier version has made it."""
    return set(found.get("subjects") or []) < set(wanted["subjects"])


async def _add_subjects(connection: Connection, found: StreamInfo, wanted: dict[str, Any]) -> StreamInfo:
    """The stream with the subjects that an earlier version did not have; as it was where this user may not edit it."""
    config = {**found.config, "subjects": wanted["subjects"]}
    try:
        return json.decode(
            await connection.api(f"STREAM.UPDATE.{wanted['name']}", config, timeout=10.0), type=StreamInfo
        )
    except (RefusedError, StorePermissionError) as error:
        text = "the settings of stream %s were not updated; it is used as it is (%s)"
        logger().warning(text, wanted["name"], error_text(error))
        return found


def _no_store(connection: Connection, stream: str) -> StoreMissingError:
    options = connection.options
    problem = f"there is no store named {options.name} (no stream {stream})"
    makers = "`submit`, `run`, `up`, `worker start` and `router start` make a new store"
    if options.roles:
        makers = f"an administrator makes one: reefknot store create --engine {options.shown}"
    return StoreMissingError(options.shown, problem, f"check the name behind the address; {makers}")


async def _create_copied(connection: Connection, wanted: dict[str, Any]) -> StreamInfo:
    """A new stream: with three copies in a cluster that has the servers, where their number is not configured."""
    if connection.options.replicas is None and connection.cluster:
        try:
            return await _create(connection, {**wanted, "num_replicas": CLUSTER_REPLICAS})
        except StoreUnavailableError as error:
            refusal = error.__cause__
            if not (isinstance(refusal, RefusedError) and refusal.number in TOO_FEW) or "offline" in refusal.text:
                raise
    return await _create(connection, wanted)


class StoreUser(Struct, frozen=True):
    """A process that works with a store, as it answers to `Names.users`."""

    process: str
    created: str


class Restored(Struct, frozen=True):
    """The note of a process that its store was replaced by an older copy, or by another store."""

    was: str
    """When the stream was created that it worked with."""
    is_now: str
    was_at: int
    is_at: int
    at: str


async def _stream_in_use(connection: Connection, stream: str) -> StreamInfo | None:
    """
    The stream of a store, if another process has made it just now.

    It is refused to make one while a process works with a store of this name: that one was deleted a moment ago.
    """
    names, shown = Names(connection.options.name), connection.options.shown
    if stream != names.state:
        return None
    try:
        user = json.decode((await connection.request(names.users, timeout=ASKED_S)).data, type=StoreUser)
    except (StoreUnavailableError, DecodeError):  # no process answers
        return None
    try:
        return await stream_info(connection, stream)
    except RefusedError as error:
        if error.number != NOT_FOUND:
            raise
    process = printable(user.process, most=100)
    problem = f"its stream {stream} was deleted, and a process still works with it ({process})"
    way_out = (
        "restore it (nats stream restore), or try again when that process has ended, in about two seconds: then a new "
        "store is made"
    )
    raise StoreReplacedError(shown, problem, way_out)


async def _create(connection: Connection, wanted: dict[str, Any]) -> StreamInfo:
    name = wanted["name"]

    async def ask() -> bytes | RefusedError:
        try:
            return await connection.api(f"STREAM.CREATE.{name}", wanted, timeout=10.0)
        except RefusedError as error:
            if error.number in TOO_FEW and "offline" not in error.text:  # waiting makes no further servers
                return error
            raise

    try:
        answer = await patiently(connection, ask)
        if isinstance(answer, RefusedError):
            raise answer
        return json.decode(answer, type=StreamInfo)
    except (RefusedError, StoreFullError) as error:
        shown = connection.options.shown
        if isinstance(error, RefusedError) and error.number == OVERLAP:
            if (old := await earlier_events(connection)) is not None:
                raise earlier_design(connection, old) from error
            problem = f"another stream has subjects of {name} ({error.text})"
            raise StoreVersionError(shown, problem, "use a store of another name: nats://HOST:PORT/NAME") from error
        why = error.text if isinstance(error, RefusedError) else error.problem
        problem = f"the stream {name} cannot be made ({why})"
        way_out = (
            "check the limits of the account, that nats.max_bytes fits into them, and that the cluster has as"
            " many servers as replicas are asked for"
        )
        raise StoreUnavailableError(shown, problem, way_out) from error


async def earlier_events(connection: Connection) -> str | None:
    """The stream in which the earlier design kept the events of this store, if there is one."""
    name = f"{connection.options.name}_audit"
    try:
        found = await stream_info(connection, name)
    except StoreUnavailableError:
        return None
    return name if f"{connection.options.name}.audit.>" in (found.config.get("subjects") or []) else None


def drift(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """The differences between a stream and what the store needs, in words."""
    problems = []
    for key, value in {**wanted, **LOSES}.items():
        is_now = found.get(key, LOSES.get(key, False if isinstance(value, bool) else None))
        if isinstance(value, list):
            is_now, value = sorted(is_now or []), sorted(value)
        if key not in FREE and is_now != value:
            problems.append(f"{key} is {json.encode(is_now).decode()}, not {json.encode(value).decode()}")
    bound = found.get("max_bytes", UNBOUNDED)
    if bound != UNBOUNDED and found.get("discard") != "new":
        problems.append(f"max_bytes is {bound}, and discard is not new")
    return problems
