"""`reefknot telemetry` and `policy tune`: the schema to the letter, tables, resets, and proposals that pass a check."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.ingest.telemetry import PREFIX, TelemetryRecorder
from reefknot.stores.port import Store
from tests.unit.console.cli import audit_events as kept
from tests.unit.console.cli.running import Commands


def in_store(work: Callable[[Store], Awaitable[None]]) -> None:
    kept.in_store(Path(".reefknot/state.db"), work)


def record(*jobs: dict[str, Any]) -> None:
    """Add to the counts as an orchestrator does: a job is its connector, and the failures before its end."""

    async def work(store: Store) -> None:
        recorder = TelemetryRecorder(store.values)
        for job in jobs:
            for _ in range(job.get("times", 1)):
                _record(recorder, job)
        await recorder.flush()

    in_store(work)


def _record(recorder: TelemetryRecorder, job: dict[str, Any]) -> None:
    facts: dict[str, Any] = {"job_type": job.get("connector", "imap_mailbox")}
    failures = job.get("failures", ())
    for attempt, kind in enumerate(failures, 1):
        metadata = {**facts, "attempt": attempt, "failure_type": kind}
        recorder.record("job", duration=0.5, status="failed", metadata=metadata)
        facts["caused_by"] = kind
        if attempt == len(failures) and job.get("quarantined"):
            recorder.record("job", status="quarantined", metadata=metadata)
        else:
            recorder.record("job", status="retry_scheduled", metadata={**metadata, "delay_seconds": 120})
    if not job.get("quarantined"):
        recorder.record("job", duration=0.5, status="succeeded", metadata={**facts, "attempt": len(failures) + 1})


def damage(connector: str) -> None:
    async def work(store: Store) -> None:
        known = await store.values.get(PREFIX + connector)
        version = 0 if known is None else known.version
        assert await store.values.put(PREFIX + connector, '{"scheduled": "many"}', version=version)

    in_store(work)


def metrics(rk: Commands, *words: str) -> Any:
    return rk("telemetry", "show", *words, "--json").json["retry_metrics"]


HOPELESS = {"failures": ["transient"] * 8, "quarantined": True, "times": 60}
FINE = {"times": 100}
ZERO: dict[str, Any] = {
    "total_retries": 0,
    "successful_retries": 0,
    "failed_retries": 0,
    "avg_attempts_until_success": 0.0,
    "by_failure_type": {"transient": 0, "rate_limited": 0, "permanent": 0, "unknown": 0},
}


def test_json_is_the_schema_to_the_letter(rk: Commands) -> None:
    record({"failures": ["transient", "rate_limited"]}, {}, {"failures": ["permanent"], "quarantined": True})
    record({"connector": "local_files"})
    ended = rk("telemetry", "show", "--json")
    assert (ended.code, ended.err) == (0, "")
    by_type = ZERO["by_failure_type"] | {"transient": 1, "rate_limited": 1}
    mailbox = {"total_retries": 2, "successful_retries": 1, "failed_retries": 1, "avg_attempts_until_success": 2.0}
    retry_metrics = {
        "imap_mailbox": mailbox | {"by_failure_type": by_type},
        "local_files": ZERO | {"avg_attempts_until_success": 1.0},
    }
    assert ended.json == {"retry_metrics": retry_metrics}
    assert list(metrics(rk, "--connector", "local_files")) == ["local_files"]
    detailed = rk("telemetry", "show", "--details", "--json").json
    counts = {"successful_retries": 0, "failed_retries": 0, "scheduled": 0, "waited_s": 0.0, "executions": 1}
    by_kind = {"retried_after": {}, "successes": {"1": 1}, "failures": {}, "quarantined": {}}
    assert detailed.pop("details")["local_files"] == counts | by_kind | {"busy_s": 0.5}
    assert detailed == ended.json, "details stand beside the schema, and not inside"


def test_the_table_has_rates_and_waits(rk: Commands) -> None:
    record({"failures": ["transient"], "times": 3}, {"failures": ["unknown", "unknown"], "quarantined": True})
    ended = rk("telemetry", "show", "--details")
    (row,) = [line for line in ended.out.splitlines() if line.startswith("imap_mailbox  ")]
    assert " ".join(row.split()) == "imap_mailbox 4 3 1 75% 2.00 transient 3, unknown 1 unknown 1 120 s"
    assert "imap_mailbox: 8 executions, 4 s busy" in ended.out
    assert "succeeded after  2 executions: 3 jobs" in ended.out


CONFIGURED = """\
retry_policies:
  own_notes: {max_attempts: 1}
sources:
  wiki: {connector: team_wiki}
ingestion:
  connectors: {own_chat: {max_concurrency: 1}}
"""


@pytest.mark.parametrize("has_counts", [False, True])
def test_a_connector_without_counts_has_zero_counts_whatever_else_is_counted(rk: Commands, has_counts: bool) -> None:
    rk.write(CONFIGURED)
    if has_counts:
        record({"connector": "local_files"}, {"connector": "counted_once"})
    for name in ("imap_mailbox", "own_notes", "team_wiki", "own_chat"):
        shown = rk("telemetry", "show", "--connector", name, "--json")
        assert (shown.code, shown.json, "nothing is counted" in shown.err) == (0, {"retry_metrics": {name: ZERO}}, True)
        tuned = rk("policy", "tune", "--connector", name, "--json").json["connectors"]
        assert (list(tuned), tuned[name]["jobs"]) == ([name], 0)
        reset = rk("telemetry", "reset", name)
        assert (reset.code, reset.out) == (0, f"{name}: no counts\n")
    counted = "counted_once, " if has_counts else ""
    builtin = "github_repository, imap_mailbox, local_files, obsidian_vault"
    for name in ("nope", ""):
        ended = rk("telemetry", "reset", name)
        assert ended.code == 2
        assert f"{name!r} is unknown; accepted: {counted}{builtin}, own_chat, own_notes, team_wiki" in ended.err


@pytest.mark.parametrize(
    "words", [("telemetry", "show"), ("telemetry", "reset", "imap_mailbox"), ("policy", "tune"), ("schedule", "list")]
)
def test_a_store_that_a_flag_names_and_that_is_not_there_is_69(rk: Commands, words: tuple[str, ...]) -> None:
    ended = rk(*words, "--engine", "sqlite:slip.db")
    assert (ended.code, ended.out) == (69, "")
    assert f"there is no store at {rk.folder / 'slip.db'}; name one with --engine" in ended.err
    rk.write("engine: sqlite:not-yet.db\n")  # that nothing has run over this one is no mistake
    assert rk(*words).code == 0
    assert not list(rk.folder.glob("*.db"))


def test_a_damaged_record_is_named_with_a_way_out_and_replaced(rk: Commands, caplog: pytest.LogCaptureFixture) -> None:
    record({"times": 5}, {"connector": "local_files"})
    damage("imap_mailbox")
    ended = rk("telemetry", "show")
    assert ended.code == 65
    assert "the telemetry record telemetry:imap_mailbox cannot be read" in ended.err
    assert "`telemetry reset imap_mailbox`" in ended.err
    record({"failures": ["transient"]})
    assert metrics(rk)["imap_mailbox"]["total_retries"] == 1
    assert "telemetry:imap_mailbox cannot be read" in caplog.text
    assert "its counts start again from zero" in caplog.text
    damage("imap_mailbox")
    assert rk("telemetry", "reset", "imap_mailbox").code == 0
    assert list(metrics(rk)) == ["local_files"]


def test_a_reset_is_audited_and_leaves_the_other_connectors(rk: Commands) -> None:
    record(FINE, {"failures": ["transient"]}, FINE | {"connector": "local_files"})
    assert rk("telemetry", "reset", "imap_mailbox", "--dry-run").out == "imap_mailbox: counts would be reset\n"
    assert len(metrics(rk)) == 2
    assert rk("telemetry", "reset", "imap_mailbox", "--as", "ann").out == "imap_mailbox: counts reset\n"
    assert list(metrics(rk)) == ["local_files"]
    lines = rk("audit", "export", "-", "--type", "operator_action").out.splitlines()
    (event,) = [json.loads(line)["event"] for line in lines]
    assert (event["action"], event["actor"], event["subject"]) == ("telemetry.reset", "ann", "imap_mailbox")
    assert event["details"]["counts"]["total_retries"] == 1
    record(FINE | {"connector": "my.own"})
    assert metrics(rk, "--connector", "my.own")["my.own"]["avg_attempts_until_success"] == 1


def test_a_proposal_passes_the_check_changes_the_policy_and_touches_no_file(rk: Commands) -> None:
    file = rk.write("retry_policies:\n  imap_mailbox: {jitter_factor: 0.5}\n")
    before = file.read_text()
    record(FINE, HOPELESS, FINE | {"connector": "my_wiki", "failures": ["rate_limited"]})
    tuned = rk("policy", "tune", "--json").json

    assert file.read_text() == before
    answers = {one["question"]: one for one in tuned["connectors"]["imap_mailbox"]["answers"]}
    fewer = answers["retries (transient_max_attempts)"]
    assert (fewer["verdict"], fewer["current"], fewer["proposed"]) == ("proposal", 7, 1)
    assert "of 60 jobs" in fewer["why"]
    assert "2250 executions fewer per 1,000 jobs" in fewer["effect"]
    assert len(tuned["cannot_know"]) == 3
    rk.write(tuned["yaml"], "proposal.yaml")
    assert rk("config", "check", "proposal.yaml").code == 0
    words = ("--config", "proposal.yaml", "--json", "--failure-type")
    explained = rk("policy", "explain", "connector:imap_mailbox", *words, "transient").json
    assert explained["policy"]["retries"]["value"] == 1
    explained = rk("policy", "explain", "connector:my_wiki", *words, "rate_limited").json
    assert explained["policy"]["base_delay"]["value"] == 120


def test_for_people_each_proposal_has_its_reason_its_effect_and_the_yaml(rk: Commands) -> None:
    rk.write("sources:\n  own-mail: {connector: imap_mailbox, host: a, user: b, retry: {max_attempts: 1}}\n")
    record(FINE, HOPELESS)
    ended = rk("policy", "tune", "--connector", "imap_mailbox")
    assert "proposal: transient_max_attempts: 7 → 1" in ended.out
    assert "    why: of 60 jobs that were not done after retry 1, later ones rescued at most 0" in ended.out
    assert "    effect: about 2250 executions fewer per 1,000 jobs" in ended.out
    assert "with a policy of their own, and in these counts: own-mail" in ended.out
    assert ended.out.endswith("retry_policies:\n  imap_mailbox:\n    transient_max_attempts: 1\n")
    assert "Nothing was changed." in ended.err


def test_missing_jobs_are_counted_and_a_connector_that_no_file_can_name_gets_no_yaml(rk: Commands) -> None:
    record({"times": 7})
    ended = rk("policy", "tune")
    assert "policy: not enough data: 7 of 50 jobs" in ended.out
    assert "No change is proposed." in ended.err
    record(FINE | {"connector": "my.own"}, HOPELESS | {"connector": "my.own", "failures": ["transient"] * 4})
    ended = rk("policy", "tune", "--connector", "my.own")
    assert "proposal: max_attempts: 3 → 1" in ended.out
    assert "a configuration does not accept this name" in ended.out
    assert "retry_policies:" not in ended.out
