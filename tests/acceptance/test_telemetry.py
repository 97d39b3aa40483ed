"""Telemetry as a user meets it: syncs of several processes and restarts in one answer, and proposals from it."""

from tests.acceptance.folder import Folder

CONNECTOR = """\
import os
import reefknot as rk
from reefknot.core.failure import FailureType
from reefknot.errors import SourceError


@rk.connector("team_wiki")
class TeamWiki:
    def __init__(self, context):
        self.fails = context.settings["fails"]
        self.kind = FailureType(context.settings["kind"])
        self.file = context.folder / f"{context.name}.txt"

    async def fetch(self, request):
        calls = int(self.file.read_text()) if self.file.exists() else 0
        self.file.write_text(str(calls + 1))
        if calls < self.fails:
            raise SourceError("busy", self.kind)
        return rk.Page(cursor="1", documents=(rk.Document("a", "a", "1", text="ahoy"),))
"""
SOURCES = """
retry_policies:
  team_wiki: {strategy: immediate, max_attempts: 3}
sources:
  first: {connector: team_wiki, fails: 1, kind: transient}
  second: {connector: team_wiki, fails: 2, kind: transient}
  hopeless: {connector: team_wiki, fails: 100, kind: unknown}
"""
"""A source whose failures are transient would rest after three of them and give up no job."""
GIVEN_UP = """
retry_policies:
  team_wiki: {strategy: immediate, max_attempts: 1}
sources:
  busy: {connector: team_wiki, fails: 100, kind: transient}
  locked: {connector: team_wiki, fails: 100, kind: permanent}
"""
"""Two transient failures are too few for a rest: the job is given up."""


def test_a_job_that_is_given_up_is_counted_by_the_kind_of_its_last_failure(folder: Folder) -> None:
    folder.write("team_wiki.py", CONNECTOR)
    folder.configure(GIVEN_UP)
    for name in ("busy", "locked"):
        code, _, err = folder.ends(folder.start("source", "run", name, "--module", "team_wiki"))
        assert code == 1, err
    found = folder.json("telemetry", "show", "--details")["details"]["team_wiki"]["quarantined"]
    assert found == {"transient": 1, "permanent": 1}


def test_the_retries_of_all_processes_are_one_answer_that_survives_them(folder: Folder) -> None:
    folder.write("team_wiki.py", CONNECTOR)
    file = folder.path / "reefknot.yaml"
    file.write_text(file.read_text() + SOURCES)
    if folder.has_store:  # on a server; without a file there is nothing to look at yet
        assert folder("submit", "--type", "own.nap", "--inputs", "{}").code == 0
    assert folder.json("telemetry", "show") == {"retry_metrics": {}}

    processes = [folder.start("source", "run", name, "--module", "team_wiki") for name in ("first", "second")]
    assert [folder.ends(one)[0] for one in processes] == [0, 0]
    by_type = {"transient": 3, "rate_limited": 0, "permanent": 0, "unknown": 0}
    counts = {"total_retries": 3, "successful_retries": 2, "failed_retries": 1}
    expected = {"team_wiki": {**counts, "avg_attempts_until_success": 2.5, "by_failure_type": by_type}}
    assert folder.json("telemetry", "show") == {"retry_metrics": expected}
    code, _, err = folder.ends(folder.start("source", "run", "hopeless", "--module", "team_wiki"))
    assert code == 1, err

    after = folder.json("telemetry", "show", "--details")
    found = after["retry_metrics"]["team_wiki"]
    assert (found["total_retries"], found["successful_retries"], found["failed_retries"]) == (6, 2, 4)
    assert sum(found["by_failure_type"].values()) == found["total_retries"]
    assert after["details"]["team_wiki"]["quarantined"] == {"unknown": 1}
    shown = folder("telemetry", "show").out
    assert "33%" in shown
    tuned = folder.json("policy", "tune")
    (answer,) = tuned["connectors"]["team_wiki"]["answers"]
    assert (answer["verdict"], answer["why"]) == ("not_enough_data", "not enough data: 3 of 50 jobs")

    assert folder("telemetry", "reset", "team_wiki").code == 0
    assert folder.json("telemetry", "show") == {"retry_metrics": {}}
    assert folder("audit", "verify").code == 0
