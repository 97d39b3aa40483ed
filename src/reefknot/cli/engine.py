"""
The store that a command works on, and who is at the keyboard.

`--engine URL`, else `engine` of the configuration, else `.reefknot/state.db` beside it. A command that looks at a store
never makes one: a file that is not there is an error that names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter
from msgspec import Struct

from reefknot.cli.asking import settings
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import printable

if TYPE_CHECKING:
    from reefknot.config.settings import Settings
    from reefknot.core.redaction import Redactor
    from reefknot.ports.audit_log import AuditEntry
    from reefknot.ports.store import Store

Engine = Annotated[
    str | None, Parameter(help="The store: sqlite:PATH. Without it, the configured one, or sqlite:.reefknot/state.db.")
]
Actor = Annotated[
    str | None, Parameter(name="--as", help="Who does this, for the record, instead of the user of this system.")
]
DryRun = Annotated[bool, Parameter(help="Say what would be done, and do nothing.")]

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

    from reefknot.config.load import load_tree
    from reefknot.config.secrets import resolve_section
    from reefknot.core.redaction import Redactor

    tree, path = load_tree(config, environ=os.environ, cwd=Path.cwd())
    found, _ = resolve_section(tree, environ=os.environ, folder=Path.cwd() if path is None else path.parent)
    return Redactor(secret.reveal() for secret in found.values())


@asynccontextmanager
async def opened(where: Place, *, or_empty: bool = False) -> AsyncIterator[Store]:
    """The store, if there is one. An empty file would become one, which only who migrates wants."""
    from reefknot.assembly import open_store

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
    from reefknot.core.audit.event import OperatorAction
    from reefknot.execution.journal import Journal, event_id, now_text

    event = OperatorAction(
        timestamp=now_text(),
        event_id=event_id(),
        actor=actor,
        action=action,
        subject=None if subject is None else where.redactor(subject),
        details=where.redactor.tree(details) or None,
    )
    return Journal(None, redactor=where.redactor).entries([event])[0]
