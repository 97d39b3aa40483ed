from collections.abc import Mapping
from typing import Any

import pytest

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import environment
from tests.rows import for_each_row


def mistakes(environ: Mapping[str, str]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        environment(environ)
    return [str(problem) for problem in caught.value.problems]


def test_a_variable_says_the_setting_at_its_path_and_the_more_exact_one_wins() -> None:
    tree = environment({"REEFKNOT__WORKER__QUEUE__V2__ENABLED": "on", "PATH": "/bin", "REEFKNOT_CONFIG": "x"})
    assert tree.value == {"worker": {"queue": {"v2": {"enabled": True}}}}
    assert str(tree.mark(("worker", "queue", "v2", "enabled"))) == "environment REEFKNOT__WORKER__QUEUE__V2__ENABLED"
    for nothing in ("", "  "):
        assert environment({"REEFKNOT__A__B": nothing}).value == {}

    tree = environment({"REEFKNOT__A__B": "1", "REEFKNOT__A": "{b: 2, c: [3]}"})
    assert tree.value == {"a": {"b": 1, "c": [3]}}
    assert str(tree.mark(("a", "b"))) == "environment REEFKNOT__A__B"
    assert str(tree.mark(("a", "c", 0))) == "environment REEFKNOT__A"


@for_each_row(
    ("written", "meant"),
    [
        ("5", 5), ("1e3", 1000.0), ("no", False), ("null", None), ("~", None), ("text", "text"), (" 5 ", 5),
        ("memory:", "memory:"), ("sqlite:a b.db", "sqlite:a b.db"), ("a: b", "a: b"), ("- a", "- a"), ("#x", "#x"),
        ("*x", "*x"), ("!x", "!x"), ("'5'", "5"), ('""', ""), ("[1, a]", [1, "a"]),
        ("{a: {b: on}}", {"a": {"b": True}}),
        ('{"a": "on"}', {"a": "on"}),
    ],
)  # fmt: skip
def test_a_value_is_a_word_or_one_piece_of_yaml(written: str, meant: Any) -> None:
    read = environment({"REEFKNOT__A": written}).value["a"]
    assert (type(read), read) == (type(meant), meant)


def test_every_variable_that_cannot_be_read_is_named() -> None:
    given = {"": "1", "A____B": "1", "C": "[1", "D": "0123", "E": "x\udcff", "F": "{a: 1, a: 2}", "G": "1"}
    given |= {"G__H": "1", "g": "2"}
    found = mistakes({f"REEFKNOT__{name}": text for name, text in given.items()})
    named = [line.partition(":")[0].removeprefix("environment REEFKNOT__") for line in found]
    assert named == ["", "A____B", "C", "D", "E", "F", "g", "G__H"]
    assert found[-1].endswith("environment REEFKNOT__G gives g a value that holds no further settings")


def test_the_variables_share_the_limits_of_one_document() -> None:
    lists = {f"REEFKNOT__A{n:02}": f"[{', '.join(['1'] * 2000)}]" for n in range(6)}
    assert len(environment(dict(list(lists.items())[:4])).value) == 4
    assert "limit of 10000" in mistakes(lists)[0]
    assert "256 kB" in mistakes({f"REEFKNOT__A{n}": "x" * 100_000 for n in range(3)})[0]
    assert "256 kB" in mistakes({"REEFKNOT__A": "x" * 300_000})[0]
    assert "32 levels" in mistakes({"REEFKNOT__" + "__".join(["A"] * 33): "1"})[0]
    assert "32 levels" in mistakes({"REEFKNOT__A": "[" * 40 + "]" * 40})[0]
