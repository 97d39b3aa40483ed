"""`reefknot telemetry` and `policy tune`: the schema to the letter, tables, resets, and proposals that pass a check."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import reefknot as rk_library
from reefknot.ingest.telemetry import PREFIX, TelemetryRecorder
from tests.unit.console.cli.running import Commands

STORE = "sqlite:.reefknot/state.db"


def record(*jobs: dict[str, Any]) -> None:
    """Add to the counts as an orchestrator does: a job is its connector, and the failures before its end."""

    async def work() -> None:
        async with rk_library.open_store(STORE) as store:
            recorder = TelemetryRecorder(store.values)
            for job in jobs:
                for _ in range(job.get("times", 1)):
                    _record(recorder, job)
            await recorder.flush()

    asyncio.run(work())


def _record(recorder: TelemetryRecorder, job: dict[str, Any]) -> None:
    about = {"job_type": job.get("connector", "imap_mailbox")}
    caused: dict[str, Any] = {}
    failures = job.get("failures", ())
    for attempt, kind in enumerate(failures, 1):
        metadata = {**about, **caused, "attempt": attempt, "failure_type": kind}
        recorder.record("job", duration=0.5, status="failed", metadata=metadata)
        caused = {"caused_by": kind}
        if attempt == len(failures) and job.get("quarantined"):
            recorder.record("job", status="quarantined", metadata=metadata)
        else:
            recorder.record("job", status="retry_scheduled", metadata={**metadata, "delay_seconds": 120})
    if not job.get("quarantined"):
        metadata = {**about, **caused, "attempt": len(failures) + 1}
        recorder.record("job", duration=0.5, status="succeeded", metadata=metadata)


HOPELESS = {"failures": ["transient"] * 8, "quarantined": True, "times": 60}
FINE = {"times": 100}

# ---- show ------------------------------------------------------------------------------------------------------------


def test_json_is_the_schema_to_the_letter(rk: Commands) -> None:
    record({"failures": ["transient", "rate_limited"]}, {}, {"failures": ["permanent"], "quarantined": True})
    record({"connector": "local_files"})

    ended = rk("telemetry", "show", "--json")

    assert (ended.code, ended.err) == (0, "")
    nothing = {"transient": 0, "rate_limited": 0, "permanent": 0, "unknown": 0}
    assert ended.json == {
        "retry_metrics": {
            "imap_mailbox": {
                "total_retries": 2,
                "successful_retries": 1,
                "failed_retries": 1,
                "avg_attempts_until_success": 2.0,
                "by_failure_type": nothing | {"transient": 1, "rate_limited": 1},
            },
            "local_files": {
                "total_retries": 0,
                "successful_retries": 0,
                "failed_retries": 0,
                "avg_attempts_until_success": 1.0,
                "by_failure_type": nothing,
            },
        }
    }
    assert list(rk("telemetry", "show", "--connector", "local_files", "--json").json["retry_metrics"]) == [
        "local_files"
    ]


def test_details_stand_beside_the_schema_and_not_inside(rk: Commands) -> None:
    record({"failures": ["transient"]})

    plain = rk("telemetry", "show", "--json").json
    detailed = rk("telemetry", "show", "--details", "--json").json

    assert detailed["retry_metrics"] == plain["retry_metrics"]
    assert detailed["details"]["imap_mailbox"] == {
        "retried_after": {"transient": 1},
        "successful_retries": 1,
        "failed_retries": 0,
        "successes": {"2": 1},
        "failures": {"transient": 1},
        "quarantined": {},
        "scheduled": 1,
        "waited_s": 120.0,
        "executions": 2,
        "busy_s": 1.0,
    }


def test_the_table_has_rates_and_waits(rk: Commands) -> None:
    record({"failures": ["transient"], "times": 3}, {"failures": ["unknown", "unknown"], "quarantined": True})

    ended = rk("telemetry", "show", "--details")

    (row,) = [line for line in ended.out.splitlines() if line.startswith("imap_mailbox  ")]
    assert " ".join(row.split()) == "imap_mailbox 4 3 1 75% 2.00 transient 3, unknown 1 unknown 1 120 s"
    assert "imap_mailbox: 8 executions, 4 s busy" in ended.out
    assert "succeeded after  2 executions: 3 jobs" in ended.out


ZERO = {
    "total_retries": 0,
    "successful_retries": 0,
    "failed_retries": 0,
    "avg_attempts_until_success": 0.0,
    "by_failure_type": {"transient": 0, "rate_limited": 0, "permanent": 0, "unknown": 0},
}


@pytest.mark.parametrize("has_store", [False, True])
def test_without_counts_there_is_an_empty_answer_and_a_word_why(rk: Commands, has_store: bool) -> None:
    if has_store:
        record()

    shown = rk("telemetry", "show", "--json")
    assert (shown.code, shown.json) == (0, {"retry_metrics": {}})
    assert "nothing is counted: no job of a source has run over this store" in shown.err
    tuned = rk("policy", "tune", "--json")
    assert (tuned.code, tuned.json["connectors"], tuned.json["yaml"]) == (0, {}, "")
    assert (rk.folder / ".reefknot").exists() == has_store, "looking makes no store"


def test_after_a_reset_the_word_why_there_are_no_counts_is_true(rk: Commands) -> None:
    record(FINE)
    assert rk("telemetry", "reset", "imap_mailbox").code == 0

    for words in (("telemetry", "show"), ("policy", "tune")):
        ended = rk(*words)
        assert ended.code == 0
        assert "or none since `telemetry reset`" in ended.err


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
        assert (shown.code, shown.json) == (0, {"retry_metrics": {name: ZERO}})
        assert "nothing is counted" in shown.err
        tuned = rk("policy", "tune", "--connector", name, "--json")
        assert (tuned.code, list(tuned.json["connectors"]), tuned.json["connectors"][name]["jobs"]) == (0, [name], 0)
        reset = rk("telemetry", "reset", name)
        assert (reset.code, reset.out) == (0, f"{name} has no counts\n")
    for words in (("telemetry", "show", "--connector"), ("policy", "tune", "--connector"), ("telemetry", "reset")):
        for name in ("nope", ""):
            ended = rk(*words, name)
            assert ended.code == 2, words
            counted = "counted_once, " if has_counts else ""
            builtin = "github_repository, imap_mailbox, local_files, obsidian_vault"
            assert f"{name!r} is unknown; accepted: {counted}{builtin}, own_chat, own_notes, team_wiki" in ended.err


def test_a_connector_that_a_file_does_not_name_is_known_by_its_counts(rk: Commands) -> None:
    record({"connector": "my.own"})
    shown = rk("telemetry", "show", "--connector", "my.own", "--json").json
    assert shown["retry_metrics"]["my.own"]["avg_attempts_until_success"] == 1


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


def damage(connector: str) -> None:
    async def work() -> None:
        async with rk_library.open_store(STORE) as store:
            known = await store.values.get(PREFIX + connector)
            version = 0 if known is None else known.version
            assert await store.values.put(PREFIX + connector, '{"scheduled": "many"}', version=version)

    asyncio.run(work())


def test_a_damaged_record_is_named_with_the_way_out(rk: Commands) -> None:
    record({}, {"connector": "local_files"})
    damage("imap_mailbox")

    ended = rk("telemetry", "show")
    assert ended.code == 65
    assert "the telemetry record telemetry:imap_mailbox cannot be read" in ended.err
    assert "`telemetry reset imap_mailbox`" in ended.err

    assert rk("telemetry", "reset", "imap_mailbox").code == 0
    assert list(json.loads(rk("telemetry", "show", "--json").out)["retry_metrics"]) == ["local_files"]


def test_counting_goes_on_over_a_damaged_record_and_the_loss_is_told(
    rk: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    record({"times": 5})
    damage("imap_mailbox")
    record({"failures": ["transient"]})

    assert json.loads(rk("telemetry", "show", "--json").out)["retry_metrics"]["imap_mailbox"]["total_retries"] == 1
    assert "telemetry:imap_mailbox cannot be read" in caplog.text
    assert "its counts start again from zero" in caplog.text


# ---- reset -----------------------------------------------------------------------------------------------------------


def test_a_reset_is_audited_and_leaves_the_other_connectors(rk: Commands) -> None:
    record(FINE, FINE | {"connector": "local_files"})

    assert rk("telemetry", "reset", "imap_mailbox", "--dry-run").out == "imap_mailbox would begin anew\n"
    assert len(rk("telemetry", "show", "--json").json["retry_metrics"]) == 2
    assert rk("telemetry", "reset", "imap_mailbox", "--as", "ann").out == "imap_mailbox begins anew\n"

    assert list(rk("telemetry", "show", "--json").json["retry_metrics"]) == ["local_files"]
    lines = rk("audit", "export", "-", "--type", "operator_action").out.splitlines()
    (event,) = [json.loads(line)["event"] for line in lines]
    assert (event["action"], event["actor"], event["subject"]) == ("telemetry.reset", "ann", "imap_mailbox")
    assert event["details"]["counts"]["total_retries"] == 0
    record(FINE)
    assert rk("telemetry", "show", "--json").json["retry_metrics"]["imap_mailbox"]["avg_attempts_until_success"] == 1


# ---- tune ------------------------------------------------------------------------------------------------------------


def test_a_proposal_passes_the_check_changes_the_policy_and_touches_no_file(rk: Commands) -> None:
    rk.write("retry_policies:\n  imap_mailbox: {jitter_factor: 0.5}\n")
    before = (rk.folder / "reefknot.yaml").read_text()
    record(FINE, HOPELESS, FINE | {"connector": "my_wiki", "failures": ["rate_limited"]})

    tuned = rk("policy", "tune", "--json").json

    assert (rk.folder / "reefknot.yaml").read_text() == before
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


def test_with_few_jobs_it_says_how_many_are_missing(rk: Commands) -> None:
    record({"times": 7})

    ended = rk("policy", "tune")

    assert "policy: not enough data: 7 of 50 jobs" in ended.out
    assert "No change is proposed." in ended.err


def test_a_connector_that_no_file_can_name_gets_no_yaml(rk: Commands) -> None:
    record(FINE | {"connector": "my.own"}, HOPELESS | {"connector": "my.own", "failures": ["transient"] * 4})

    ended = rk("policy", "tune")

    assert "proposal: max_attempts: 3 → 1" in ended.out
    assert "a configuration does not accept this name" in ended.out
    assert "retry_policies:" not in ended.out
