"""`reefknot policy`: list, show, explain, schedule with its waits as bars, check, templates."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli.policy import BAR_WIDTH, bar, put_schedule
from reefknot.core.failure import ErrorCode
from reefknot.policy.book import PolicyBook, failure_from_facts
from reefknot.policy.model.explain import PlannedWait
from tests.rows import for_each_row
from tests.unit.console.cli.running import Commands


def explained(rk: Commands, *words: str) -> Any:
    return rk("policy", "explain", *words, "--json").json


def test_a_configured_secret_is_not_shown(rk: Commands) -> None:
    words = ("policy", "explain", "block:http", "--message", "it was xyzzy-4711", "--exception", "xyzzy-4711.Error")
    assert "xyzzy-4711" in rk(*words, "--json").out, "the control: nothing says yet that it is secret"
    rk.environment.setenv("THE_SECRET", "xyzzy-4711")
    rk.write("secrets:\n  key: env:THE_SECRET\n  gone: env:NOT_SET_HERE\n")
    for more in ([], ["--json"], ["--baseline", "--json"]):
        ended = rk(*words, *more)
        assert (ended.code, "xyzzy-4711" in ended.out + ended.err) == (0, False), ended
    assert rk(*words, "--json").json["failure"]["message"] == "it was [redacted]"


def test_retries_follow_from_attempts_and_an_exception_list_is_named_as_the_reason(rk: Commands) -> None:
    rk.write("worker: {retries: {v2: {block_policies: {http: {max_attempts: 7}}}}}")
    policy = explained(rk, "block:http", "--status", "500")["policy"]
    attempts, retries = policy["max_attempts"], policy["retries"]
    assert (attempts["value"], retries["value"]) == (8, 7)
    assert retries["source"] == attempts["source"]
    assert attempts["source"].endswith("reefknot.yaml:1:49")
    assert [one["value"] for one in retries["overrode"]] == [one["value"] - 1 for one in attempts["overrode"]]
    rk.write("operations: {KV_GET: {retryable_exceptions: [TimeoutError]}}")
    ended = rk("policy", "explain", "operation:kv.get", "--exception", "ValueError")
    assert "does not match the exceptions" in ended.out.splitlines()[0]


@pytest.mark.parametrize("target", ["block:fs", "connector:local_files", "operation:kv.put"])
def test_the_command_answers_what_the_book_answers(rk: Commands, target: str) -> None:
    for code in [code for code in ErrorCode if code is not ErrorCode.none]:
        said = explained(rk, target, "--error", code.name, "--seed", "7")
        known = PolicyBook().explain(target, failure_from_facts(code=code), seed=7)
        assert said["decision"] == ("retry" if known.retries else "stop"), code
        assert [wait["delay"] for wait in said["schedule"]] == [wait.delay for wait in known.schedule], code


def test_the_gate_is_shown_and_does_not_change_the_answer(rk: Commands) -> None:
    off = explained(rk, "block:http", "--status", "404")
    rk.environment.setenv("WORKER_RETRIES_V2_ENABLED", "YES")
    on = explained(rk, "block:http", "--status", "404")
    assert (off.pop("gate"), on.pop("gate")) == ("off", "on")
    assert off == on


@for_each_row(
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
def test_a_retry_that_a_worker_may_throttle_says_so(rk: Commands, words: str, settings: str, throttled: bool) -> None:
    rk.write(f"worker: {{retries: {{v2: {settings}}}}}\n")
    ended = rk("policy", "explain", *words.split())
    assert (ended.code, "worker.retries.v2.throttle" in ended.out) == (0, throttled), ended.out


OWN = """\
import reefknot as rk

print("a line of the module")

@rk.block("{prefix}.render", timeout=20, attempt_timeout=5)
async def render(inputs, context):
    return {{}}
"""


def test_the_time_limits_of_ones_own_step_are_explained_with_where_they_come_from(rk: Commands) -> None:
    rk.write(OWN.format(prefix="explained"), "explained_steps.py")
    words = ("block:explained.render", "--error", "connection_timeout")
    module = ("--module", "explained_steps")
    own = {"layer": "step", "source": f"{Path.cwd() / 'explained_steps.py'}:5"}
    ended = rk("policy", "explain", *words, "--module", "explained_steps.py", "--json")
    policy = ended.json["policy"]

    assert policy["time_budget"].items() >= {"value": 20, **own}.items()
    assert policy["attempt_timeout"].items() >= {"value": 5, **own}.items()
    assert "a line of the module" in ended.err
    baseline = explained(rk, *words, *module, "--baseline")["policy"]["attempt_timeout"]
    assert (baseline["value"], baseline["source"]) == (20, own["source"])
    shown = rk("policy", "show", "block:explained.render", *module, "--json").json["policy"]
    assert shown["attempt_timeout"]["value"] == 5
    assert explained(rk, *words)["policy"]["attempt_timeout"]["value"] is None, "the control: no module is named"

    rk.write("worker: {retries: {v2: {enabled: true, block_policies: {explained.render: {timeout_ms: 3000}}}}}")
    over = explained(rk, *words, *module)["policy"]
    assert (over["time_budget"]["value"], over["attempt_timeout"]["value"]) == (3, 5)
    assert {"value": 20, **own} in over["time_budget"]["overrode"]


PATIENT = "retry_policies: {imap_mailbox: {rate_limit_delay_seconds: 1200, transient_max_attempts: 9}}\n"
GATEWAY = """
import reefknot as rk

class GatewayError(ConnectionError): ...

@rk.block("gateway.call")
async def call(inputs, context): ...
"""


@pytest.mark.parametrize(
    ("retry", "waits", "retries"),
    [
        ("", 1200.0, 9),
        ("base_delay_seconds: 30, max_attempts: 2", 30.0, 2),
        ("base_delay_seconds: 30, max_attempts: 2, rate_limit_delay_seconds: 300, transient_max_attempts: 4", 300.0, 4),
    ],
)
def test_what_a_source_sets_for_all_failures_beats_what_its_connector_sets_for_some(
    rk: Commands, retry: str, waits: float, retries: int
) -> None:
    rk.write(f"{PATIENT}sources: {{mail: {{connector: imap_mailbox, retry: {{{retry}}}}}}}\n")
    policies = {
        kind: explained(rk, "--source", "mail", "--failure-type", kind)["policy"]
        for kind in ("rate_limited", "transient", "unknown")
    }
    assert policies["rate_limited"]["base_delay"]["value"] == waits
    assert policies["transient"]["retries"]["value"] == retries
    shown = rk("policy", "show", "--source", "mail", "--json").json["overrides"]
    for kind, field in (("rate_limited", "base_delay"), ("transient", "max_attempts")):
        in_force = shown.get(kind, {}).get(field, policies["unknown"][field])
        assert in_force["value"] == policies[kind][field]["value"], "`show` and `explain` agree"


def test_an_exception_that_is_not_found_is_named_and_one_of_own_steps_is_found_in_their_module(rk: Commands) -> None:
    unknown = rk("policy", "explain", "block:http", "--exception", "my_client.Broken")
    assert unknown.err.startswith("my_client.Broken is taken by its name alone")
    for known in ("httpx.ReadTimeout", "ValueError", "requests.Timeout", "SystemExit", "CancelledError"):
        assert "by its name alone" not in rk("policy", "explain", "block:http", "--exception", known).err
    rk.write(GATEWAY, "gateway_steps.py")
    words = ("block:gateway.call", "--exception", "gateway_steps.GatewayError", "--module", "gateway_steps.py")
    assert explained(rk, *words)["decision"] == "retry"


def test_an_answer_about_a_connector_says_what_ingestion_does_by_the_configured_numbers(rk: Commands) -> None:
    def about(kind: str) -> Any:
        return explained(rk, "connector:imap_mailbox", "--failure-type", kind)["ingestion"]

    numbers = "failures: 9, jobs: 1, source_failures: 4, cooldown_seconds: 7, max_cooldown_seconds: 600"
    rk.write(f"ingestion: {{breaker: {{{numbers}, max_outage_seconds: 7200}}}}\n")
    source = about("transient")["source"]
    assert source.startswith(
        "9 such failures in a row, of 1 job or more, or 4 of the source itself, open its breaker: it rests for 7 s"
    )
    assert "up to 10 min" in source
    assert "without an answer for 2 h" in about("rate_limited")["job"]
    rk.write("ingestion: {breaker: {enabled: false}}\n")
    off = about("transient")
    assert ("ingestion.breaker.enabled is false" in off["source"], "rests" in off["job"]) == (True, False)


def test_a_bar_goes_from_the_shortest_wait_to_the_longest_and_marks_the_seeds() -> None:
    quarter = BAR_WIDTH // 4
    assert bar(PlannedWait(0, 1.0, 2.0), 4.0) == "│" + "·" * quarter + "█" * quarter + " " * (BAR_WIDTH // 2)
    assert bar(PlannedWait(0, 4.0, 4.0), 4.0).count("█") == 1, "a wait without choice is still seen"
    assert bar(PlannedWait(0, 1.0, 3.0, 2.0), 4.0).index("◆") == 1 + BAR_WIDTH // 2


@pytest.mark.parametrize(
    "wait",
    [
        PlannedWait(0, 0.0, 0.0),
        PlannedWait(0, 4.0, 4.0),
        PlannedWait(0, 0.0, 4.0, 4.0),
        PlannedWait(0, 0.0, 1e-9),
        PlannedWait(0, 3.999, 4.0, 3.9995),
    ],
)
def test_every_bar_is_as_wide_as_the_others(wait: PlannedWait) -> None:
    assert len(bar(wait, 4.0)) == BAR_WIDTH + 1
    assert len(bar(wait, 0.0)) == BAR_WIDTH + 1


def test_time_gone_by_is_the_sum_of_the_waits_and_a_long_schedule_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    put_schedule([PlannedWait(0, 1.0, 2.0), PlannedWait(1, 2.0, 4.0)])
    assert "3 s – 6 s" in capsys.readouterr().out
    put_schedule([PlannedWait(k, 1.0, 1.0) for k in range(30)])
    out = capsys.readouterr().out
    assert "… and 10 more, 30 s – 30 s in total" in out
    assert len(out.splitlines()) < 30
