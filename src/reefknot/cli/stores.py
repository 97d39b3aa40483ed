"""
The store that a command works on, and who is at the keyboard.

`--engine URL`, else `engine` of the configuration, else `.reefknot/state.db` beside it. A command that looks at a store
never makes one: a file that is not there is an error that names it.

What running systems say of themselves, seen from another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import settings
from reefknot.cli.output import printable

if TYPE_CHECKING:
    from reefknot.config.settings import Settings
    from reefknot.core.redaction import Redactor
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

DEFAULT = ".reefknot/state.db"
R = TypeVar("R")


class Place(Struct, frozen=True):
    """Where the store is, and the secrets that must not leave it."""

    url: str
    redactor: Any
    options: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        """The file of a SQLite store."""
        scheme, _, path = self.url.partition(":")
        if scheme != "sqlite":
            raise CommandError(f"--engine: {printable(self.url)} is no sqlite store; accepted here: sqlite:PATH")
        return Path(path.removeprefix("//"))


def run(work: Coroutine[Any, Any, R]) -> R:
    """Run a command's work in a loop of its own."""
    import asyncio

    return asyncio.run(work)


def place(engine: str | None, config: str | None) -> Place:
    """The store that is meant."""
    found = settings(config)
    folder = Path.cwd() if found.path is None else found.path.parent
    if engine is not None:
        return Place(_checked(engine, Path.cwd()), _redactor(config), _options(found))
    configured = found.configuration.engine
    return Place(_checked(configured or f"sqlite:{DEFAULT}", folder), _redactor(config), _options(found))


def _checked(url: str, folder: Path) -> str:
    """The URL of a store that outlives the process which opened it."""
    if url.rstrip(":") == "memory":
        raise CommandError("--engine: memory: ends with the process that opened it; accepted here: sqlite:PATH")
    return checked_url(url, folder)


def checked_url(url: str, folder: Path) -> str:
    """The URL with a path that does not depend on the current folder."""
    scheme, colon, path = url.partition(":")
    if scheme == "sqlite" and colon and path.removeprefix("//"):
        return f"sqlite:{folder / path.removeprefix('//')}"
    return url  # what opens stores says what it accepts


def _options(found: Settings) -> dict[str, Any]:
    """How the store is opened; a command that looks at one neither tidies it nor says how long it keeps what."""
    keys = found.configuration.idempotency
    return {
        "retention": keys.retention_seconds,
        "largest_result": keys.largest_result_bytes,
        "most_keys": keys.max_keys,
    }


def _redactor(config: str | None) -> Redactor:
    """Hides the configured secrets that can be read here; an operator may not be allowed to read all of them."""
    import os

    from reefknot.config.layers import load_tree
    from reefknot.config.secrets import resolve_section
    from reefknot.core.redaction import Redactor

    tree, path = load_tree(config, environ=os.environ, cwd=Path.cwd())
    found, _ = resolve_section(tree, environ=os.environ, folder=Path.cwd() if path is None else path.parent)
    return Redactor(secret.reveal() for secret in found.values())


@asynccontextmanager
async def opened(where: Place, *, or_empty: bool = False) -> AsyncIterator[Store]:
    """The store, if there is one. An empty file would become one, which only who migrates wants."""
    from reefknot.app import open_store

    existing(where)
    if not or_empty and where.url.startswith("sqlite:") and where.path.stat().st_size == 0:
        raise CommandError(
            f"{where.path}: is an empty file, and no store; `store migrate` makes it one", Exit.UNREACHABLE
        )
    async with open_store(where.url, **where.options, tidy=False) as store:
        yield store


def existing(where: Place) -> None:
    """Refuse a store that is not there."""
    if where.url.startswith("sqlite:") and not where.path.is_file():
        raise CommandError(
            f"there is no store at {where.path}; name one with --engine sqlite:PATH, or with `engine` in reefknot.yaml",
            Exit.UNREACHABLE,
        )


def who(named: str | None) -> str:
    """Whose doing it is."""
    from getpass import getuser

    if named:
        return printable(named)[:200]
    try:
        return getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"


def operator_event(where: Place, actor: str, action: str, subject: str | None = None, **details: Any) -> AuditEntry:
    """What a person did, ready for the record."""
    from reefknot.audit.journal import Journal, event_id, now_text
    from reefknot.core.audit.event import OperatorAction

    event = OperatorAction(
        timestamp=now_text(),
        event_id=event_id(),
        actor=actor,
        action=action,
        subject=None if subject is None else where.redactor(subject),
        details=where.redactor.tree(details) or None,
    )
    return Journal(None, redactor=where.redactor).entries([event])[0]


PATIENCE_S = 1.5
"""A system says how it is every second; one that has just started may not have done so yet."""
_LOOK_S = 0.1


async def systems(store: Store) -> list[dict[str, Any]]:
    """The systems that run over this store. Empty when there is none, or none that answers."""
    from reefknot.app.presence import living_systems

    for _ in range(int(PATIENCE_S / _LOOK_S)):
        found = await living_systems(store)
        if found:
            return found
        await asyncio.sleep(_LOOK_S)
    return []


async def has_router(store: Store) -> bool:
    """Whether somebody routes over this store, or is about to."""
    return any(one["router"] for one in await systems(store))


async def running(store: Store, where: Place, part: str) -> list[dict[str, Any]]:
    """The same, or an error that says what to do when there is no `part` (worker or router) among them."""
    found = await systems(store)
    if not any(one["workers"] if part == "worker" else one["router"] for one in found):
        ways = f"reefknot up --engine {where.url} (or, alone: reefknot {part} start --engine {where.url})"
        raise CommandError(f"no {part} is running on {where.url}; start one with: {ways}", Exit.UNREACHABLE)
    return found


def time_text(milliseconds: int | None) -> str | None:
    """A stored time as people and programs read it."""
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def places(depth: int, size: int | None) -> str:
    """
    How many places of a queue are taken.

    A step that ran and is to be tried again comes back whether there is room or not: a queue may hold so many more as
    the class has slots, and those are told apart.
    """
    if size is None:
        return f"{depth} of no bound"
    return f"{depth} of {size}" if depth <= size else f"{size} of {size} and {depth - size} back for a retry"


def age(seconds: float) -> str:
    """`3.2 s`, `4 min`: how long ago, or how long still."""
    from reefknot.cli.output import long_seconds

    return long_seconds(max(0.0, round(seconds, 1)))
