"""
The table of a ledger: its name, and the statements on it.

The name is the only thing that is ever put into a statement, so it is checked as an identifier and quoted. Keys,
fingerprints and results are bound.

What a block is told about its key, and what it says in the end.

A result is JSON. It is written down the moment it is set, so that the first caller reads what every later one will:
a tuple comes back as a list, a record as a dictionary, or as the type that `result_as` is asked for.

One story for sync and async drivers.

A flow is a generator. It yields what may take time, a call or a nap, and gets back what came of it; `drive` does that
by blocking, `adrive` by awaiting. The flows themselves know nothing of an event loop.

The block: take the key, let the body do its work, keep both or neither.

    begin → take the key ─┬─ free ──▶ body ─┬─ ends ───▶ write the result → commit
                          │                 └─ raises ─▶ roll back
                          └─ on record ──▶ body sees `done` ──▶ roll back: a body that forgot to look does no harm

When the caller has a transaction open, the block joins it by a savepoint: it rolls back its own part, and leaves the
commit to the caller. A connection carries one transaction; two tasks or threads inside blocks of one connection are
refused, because one would commit or undo the other's work.
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
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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

TABLE = "reefknot_ledger"

_PART = r"[A-Za-z_][A-Za-z0-9_]{0,62}"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})?")
_ACCEPTED = (
    "a name of letters, digits and _, at most 63 long and not starting with a digit; a schema may stand before it"
)


@dataclass(frozen=True, slots=True)
class Table:
    """A checked, quoted name. `mark` below is the driver's placeholder: `?` or `%s`."""

    quoted: str

    @classmethod
    def named(cls, name: str) -> Table:
        if not isinstance(name, str):
            raise ParameterTypeError("table", name, _ACCEPTED)
        if not _NAME.fullmatch(name):
            raise ParameterError("table", name, _ACCEPTED)
        return cls(".".join(f'"{part}"' for part in name.split(".")))

    def create(self, time_type: str, now: str) -> str:
        # A result of NULL is a key that is taken but not finished: seen by its own transaction only, unless somebody
        # commits in the middle. JSON's null is the text 'null'.
        return (
            f"CREATE TABLE IF NOT EXISTS {self.quoted} (key TEXT NOT NULL PRIMARY KEY, fingerprint TEXT NOT NULL, "
            f"result TEXT, created_at {time_type} NOT NULL DEFAULT {now})"
        )

    def take(self, mark: str) -> str:
        """Gives a row when the key was free."""
        return (
            f"INSERT INTO {self.quoted} (key, fingerprint) VALUES ({mark}, {mark}) "  # noqa: S608 - a checked name
            "ON CONFLICT (key) DO NOTHING RETURNING key"
        )

    def find(self, mark: str) -> str:
        return f"SELECT fingerprint, result FROM {self.quoted} WHERE key = {mark}"  # noqa: S608 - a checked name

    def keep(self, mark: str) -> str:
        """Gives a row when the key was taken and not finished."""
        return (
            f"UPDATE {self.quoted} SET result = {mark} "  # noqa: S608 - a checked name
            f"WHERE key = {mark} AND result IS NULL RETURNING key"
        )


LARGEST_RESULT = 256 * 1024

T = TypeVar("T")


class LedgerClaim:
    """One key, inside its block. `done`: the effect has happened, `result` is what came of it."""

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
        """Is it on record already? Then the block has nothing to do, and nothing that it writes is kept."""
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
        self._text = _text(value)

    def result_as(self, kind: type[T]) -> T:
        """The result as this type; a result that does not fit it is an error of msgspec's."""
        return msgspec.json.decode(self._text, type=kind)

    @property
    def text(self) -> str:
        """The result as it is recorded."""
        return self._text

    def __repr__(self) -> str:
        return f"<LedgerClaim {shown(self._key)} {'done' if self._done else 'to do'}>"


def _text(value: object) -> str:
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except TypeError as error:
        raise NotJsonError("", str(error)) from error
    text = canonical(plain)
    if len(text) > LARGEST_RESULT:
        raise ResultTooLargeError(size=len(text), limit=LARGEST_RESULT)
    return text.decode()


@dataclass(frozen=True, slots=True)
class Nap:
    """Wait a little, then look again."""

    seconds: float


Step = Nap | Callable[[], Any]
Steps = Generator[Step, Any, T]


class _Flow(Generic[T]):
    """A flow on its way, whoever moves it: what is next, and in the end its result."""

    def __init__(self, steps: Steps[T]) -> None:
        self._steps = steps
        self.result: T
        self.step: Step | None = None
        self._moved(lambda: next(steps))

    def answered(self, answer: Any) -> None:
        self._moved(lambda: self._steps.send(answer))

    def failed(self, error: BaseException) -> None:
        self._moved(lambda: self._steps.throw(error))

    def _moved(self, move: Callable[[], Step]) -> None:
        try:
            self.step = move()
        except StopIteration as end:
            self.step, self.result = None, end.value


def drive(steps: Steps[T]) -> T:
    """To the end, by blocking."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = None
            if isinstance(flow.step, Nap):
                time.sleep(flow.step.seconds)
            else:
                answer = flow.step()
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result


async def adrive(steps: Steps[T]) -> T:
    """To the end, by awaiting. A cancellation reaches the flow like any other error, so that it can undo."""
    flow = _Flow(steps)
    while flow.step is not None:
        try:
            answer = asyncio.sleep(flow.step.seconds) if isinstance(flow.step, Nap) else flow.step()
            if isawaitable(answer):
                answer = await answer
        except BaseException as error:
            flow.failed(error)
        else:
            flow.answered(answer)
    return flow.result


class Found(NamedTuple):
    """The record of a key. A result of None was committed before its block had ended."""

    fingerprint: str
    result: str | None


class Transaction(Protocol):
    """What a driver does for one block. Every method is a flow of steps."""

    needs_await: bool

    def begin(self, key: str) -> Steps[None]:
        """Open a transaction, or a savepoint in the one that the caller has open."""
        ...

    def take(self, key: str, fingerprint: str) -> Steps[Found | None]:
        """None when the key is ours now; waits for another transaction that holds it."""
        ...

    def keep(self, key: str, result: str) -> Steps[None]:
        """Write the result and commit, or leave the commit to the caller's own transaction."""
        ...

    def undo(self) -> Steps[None]:
        """Roll back our part. Does not raise: a connection that is gone has rolled back already."""
        ...


class Ledger:
    """The idempotency records in one database, through one connection."""

    def __init__(self, conn: Any, transaction: Callable[[], Transaction]) -> None:
        self._conn = conn
        self._transaction = transaction

    def once(self, key: str, *, fingerprint: str = "") -> LedgerBlock:
        """
        A block that runs its effect once for this key. `async with`, or `with` on a sync connection.

        A `fingerprint` of the payload tells a key that is used for something else; an empty one is not compared.
        """
        checked_key(key)
        if not isinstance(fingerprint, str):
            raise ParameterTypeError("fingerprint", fingerprint, "a text")
        if "\0" in key or "\0" in fingerprint:  # PostgreSQL has no such text
            raise ParameterError("key or fingerprint", key, "text without NUL characters")
        return LedgerBlock(self._conn, self._transaction(), key, fingerprint)


class LedgerBlock:
    """One use of one key. It is entered once."""

    def __init__(self, conn: Any, transaction: Transaction, key: str, fingerprint: str) -> None:
        self._conn = conn
        self._transaction = transaction
        self._key = key
        self._fingerprint = fingerprint
        self._claim: LedgerClaim | None = None
        self._entered = False

    def __enter__(self) -> LedgerClaim:
        if self._transaction.needs_await:
            raise ParameterTypeError("conn", self._conn, "for `with` a sync connection; use `async with` here")
        return drive(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drive(self._leave(failed=kind is not None))

    async def __aenter__(self) -> LedgerClaim:
        return await adrive(self._enter())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await adrive(self._leave(failed=kind is not None))

    def _enter(self) -> Steps[LedgerClaim]:
        if self._entered:
            raise IdempotencyError("this block was entered before; ask the ledger for another: ledger.once(key)")
        _refuse_strangers(self._conn)
        self._entered = True
        _inside.setdefault(id(self._conn), (self, _whoever_this_is()))
        try:
            yield from self._transaction.begin(self._key)
            self._claim = self._claim_of((yield from self._transaction.take(self._key, self._fingerprint)))
        except BaseException:
            yield from self._transaction.undo()
            self._forget()
            raise
        return self._claim

    def _claim_of(self, found: Found | None) -> LedgerClaim:
        if found is None:
            return LedgerClaim(self._key, recorded=None)
        if found.fingerprint and self._fingerprint and found.fingerprint != self._fingerprint:
            raise KeyConflictError(self._key, recorded=found.fingerprint, given=self._fingerprint)
        if found.result is None:
            raise OutcomeUnknownError(self._key, owner="a block that committed before its end")
        return LedgerClaim(self._key, recorded=found.result)

    def _leave(self, *, failed: bool) -> Steps[None]:
        assert self._claim is not None
        try:
            if failed or self._claim.done:
                yield from self._transaction.undo()
                return
            try:
                yield from self._transaction.keep(self._key, self._claim.text)
            except BaseException:
                yield from self._transaction.undo()
                raise
        finally:
            self._forget()

    def _forget(self) -> None:
        holder = _inside.get(id(self._conn))
        if holder is not None and holder[0] is self:
            del _inside[id(self._conn)]


Who = tuple[int, object]

_inside: dict[int, tuple[LedgerBlock, Who]] = {}
"""The outermost open block of each connection, by the connection's identity; the block keeps the connection alive."""


def _refuse_strangers(conn: Any) -> None:
    holder = _inside.get(id(conn))
    if holder is not None and holder[1] != _whoever_this_is():
        raise IdempotencyError(
            "another task or thread is inside a block of this connection, and a connection carries one transaction; "
            "give each its own connection"
        )


def _whoever_this_is() -> Who:
    try:
        task: object = asyncio.current_task()
    except RuntimeError:
        task = None
    return get_ident(), task
