"""
Every action of an operator has a command and, where it can be done from afar, a route of the HTTP API: twins.

Both leave the same event, with the name of who asked; a dry run leaves none.
"""

import asyncio
import json
import os
import shlex
from inspect import isawaitable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from msgspec import Struct

from reefknot.audit.model.event import OperatorAction
from reefknot.console.cli.app import NOUNS, application
from reefknot.console.dashboard.api import body_of, parameters_of
from reefknot.console.dashboard.api_routes import ROUTES
from reefknot.console.dashboard.openapi import openapi_document
from reefknot.console.operations import jobs, systems
from reefknot.console.operations.operator import Operator
from reefknot.core.redaction import Redactor
from reefknot.idempotency.model import Claimed, Done, Unknown
from reefknot.ingest.jobs import IngestionJob, JobQueue
from reefknot.ingest.sources import SourceRecords
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.policy.settings import load_settings
from reefknot.queue.model.work import WorkFailed
from reefknot.stores.opening import open_store, options_of
from reefknot.stores.port import Store
from tests.acceptance.folder import Folder
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.work_items import accepted, events, quarantined, reported_running, submitted

CONFIG = """
sources:
  notes: {connector: local_files, path: files}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.nap, payload: {seconds: 0}}}}
"""


class Twin(Struct, frozen=True):
    """An action: its command, its subject, and the route that does the same."""

    words: str
    subject: str | None
    route: str = ""
    """The id of the operation in the OpenAPI document; empty where there is no route, and `why` says why."""
    by: str = ""
    """The parameter of the path that names the subject."""
    body: dict[str, Any] = {}
    before: str = ""
    """A command that makes the action possible."""
    why: str = ""

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.words))

    @property
    def action(self) -> str:
        """The name of the event."""
        return ".".join(self.command[:2]).replace("-", "_")


FILE = "it is about the file of the store, on the host where that is"
RARE = "it is rare, and cannot be taken back"
X = {"because": "x"}
EDITED = {"payload": {"path": "b.txt"}}
PAUSED = "schedule pause nightly --because x"
WORKER_VERBS = ("drain", "pause", "resume", "reload")
TWINS = (
    Twin("job cancel waiting", "waiting", "cancel_job", by="job"),
    Twin("job cancel --type fs.blob_get", "waiting", "cancel_jobs", body={"type": "fs.blob_get"}),
    Twin("job retry failed", "failed", "retry_jobs", body={"ids": ["failed"]}),
    Twin("quarantine requeue kept", "kept", "requeue_jobs", body={"ids": ["kept"]}),
    Twin("quarantine discard kept --because x", "kept", "discard_jobs", body={"ids": ["kept"], **X}),
    Twin("quarantine purge kept", "kept", "purge_jobs", body={"ids": ["kept"]}),
    Twin("quarantine requeue kept --payload edited.json", "kept", "edit_and_requeue", by="job", body=EDITED),
    *(Twin(f"worker {verb} worker-1", "worker-1", f"{verb}_worker", by="worker") for verb in WORKER_VERBS),
    *(Twin(f"worker {verb}", "*", f"{verb}_workers") for verb in WORKER_VERBS),
    Twin("router reload router", "router", "reload_router", by="router"),
    Twin("router reload", "*", "reload_routers"),
    Twin("source run notes", "notes", "run_source", by="name"),
    Twin("source pause notes", "notes", "pause_source", by="name"),
    Twin("source resume notes", "notes", "resume_source", by="name", before="source pause notes"),
    Twin("queue pause --type own.nap", "type own.nap", "pause_queue", body={"type": "own.nap"}),
    Twin(
        "queue resume --tenant acme",
        "tenant acme",
        "resume_queue",
        body={"tenant": "acme"},
        before="queue pause --tenant acme",
    ),
    Twin("schedule run nightly", "nightly", "run_schedule", by="name"),
    Twin(PAUSED, "nightly", "pause_schedule", by="name", body=X),
    Twin("schedule resume nightly", "nightly", "resume_schedule", by="name", before=PAUSED),
    Twin("source forget gone --because x", "gone", why=RARE),
    Twin("telemetry reset local_files", "local_files", why=RARE),
    Twin("idempotency forget order", "order", why=RARE),
    Twin("idempotency resolve charge --released", "charge", why=RARE),
    Twin("store backup copy.db", "copy.db", why=FILE),
    Twin("store create", None, why=RARE),
    Twin("store migrate", None, why=FILE),
    Twin("store compact", None, why=FILE),
    Twin("store forget-record reefknot.work.open.cpu.order-7", None, why=RARE),
    Twin("store move --from sqlite:.reefknot/state.db --to sqlite:moved.db", "moved.db", why=RARE),
)
NOT_AUDITED = {"submit_job": "a submission is an event by itself, whoever submits"}
WITHOUT_EFFECT_HERE = {"store.migrate": "the file has the current version", "store.backup": "it takes no --dry-run"}
NOTHING_TO_DO = {
    "store.migrate": "the file has the current version",
    "store.create": "the store is there",
    "store.forget_record": "it is for NATS alone",
}


def named(twin: Twin) -> str:
    return twin.words


def test_every_route_with_an_effect_has_a_command() -> None:
    paths = openapi_document()["paths"]
    changing = {one["operationId"] for each in paths.values() for method, one in each.items() if method != "get"}
    in_table = {twin.route for twin in TWINS if twin.route}
    assert changing - NOT_AUDITED.keys() == in_table, "a route and the table differ: add the action to TWINS"
    assert all(bool(twin.route) != bool(twin.why) for twin in TWINS)


def test_every_audited_command_is_in_the_table() -> None:
    found = set()
    for noun in NOUNS:
        app = application().parse_commands([noun])[1][-1]
        for verb in [one for one in app if not one.startswith("-")]:
            command = application().parse_commands([noun, verb])[1][-1]
            if any("--as" in one.names for one in command.assemble_argument_collection()):
                found.add((noun, verb))
    assert found == {twin.command[:2] for twin in TWINS}


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has something for every action."""
    path = tmp_path_factory.mktemp("filled") / "state.db"

    async def fill(store: Store) -> None:
        done = await store.idempotency.claim("order", owner="w")
        unknown = await store.idempotency.claim("charge", owner="w", guard=True)
        assert isinstance(done, Claimed)
        assert isinstance(unknown, Claimed)
        await store.idempotency.finish(done.claim, Done("7"))
        await store.idempotency.finish(unknown.claim, Unknown())
        await JobQueue(store).enqueue(IngestionJob("gone@1", "local_files", "gone"))
        recorder = TelemetryRecorder(store.values)
        recorder.record("one", status="succeeded", metadata={"job_type": "local_files"})
        await recorder.flush()

    in_store(path, fill)
    submitted(path, "waiting")
    accepted(path, "failed", WorkFailed("attempts_spent", "{}"))
    quarantined(path, "kept")
    return path.parent


@pytest.fixture
def filled(folder: Folder, store_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A copy of that store; nobody obeys, so nothing waits for it."""
    monkeypatch.setattr(systems, "OBEY_WAIT_S", 0.0)
    monkeypatch.setattr(jobs, "CANCEL_WAIT_S", 0.0)
    folder.configure(CONFIG)
    folder.write("edited.json", '{"path": "b.txt"}')
    copytree(store_folder, folder.path / ".reefknot")
    return folder


def make_possible(folder: Folder, twin: Twin) -> None:
    """Do what comes before the action. A status is one of a system that runs for five seconds only."""
    if twin.before:
        assert folder(*twin.before.split()).code == 0
    if twin.command[0] in ("worker", "router"):
        reported_running(folder.path / ".reefknot" / "state.db", "worker-1")


def actions(folder: Folder) -> list[OperatorAction]:
    path = folder.path / ".reefknot" / "state.db"
    return [one for one in events(path) if isinstance(one, OperatorAction)]


def by_route(folder: Folder, twin: Twin, **more: Any) -> Any:
    """Call the route as the API does, with the body of a request."""
    (route,) = [one for one in ROUTES if one.name == twin.route]

    async def call() -> Any:
        config = folder.path / "reefknot.yaml"
        settings = load_settings(str(config), environ=os.environ, cwd=folder.path)
        async with open_store(folder.engine, **options_of(settings), tidy=False) as store:
            operator = Operator(store, Redactor(()), "ann", settings, folder.engine)
            parameters = parameters_of(route, {twin.by: twin.subject or ""} if twin.by else {}, b"")
            body = json.dumps(twin.body | more).encode()
            found = route.call(operator, parameters, route.body and body_of(route.body, "application/json", body))
            return await found if isawaitable(found) else found

    return asyncio.run(call())


def is_audited(folder: Folder, twin: Twin) -> bool:
    """Whether the last action is the twin's, by the actor that was named."""
    done = actions(folder)[-1:]
    return [(one.action, one.actor) for one in done] == [(twin.action, "ann")] and (
        twin.subject is None or Path(done[0].subject or "").name == twin.subject
    )


@pytest.mark.parametrize("twin", [one for one in TWINS if one.action not in NOTHING_TO_DO], ids=named)
def test_a_command_leaves_its_event_and_a_dry_run_none(filled: Folder, twin: Twin) -> None:
    make_possible(filled, twin)
    if twin.action not in WITHOUT_EFFECT_HERE:
        before = actions(filled)
        assert filled(*twin.command, "--as", "ann", "--dry-run").code == 0
        assert actions(filled) == before
    make_possible(filled, twin)
    done = filled(*twin.command, "--as", "ann")
    assert is_audited(filled, twin), done.err


@pytest.mark.parametrize("twin", [one for one in TWINS if one.route], ids=named)
def test_a_route_leaves_the_event_of_its_command_and_a_dry_run_none(filled: Folder, twin: Twin) -> None:
    make_possible(filled, twin)
    before = actions(filled)
    by_route(filled, twin, dry_run=True)
    assert actions(filled) == before
    make_possible(filled, twin)
    answer = by_route(filled, twin)
    assert answer["actor"] == "ann"
    assert is_audited(filled, twin), answer


def test_an_operation_that_keeps_no_event_is_noticed(filled: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the two tests above."""
    change = SourceRecords.change

    async def silent(self: SourceRecords, name: str, changed: Any, **_: Any) -> Any:
        return await change(self, name, changed)

    monkeypatch.setattr(SourceRecords, "change", silent)
    (twin,) = [one for one in TWINS if one.action == "source.pause"]
    assert by_route(filled, twin)["changed"] is True
    assert not is_audited(filled, twin)
