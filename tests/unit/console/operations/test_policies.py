"""Questions about policies; `tests/integration/test_dashboard_api.py` compares answers with the command line."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.console.operations.policies import PolicyQuestion, explain_failure, list_policies, question_of
from reefknot.errors import ParameterError
from reefknot.policy.settings import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "reefknot.yaml").write_text("sources: {notes: {connector: local_files, path: notes}}\n")
    return load_settings(None, environ={}, cwd=tmp_path)


def test_the_baseline_and_control_flow_are_explained_without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKER_RETRIES_V2_ENABLED", raising=False)
    baseline = explain_failure(None, PolicyQuestion(target="block:http", status=503, baseline=True))
    assert [wait["min"] for wait in baseline["schedule"]] == pytest.approx([0.1, 0.2, 0.3]), "and not those of v2"
    stopped = explain_failure(None, PolicyQuestion(target="block:http", exception="KeyboardInterrupt"))
    assert stopped["reason"] == "control_flow"
    assert list_policies(None)["gate"] == "off"


def test_what_is_not_accepted_is_named_by_its_parameter(settings: Settings) -> None:
    """The golden files hold the words."""
    http = {"target": "block:http"}
    bad: list[tuple[str, dict[str, Any]]] = [
        ("target", {}),
        ("target", {"target": "blok:http"}),
        ("source", {"source": "nots"}),
        ("error", http | {"error": "htp_error"}),
        ("status", http | {"status": 200}),
        ("failure_type", http | {"failure_type": "odd"}),
        ("retry_after", http | {"retry_after": -1.0}),
        ("baseline", {"target": "connector:imap_mailbox", "baseline": True}),
    ]
    for parameter, asked in bad:
        with pytest.raises(ParameterError) as refused:
            explain_failure(settings, PolicyQuestion(**asked))
        assert refused.value.parameter == parameter


def test_a_form_is_a_question_and_a_field_left_empty_is_left_out() -> None:
    form = {"target": "block:http", "status": "429", "retry_after": "1.5"}
    form |= {"message": "", "seed": "7", "baseline": "true"}
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
