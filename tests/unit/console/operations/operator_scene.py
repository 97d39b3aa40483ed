"""An operator over a store in memory, in virtual time, with sources and schedules; or over a store in a file."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs

from reefknot.audit.model.event import OperatorAction, decode
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.ingest import configured_sources, port, sources
from reefknot.policy.settings import load_settings
from tests.stories import InLoop
from tests.unit.console.cli.audit_events import in_store
from tests.unit.ingest.world import World, new_world, page

R = TypeVar("R")
SECRET = "tok-4711-hush-hush"
CONFIG = """\
sources:
  notes: {connector: local_files, path: notes, every: 15m}
  mail: {connector: local_files, path: mail}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.nap, payload: {}}, tenant_id: acme}}
"""


class OperatorScene:
    def __init__(self, world: World, folder: Path, config: str = CONFIG) -> None:
        self.world = world
        (folder / "reefknot.yaml").write_text(config)
        settings = load_settings(str(folder / "reefknot.yaml"), environ={}, cwd=folder)
        self.operator = Operator(world.store, Redactor([SECRET]), "ann", settings, f"sqlite:{folder / 'state.db'}")
        self.records = sources.SourceRecords(world.store)
        self.file = folder / "documents.db"

    async def change(self, name: str, **fields: Any) -> sources.SourceRecord:
        """Change the record of a source; `health` is a mapping of fields of it."""
        await self.records.read(name)
        health = fields.pop("health", {})
        return await self.records.change(
            name, lambda one: structs.replace(one, health=structs.replace(one.health, **health), **fields)
        )

    async def keep(self, source: str, *names: str, cursor: str = "", problem: str = "") -> str:
        """Keep documents as a sync does. Returns the place they are in."""
        async with configured_sources.open_documents(self.file) as documents:
            kept = page(*names, cursor=cursor)
            if problem:
                kept = structs.replace(kept, documents=(port.Document("odd", "odd", "1", problem=problem),))
            await documents.keep(source, kept, after=await documents.position(source))
            return await documents.identity()

    async def actions(self) -> list[OperatorAction]:
        events = [decode(kept.entry.body) for kept in await self.world.store.audit.read()]
        return [one for one in events if isinstance(one, OperatorAction)]


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> InLoop:
    """A scene with the usual configuration, or the one that a test gives as the fixture's parameter."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[OperatorScene]:
        async with new_world() as world:
            yield OperatorScene(world, tmp_path, getattr(request, "param", CONFIG))

    return InLoop(opened)


def names_of(actions: Sequence[OperatorAction]) -> list[tuple[str, str | None, str]]:
    return [(one.action, one.subject, one.actor) for one in actions]


def asked(path: Path, operation: Callable[[Operator], Awaitable[R]], *, secrets: Any = (), settings: Any = None) -> R:
    """The answer to an operator over the store in this file."""
    return in_store(path, lambda kept: operation(Operator(kept, Redactor(secrets), "ann", settings, f"sqlite:{path}")))
