"""The two gates between the baseline and v2."""

import pytest

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import QUEUE, RETRIES, Gate, gate, gate_from_environment
from tests.rows import for_each_row

BOTH = for_each_row("variable", [RETRIES, QUEUE])


def test_the_variables_have_the_documented_names_and_one_gate_does_not_hear_the_others() -> None:
    assert (RETRIES, QUEUE) == ("WORKER_RETRIES_V2_ENABLED", "WORKER_QUEUE_V2_ENABLED")

    assert not gate(RETRIES, {QUEUE: "true"}, None)
    assert gate_from_environment(QUEUE, {RETRIES: "maybe"}) is None


@BOTH
@for_each_row(
    ("word", "opens"),
    [
        *((word, True) for word in ("true", "1", "yes", "on", "TRUE", "Yes", "oN", " true ", "on\n")),
        *((word, False) for word in ("false", "0", "no", "off", "FALSE", "No", "oFF", " 0 ")),
    ],
)
@for_each_row("configured", [None, True, False])
def test_a_word_in_the_environment_opens_or_closes_the_gate_whatever_the_file_says(
    variable: str, word: str, opens: bool, configured: bool | None
) -> None:
    found = gate(variable, {variable: word}, configured)
    assert found == Gate(opens, f"environment {variable}")
    assert bool(found) is opens


@BOTH
@for_each_row("environ", [{}, {"X": "1"}, {RETRIES: "", QUEUE: ""}, {RETRIES: "  ", QUEUE: "\t"}])
def test_a_silent_environment_leaves_it_to_the_file(variable: str, environ: dict[str, str]) -> None:
    assert gate(variable, environ, True, where="a.yaml:3") == Gate(True, "a.yaml:3")
    assert gate(variable, environ, False) == Gate(False, "the file")
    assert gate(variable, environ, None) == Gate(False, "default")


@for_each_row("word", ["maybe", "2", "truee", "y", "enabled", "-1", "ja", "1.0"])
def test_anything_else_is_a_mistake_and_not_a_guess(word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        gate(RETRIES, {RETRIES: word}, True)

    (problem,) = caught.value.problems
    assert str(problem) == (
        f"environment {RETRIES}: {word!r} is not accepted; accepted: true, 1, yes, on, false, 0, no, off, or nothing"
    )
