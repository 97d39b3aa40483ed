"""
Roles: the subjects that a client, a worker, a router, an operator and a reader of a store use, and no other subject.

`permissions` is the one table of them; `reefknot dev permissions` prints it for a server's configuration. A process
whose `nats.roles` are set compares it with what the server allows its user, before it does anything else, and again
whenever its connection is back: a missing permission is found before work depends on it.

A subject says who may write a record, not which one: a worker that may end its own work may end that of another worker.
Reads are not divided: who may read a record of the stream may read all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import get_args

from msgspec import DecodeError, Struct, json, structs

from reefknot.errors import StoreError, StorePermissionError
from reefknot.policy.schema import NatsRole
from reefknot.queue.model.messages import ACK, CANCEL, FLEET, HEARTBEAT, RESULT, assign_subject
from reefknot.queue.model.work import WorkState
from reefknot.runtime.log import error_text, logger
from reefknot.stores.jetstream.assignments import CONSUMER
from reefknot.stores.jetstream.connection import Connection, NatsOptions
from reefknot.stores.jetstream.requests import NotOfThisRoleError
from reefknot.stores.jetstream.streams import OPEN, Names

ROLES: tuple[NatsRole, ...] = get_args(NatsRole)
ROUND_TRIP = "$JS.API.INFO"
USER_INFO = "$SYS.REQ.USER.INFO"
"""The server answers with the permissions of the user that asks."""
ASKED_S = 2.0


class Permissions(Struct, frozen=True):
    """The subjects that a user may publish and subscribe to; every other one is refused."""

    publish: list[str]
    subscribe: list[str]


@lru_cache(maxsize=64)
def permissions(roles: tuple[str, ...], options: NatsOptions) -> Permissions:
    """The permissions of a user with these roles, whose answers arrive in the inbox of these options."""
    table = _Table(options)
    found = [(_TABLE[role](table)) for role in sorted(roles)]
    return Permissions(
        list(dict.fromkeys(one for each in found for one in each.publish)),
        list(dict.fromkeys(one for each in found for one in each.subscribe)),
    )


class _Table:
    """The subjects of one store."""

    def __init__(self, options: NatsOptions) -> None:
        self.names = Names(options.name)
        self.inbox = f"{options.inbox}.>"
        self._prefix = options.prefix

    def record(self, branch: str, tokens: int) -> str:
        """The records of a branch of the state stream."""
        return ".".join((self.names.name, branch, *("*" * tokens)))

    @property
    def arrivals(self) -> str:
        """The marks of work that was admitted, by class."""
        return f"{self.record('pool', 1)}.entered"

    def work(self, *states: WorkState) -> list[str]:
        """The records of work in these states, and of open work: a record that ends leaves a tombstone there."""
        return [self.names.all_work(one) for one in (OPEN, *states)]

    @property
    def reads(self) -> list[str]:
        """The requests of everyone who looks at a store: it is read whole or not at all."""
        stream, api = self.names.state, "$JS.API"
        consumer = [f"{api}.CONSUMER.{verb}.{stream}.*" for verb in ("CREATE", "DELETE", "MSG.NEXT")]
        reads = [f"{api}.{verb}.{stream}" for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")]
        return [USER_INFO, *reads, *consumer, f"$JS.FC.{stream}.>"]

    @property
    def looks(self) -> list[str]:
        """The requests of everyone who may ask what `doctor` asks."""
        return [*self.reads, f"$JS.API.STREAM.INFO.{self.names.name}_assign", ROUND_TRIP]

    @property
    def writes(self) -> list[str]:
        """The subjects of everyone who changes a store: events, parts of large records, ends that others wait for."""
        return [self.record("audit", 3), self.record("blob", 3), self.names.over_any]

    @property
    def runs(self) -> list[str]:
        """The subjects of every running part: ends of work, its status, named values, resource classes."""
        branches = (("status", 1), ("value", 1), ("pool", 2), ("writer", 1))
        own = [self.record(branch, tokens) for branch, tokens in branches]
        return [*self.reads, ROUND_TRIP, *self.writes, *self.work(*_RUNS), *own, *self.listening]

    def messages(self, *subjects: str) -> list[str]:
        """Documented messages."""
        return [f"{self._prefix}{one}" for one in subjects]

    def parts(self, *subjects: str) -> list[str]:
        """Documented messages that are larger than the server takes."""
        return [f"{self.names.name}.parts.{one}" for one in subjects]

    @property
    def listening(self) -> list[str]:
        """Back-pressure between the ends of a store."""
        return [f"{self.names.name}.listeners", f"{self.names.name}.read.*"]

    @property
    def shared(self) -> list[str]:
        """The requests of a worker to the stream of the shared subject."""
        stream = f"{self.names.name}_assign"
        consumer = [f"$JS.API.CONSUMER.{verb}.{stream}.{CONSUMER}" for verb in ("CREATE", "MSG.NEXT")]
        return [f"$JS.API.STREAM.INFO.{stream}", *consumer, f"$JS.ACK.{stream}.{CONSUMER}.>"]


_RUNS = (WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED, WorkState.QUARANTINED)


def _reader(table: _Table) -> Permissions:
    return Permissions(table.looks, [table.inbox])


def _client(table: _Table) -> Permissions:
    names, own = table.names, [table.record("key", 1), table.record("writer", 1), table.arrivals]
    asks = [names.submissions, names.command("cancel", "*")]
    work = table.work(WorkState.CANCELLED)
    return Permissions([*table.reads, *table.writes, *work, *own, *asks], [table.inbox, names.over_any])


def _worker(table: _Table) -> Permissions:
    sends = [*table.messages(ACK, RESULT, HEARTBEAT), *table.parts(RESULT), table.record("key", 1)]
    hears = (assign_subject("*"), CANCEL, FLEET)
    heard = [table.inbox, *table.listening, *table.messages(*hears), *table.parts(*hears)]
    return Permissions([*table.runs, *table.shared, *sends], heard)


def _router(table: _Table) -> Permissions:
    to_worker, hears = assign_subject("*"), (ACK, RESULT, HEARTBEAT)
    answers = f"_INBOX.{table.names.name}.>"
    sends = [*table.messages(to_worker, CANCEL, FLEET), *table.parts(to_worker), answers]
    asked = [table.names.submissions, table.names.users]
    heard = [table.inbox, *asked, *table.listening, *table.messages(*hears), *table.parts(*hears)]
    return Permissions([*table.runs, *sends], heard)


def _operator(table: _Table) -> Permissions:
    states = (WorkState.FAILED, WorkState.CANCELLED, WorkState.QUARANTINED, WorkState.DISCARDED)
    own = [table.record(one, n) for one, n in (("command", 2), ("key", 1), ("value", 1))]
    asks = [*own, table.arrivals, table.names.submissions]
    return Permissions([*table.looks, *table.writes, *table.work(*states), *asks], [table.inbox])


_TABLE: dict[str, Callable[[_Table], Permissions]] = {
    "client": _client,
    "worker": _worker,
    "router": _router,
    "operator": _operator,
    "reader": _reader,
}


# ---- what a user lacks ---------------------------------------------------------------------------------------------


def denial(options: NatsOptions, text: str) -> StorePermissionError:
    """The error for a subject that the server refuses, with the roles that need it. `text` is what the server says."""
    verb = "subscribe" if "for subscription to" in text else "publish"
    subject = text.partition('"')[2].partition('"')[0]
    problem = f"the server refuses this user ({text})"
    for pattern, roles in _needed(options, verb):
        if covers(pattern.lower(), subject):
            return _missing(options, verb, pattern, roles, problem)
    for pattern, roles in _needed(structs.replace(options, roles=()), verb):
        if covers(pattern.lower(), subject):
            way_out = f"only {_named(roles)} may, and this user has {_named(options.roles)}"
            return NotOfThisRoleError(options.shown, problem, way_out)
    way_out = "no role has this permission: an administrator makes and changes streams (reefknot store create)"
    return NotOfThisRoleError(options.shown, problem, way_out)


def _needed(options: NatsOptions, verb: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The subjects that the roles of this user need, each with its roles; without roles those of all."""
    found: dict[str, list[str]] = {}
    for role in options.roles or ROLES:
        for pattern in getattr(permissions((role,), options), verb):
            found.setdefault(pattern, []).append(role)
    yield from found.items()


def _missing(
    options: NatsOptions, verb: str, pattern: str, roles: Sequence[str], problem: str = ""
) -> StorePermissionError:
    missing = f"{_named(roles)} need{'s' if len(roles) == 1 else ''} to {verb} to {pattern}"
    flags = " ".join(f"--role {one}" for one in options.roles or roles[:1])
    way_out = f"`reefknot dev permissions {flags} --engine {options.shown}` prints all that is needed"
    if problem:
        return StorePermissionError(options.shown, problem, f"{missing}; {way_out}")
    return StorePermissionError(options.shown, f"{missing}, and this user may not", way_out)


def _named(roles: Sequence[str]) -> str:
    return f"the role {roles[0]}" if len(roles) == 1 else f"the roles {', '.join(roles[:-1])} and {roles[-1]}"


class _Allowed(Struct):
    allow: list[str] | None = None
    deny: list[str] | None = None

    def has(self, needed: str) -> bool:
        allowed = self.allow is None or any(covers(one, needed) for one in self.allow)
        return allowed and not any(overlap(one, needed) for one in self.deny or ())


class _Rights(Struct):
    publish: _Allowed | None = None
    subscribe: _Allowed | None = None


class _User(Struct):
    permissions: _Rights | None = None


class _UserInfo(Struct):
    data: _User | None = None


async def check(connection: Connection) -> None:
    """Raise if this user lacks a permission that its roles need; a server that does not tell is believed later."""
    options = connection.options
    if not options.roles:
        return
    try:
        answer = (await connection.request(USER_INFO, timeout=ASKED_S)).data
        found = json.decode(answer, type=_UserInfo).data
    except StorePermissionError:
        raise
    except (StoreError, DecodeError) as error:
        logger().info("%s does not tell the permissions of this user (%s)", options.shown, error_text(error))
        return
    rights = _Rights() if found is None or found.permissions is None else found.permissions
    for verb, allowed in (("publish", rights.publish), ("subscribe", rights.subscribe)):
        for pattern, roles in _needed(options, verb):
            if allowed is not None and not allowed.has(pattern):
                raise _missing(options, verb, pattern, roles)


class Loss:
    """Permissions that the user of a running process has lost: each is logged once."""

    def __init__(self) -> None:
        self._problem = ""

    async def look(self, connection: Connection) -> None:
        """Check the permissions again; an error of the server is no loss."""
        problem = ""
        try:
            await check(connection)
        except StorePermissionError as error:
            problem = error.problem
            if problem != self._problem:
                logger().error("%s; this part cannot do all of its work until it may", error)
        self._problem = problem


def covers(pattern: str, needed: str) -> bool:
    """Whether every subject of `needed`, which may have wildcards too, is one of `pattern`."""
    allowed, wanted = pattern.split("."), needed.split(".")
    for at, one in enumerate(allowed):
        if one == ">":
            return at < len(wanted)
        if at >= len(wanted) or wanted[at] == ">" or one not in ("*", wanted[at]):
            return False
    return len(allowed) == len(wanted)


def overlap(one: str, other: str) -> bool:
    """Whether two subjects with wildcards have a subject in common."""
    left, right = one.split("."), other.split(".")
    for first, second in zip(left, right, strict=False):
        if ">" in (first, second):
            return True
        if first != second and "*" not in (first, second):
            return False
    return len(left) == len(right)
