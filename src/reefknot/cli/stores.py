"""
The store that a command works on: its address, opening it, audited actions on it, and the systems that run over it.

The address is `--engine URL`, else `engine` of the configuration, else `.reefknot/state.db` beside it. A command never
creates a store that it only looks at: a missing file is an error that names it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import OperatorFlags, StoreFlags, is_unconfigured, settings
from reefknot.runtime.database_urls import SQLITE_PREFIX, sqlite_path
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

R = TypeVar("R")


class StoreAddress(Struct, frozen=True):
    """The store of a command: its URL, the settings in force (None when nothing is configured), the redactor of their
    secrets, the value of `--as`."""

    url: str
    settings: Any
    redactor: Any
    named_actor: str | None = None

    @property
    def path(self) -> Path:
        """The file of a SQLite store; every other engine is refused."""
        if not self.is_sqlite:
            raise CommandError(f"--engine: {printable(self.url)} is not a sqlite store; accepted here: sqlite:PATH")
        return Path(sqlite_path(self.url))

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith(SQLITE_PREFIX)

    def require_file(self) -> None:
        """Refuse a SQLite store whose file is missing."""
        if self.is_sqlite and not self.path.is_file():
            raise CommandError(
                f"there is no store at {self.path}; name one with --engine sqlite:PATH, or with `engine` in "
                "reefknot.yaml",
                Exit.UNREACHABLE,
            )

    @property
    def actor(self) -> str:
        """The actor of an audited action: the value of `--as`, else the user of this system."""
        from getpass import getuser

        if self.named_actor:
            return printable(self.named_actor)[:200]
        try:
            return getuser()
        except (KeyError, OSError, ImportError):
            return "unknown"

    def event(
        self, action: str, subject: str | None = None, *, tenant_id: str | None = None, **details: Any
    ) -> AuditEntry:
        """The audit entry of an operator's action, secrets hidden. User, host and process are those of this command,
        whatever name was given with `--as`."""
        from reefknot import clock
        from reefknot.audit.journal import Journal, envelope
        from reefknot.core.audit.event import OperatorAction
        from reefknot.runtime.processes import own_identity

        mine = own_identity()
        event = OperatorAction(
            **envelope(wall=clock.wall(), tenant_id=tenant_id),
            actor=self.actor,
            os_user=mine.user,
            host=mine.host,
            process=mine.process,
            action=action,
            subject=None if subject is None else self.redactor(subject),
            details=self.redactor.tree(details) or None,
        )
        return Journal(None, redactor=self.redactor).entries([event])[0]


def address_of(options: StoreFlags, *, actor: str | None = None) -> StoreAddress:
    """The store that `--engine` and `--config` name. Secrets that cannot be read here are skipped: an operator need not
    be allowed to read all of them, and what was not read cannot be shown."""
    from reefknot.app.stores import store_url
    from reefknot.config.secrets import secret_texts
    from reefknot.core.redaction import Redactor

    found = None if is_unconfigured(options.config) else settings(options.config)
    url = store_url(found, options.engine)
    if url.rstrip(":") == "memory":
        raise CommandError("--engine: memory: ends with the process that opened it; accepted here: sqlite:PATH")
    secrets = () if found is None else secret_texts(found.tree, found.path, environ=os.environ)[0]
    return StoreAddress(url, found, Redactor(secrets), options.actor if isinstance(options, OperatorFlags) else actor)


@asynccontextmanager
async def opened(address: StoreAddress, *, or_empty: bool = False) -> AsyncIterator[Store]:
    """The store, opened without retention, and for reading only where it may not be written. An empty file is refused:
    opening would turn it into a store, which only `store migrate` may do (`or_empty`)."""
    from reefknot.app.stores import open_store, options_of
    from reefknot.engines.sqlite.reads import is_writable

    address.require_file()
    if not or_empty and address.is_sqlite and address.path.stat().st_size == 0:
        text = f"{address.path}: is an empty file, not a store; `store migrate` turns it into one"
        raise CommandError(text, Exit.UNREACHABLE)
    options: Any = {} if address.settings is None else options_of(address.settings)
    read_only = address.is_sqlite and not is_writable(str(address.path))
    async with open_store(address.url, **options, tidy=False, read_only=read_only) as store:
        yield store


def with_store(address: StoreAddress, work: Callable[[Store], Awaitable[R]], *, or_empty: bool = False) -> R:
    """Open the store, await `work(store)` in an event loop of its own, and return the result."""

    async def main() -> R:
        async with opened(address, or_empty=or_empty) as store:
            return await work(store)

    return asyncio.run(main())


_POLL_S = 0.1


async def polled(look: Callable[[], Awaitable[R]], seconds: float, *, enough: Callable[[R], object] = bool) -> R:
    """The first result of `look` that is enough, else the last one within these seconds."""
    found = await look()
    for _ in range(int(seconds / _POLL_S)):
        if enough(found):
            break
        await asyncio.sleep(_POLL_S)
        found = await look()
    return found


# ---- running systems -------------------------------------------------------------------------------------------------


def has_part(systems: list[dict[str, Any]], part: str, *, for_all: bool = False) -> bool:
    """True when one of the systems has the part, `worker` or `router`; with `for_all`, one for work of everybody: a
    `run` is only for its own."""
    able = [one for one in systems if not (for_all and one.get("own_work_only"))]
    return any(one["workers"] if part == "worker" else one["router"] for one in able)


async def systems_with(part: str, store: Store, address: StoreAddress) -> list[dict[str, Any]]:
    """The status of every running system. With no `part` (worker or router) among them, an error that says how to
    start one. A system reports before it says that it is ready, so nothing has to be waited for."""
    from reefknot.app.presence import living_systems

    found = await living_systems(store)
    if not has_part(found, part):
        ways = f"reefknot up --engine {address.url} (or, alone: reefknot {part} start --engine {address.url})"
        raise CommandError(f"no {part} is running on {address.url}; start one with: {ways}", Exit.UNREACHABLE)
    return found
