"""
The ledger: `Ledger.once(key)` is a block whose effect and idempotency record commit together, or not at all.

    begin → claim the key ─┬─ free ──────▶ body ─┬─ returns ─▶ write the result → commit
                           │                     └─ raises ──▶ roll back
                           └─ recorded ──▶ body sees `done` ─▶ roll back: a body that does not check does no harm

When the caller has a transaction open, the block joins it by a savepoint: it rolls back its own part, and leaves the
commit to the caller. A connection carries one transaction; two tasks or threads inside blocks of one connection are
refused, because one would commit or undo the other's work.

Sync and async drivers share one implementation, in coroutines. On a sync connection they only wait in their own
`sleep`; where that blocks too, `run_blocking` runs a coroutine to its end in one go.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from reefknot.core.canonical import canonical, json_value, typed_from_json
from reefknot.errors import (
    IdempotencyError,
    KeyConflictError,
    OutcomeUnknownError,
    ParameterError,
    ParameterTypeError,
    ResultTooLargeError,
    shown,
)
from reefknot.idempotency.model import checked_key
from reefknot.runtime.event_loops import require_asyncio

DEFAULT_TABLE = "reefknot_ledger"
LARGEST_RESULT = 256 * 1024

_PART = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})?")
_ACCEPTED = (
    "a name of letters, digits and _, at most 63 long and not starting with a digit; a schema may stand before it"
)

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]


class Ledger:
    """The idempotency records in one database, through one connection."""

    def __init__(self, conn: Any, transaction: Callable[[], LedgerTransaction]) -> None:
        self._conn = conn
        self._transaction = transaction

    def once(self, key: str, *, fingerprint: str = "") -> LedgerBlock:
        """
        A block that runs its effect once for this key. `async with`, or `with` on a sync connection.

        A `fingerprint` of the payload detects a key that is used for something else; an empty one is not compared.
        """
        checked_key(key)
        if not isinstance(fingerprint, str):
            raise ParameterTypeError("fingerprint", fingerprint, "a text")
        if "\0" in key or "\0" in fingerprint:  # PostgreSQL has no such text
            raise ParameterError("key or fingerprint", key, "text without NUL characters")
        return LedgerBlock(self._conn, self._transaction(), key, fingerprint)


class LedgerBlock:
    """A block for one use of one key; it can be entered once."""

    def __init__(self, conn: Any, transaction: LedgerTransaction, key: str, fingerprint: str) -> None:
        self._conn = conn
        self._transaction = transaction
        self._key = key
        self._fingerprint = fingerprint
        self._claim: LedgerClaim | None = None
        self._entered = False

    def __enter__(self) -> LedgerClaim:
        if self._transaction.needs_await:
            raise ParameterTypeError("conn", self._conn, "for `with` a sync connection; use `async with` here")
        self._transaction.sleep = sleep_blocking
        return run_blocking(self.__aenter__())

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        run_blocking(self.__aexit__(kind))

    async def __aenter__(self) -> LedgerClaim:
        if self._entered:
            raise IdempotencyError("this block was entered before; ask the ledger for another: ledger.once(key)")
        require_asyncio("ledger")
        _refuse_other_callers(self._conn)
        self._entered = True
        _open_blocks.setdefault(id(self._conn), (self, _current_caller()))
        try:
            await self._transaction.begin(self._key)
            self._claim = self._claim_of(await self._transaction.claim(self._key, self._fingerprint))
        except BaseException:
            await self._transaction.roll_back()
            self._forget()
            raise
        return self._claim

    def _claim_of(self, stored: StoredKey | None) -> LedgerClaim:
        if stored is None:
            return LedgerClaim(self._key, recorded=None)
        if stored.fingerprint and self._fingerprint and stored.fingerprint != self._fingerprint:
            raise KeyConflictError(self._key, recorded=stored.fingerprint, given=self._fingerprint)
        if stored.result is None:
            raise OutcomeUnknownError(self._key, owner="a block that committed before its end")
        return LedgerClaim(self._key, recorded=stored.result)

    async def __aexit__(self, kind: type[BaseException] | None, *more: object) -> None:
        assert self._claim is not None
        try:
            if kind is not None or self._claim.done:
                await self._transaction.roll_back()
                return
            try:
                await self._transaction.record(self._key, self._claim.text)
            except BaseException:
                await self._transaction.roll_back()
                raise
        finally:
            self._forget()

    def _forget(self) -> None:
        holder = _open_blocks.get(id(self._conn))
        if holder is not None and holder[0] is self:
            del _open_blocks[id(self._conn)]


Caller = tuple[int, object]

_open_blocks: dict[int, tuple[LedgerBlock, Caller]] = {}
"""The outermost open block of each connection, by the connection's identity; the block keeps the connection alive."""


def _refuse_other_callers(conn: Any) -> None:
    holder = _open_blocks.get(id(conn))
    if holder is not None and holder[1] != _current_caller():
        raise IdempotencyError(
            "another task or thread is inside a block of this connection, and a connection carries one transaction; "
            "give each its own connection"
        )


def _current_caller() -> Caller:
    try:
        task: object = asyncio.current_task()
    except RuntimeError:
        task = None
    return get_ident(), task


class LedgerClaim:
    """
    The key of a block, inside that block. `done`: the effect has happened, `result` is its recorded result.

    A result is JSON. It is encoded the moment it is set, so that the first caller reads what every later one will: a
    tuple comes back as a list, a record as a dictionary, or as the type given to `result_as`.
    """

    __slots__ = ("_done", "_key", "_text")

    def __init__(self, key: str, *, recorded: str | None) -> None:
        self._key = key
        self._done = recorded is not None
        self._text = "null" if recorded is None else recorded

    @property
    def key(self) -> str:
        return self._key

    @property
    def done(self) -> bool:
        """Whether the key is recorded. Then the block has nothing to do, and nothing that it writes is kept."""
        return self._done

    @property
    def result(self) -> Any:
        """The recorded result, or the one that was set. None until then."""
        return msgspec.json.decode(self._text)

    @result.setter
    def result(self, value: Any) -> None:
        if self._done:
            raise IdempotencyError(
                f"key {shown(self._key)} has its result already, and nothing of this block is kept; "
                "ask `if claim.done:` before the effect"
            )
        self._text = _json_text(value)

    def result_as(self, kind: type[T]) -> T:
        """The result as this type; `msgspec.ValidationError` when it does not fit."""
        typed: T = typed_from_json(self._text, kind)
        return typed

    @property
    def text(self) -> str:
        """The result as it is recorded."""
        return self._text

    def __repr__(self) -> str:
        return f"<LedgerClaim {shown(self._key)} {'done' if self._done else 'to do'}>"


def _json_text(value: object) -> str:
    text = canonical(json_value(value, round_trip=True))
    if len(text) > LARGEST_RESULT:
        raise ResultTooLargeError(size=len(text), limit=LARGEST_RESULT)
    return text.decode()


class StoredKey(NamedTuple):
    """The record of a key. A result of None was committed before its block had ended."""

    fingerprint: str
    result: str | None


class LedgerTransaction(Protocol):
    """The transaction of one block on one driver. On a sync connection its methods wait by `sleep` alone."""

    needs_await: bool
    sleep: Sleep

    async def begin(self, key: str) -> None:
        """Open a transaction, or a savepoint in the one that the caller has open."""

    async def claim(self, key: str, fingerprint: str) -> StoredKey | None:
        """None when this block has the key now, else its record. Waits for another transaction that holds the key."""

    async def record(self, key: str, result: str) -> None:
        """Write the result and commit, or leave the commit to the caller's own transaction."""

    async def roll_back(self) -> None:
        """Undo the block's part. Does not raise: a connection that is lost has rolled back already."""


@dataclass(frozen=True, slots=True)
class LedgerTable:
    """
    Statements on the ledger's table, whose name is checked as an identifier and quoted; everything else is bound.

    `mark` is the driver's placeholder: `?` or `%s`.
    """

    quoted: str

    @classmethod
    def named(cls, name: str) -> LedgerTable:
        if not isinstance(name, str):
            raise ParameterTypeError("table", name, _ACCEPTED)
        if not _NAME.fullmatch(name):
            raise ParameterError("table", name, _ACCEPTED)
        return cls(".".join(f'"{part}"' for part in name.split(".")))

    def create(self, time_type: str, now: str) -> str:
        # A result of NULL is a key that is claimed but not finished: seen by its own transaction only, unless the body
        # commits in the middle. JSON's null is the text 'null'.
        return (
            f"CREATE TABLE IF NOT EXISTS {self.quoted} (key TEXT NOT NULL PRIMARY KEY, fingerprint TEXT NOT NULL, "
            f"result TEXT, created_at {time_type} NOT NULL DEFAULT {now})"
        )

    def claim(self, mark: str) -> str:
        """An insert that returns a row when the key was free."""
        return (
            f"INSERT INTO {self.quoted} (key, fingerprint) VALUES ({mark}, {mark}) "  # noqa: S608 - a checked name
            "ON CONFLICT (key) DO NOTHING RETURNING key"
        )

    def find(self, mark: str) -> str:
        return f"SELECT fingerprint, result FROM {self.quoted} WHERE key = {mark}"  # noqa: S608 - a checked name

    def record(self, mark: str) -> str:
        """An update that returns a row when the key was claimed and not finished."""
        return (
            f"UPDATE {self.quoted} SET result = {mark} "  # noqa: S608 - a checked name
            f"WHERE key = {mark} AND result IS NULL RETURNING key"
        )


async def sleep_blocking(seconds: float) -> None:
    """Sleep without giving way to the event loop, if there is one."""
    time.sleep(seconds)  # noqa: ASYNC251 - for callers that block


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a ledger's transaction suspended on a sync connection")


@contextmanager
def translating(driver_error: type[Exception], translated: Callable[[Any], Exception]) -> Iterator[None]:
    """A scope in which a driver's error is raised as its translation, or as it is where it has none."""
    try:
        yield
    except driver_error as error:
        ours = translated(error)
        if ours is error:
            raise
        raise ours from error


def ended_inside(key: str, how: str = "") -> IdempotencyError:
    """The error for a body that ended the transaction of its block."""
    return IdempotencyError(
        f"the block of key {shown(key)} ended its own transaction{how}; what it committed is not undone. "
        "Leave the end of the transaction to the block"
    )
