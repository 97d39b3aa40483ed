"""`quarantine requeue`, and what everybody who asks for the result hears afterwards."""

from __future__ import annotations

import json

from tests.unit.cli.running import Commands

CONFIG = """\
worker:
  quarantine_failed: true
  retries: {v2: {enabled: true, default_policy: {max_attempts: 0}}}
  queue: {v2: {enabled: true}}
blocks:
  fs: {roots: [files]}
"""


def failed(rk: Commands) -> str:
    """A file of one assignment that failed for good, because what it reads was not there."""
    (rk.folder / "files").mkdir()
    rk.write(CONFIG)
    line = {"assignment_id": "a", "request_id": "r", "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}}
    file = str(rk.write(json.dumps(line) + "\n", "work.jsonl"))
    ended = rk("run", file, "--json")
    assert (ended.code, ended.json["quarantined"]) == (1, 1), ended.err
    (rk.folder / "files" / "a.txt").write_text("ahoy")
    return file


def test_the_same_file_again_gets_the_new_result(rk: Commands) -> None:
    file = failed(rk)
    assert rk("quarantine", "requeue", "a").code == 0
    assert rk("job", "show", "a", "--json").json["state"] == "pending"

    ended = rk("run", file, "--json", "--results", "out.jsonl")
    assert (ended.code, ended.json["succeeded"]) == (0, 1)
    assert json.loads((rk.folder / "out.jsonl").read_text())["output"]["content"] == "ahoy"
    shown = rk("job", "show", "a", "--json").json
    assert (shown["state"], shown["result"]["status"]) == ("succeeded", "success")


def test_who_waits_with_submit_hears_the_new_result_as_well(rk: Commands) -> None:
    file = failed(rk)
    rk("quarantine", "requeue", "a")
    assert rk("run", file).code == 0

    ended = rk("submit", file, "--wait", "--json")
    assert (ended.code, ended.json["results"][0]["status"]) == (0, "success")


def test_control_without_a_requeue_the_old_result_stays(rk: Commands) -> None:
    file = failed(rk)
    ended = rk("run", file, "--json")
    assert (ended.code, ended.json["failed"]) == (1, 1)
    assert "had ended in an earlier run" in ended.err
