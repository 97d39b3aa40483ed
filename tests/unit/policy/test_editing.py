"""An entry more in a configuration file: beneath its section, and nothing else changes."""

import json
from typing import Any

import pytest

from reefknot.errors import ConfigurationError
from reefknot.policy.editing import with_entry
from reefknot.policy.layers import Format, read_text

VALUES: dict[str, Any] = {
    "connector": "local_files",
    "path": "~/my notes",
    "every": "15m",
    "on_change": True,
    "words": ["yes", "1", "null", "a: b", "# c", "ü", "line\nbreak", "'", '"', "-", "0x1", "1e3", "~", "2026-01-01"],
    "numbers": [1, 1.5, -3],
    "deep": {"a b": [1, {"c": False}]},
}


def longer(text: str, written_in: Format = "yaml", name: str = "notes") -> str:
    return with_entry(text, "sources", name, values=VALUES, file="f", written_in=written_in)[0]


HEAD, ENTRY = "engine: memory\r\nsources:\r\n", "  a: {connector: x_y}\r\n"


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("", "", ""),
        ("engine: memory", "engine: memory\n\n", ""),
        ("# first\nengine: memory\n", "# first\nengine: memory\n\n", ""),
        ("sources:\nengine: memory\n", "sources:\n", "engine: memory\n"),
        ("sources:", "sources:\n", ""),
        ("sources:   # ours\n  # old: {}\nengine: memory\n", "sources:   # ours\n", "  # old: {}\nengine: memory\n"),
        ("sources: {}\nengine: memory\n", "sources:\n", "engine: memory\n"),
        ("sources: {}  # none yet\n", "sources: # none yet\n", ""),
        ("sources: null\n", "sources:\n", ""),
        ('"sources":\n    a: {connector: x_y}\n', '"sources":\n', "    a: {connector: x_y}\n"),
        (HEAD + ENTRY, HEAD, ENTRY),
        ("\ufeffsources:\n", "\ufeffsources:\n", ""),
    ],
)
def test_lines_are_added_to_yaml_and_no_other_byte_changes(text: str, before: str, after: str) -> None:
    found = longer(text)
    assert found.startswith(before)
    assert found.endswith(after)
    old, new = read_text(text).value, read_text(found).value
    assert new.pop("sources") == (old.pop("sources", None) or {}) | {"notes": VALUES}
    assert new == old
    added = found[len(before) : len(found) - len(after)]
    assert ("\r\n" in added) == ("\r\n" in text)


@pytest.mark.parametrize(
    ("text", "written_in"),
    [
        *((text, "yaml") for text in ("{engine: memory}", "---\nengine: memory\n...\n")),
        *((f"sources: {text}{{a: {{connector: x_y}}}}\n", "yaml") for text in ("", "&all ")),
        ("x: &all {a: {connector: x_y}}\nsources: *all\n", "yaml"),
        ("sources = {}\n", "toml"),
        ("sources = { a = { connector = 'x_y' } }\n", "toml"),
    ],
)
def test_a_form_that_lines_cannot_extend_is_refused_with_the_entry(text: str, written_in: Format) -> None:
    with pytest.raises(ConfigurationError, match="by hand: notes"):
        longer(text, written_in)


def test_a_table_is_added_to_toml_and_a_file_with_mistakes_is_refused_as_it_is() -> None:
    values = {key: value for key, value in VALUES.items() if key != "deep"} | {"deep": {"a b": [1, 2]}}
    text = '# ours\n[sources."a b"]\nconnector = "x_y"'
    found, added = with_entry(text, "sources", "no.tes", values=values, file="f", written_in="toml")
    assert found.startswith(text + "\n\n" + '[sources."no.tes"]\n')
    assert added in found
    assert read_text(found, format="toml").value["sources"]["no.tes"] == values

    with pytest.raises(ConfigurationError, match="already given"):
        longer("engine: a\nengine: b\n")


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_keeps_its_indentation(indent: int | str | None) -> None:
    old = {"engine": "memory", "sources": {"a": {"connector": "x_y"}}}
    text = json.dumps(old, indent=indent)
    assert longer(text, "json") == json.dumps(old | {"sources": {**old["sources"], "notes": VALUES}}, indent=indent)  # type: ignore[dict-item]
