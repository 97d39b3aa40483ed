"""
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
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from reefknot.core.idempotency import checked_key
from reefknot.engines.ledger.claim import LedgerClaim
from reefknot.engines.ledger.steps import Steps, adrive, drive
from reefknot.errors import (
    IdempotencyError,
    KeyConflictError,
    OutcomeUnknownError,
    ParameterError,
    ParameterTypeError,
)


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
