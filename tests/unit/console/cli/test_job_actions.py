"""`quarantine show --payload-only` and `quarantine requeue --payload`: an edited payload as a new version."""

import json
from pathlib import Path

import pytest

from reefknot.audit.model.event import OperatorAction
from reefknot.ingest.jobs import IngestionJob
from reefknot.queue.model.work import Quarantine, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from reefknot.stores.port import Store
from tests.rows import for_each_row
from tests.unit.console.cli import work_items
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands


@pytest.fixture
def store(store: Path) -> Path:
    work_items.quarantined(store, "order", payload={"city": "Bonn", "rows": [1, 2]})
    work_items.failed_job(store, IngestionJob("import", "own_sea", "notes", {"folder": "Wokr"}))
    return store


def edited(rk: Commands, text: object) -> str:
    return str(rk.write(text if isinstance(text, str) else json.dumps(text), "edited.json"))


def test_the_payload_is_printed_edited_and_given_back_as_the_next_version(rk: Commands, store: Path) -> None:
    before = work_items.item(store, "order")
    printed = rk("quarantine", "show", "order", "--payload-only")
    assert (json.loads(printed.out), printed.err) == ({"city": "Bonn", "rows": [1, 2]}, "")
    file = edited(rk, printed.out.replace("Bonn", "Rome"))

    dry = rk("quarantine", "requeue", "order", "--payload", file, "--dry-run")
    assert (dry.code, dry.out.splitlines()[-1]) == (0, "order would be replaced by order~2")
    assert '-  "city": "Bonn",\n+  "city": "Rome",' in dry.out
    assert work_items.item(store, "order") == before

    done = rk("quarantine", "requeue", "order", "--payload", file, "--because", "a typo", "--as", "ann", "--json")
    assert (done.code, done.json["requeued"], done.json["replaces"]) == (0, ["order~2"], "order")
    old, new = work_items.item(store, "order"), work_items.item(store, "order~2")
    assert (old.state.value, old.payload, old.history[:-1]) == ("discarded", before.payload, before.history)
    assert (old.history[-1].why, old.history[-1].who) == ("replaced by order~2", "ann")
    body = json.loads(new.payload)
    assert (body["assignment_id"], body["job"]["payload"]) == ("order~2", {"city": "Rome", "rows": [1, 2]})
    assert (new.state.value, new.resource_class, new.pool) == ("pending", "router", "cpu")
    assert [(one.what, one.why, one.who) for one in new.history] == [("replaces", "order: a typo", "ann")]
    events = work_items.events(store)
    (action,) = [one for one in events if isinstance(one, OperatorAction)]
    details = {"count": 1, "ids": ["order"], "replaced_by": "order~2", "reason": "a typo"}
    assert (action.actor, action.subject, action.details) == ("ann", "order", details)
    assert [one.work_id for one in events if one.event_type == "submitted"] == ["order~2"]


def test_a_job_of_a_source_goes_on_with_another_payload_in_its_own_class(rk: Commands, store: Path) -> None:
    file = edited(rk, rk("quarantine", "show", "import", "--payload-only").out.replace("Wokr", "Work"))
    assert rk("quarantine", "requeue", "import", "--payload", file).out == "import replaced by import~2\n"
    job = IngestionJob.of(work_items.item(store, "import~2"))
    assert (job.payload, job.source, job.is_sync) == ({"folder": "Work"}, "notes", False)
    assert work_items.item(store, "import~2").resource_class == "ingest.notes"


def test_a_command_that_was_cut_off_may_be_given_again_and_another_edit_is_refused(rk: Commands, store: Path) -> None:
    file = edited(rk, {"city": "Rome"})
    for _ in range(2):
        ended = rk("quarantine", "requeue", "order", "--payload", file)
        assert (ended.code, ended.out) == (0, "order replaced by order~2\n")
    assert len(work_items.operator_actions(store)) == 1
    ended = rk("quarantine", "requeue", "order", "--payload", edited(rk, {"city": "Oslo"}))
    assert (ended.code, "there is a job order~2 already, with another payload" in ended.err) == (1, True)
    assert json.loads(work_items.item(store, "order~2").payload)["job"]["payload"] == {"city": "Rome"}


NO_FILE = "accepted: a file with the payload as JSON"


@for_each_row(
    ("text", "said"),
    [
        ("[1]", "not an object"),
        ('{"city": ', "not JSON in UTF-8"),
        ('{"a": 1, "a": 2}', "a: the key stands twice"),
        ('{"city": "Bonn", "rows": [1, 2]}', "it is the payload that order has already"),
        ('{"city": "[redacted]"}', "stands for a part that was hidden"),
        ("x" * 9_000_000, "longer than"),
    ],
)
def test_what_is_no_payload_is_refused_and_nothing_is_changed(rk: Commands, store: Path, text: str, said: str) -> None:
    ended = rk("quarantine", "requeue", "order", "--payload", edited(rk, text))
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert work_items.item(store, "order").state.value == "quarantined"
    assert work_items.item(store, "order~2") is None


@for_each_row(
    ("name", "said"),
    [
        (".", f".: is a folder; {NO_FILE}, or - for stdin"),
        ("", f"the name of the file is empty; {NO_FILE}, or - for stdin"),
        ("--dry-run", f"'--dry-run' begins like an option; {NO_FILE}"),
        ("/dev/zero", f"/dev/zero: is a device; {NO_FILE}"),
        ("nowhere.json", "nowhere.json: there is no such file"),
    ],
)
def test_what_is_no_file_is_refused_as_are_several_jobs(rk: Commands, store: Path, name: str, said: str) -> None:
    ended = rk("quarantine", "requeue", "order", "--payload", name)
    assert ended.code == (66 if name == "nowhere.json" else 2)
    assert ended.err.startswith(f"reefknot: --payload: {said}")
    assert "assignment" not in ended.err
    for words in (("order", "import"), (), ("order", "--all"), ("order", "--type", "x")):
        ended = rk("quarantine", "requeue", *words, "--payload", edited(rk, {}))
        assert (ended.code, "accepted with the id of one job" in ended.err) == (2, True)


def test_what_has_no_payload_to_edit_says_so(rk: Commands, store: Path) -> None:
    work_items.failed_job(store, IngestionJob("one", "own_sea", "notes", item="a.md"))
    work_items.failed_job(store, IngestionJob("sync", "own_sea", "notes"))
    work_items.failed_job(store, IngestionJob("broken", "own_sea", "notes"), b"\xff no json")
    table = [
        *(("one", {"city": "Rome"}, 2, "only fetches 'a.md' again"), ("one", {}, 2, "only fetches 'a.md' again")),
        *(("sync", one, 2, "sync is a sync of notes and has no payload") for one in ({"city": "Rome"}, {})),
        ("import", {}, 2, "without a payload import would be a sync of notes"),
        ("broken", {"city": "Rome"}, 1, "cannot be read as a job"),
        ("nobody", {"city": "Rome"}, 1, "'nobody' is not in quarantine: there is no such job"),
    ]
    for name, payload, code, said in table:
        ended = rk("quarantine", "requeue", name, "--payload", edited(rk, payload))
        assert (ended.code, said in ended.err) == (code, True), ended.err
    for name in ("one", "sync"):
        shown = rk("quarantine", "show", name, "--payload-only")
        assert (shown.code, shown.out, "has no payload to edit" in shown.err) == (0, "{}\n", True)
    assert rk("quarantine", "show", "broken", "--payload-only").code == 1


def test_secrets_are_hidden_and_said_to_be(rk: Commands, store: Path) -> None:
    work_items.quarantined(store, "secret")
    printed = rk("quarantine", "show", "secret", "--payload-only")
    assert "hunter2" not in printed.out
    assert "write their values in place of that" in printed.err
    file = edited(rk, {"path": "b.txt", "password": "hunter2hunter2"})
    dry = rk("quarantine", "requeue", "secret", "--payload", file, "--dry-run")
    assert (dry.code, "hunter2" in dry.out) == (0, False)


def test_a_version_of_a_version_counts_on_and_keeps_its_tenant(rk: Commands, store: Path) -> None:
    async def work(store: Store) -> None:
        assignment = {"assignment_id": "x~2", "request_id": "r", "job": {"type": "t"}, "tenant_id": "acme"}
        item = WorkItem("acme|x~2", "t", tenant_id="acme", payload=json.dumps(assignment).encode())
        await store.work.enqueue([item])
        (held,) = await store.work.claim(1, WorkClaim(owner="o", classes=("cpu",)))
        assert await store.work.settle([Settlement(held.id, "o", held.fence, Quarantine("bad"))]) == [True]

    in_store(store, work)
    ended = rk("quarantine", "requeue", "x~2", "--tenant", "acme", "--payload", edited(rk, {"a": 1}))
    assert ended.out == "x~2 replaced by x~3\n"
    new = work_items.item(store, "acme|x~3")
    assert (new.tenant_id, json.loads(new.payload)["tenant_id"]) == ("acme", "acme")
