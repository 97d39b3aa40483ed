"""`reefknot queue`: what is paused and resumed, who sees it, and every mistake with what is accepted."""

import json
from pathlib import Path

import pytest

from tests.unit.console.cli.running import Commands

LIMITS = """\
limits:
  "billing.*": {rate: 10/s, burst: 20}
  tenant: {running: 5}
"""


def operator_actions(rk: Commands) -> list[tuple[str, str, str]]:
    done = rk("audit", "tail", "--type", "operator_action", "--json")
    events = [json.loads(line)["event"] for line in done.out.splitlines()]
    return [(one["action"], one["subject"], one["actor"]) for one in events if one["action"].startswith("queue.")]


def test_a_type_is_paused_shown_everywhere_and_resumed(rk: Commands) -> None:
    paused = rk("queue", "pause", "--type", "billing.*", "--until", "2h", "--reason", "closed", "--as", "ann", "--json")
    assert paused.code == 0, paused.err
    assert {"what": "type", "name": "billing.*", "by": "ann", "reason": "closed", "changed": True}.items() <= (
        paused.json.items()
    )
    assert rk("submit", "--type", "billing.charge", "--id", "a").code == 0, "it is accepted, and waits"
    waiting = rk("job", "show", "a", "--json").json["waiting"]
    assert waiting["code"] == "queue_paused"
    assert (
        waiting["text"].startswith("the type billing.* is paused by ann for 2 h (closed)")
        or "120 min" in (waiting["text"])
    )
    assert waiting["remedy"] == "resume it with `reefknot queue resume --type 'billing.*'`"
    assert "type billing.* is paused by ann" in rk("doctor").out
    assert [one["name"] for one in rk("queue", "list", "--json").json["paused"]] == ["billing.*"]

    again = rk("queue", "pause", "--type", "billing.*", "--until", "2h", "--reason", "another")
    assert again.code == 0
    assert rk("queue", "resume", "--type", "billing.*", "--dry-run").out == "type billing.* would be resumed\n"
    assert rk("queue", "resume", "--type", "billing.*").out == "type billing.* resumed\n"
    assert rk("queue", "resume", "--type", "billing.*").out == "type billing.* is not paused\n"
    assert rk("queue", "list", "--json").json["paused"] == []
    assert [action for action, _, _ in operator_actions(rk)] == ["queue.pause", "queue.pause", "queue.resume"]
    assert operator_actions(rk)[0][1:] == ("type billing.*", "ann")


def test_a_dry_run_changes_nothing(rk: Commands) -> None:
    rk("queue", "pause", "--tenant", "acme")
    assert rk("queue", "pause", "--tenant", "other", "--dry-run").out == "tenant other would be paused\n"
    assert [one["name"] for one in rk("queue", "list", "--json").json["paused"]] == ["acme"]
    assert len(operator_actions(rk)) == 1


def test_the_same_pause_again_is_no_change(rk: Commands) -> None:
    rk("queue", "pause", "--tenant", "acme", "--reason", "closed")
    assert rk("queue", "pause", "--tenant", "acme", "--reason", "closed").out == "tenant acme is paused already\n"
    assert len(operator_actions(rk)) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pause", "--type: is missing; give one of them"),
        ("pause --type a --tenant b", "--type: not together with a tenant"),
        ("pause --type=", "a job type without blanks"),
        ("pause --tenant=", "a tenant's name"),
        (["pause", "--type", "a b"], "a job type without blanks"),
        (["pause", "--type", "x" * 201], "at most 200 characters"),
        ("pause --type a --until yesterday", "a time in the future"),
        ("pause --type a --until 2020-01-01", "a time in the future"),
        ("pause --type a --until 0s", "a time in the future"),
        ("pause --type a --until 99999d", "a time in the future"),
        ("pause a", "a"),
        ("resume", "--type: is missing; give one of them"),
        ("resume --type a --tenant b", "not together with a tenant"),
        ("stop", "pause"),
    ],
)
def test_a_mistake_is_answered_with_what_is_accepted(rk: Commands, words: str | list[str], said: str) -> None:
    done = rk("queue", *(words.split() if isinstance(words, str) else words))
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not Path(".reefknot").exists(), "a mistake makes no store"


def test_without_a_store_nothing_is_paused(rk: Commands) -> None:
    assert rk("queue", "list", "--json").json == {"paused": [], "limits": []}
    assert rk("queue", "resume", "--type", "a").out == "type a is not paused\n"
    assert not Path(".reefknot").exists()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            '"billing.*": {rate: 10/d}',
            "limits.yaml:2:17: limits.\"billing.*\".rate: '10/d' is not accepted; accepted: a ",
        ),
        ("a: {rate: 10}", "limits.yaml:2:7: limits.a.rate: 10 is not accepted; accepted: a number above 0 with /s"),
        ("a: {rate: 0/s}", "limits.yaml:2:7: limits.a.rate: '0/s' is not accepted"),
        ("a: {}", "limits.yaml:2:3: limits.a: a limit without a number is not accepted; accepted: at least one of"),
        ("a: {burst: 3, running: 1}", "limits.yaml:2:7: limits.a.burst: 3 is not accepted; accepted: only together"),
        ("a: {running: 0}", "limits.yaml:2:7: limits.a.running: 0 is out of bounds; accepted: from 1 to"),
        ("a: {running: many}", "limits.yaml:2:7: limits.a.running: 'many' is not accepted; accepted: a whole number"),
        ("a: {rates: 1/s}", "unknown key; accepted: burst, per, rate, running; did you mean 'rate'?"),
        ("a: {rate: 1/s, per: color}", "limits.yaml:2:18: limits.a.per: 'color' is not accepted; accepted: tenant"),
        ("tenant: {rate: 1/s, per: tenant}", "only for a limit of job types; this one holds per tenant already"),
        (
            '"tenant:": {running: 1}',
            'limits.yaml:2:3: limits."tenant:": this name is not accepted; accepted: a job type',
        ),
        ("a: 5", "limits.yaml:2:3: limits.a: 5 is not accepted; accepted: a mapping of burst, per, rate, running"),
    ],
)
def test_a_mistake_in_a_limit_is_named_with_its_line(rk: Commands, limits: str, said: str) -> None:
    rk.write(f"limits:\n  {limits}\n", "limits.yaml")
    done = rk("config", "check", "limits.yaml")
    assert done.code == 78
    assert said in done.out + done.err
    assert len((done.out + done.err).strip().splitlines()) <= 2, "one mistake is told once"


def test_explain_names_the_limits_of_a_step_and_their_lines(rk: Commands) -> None:
    rk.write(LIMITS)
    done = rk("policy", "explain", "--target", "block:billing.charge", "--status", "503")
    assert "limit billing.*: 10/s, burst 20 (reefknot.yaml:2:3)" in done.out
    assert "limit tenant: 5 running, for each tenant (reefknot.yaml:3:3)" in done.out
    found = rk("policy", "explain", "--target", "block:mail.send", "--status", "503", "--json").json["limits"]
    assert [one["name"] for one in found] == ["tenant"]
    assert "limits" not in rk("policy", "explain", "operation:kv.put", "--exception", "TimeoutError", "--json").json
