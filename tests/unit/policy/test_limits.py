import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import Format, read_file, read_text
from reefknot.policy.reading.session import MOST_BYTES, MOST_LEVELS, MOST_NODES, LineIndex
from tests.pace import slowness
from tests.rows import for_each_row
from tests.unit.policy.hostile import HOSTILE, Hostile

NO_LONGER_THAN = 0.2


def refusal(hostile: Hostile, folder: Path) -> tuple[str, float]:
    """What the reader says, and the processor seconds it took to say it: its own, without the suite's garbage."""
    path = folder / f"reefknot{hostile.suffix}"
    path.write_bytes(hostile.data)
    gc.disable()
    began = time.process_time()
    try:
        read_file(path)
        said = ""
    except ConfigurationError as error:
        said = str(error)
    finally:
        taken = time.process_time() - began
        gc.enable()
    return said, taken


@for_each_row("name", HOSTILE)
def test_a_hostile_file_is_refused_quickly_and_with_its_reason(name: str, tmp_path: Path) -> None:
    message, seconds = min((refusal(HOSTILE[name], tmp_path) for _ in range(3)), key=lambda one: one[1])

    assert HOSTILE[name].reason in message
    assert "reefknot" + HOSTILE[name].suffix in message
    assert seconds < NO_LONGER_THAN * slowness()

    assert len(HOSTILE) >= 50


def test_control_the_safe_loader_alone_builds_what_the_limits_refuse() -> None:
    """The alias bomb is one to PyYAML's safe loader too: the limits are what stops it."""
    import yaml

    small_bomb = "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]"
    built = yaml.safe_load(small_bomb)
    assert sum(len(row) for part in built["c"] for row in part) == 4**3
    assert yaml.safe_load("a: &a [*a]")["a"][0][0] is not None


def nested(levels: int) -> dict[str, Callable[[], str]]:
    """A document of so many levels, the document's own mapping included, in each format."""
    inner = levels - 1
    return {
        "yaml": lambda: "a: " + "[" * inner + "]" * inner,
        "json": lambda: '{"a": ' + "[" * inner + "]" * inner + "}",
        "toml": lambda: "a = " + "[" * inner + "]" * inner,
    }


def flat(values: int) -> dict[str, str]:
    """A document of so many values, the mapping and the list counted."""
    items = ", ".join(["1"] * (values - 2))
    return {"yaml": f"a: [{items}]", "json": f'{{"a": [{items}]}}', "toml": f"a = [{items}]"}


@pytest.mark.parametrize("kind", ["yaml", "json", "toml"])
def test_the_last_within_a_bound_is_accepted_and_the_next_is_refused_in_every_format(kind: Format) -> None:
    number = {"yaml": "a: {}", "json": '{{"a": {}}}', "toml": "a = {}"}[kind]
    for accepted, refused, reason in (
        (nested(MOST_LEVELS)[kind](), nested(MOST_LEVELS + 1)[kind](), "32 levels"),
        (flat(MOST_NODES)[kind], flat(MOST_NODES + 1)[kind], "limit of 10000"),
        (number.format(2**63 - 1), number.format(2**63), "64 bits"),
    ):
        assert read_text(accepted, format=kind).value["a"]
        with pytest.raises(ConfigurationError, match=reason):
            read_text(refused, format=kind)


def test_size_is_counted_in_bytes_keys_are_no_values_and_a_hundred_aliases_are_accepted() -> None:
    text = "# " + "é" * (MOST_BYTES // 2 - 1)
    assert read_text(text).value == {}
    with pytest.raises(ConfigurationError, match="256 kB"):
        read_text(text + "x")

    text = "\n".join(f"k{n}: 1" for n in range(MOST_NODES - 1))
    assert len(read_text(text).value) == MOST_NODES - 1
    tree = read_text(f"a: &a 1\nb: [{', '.join(['*a'] * 100)}]")
    assert tree.value["b"] == [1] * 100


def test_control_characters_are_reported_together_but_not_without_end() -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_text("a: \x01\nb: \x02\n")
    assert [str(problem).split(": ")[0] for problem in caught.value.problems] == ["<text>:1:4", "<text>:2:4"]

    with pytest.raises(ConfigurationError) as caught:
        read_text("\x01" * 1000)
    assert len(caught.value.problems) == 10


def test_offsets_become_lines_and_columns_whatever_ends_the_lines() -> None:
    text = "a\r\nbc\rd\n\ne"
    expected = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (5, 1), (5, 2)]
    index = LineIndex(text)
    assert [index(offset) for offset in range(len(text) + 1)] == expected
