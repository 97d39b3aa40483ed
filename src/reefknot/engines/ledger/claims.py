"""
The ledger: `Ledger.once(key)` is a block whose effect and idempotency record commit together, or not at all.

    begin → claim the key ─┬─ free ──────▶ body ─┬─ returns ─▶ write the result → commit
                           │                     └─ raises ──▶ roll back
                           └─ recorded ──▶ body sees `done` ─▶ roll back: a body that does not check does no harm

When the caller has a transaction open, the block joins it by a savepoint: it rolls back its own part, and leaves the
commit to the caller. A connection carries one transaction; two tasks or threads inside blocks of one connection are
refused, because one would commit or undo the other's work.

Sync and async drivers share one implementation: a driver's methods are generators of steps. A step is a call, or a
pause in seconds; `run_steps` takes them by blocking, `run_steps_async` by awaiting.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from inspect import isawaitable
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec

from reefknot.core.canonical import canonical
from reefknot.core.idempotency import checked_key
from reefknot.errors import (
    IdempotencyError,
    KeyConflictError,
    NotJsonError,
    OutcomeUnknownError,
    ParameterError,
    ParameterTypeError,
    ResultTooLargeError,
    shown,
)

DEFAULT_TABLE = "reefknot_ledger"
LARGEST_RESULT = 256 * 1024

_PART = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})?")
_ACCEPTED = (
    "a name of letters, digits and _, at most 63 long and not starting with a digit; a schema may stand before it"
)

T = TypeVar("T")

Step = Callable[[], Any] | float
Steps = Generator[Step, Any, T]


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
        return run_steps(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_steps(self._leave(failed=kind is not None))

    async def __aenter__(self) -> LedgerClaim:
        return await run_steps_async(self._enter())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_steps_async(self._leave(failed=kind is not None))

    def _enter(self) -> Steps[LedgerClaim]:
        if self._entered:
            raise IdempotencyError("this block was entered before; ask the ledger for another: ledger.once(key)")
        _refuse_other_callers(self._conn)
        self._entered = True
        _open_blocks.setdefault(id(self._conn), (self, _current_caller()))
        try:
            yield from self._transaction.begin(self._key)
            self._claim = self._claim_of((yield from self._transaction.claim(self._key, self._fingerprint)))
        except BaseException:
            yield from self._transaction.roll_back()
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

    def _leave(self, *, failed: bool) -> Steps[None]:
        assert self._claim is not None
        try:
            if failed or self._claim.done:
                yield from self._transaction.roll_back()
                return
            try:
                yield from self._transaction.record(self._key, self._claim.text)
            except BaseException:
                yield from self._transaction.roll_back()
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
        return msgspec.json.decode(self._text, type=kind)

    @property
    def text(self) -> str:
        """The result as it is recorded."""
        return self._text

    def __repr__(self) -> str:
        return f"<LedgerClaim {shown(self._key)} {'done' if self._done else 'to do'}>"


def _json_text(value: object) -> str:
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except TypeError as error:
        raise NotJsonError("", str(error)) from error
    text = canonical(plain)
    if len(text) > LARGEST_RESULT:
        raise ResultTooLargeError(size=len(text), limit=LARGEST_RESULT)
    return text.decode()


class StoredKey(NamedTuple):
    """The record of a key. A result of None was committed before its block had ended."""

    fingerprint: str
    result: str | None


class LedgerTransaction(Protocol):
    """The transaction of one block on one driver. Every method is a generator of steps."""

    needs_await: bool

    def begin(self, key: str) -> Steps[None]:
        """Open a transaction, or a savepoint in the one that the caller has open."""
        ...

    def claim(self, key: str, fingerprint: str) -> Steps[StoredKey | None]:
        """None when this block has the key now, else its record. Waits for another transaction that holds the key."""
        ...

    def record(self, key: str, result: str) -> Steps[None]:
        """Write the result and commit, or leave the commit to the caller's own transaction."""
        ...

    def roll_back(self) -> Steps[None]:
        """Undo the block's part. Does not raise: a connection that is lost has rolled back already."""
        ...


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


class _Flow(Generic[T]):
    """A generator of steps under way: its next step, None at the end, and then its result."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.result: T
        self.step: Step | None = None
        self._advance(lambda: next(steps))

    def answered(self, answer: Any) -> None:
        self._advance(lambda: self._steps.send(answer))

    def failed(self, error: BaseException) -> None:
        self._advance(lambda: self._steps.throw(error))

    def _advance(self, move: Callable[[], Step]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            self.step, self.result = None, end.value


def run_steps(steps: Steps[T]) -> T:
    """The result of the steps, taken by blocking."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = None
            if isinstance(flow.step, float):
                time.sleep(flow.step)
            else:
                answer = flow.step()
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result


async def run_steps_async(steps: Steps[T]) -> T:
    """The result of the steps, taken by awaiting. A cancellation reaches them like an error: they can roll back."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = asyncio.sleep(flow.step) if isinstance(flow.step, float) else flow.step()
            if isawaitable(answer):
                answer = await answer
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result


def raise_translated(error: Exception, ours: Exception) -> NoReturn:
    """Raise the translation of a driver's error, or that error itself where there is none."""
    if ours is error:
        raise error
    raise ours from error


def ended_inside(key: str, how: str = "") -> IdempotencyError:
    """The error for a body that ended the transaction of its block."""
    return IdempotencyError(
        f"the block of key {shown(key)} ended its own transaction{how}; what it committed is not undone. "
        "Leave the end of the transaction to the block"
    )
