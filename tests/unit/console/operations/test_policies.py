"""Questions about policies, answered as on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli import main
from reefknot.console.operations.policies import (
    PolicyQuestion,
    explain_failure,
    list_policies,
    policy_waits,
    question_of,
    show_policy,
)
from reefknot.errors import ParameterError
from reefknot.policy.settings import Settings, load_settings

CONFIG = """\
worker:
  retries:
    v2:
      enabled: true
      default_policy: {max_attempts: 4}
      block_policies:
        http: {max_attempts: 6}
sources:
  notes: {connector: local_files, path: notes, retry: {max_attempts: 7}}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The settings of a folder, in which commands run too."""
    (tmp_path / "reefknot.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return load_settings(None, environ={}, cwd=tmp_path)


def printed(capsys: pytest.CaptureFixture[str], *given: str) -> Any:
    """The JSON that a command prints."""
    capsys.readouterr()
    assert main([*given, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lists_policies_answers_and_waits_are_those_of_the_command_line(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_policies(settings) == printed(capsys, "policy", "list")
    assert list_policies(settings, "block") == printed(capsys, "policy", "list", "--kind", "block")
    assert show_policy(settings, "block:http") == printed(capsys, "policy", "show", "block:http")
    assert show_policy(settings, source="notes") == printed(capsys, "policy", "show", "--source", "notes")
    for asked in QUESTIONS:
        flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        question = PolicyQuestion(**asked)
        assert explain_failure(settings, question) == printed(capsys, "policy", "explain", *flags)
        assert policy_waits(settings, question) == printed(capsys, "policy", "schedule", *flags)


QUESTIONS: list[dict[str, Any]] = [
    {"target": "block:http", "status": 429},
    {"target": "block:http", "error": "http_error", "retry_after": 5.0, "retry_count": 2, "seed": 7},
    {"source": "notes", "message": "timeout"},
    {"target": "operation:nats.publish", "exception": "TimeoutError", "timeout_ms": 900},
    {"target": "connector:imap_mailbox", "failure_type": "permanent"},
]


def test_the_baseline_and_control_flow_are_explained_without_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORKER_RETRIES_V2_ENABLED", raising=False)
    baseline = PolicyQuestion(target="block:http", status=503, baseline=True)
    stopped = PolicyQuestion(target="block:http", exception="KeyboardInterrupt")

    flags = ("policy", "explain", "block:http")
    assert explain_failure(None, baseline) == printed(capsys, *flags, "--status", "503", "--baseline")
    assert explain_failure(None, stopped)["reason"] == "control_flow"
    assert list_policies(None)["gate"] == "off"


def test_every_field_has_its_value_layer_source_and_what_it_overrides(settings: Settings) -> None:
    field = show_policy(settings, "block:http")["policy"]["max_attempts"]

    assert (field["value"], field["layer"]) == (7, "target"), "6 retries"
    assert field["source"].endswith("reefknot.yaml:7:16"), field["source"]
    assert [(one["value"], one["layer"]) for one in field["overrode"]] == [(5, "global"), (4, "builtin")]


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({}, "target"),
        ({"target": "blok:http"}, "target"),
        ({"source": "nots"}, "source"),
        ({"target": "block:http", "error": "htp_error"}, "error"),
        ({"target": "block:http", "status": 200}, "status"),
        ({"target": "block:http", "failure_type": "odd"}, "failure_type"),
        ({"target": "block:http", "retry_after": -1.0}, "retry_after"),
        ({"target": "connector:imap_mailbox", "baseline": True}, "baseline"),
    ],
)
def test_what_is_not_accepted_is_named_by_its_parameter(
    settings: Settings, asked: dict[str, Any], parameter: str
) -> None:
    """The golden files hold the words."""
    with pytest.raises(ParameterError) as refused:
        explain_failure(settings, PolicyQuestion(**asked))
    assert refused.value.parameter == parameter


def test_a_form_is_a_question_and_a_field_left_empty_is_left_out() -> None:
    form = {
        "target": "block:http",
        "status": "429",
        "retry_after": "1.5",
        "message": "",
        "seed": "7",
        "baseline": "true",
    }
    assert question_of(form) == PolicyQuestion(target="block:http", status=429, retry_after=1.5, seed=7, baseline=True)
    assert question_of({"target": "x", "status": 429, "source": None}) == PolicyQuestion(target="x", status=429)


@pytest.mark.parametrize(
    ("form", "parameter", "said"),
    [
        ({"status": "many"}, "status", "a whole number"),
        ({"status": 4.5}, "status", "a whole number"),
        ({"retry_after": "soon"}, "retry_after", "a number of seconds"),
        ({"baseline": "maybe"}, "baseline", "true or false"),
        ({"message": 7}, "message", "text"),
        ({"stats": "429"}, "stats", "is unknown; accepted: target, source, error"),
    ],
)
def test_a_form_that_is_no_question_is_refused_by_its_field(form: dict[str, object], parameter: str, said: str) -> None:
    with pytest.raises(ParameterError) as refused:
        question_of(form)
    assert (refused.value.parameter, said in str(refused.value)) == (parameter, True), str(refused.value)
