"""`reefknot policy`: list, show, explain, schedule, check, templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.core.failure import ErrorCode, FailureType
from reefknot.policy.book import PolicyBook
from tests.unit.console.cli.running import Commands

SOURCES = """
sources:
  work-mail:
    connector: imap_mailbox
    retry: {max_attempts: 2, rate_limit_delay_seconds: 60}
"""
DECISION = ("target", "failure", "decision", "reason", "gate", "policy", "schedule")


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_an_answer_has_exactly_the_keys_of_the_design(rk: Commands) -> None:
    answer = rk("policy", "explain", "--target", "block:http", "--status", "503", "--json").json

    assert tuple(answer) == DECISION
    assert tuple(answer["policy"]) == (
        *("strategy", "max_attempts", "retries", "base_delay", "max_delay", "multiplier", "jitter", "jitter_factor"),
        *("time_budget", "attempt_timeout", "max_retry_after", "retryable"),
    )
    assert all(set(field) == {"value", "layer", "source", "overrode"} for field in answer["policy"].values())
    assert all(set(wait) == {"retry", "min", "max", "delay"} for wait in answer["schedule"])
    assert answer["failure"] == {
        "code": "http_error",
        "category": "network",
        "failure_type": "transient",
        "http_status": 503,
        "exception": None,
        "message": None,
        "retry_after": None,
    }


def test_a_configured_secret_is_not_shown(rk: Commands) -> None:
    words = ("policy", "explain", "block:http", "--message", "it was xyzzy-4711", "--exception", "xyzzy-4711.Error")
    assert "xyzzy-4711" in rk(*words, "--json").out, "the control: nothing says yet that it is secret"
    rk.environment.setenv("THE_SECRET", "xyzzy-4711")
    rk.write("secrets:\n  key: env:THE_SECRET\n  gone: env:NOT_SET_HERE\n")

    for more in ([], ["--json"], ["--baseline", "--json"]):
        ended = rk(*words, *more)
        assert (ended.code, "xyzzy-4711" in ended.out + ended.err) == (0, False), ended
    assert rk(*words, "--json").json["failure"]["message"] == "it was [redacted]"


def test_retries_follow_from_attempts_and_come_from_the_same_place(rk: Commands) -> None:
    rk.write("worker: {retries: {v2: {block_policies: {http: {max_attempts: 7}}}}}")

    policy = rk("policy", "explain", "block:http", "--status", "500", "--json").json["policy"]

    assert (policy["max_attempts"]["value"], policy["retries"]["value"]) == (8, 7)
    assert policy["retries"]["source"] == policy["max_attempts"]["source"]
    assert policy["max_attempts"]["source"].endswith("reefknot.yaml:1:49")
    assert [one["value"] for one in policy["retries"]["overrode"]] == [
        one["value"] - 1 for one in policy["max_attempts"]["overrode"]
    ]


@pytest.mark.parametrize(
    ("words", "decision", "reason"),
    [
        (("block:http", "--status", "429"), "retry", "retryable"),
        (("block:http", "--status", "404"), "stop", "not_retryable"),
        (("block:http", "--error", "HTTP_ERROR"), "retry", "retryable"),
        (("block:http", "--error", "3001"), "retry", "retryable"),
        (("block:http", "--error", "cancelled_by_timeout"), "stop", "budget_spent"),
        (("block:http", "--status", "503", "--retry-count", "0"), "stop", "attempts_spent"),
        (("block:http", "--status", "503", "--retry-after", "301"), "stop", "hint_too_long"),
        (("block:http", "--status", "503", "--retry-after", "5", "--timeout-ms", "4000"), "stop", "budget_spent"),
        (("block:http", "--exception", "TimeoutError"), "retry", "retryable"),
        (("block:http", "--exception", "httpx.ReadTimeout"), "retry", "retryable"),
        (("block:http", "--exception", "httpx.ConnectError"), "retry", "retryable"),
        (("block:http", "--message", "got HTTP 503"), "retry", "retryable"),
        (("block:my.own", "--failure-type", "permanent"), "stop", "not_retryable"),
        (("connector:imap_mailbox", "--message", "invalid credentials"), "stop", "not_retryable"),
        (("connector:imap_mailbox", "--failure-type", "rate-limited"), "retry", "retryable"),
        (("operation:REPLAY_PROCESSING",), "stop", "attempts_spent"),
        (("operation:nats.publish", "--exception", "KeyboardInterrupt"), "stop", "control_flow"),
        (("operation:nats.publish", "--exception", "asyncio.CancelledError"), "stop", "control_flow"),
        (("operation:nats.publish", "--exception", "trio.Cancelled"), "stop", "control_flow"),
    ],
)
def test_a_failure_is_answered(rk: Commands, words: tuple[str, ...], decision: str, reason: str) -> None:
    ended = rk("policy", "explain", *words, "--json")

    assert ended.code == 0
    assert (ended.json["decision"], ended.json["reason"]) == (decision, reason)


@pytest.mark.parametrize("code", [code for code in ErrorCode if code is not ErrorCode.none])
@pytest.mark.parametrize("target", ["block:fs", "connector:local_files", "operation:kv.put"])
def test_the_command_answers_what_the_book_answers(rk: Commands, target: str, code: ErrorCode) -> None:
    from reefknot.policy.book import failure_from_facts

    said = rk("policy", "explain", target, "--error", code.name, "--seed", "7", "--json").json
    known = PolicyBook().explain(target, failure_from_facts(code=code), seed=7)

    assert said["decision"] == ("retry" if known.retries else "stop")
    assert [wait["delay"] for wait in said["schedule"]] == [wait.delay for wait in known.schedule]


def test_every_spelling_of_an_operation_is_the_same_target(rk: Commands) -> None:
    for spelling in ("nats.publish", "NATS_PUBLISH", "RETRY_NATS_PUBLISH", "nats_publish"):
        assert rk("policy", "show", f"operation:{spelling}", "--json").json["target"] == "operation:nats.publish"


def test_a_seed_draws_the_waits_and_draws_them_again(rk: Commands) -> None:
    words = ("policy", "explain", "block:http", "--status", "503", "--json")
    first, again, other = (rk(*words, "--seed", seed).json["schedule"] for seed in ("7", "7", "8"))

    assert all(wait["min"] <= wait["delay"] <= wait["max"] for wait in first)
    assert first == again != other
    assert all(wait["delay"] is None for wait in rk(*words).json["schedule"])


def test_without_a_failure_the_answer_is_for_an_unknown_one_and_says_so(rk: Commands) -> None:
    ended = rk("policy", "explain", "connector:github_repository", "--json")

    assert ended.json["failure"]["failure_type"] == "unknown"
    assert "No failure given" in ended.err


def test_the_gate_is_shown_and_does_not_change_the_answer(rk: Commands) -> None:
    words = ("policy", "explain", "block:http", "--status", "404", "--json")
    off = rk(*words).json
    rk.environment.setenv("WORKER_RETRIES_V2_ENABLED", "YES")
    on = rk(*words).json

    assert (off.pop("gate"), on.pop("gate")) == ("off", "on")
    assert off == on


@pytest.mark.parametrize(
    ("words", "settings", "throttled"),
    [
        ("block:http --status 503", "{enabled: true}", True),
        ("block:http --status 404", "{enabled: true}", False),
        ("block:http --status 503", "{enabled: false}", False),
        ("block:http --status 503 --baseline", "{enabled: true}", False),
        ("block:http --status 503", "{enabled: true, throttle: {enabled: false}}", False),
        ("connector:imap_mailbox --failure-type transient", "{enabled: true}", False),
    ],
)
def test_a_retry_that_a_worker_may_throttle_is_told_with_it(
    rk: Commands, words: str, settings: str, throttled: bool
) -> None:
    rk.write(f"worker: {{retries: {{v2: {settings}}}}}\n")
    ended = rk("policy", "explain", *words.split())
    assert (ended.code, "worker.retries.v2.throttle" in ended.out) == (0, throttled), ended.out


def test_the_baseline_is_answered_as_the_preset(rk: Commands) -> None:
    answer = rk("policy", "explain", "block:http", "--status", "404", "--baseline", "--json").json

    assert answer["decision"] == "retry"
    assert [wait["max"] for wait in answer["schedule"]] == pytest.approx([0.1, 0.2, 0.3])
    assert answer["policy"]["retries"]["value"] == 3
    assert {field["layer"] for field in answer["policy"].values()} == {"builtin"}
    assert answer["policy"]["time_budget"]["value"] is None


def test_a_request_speaks_over_the_baseline(rk: Commands) -> None:
    policy = rk(
        *("policy", "explain", "block:http", "--status", "404", "--baseline", "--json"),
        *("--retry-count", "1", "--timeout-ms", "500"),
    ).json["policy"]

    assert (policy["retries"]["value"], policy["retries"]["layer"]) == (1, "request")
    assert policy["max_attempts"]["overrode"] == [{"value": 4, "layer": "builtin", "source": "built-in: baseline"}]
    assert (policy["attempt_timeout"]["value"], policy["attempt_timeout"]["layer"]) == (0.5, "request")


def test_the_baseline_does_not_retry_a_cancellation_either(rk: Commands) -> None:
    words = ("policy", "explain", "block:http", "--error", "cancelled_by_user", "--baseline", "--json")

    assert rk(*words).json["decision"] == "stop"


OWN = """\
import reefknot as rk

print("a line of the module")

@rk.block("{prefix}.render", timeout=20, attempt_timeout=5)
async def render(inputs, context):
    return {{}}
"""


def test_the_time_limits_of_ones_own_step_are_explained_with_where_they_come_from(rk: Commands) -> None:
    rk.write(OWN.format(prefix="explained"), "explained_steps.py")
    words = ("policy", "explain", "block:explained.render", "--error", "connection_timeout", "--json")
    own = {"layer": "step", "source": f"{Path.cwd() / 'explained_steps.py'}:5"}
    ended = rk(*words, "--module", "explained_steps.py")
    policy = ended.json["policy"]

    assert {name: policy["time_budget"][name] for name in ("value", "layer", "source")} == {"value": 20, **own}
    assert {name: policy["attempt_timeout"][name] for name in ("value", "layer", "source")} == {"value": 5, **own}
    assert "a line of the module" in ended.err
    baseline = rk(*words, "--module", "explained_steps", "--baseline").json["policy"]["attempt_timeout"]
    assert (baseline["value"], baseline["source"]) == (20, own["source"])
    shown = rk("policy", "show", "block:explained.render", "--module", "explained_steps", "--json").json["policy"]
    assert shown["attempt_timeout"]["value"] == 5
    assert rk(*words).json["policy"]["attempt_timeout"]["value"] is None, "the control: nobody has named the module"

    written = "worker: {retries: {v2: {enabled: true, block_policies: {explained.render: {timeout_ms: 3000}}}}}"
    rk.write(written)
    over = rk(*words, "--module", "explained_steps").json["policy"]
    assert (over["time_budget"]["value"], over["attempt_timeout"]["value"]) == (3, 5)
    assert {"value": 20, **own} in over["time_budget"]["overrode"]


def test_a_module_that_cannot_be_imported_is_refused(rk: Commands) -> None:
    ended = rk("policy", "explain", "block:own.render", "--module", "not_there")

    assert (ended.code, "--module not_there: there is no module not_there here" in ended.err) == (78, True)


def test_only_blocks_have_a_baseline(rk: Commands) -> None:
    ended = rk("policy", "explain", "connector:local_files", "--baseline")

    assert ended.code == 2
    assert "governs blocks alone" in ended.err


def test_a_source_is_laid_over_its_connector(rk: Commands) -> None:
    rk.write(SOURCES)

    words = ("policy", "explain", "--source", "work-mail", "--failure-type", "rate_limited", "--json")
    by_source = rk(*words, "--target", "connector:imap_mailbox").json

    assert by_source["policy"]["retries"]["value"] == 2
    assert (by_source["policy"]["base_delay"]["value"], by_source["policy"]["base_delay"]["layer"]) == (60.0, "source")
    assert rk(*words).json == by_source, "a source knows its connector"


PATIENT = "retry_policies: {imap_mailbox: {rate_limit_delay_seconds: 1200, transient_max_attempts: 9}}\n"


@pytest.mark.parametrize(
    ("retry", "waits", "retries"),
    [
        ("{}", 1200.0, 9),
        ("{base_delay_seconds: 30, max_attempts: 2}", 30.0, 2),
        (
            "{base_delay_seconds: 30, max_attempts: 2, rate_limit_delay_seconds: 300, transient_max_attempts: 4}",
            300.0,
            4,
        ),
    ],
)
def test_what_a_source_sets_for_all_failures_beats_what_its_connector_sets_for_some(
    rk: Commands, retry: str, waits: float, retries: int
) -> None:
    rk.write(f"{PATIENT}sources: {{mail: {{connector: imap_mailbox, retry: {retry}}}}}\n")
    policies = {
        kind: rk("policy", "explain", "--source", "mail", "--failure-type", kind, "--json").json["policy"]
        for kind in ("rate_limited", "transient", "unknown")
    }
    assert policies["rate_limited"]["base_delay"]["value"] == waits
    assert policies["transient"]["retries"]["value"] == retries

    shown = rk("policy", "show", "--source", "mail", "--json").json["overrides"]
    for kind, field in (("rate_limited", "base_delay"), ("transient", "max_attempts")):
        in_force = shown.get(kind, {}).get(field, policies["unknown"][field])
        assert in_force["value"] == policies[kind][field]["value"], "`show` and `explain` agree"


def test_a_secret_in_a_message_is_not_shown_again(rk: Commands) -> None:
    for form in ((), ("--json",)):
        words = ("policy", "explain", "connector:imap_mailbox", "--message", "login failed: password=hunter22", *form)
        assert "hunter22" not in rk(*words).out


def test_an_exception_that_cannot_be_looked_up_is_named(rk: Commands) -> None:
    unknown = rk("policy", "explain", "block:http", "--exception", "my_client.Broken")
    assert unknown.err.startswith("my_client.Broken is taken by its name alone")

    for known in ("httpx.ReadTimeout", "ValueError", "requests.Timeout", "SystemExit", "CancelledError"):
        assert "by its name alone" not in rk("policy", "explain", "block:http", "--exception", known).err


def test_an_exception_of_ones_own_steps_is_looked_up_in_their_module(rk: Commands) -> None:
    text = """
import reefknot as rk

class GatewayError(ConnectionError): ...

@rk.block("gateway.call")
async def call(inputs, context): ...
"""
    Path("gateway_steps.py").write_text(text)
    words = ("policy", "explain", "block:gateway.call", "--exception", "gateway_steps.GatewayError", "--json")

    assert rk(*words, "--module", "gateway_steps.py").json["decision"] == "retry"


def test_an_exception_list_is_named_as_the_reason(rk: Commands) -> None:
    rk.write("operations: {KV_GET: {retryable_exceptions: [TimeoutError]}}")

    ended = rk("policy", "explain", "operation:kv.get", "--exception", "ValueError")

    assert "does not match the exceptions" in ended.out.splitlines()[0]


def test_a_name_that_is_like_none_gets_no_suggestion(rk: Commands) -> None:
    ended = rk("policy", "explain", "operation:billing.charge")

    assert ended.code == 2
    assert "did you mean" not in ended.err


def test_a_source_of_another_connector_is_refused(rk: Commands) -> None:
    rk.write(SOURCES)

    ended = rk("policy", "explain", "connector:local_files", "--source", "work-mail")

    assert ended.code == 2
    assert "belongs to connector:imap_mailbox" in ended.err


# ---- list, show, schedule --------------------------------------------------------------------------------------------


def test_a_policy_is_shown_whole_with_what_differs_for_failures(rk: Commands) -> None:
    shown = rk("policy", "show", "connector:imap_mailbox", "--json").json

    assert shown["policy"]["retries"]["value"] == 5
    assert shown["overrides"]["transient"]["max_attempts"]["value"] == 8
    assert shown["overrides"]["rate_limited"]["base_delay"]["value"] == 600.0
    assert shown["overrides"]["permanent"]["retryable"]["value"] is False
    out = rk("policy", "show", "connector:imap_mailbox").out
    assert "6 attempts (1 + 5 retries), 120 s ×2 up to 1800 s, ±30 %" in out.splitlines()[0]
    assert "8 attempts (1 + 7 retries)" in out


@pytest.mark.parametrize("verb", ["show", "schedule"])
def test_an_unknown_target_is_refused_everywhere(rk: Commands, verb: str) -> None:
    ended = rk("policy", verb, "connector:imap_mail_box")

    assert ended.code == 2
    assert "did you mean 'connector:imap_mailbox'?" in ended.err


# ---- check, templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(FailureType))
def test_every_failure_type_may_be_asked_about(rk: Commands, kind: FailureType) -> None:
    words = ("policy", "explain", "connector:local_files", "--failure-type", kind.value, "--json")

    assert rk(*words).json["failure"]["failure_type"] == kind.value


# ---- what ingestion does ---------------------------------------------------------------------------------------------


def test_an_answer_about_a_connector_says_what_ingestion_does_by_the_configured_numbers(rk: Commands) -> None:
    words = ("policy", "explain", "connector:imap_mailbox", "--failure-type")
    preset = rk(*words, "transient", "--json").json
    assert tuple(preset) == (*DECISION, "ingestion")
    breaker = {"enabled": True, "failures": 5, "jobs": 2, "cooldown_seconds": 30.0, "max_cooldown_seconds": 900.0}
    breaker |= {"source_failures": 3, "max_outage_seconds": 86400.0}
    assert preset["ingestion"]["breaker"] == breaker
    assert preset["ingestion"]["longest_cooling_seconds"] == 86400
    assert (
        "5 such failures in a row, of 2 jobs or more, or 3 of the source itself, open its breaker: it rests for 30 s"
        in (preset["ingestion"]["source"])
    )
    numbers = "failures: 9, jobs: 1, source_failures: 4, cooldown_seconds: 7, max_cooldown_seconds: 600"
    rk.write(f"ingestion: {{breaker: {{{numbers}, max_outage_seconds: 7200}}}}\n")
    source = rk(*words, "transient", "--json").json["ingestion"]["source"]
    assert source.startswith(
        "9 such failures in a row, of 1 job or more, or 4 of the source itself, open its breaker: it rests for 7 s"
    )
    assert "up to 10 min" in source
    assert "without an answer for 2 h" in rk(*words, "rate_limited", "--json").json["ingestion"]["job"]
    assert "9 such failures" in " ".join(rk(*words, "transient").out.split())
    rk.write("ingestion: {breaker: {enabled: false}}\n")
    off = rk(*words, "transient", "--json").json["ingestion"]
    assert "ingestion.breaker.enabled is false" in off["source"]
    assert "rests" not in off["job"]


@pytest.mark.parametrize(
    ("more", "job", "source"),
    [
        (["permanent"], "it goes to quarantine at once", "nothing changes for its other jobs: it has answered"),
        (["unknown"], "each failure spends an attempt; after 6 attempts", "tells nothing about the source"),
        (["rate_limited"], "the source asks for, up to 24 h, or its policy's, and spends no attempt", "it cools"),
        (["rate_limited", "--retry-after", "9000"], "spends no attempt", "jobs that wait for it spend nothing"),
        (["transient", "--retry-after", "9000"], "spends no attempt", "it cools"),
    ],
)
def test_each_failure_type_has_its_own_effect_on_job_and_source(
    rk: Commands, more: list[str], job: str, source: str
) -> None:
    found = rk("policy", "explain", "connector:imap_mailbox", "--failure-type", *more, "--json").json["ingestion"]

    assert job in found["job"]
    assert source in found["source"]
    assert ("the next due time" in found["quarantine"]) == (more[0] != "permanent")


def test_control_flow_and_other_targets_have_nothing_to_do_with_ingestion(rk: Commands) -> None:
    for words in (["connector:imap_mailbox", "--exception", "CancelledError"], ["operation:nats.publish"]):
        assert tuple(rk("policy", "explain", *words, "--json").json) == DECISION
