"""
The streams of a store on JetStream, the subjects in them, and the check that they are unchanged.

A store NAME has two streams. `NAME_state` holds one message for each record, its latest version: work, idempotency
keys, commands, statuses, values. `NAME_audit` holds every event. Subjects:

    NAME.work.STATE.POOL.ID    an assignment, with the state of its record; `open` is pending or running
    NAME.blob.ID.FIELD.PART    what is too large for a record
    NAME.key.KEY               an idempotency key
    NAME.command.TARGET.ID     a command of an operator;   NAME.status.SYSTEM   a system that runs
    NAME.value.NAME            a named value, read from the server on request
    NAME.pool.POOL             service time and arrivals of a resource class
    NAME.outbox.WRITER         the last batch of one process, with its events until they are in the audit stream
    NAME.audit.CHAIN.TYPE.ID   an event; the first one of its chain on NAME.audit.CHAIN.TYPE.ID.first

A record that ends moves to another subject: in one batch its old subject gets a message without a body, a tombstone,
which the server removes after a while, and its new one the record, always in this order. So the last message of
`NAME.work.*.*.ID` is the record, and its sequence is the revision that every change is compared with.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from functools import lru_cache
from typing import Any

from msgspec import Struct, json

from reefknot.errors import (
    StoreFullError,
    StoreMissingError,
    StorePermissionError,
    StoreUnavailableError,
    StoreVersionError,
)
from reefknot.queue.model.work import WorkItem, WorkState
from reefknot.runtime.log import error_text, logger
from reefknot.stores.jetstream.connection import REQUEST_S, Connection, RefusedError, UnansweredError

OPEN, FIRST = "open", "first"
ASKED_S = 1.0
ELECTION_S = 10.0
"""How long an opening store waits for a cluster without a leader, at least."""
NO_LEADER = 10008
"""JetStream's number for a cluster that has none."""
NOT_FOUND, OVERLAP, NO_MESSAGE = 10059, 10065, 10037


class Names:
    """The names of the streams and subjects of one store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = f"{name}_state"
        self.audit = f"{name}_audit"
        self.commands = f"{name}.command.>"
        self.statuses = f"{name}.status.*"
        self.submissions = f"{name}.submissions"
        """Core NATS: submissions for the router that leads."""

    def work(self, item: WorkItem) -> str:
        is_open = item.state in (WorkState.PENDING, WorkState.RUNNING)
        return f"{self.name}.work.{OPEN if is_open else item.state.value}.{token_of(item.pool)}.{token_of(item.id)}"

    def any_work(self, work_id: str) -> str:
        return f"{self.name}.work.*.*.{token_of(work_id)}"

    def all_work(self, state: str = "*", pool: str = "*") -> str:
        return f"{self.name}.work.{state}.{pool}.*"

    def over(self, work_id: str) -> str:
        """Core NATS: a message without content, once this work has its result."""
        return f"{self.name}.over.{token_of(work_id)}"

    def blob(self, owner: str, field: str, part: int | str) -> str:
        return f"{self.name}.blob.{token_of(owner)}.{field}.{part}"

    def key(self, key: str) -> str:
        return f"{self.name}.key.{token_of(key)}"

    def command(self, target: str, command_id: str) -> str:
        return f"{self.name}.command.{token_of(target)}.{command_id}"

    def status(self, system: str) -> str:
        return f"{self.name}.status.{token_of(system)}"

    def value(self, value: str) -> str:
        return f"{self.name}.value.{token_of(value)}"

    def pool(self, pool: str) -> str:
        return f"{self.name}.pool.{token_of(pool)}"

    def outbox(self, writer: str) -> str:
        return f"{self.name}.outbox.{writer}"

    def event(self, chain: str, event_type: str, work_id: str | None, *, is_first: bool = False) -> str:
        subject = f"{self.name}.audit.{chain}.{token_of(event_type)}.{token_of(work_id) if work_id else '_'}"
        return f"{subject}.{FIRST}" if is_first else subject

    def chain(self, chain: str) -> str:
        """The events of one chain; `*` for all."""
        return f"{self.name}.audit.{chain}.>"

    def events(self, event_type: str | None = None, work_id: str | None = None) -> list[str]:
        """The subjects of events of a type, of a piece of work, or of both; all events where neither is given."""
        if event_type is None and work_id is None:
            return [self.chain("*")]
        work = "*" if work_id is None else token_of(work_id) if work_id else "_"
        subject = f"{self.name}.audit.*.{'*' if event_type is None else token_of(event_type)}.{work}"
        return [subject, f"{subject}.{FIRST}"]

    @property
    def first_events(self) -> str:
        """The first event of every chain that still has it."""
        return f"{self.name}.audit.*.*.*.{FIRST}"


@lru_cache(maxsize=1024)
def token_of(text: str) -> str:
    """
    A text as one token of a subject: unchanged where possible, else encoded, so that different texts have different
    tokens.
    """
    if 0 < len(text) <= 100 and text.isascii() and text.replace("-", "a").replace("_", "a").isalnum():
        return text
    encoded = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    return f"={encoded}" if len(encoded) <= 160 else "~" + hashlib.sha256(text.encode()).hexdigest()


def state_stream(names: Names, replicas: int, max_bytes: int | None = None) -> dict[str, Any]:
    """
    The configuration of the stream of records.

    A batch that does not fit into `max_bytes` is refused as a whole. One that does not fit into what the account or the
    server has left is not: the server stores the part of it that fits.
    """
    branches = ("work", "blob", "key", "command", "status", "value", "pool", "outbox")
    return {
        "name": names.state,
        "subjects": [f"{names.name}.{branch}.>" for branch in branches],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": UNBOUNDED if max_bytes is None else max_bytes,
        "max_msgs_per_subject": 1,
        "num_replicas": replicas,
        "allow_atomic": True,
        "allow_msg_ttl": True,
        "allow_direct": True,
    }


def audit_stream(names: Names, replicas: int, max_bytes: int | None = None) -> dict[str, Any]:
    """The configuration of the stream of events."""
    return {
        "name": names.audit,
        "subjects": [f"{names.name}.audit.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": UNBOUNDED if max_bytes is None else max_bytes,
        "max_msgs_per_subject": -1,
        "num_replicas": replicas,
        "allow_atomic": True,
        "allow_direct": False,
    }


UNBOUNDED = -1
FREE = frozenset({"num_replicas", "max_bytes", "discard"})
"""
Settings that an operator may change: more replicas are safer, fewer are theirs to decide; so is a bound in bytes, as
long as the stream refuses what does not fit instead of discarding old records.
"""
LOSES = {"max_age": 0, "max_msgs": -1, "subject_delete_marker_ttl": 0, "sealed": False}
"""Settings under which a stream would lose records or break reads, with the values they must have."""


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
        found = await _patient_info(connection, name)
    except RefusedError as error:
        if error.number != NOT_FOUND:
            raise
        if connection.options.read_only or not connection.options.creates:
            raise _no_store(connection, name) from error
        found = await _create(connection, wanted)
    is_older = lacks_subjects(found.config, wanted) and not connection.options.read_only
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


async def _patient_info(connection: Connection, name: str) -> StreamInfo:
    """Information about a stream, asked for again while a cluster elects a leader, who alone can answer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + max(ELECTION_S, connection.options.patience)
    while True:
        try:
            return await stream_info(connection, name, timeout=ASKED_S)
        except (UnansweredError, RefusedError) as error:
            is_election = isinstance(error, UnansweredError) or error.number == NO_LEADER
            if not is_election or loop.time() >= deadline:
                raise
        await asyncio.sleep(0.1)


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
    way_out = (
        "check the name behind the address; `submit`, `run`, `up`, `worker start` and `router start` make a new store"
    )
    return StoreMissingError(options.shown, problem, way_out)


async def _create(connection: Connection, wanted: dict[str, Any]) -> StreamInfo:
    name = wanted["name"]
    try:
        return json.decode(await connection.api(f"STREAM.CREATE.{name}", wanted, timeout=10.0), type=StreamInfo)
    except (RefusedError, StoreFullError) as error:
        shown = connection.options.shown
        if isinstance(error, RefusedError) and error.number == OVERLAP:
            problem = f"another stream has subjects of {name} ({error.text})"
            raise StoreVersionError(shown, problem, "use a store of another name: nats://HOST:PORT/NAME") from error
        why = error.text if isinstance(error, RefusedError) else error.problem
        problem = f"the stream {name} cannot be made ({why})"
        way_out = (
            "check the limits of the account, that twice nats.max_bytes fits into them, and that the cluster has as"
            " many servers as replicas are asked for"
        )
        raise StoreUnavailableError(shown, problem, way_out) from error


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
