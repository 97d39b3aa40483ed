"""`reefknot quarantine`, and the results that callers get after a requeue."""

import json
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.operations import bulk
from reefknot.ingest.jobs import IngestionJob
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.quarantine import QuarantineStore
from tests.unit.console.cli import work_items
from tests.unit.console.cli.running import Commands


@pytest.fixture
def store(store: Path) -> Path:
    work_items.quarantined(store, "a")
    work_items.quarantined(store, "b", "its owner vanished 3 times", kind="other.type")
    return store


CONFIG = """\
worker:
  quarantine_failed: true
  retries: {v2: {enabled: true, default_policy: {max_attempts: 0}}}
  queue: {v2: {enabled: true}}
blocks:
  fs: {roots: [files]}
"""


def test_a_job_whose_lease_ran_out_is_reported_as_the_list_shows_it(rk: Commands, store: Path) -> None:
    work_items.accepted(store, "lost", None)
    assert "lost" in work_items.ids(rk, "job", "--state", "pending")
    ended = rk("quarantine", "requeue", "a", "lost", "--json")
    assert (ended.code, ended.json["requeued"], ended.json["missing"]) == (1, ["a"], ["lost"])
    assert "'lost' is not in quarantine: it is pending" in ended.err
    assert "'lost' cannot be retried: it is pending" in rk("job", "retry", "lost").err


def failed_file(rk: Commands) -> str:
    """A file of one assignment that failed for good, because what it reads was not there."""
    (rk.folder / "files").mkdir()
    rk.write(CONFIG)
    line = {"assignment_id": "a", "request_id": "r", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    file = str(rk.write(json.dumps(line) + "\n", "work.jsonl"))
    ended = rk("run", file, "--json")
    assert (ended.code, ended.json["quarantined"]) == (1, 1), ended.err
    (rk.folder / "files" / "a.txt").write_text("ahoy")
    return file


def test_the_same_file_again_gets_the_new_result_and_so_does_a_submission_that_waits(rk: Commands) -> None:
    file = failed_file(rk)
    assert rk("quarantine", "requeue", "a").code == 0
    ended = rk("run", file, "--json", "--results", "out.jsonl")
    assert (ended.code, ended.json["succeeded"]) == (0, 1)
    assert json.loads((rk.folder / "out.jsonl").read_text())["output"]["content"] == "ahoy"
    shown = rk("job", "show", "a", "--json").json
    assert (shown["state"], shown["result"]["status"]) == ("succeeded", "success")
    ended = rk("submit", file, "--wait", "--json")
    assert (ended.code, ended.json["results"][0]["status"]) == (0, "success")


def test_control_without_a_requeue_the_old_result_stays(rk: Commands) -> None:
    ended = rk("run", failed_file(rk), "--json")
    assert (ended.code, ended.json["failed"]) == (1, 1)
    assert "had finished in an earlier run" in ended.err


def test_a_bulk_action_goes_in_pages_and_names_every_id_of_a_dry_run_and_a_change(rk: Commands, store: Path) -> None:
    rk.environment.setattr(bulk, "CHUNK", 2)
    asked: list[int] = []
    find = QuarantineStore.find

    async def counted(self: QuarantineStore, *given: Any, limit: int, **options: Any) -> list[WorkItem]:
        asked.append(limit)
        return await find(self, *given, limit=limit, **options)

    rk.environment.setattr(QuarantineStore, "find", counted)
    names = ["a", "b", "c", "d\u200be", "f"]
    for name in names[2:]:
        work_items.quarantined(store, name)
    dry = rk("quarantine", "requeue", "--all", "--dry-run", "--json")
    assert (dry.json["requeued"], dry.json["count"], dry.json["dry_run"]) == (names, 5, True)
    for left in (names, []):
        assert rk("quarantine", "requeue", "--all", "--json").json["requeued"] == left
    assert set(asked) == {2}


def test_a_dry_run_for_people_reads_no_more_than_it_shows(rk: Commands, store: Path) -> None:
    rk.environment.setattr(bulk, "MOST_SHOWN", 1)
    ended = rk("quarantine", "purge", "--all", "--dry-run")
    assert ended.out == "a would be purged\n… and 1 more\n"
    assert "2 would be purged: 1 fs.blob_get, 1 other.type" in ended.err
    ended = rk("quarantine", "requeue", "--all", "--dry-run")  # which looks for jobs that nobody will run
    assert ended.out == "a would be requeued\n… and 1 more\n"
    assert work_items.ids(rk, "quarantine") == ["a", "b"]


SOURCES = "sources: {notes: {connector: local_files, path: .}}\n"
PICKED_UP = "up within seconds"


@pytest.fixture
def of_sources(rk: Commands) -> Path:
    """Jobs of a source that is configured, and of two that are not."""
    path = rk.folder / ".reefknot" / "state.db"
    rk.write(SOURCES)
    for name, source in (("notes@1", "notes"), ("gone@1", "gone"), ("gone/a b@2", "gone"), ("lost@1", "lost")):
        work_items.failed_job(path, IngestionJob(name, "local_files", source))
    return path


def test_a_requeued_job_of_a_source_that_is_not_configured_is_said_to_wait(rk: Commands, of_sources: Path) -> None:
    work_items.failed_job(of_sources, IngestionJob("import", "own_sea", "gone", {"folder": "Wokr"}))
    ended = rk("quarantine", "requeue", "gone/a b@2")
    assert (ended.code, ended.out) == (0, "gone/a b@2 requeued\n")
    assert "1 job waits for gone (not configured here, and in no running system)" in ended.err
    assert "Add the source: reefknot source add gone …" in ended.err
    assert "reefknot job cancel 'gone/a b@2'" in ended.err
    assert PICKED_UP not in ended.err
    assert rk("job", "cancel", "gone/a b@2").code == 0
    ended = rk("job", "retry", "gone/a b@2", "--json")
    assert (ended.json["retried"], ended.json["unconfigured_sources"]) == (["gone/a b@2"], ["gone"])
    assert "1 job waits for gone" in ended.err
    edited = rk("quarantine", "requeue", "import", "--payload", str(rk.write('{"folder": "x"}', "p.json")), "--json")
    assert edited.json["unconfigured_sources"] == ["gone"]
    assert ("reefknot job cancel 'import~2'" in edited.err, PICKED_UP in edited.err) == (True, False)


def test_a_filter_counts_the_jobs_that_wait_and_the_others_are_picked_up(rk: Commands, of_sources: Path) -> None:
    rk.environment.setattr(bulk, "CHUNK", 1)
    dry = rk("quarantine", "requeue", "--all", "--dry-run")
    assert "3 jobs would wait for gone, lost (not configured here" in dry.err
    assert PICKED_UP not in dry.err
    assert rk("quarantine", "requeue", "--all", "--dry-run", "--json").json["unconfigured_sources"] == ["gone", "lost"]
    ended = rk("quarantine", "requeue", "--all", "--json")
    assert (ended.json["count"], ended.json["unconfigured_sources"]) == (4, ["gone", "lost"])
    assert "a running system picks the other 1 up within seconds" in ended.err
    assert "3 jobs wait for gone, lost" in ended.err
    assert "reefknot job cancel ID" in ended.err


def test_control_a_job_of_a_configured_source_is_picked_up(rk: Commands, of_sources: Path) -> None:
    ended = rk("quarantine", "requeue", "--source", "notes", "--json")
    assert (ended.json["count"], ended.json["unconfigured_sources"]) == (1, [])
    assert (PICKED_UP in ended.err, "wait" in ended.err) == (True, False)
    assert "unconfigured_sources" not in rk("quarantine", "purge", "gone@1", "--json").json


def test_a_filter_without_a_text_is_refused(rk: Commands, store: Path) -> None:
    """An empty --reason is in every reason: a purge by it would be one of all."""
    for verb in ("list", "requeue", "purge"):
        for flag in ("--type", "--source", "--reason", "--fingerprint", "--before"):
            for text in ("", " "):
                ended = rk("quarantine", verb, flag, text)
                assert (ended.code, ended.err.startswith(f"reefknot: {flag}: {text!r} is not accepted")) == (2, True)
    assert rk("quarantine", "stats", "--json").json["total"] == 2


def test_an_empty_list_of_a_source_says_nothing_of_failed_assignments(rk: Commands, store: Path) -> None:
    assert "worker.quarantine_failed" not in rk("quarantine", "list", "--source", "notes").err
    assert "worker.quarantine_failed is off here" in rk("quarantine", "list", "--type", "none").err
