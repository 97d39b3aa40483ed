import json
import tomllib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import ConfigurationError
from reefknot.policy.layers import Format, Tree, read_text
from tests.rows import for_each_row


def mistakes(text: str, kind: Format = "yaml") -> list[str]:
    """Every mistake of a document, one line each."""
    with pytest.raises(ConfigurationError) as caught:
        read_text(text, name="f", format=kind)
    return [str(problem) for problem in caught.value.problems]


def places(tree: Tree) -> dict[tuple[str | int, ...], tuple[int | None, int | None]]:
    """Line and column of every path."""
    return {path: (mark.line, mark.column) for path, mark in tree.marks.items() if path}


# YAML


def test_yaml_marks_are_of_the_keys_and_of_the_list_items() -> None:
    tree = read_text("# first\nworker:\n  on: [1, x]\n  v2:\n    - {deep: 1}\n", name="f")
    assert tree.value == {"worker": {"on": [1, "x"], "v2": [{"deep": 1}]}}
    assert places(tree) == {
        ("worker",): (2, 1),
        ("worker", "on"): (3, 3),
        ("worker", "on", 0): (3, 8),
        ("worker", "on", 1): (3, 11),
        ("worker", "v2"): (4, 3),
        ("worker", "v2", 0): (5, 7),
        ("worker", "v2", 0, "deep"): (5, 8),
    }


@for_each_row(
    ("written", "meant"),
    [
        ("true", True), ("False", False), ("on", True), ("OFF", False), ("yes", True), ("No", False),
        ("~", None), ("null", None), ("", None), ("oN", "oN"), ("y", "y"), ("n", "n"),
        ("1", 1), ("-7", -7), ("+7", 7), ("1_000", 1000), ("0", 0), ("0x1F", 31), ("0o17", 15), ("0b101", 5),
        ("1e3", 1000.0), ("1.5", 1.5), (".5", 0.5), ("5.", 5.0), ("-2.5E-1", -0.25), ("6.02e+23", 6.02e23),
        ("1.2.3", "1.2.3"), ("12:30", "12:30"), ("190:20:30", "190:20:30"), ("2026-01-01", "2026-01-01"),
        ("0xZZ", "0xZZ"), ("0b2", "0b2"), ("1e", "1e"), ("e3", "e3"), ("10s", "10s"),
        ("nats://host:4222", "nats://host:4222"), ("=", "="),
        ("'1'", "1"), ('"true"', "true"), ("!!str 1", "1"), ("!!int '5'", 5), ("!!float 5", 5.0), ("! 1", "1"),
        ("!!bool 'yes'", True), ("!!null ''", None),
    ],
)  # fmt: skip
def test_a_yaml_word_means_what_people_mean(written: str, meant: Any) -> None:
    read = read_text(f"a: {written}").value["a"]
    assert (type(read), read) == (type(meant), meant)


@for_each_row(
    ("written", "reason"),
    [
        ("0123", "leading zero"), ("-007", "leading zero"), (".inf", "finite"), ("-.INF", "finite"), (".nan", "finite"),
        ("1e999", "finite"), ("1" * 101, "digits"), ("!!int x", "whole number"), ("!!int 1.5", "whole number"),
        ("!!float x", "not a number"), ("!!bool 1", "neither true nor false"), ("!!null x", "not null"),
        ("!!timestamp 2026-01-01", "tag !!timestamp"), ("!own x", "tag !own"), ("!!omap [a: 1]", "tag !!omap"),
        ("!own {}", "tag !own"), ('"\\ud800"', "is not YAML"),
    ],
)  # fmt: skip
def test_a_yaml_value_without_one_meaning_is_refused_at_its_place(written: str, reason: str) -> None:
    (mistake,) = mistakes(f"a: 1\nb: {written}\n")
    assert mistake.startswith("f:2:")
    assert reason in mistake


def test_yaml_keys_stay_as_they_are_written_and_every_duplicate_is_reported_with_both_positions() -> None:
    tree = read_text("429: a\non: b\nnull: c\n1.50: d\n0123: e\n'x y': f\n")
    assert list(tree.value) == ["429", "on", "null", "1.50", "0123", "x y"]

    assert mistakes("a: 1\nb: {c: 1, c: 2}\na: 3\n429: x\n'429': y\n") == [
        "f:3:1: a: the key is already given at line 1, column 1",
        "f:5:1: 429: the key is already given at line 4, column 1",
        "f:2:11: b.c: the key is already given at line 2, column 5",
    ]
    assert yaml.safe_load("a: 1\na: 3") == {"a": 3}, "the control: the safe loader takes the last without a word"

    found = mistakes("a: 0123\nb: !own x\nc: .inf\n? [k]\n: 1\n<<: 5\nd: 1\nd: 2\n?\n: 3\n")
    assert [line.split(": ")[0] for line in found] == ["f:4:3", "f:8:1", "f:9:2", "f:6:5", "f:1:4", "f:2:4", "f:3:4"]


def test_an_alias_is_a_copy_and_keeps_the_marks_of_where_it_is_written() -> None:
    tree = read_text("a: &a {x: [1]}\nb: *a\n")
    assert tree.value == {"a": {"x": [1]}, "b": {"x": [1]}}
    tree.value["b"]["x"].append(2)
    assert tree.value["a"]["x"] == [1]
    assert places(tree)[("b", "x")] == (1, 8)
    assert len(mistakes("a: &a {x: 0123}\nb: *a\nc: *a\n")) == 1, "one mistake behind an anchor is one mistake"
    given_again = read_text("a: &x 1\nb: *x\nc: &x 2\nd: *x\n")
    assert given_again.value == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_a_merge_key_fills_in_what_the_mapping_does_not_say_itself() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc:\n  x: 0\n  <<: [*a, *b]\nd:\n  <<: *a\n"
    tree = read_text(text)
    assert tree.value["c"] == {"x": 0, "y": 1, "z": 2}
    assert tree.value["d"] == yaml.safe_load(text)["d"]
    assert places(tree)[("c", "y")] == (1, 14)
    reaching = read_text("a: &a {x: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b}\nd: {'<<': 5}\n")
    assert reaching.value["c"] == {"x": 1, "y": 2}
    assert reaching.value["d"] == {"<<": 5}, "a quoted one is a name"


@for_each_row(
    ("text", "start"),
    [
        ("a: [1\nb: 2\n", "f:2:2: is not YAML: did not find expected ',' or ']'"),
        ("a:\n\t- b\n", "f:2:1: is not YAML: found character that cannot start any token"),
        ("a: 1\n b: 2\n", "f:2:3: is not YAML: mapping values are not allowed"),
        ("e: memory:\n", "f:1:10: is not YAML: mapping values are not allowed in this context (indent the keys of"),
        ("a: @b\n", "f:1:4: is not YAML: found character that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "f:2:1: a second document"),
        ("%TAG ! x\n---\na: 1\n", "f:1:1: directives other than %YAML"),
        ("# c\n\n%FOO\n---\na: 1\n", "f:3:1: directives other than %YAML"),
        ("a: *b\n", "f:1:4: alias *b has no anchor &b before it"),
    ],
)
def test_broken_yaml_is_refused_with_line_and_column(text: str, start: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(start)


def test_a_directive_and_one_document_marker_are_accepted_and_without_libyaml_all_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_text("%YAML 1.1\n---\na: 1\n...\n").value == {"a": 1}

    text = "a: &a {x: [1, 'two']}\nb:\n  <<: *a\n  429: |\n    long\n"
    with_c = read_text(text)
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert read_text(text) == with_c
    assert mistakes("a: 1\na: 2\n") == ["f:2:1: a: the key is already given at line 1, column 1"]


# JSON


def test_json_marks_are_of_the_keys_and_its_words_are_not_read_by_the_rules_of_yaml() -> None:
    tree = read_text('{"a": {"b": [1,\n  {"c": null}]}}', format="json")
    assert tree.value == {"a": {"b": [1, {"c": None}]}}
    assert places(tree) == {
        ("a",): (1, 2),
        ("a", "b"): (1, 8),
        ("a", "b", 0): (1, 14),
        ("a", "b", 1): (2, 3),
        ("a", "b", 1, "c"): (2, 4),
    }

    tree = read_text('{"a": "on", "b": "1e3", "c": 1e3, "on": true, "d": "~", "e": -0.5, "f": "0123"}', format="json")
    assert tree.value == {"a": "on", "b": "1e3", "c": 1000.0, "on": True, "d": "~", "e": -0.5, "f": "0123"}


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
            max_leaves=10,
        ),
        max_size=4,
    )
)  # fmt: skip
def test_json_reads_what_the_standard_library_wrote(value: dict[str, Any]) -> None:
    assert read_text(json.dumps(value, indent=1), format="json").value == value


@for_each_row(
    ("text", "start"),
    [
        ('{"a": 1,\n"a": 2}', "f:2:1: a: the key is already given at line 1, column 2"),
        ('{"a": NaN}', "f:1:7: a: a number is finite"),
        ('{"a": -Infinity}', "f:1:7: a: a number is finite"),
        ('{"a": 1e400}', "f:1:7: a: a number is finite"),
        ('{"a": 01}', "f:1:7: a: is not JSON: '0' where a value"),
        ('{"a": +1}', "f:1:7: a: is not JSON: '+' where a value"),
        ('{"a": 1.}', "f:1:7: a: is not JSON: '1' where a value"),
        ('{"a": hunter2}', "f:1:7: a: is not JSON: 'h' where a value (text stands in double quotes)"),
        ("{'a': 1}", "f:1:2: is not JSON: \"'\" where a key in double quotes"),
        ('{"a": 1,}', "f:1:9: is not JSON: '}' where a key"),
        ('{"a": [1,]}', "f:1:10: a[1]: is not JSON: ']' where a value"),
        ('{"a" 1}', "f:1:6: a: is not JSON: '1' where a colon"),
        ('{"a": 1 "b": 2}', "f:1:9: is not JSON: '\"' where a comma or the closing brace"),
        ('{"a": [1 2]}', "f:1:10: a: is not JSON: '2' where a comma or the closing bracket"),
        ('{"a": 1', "f:1:8: is not JSON: the end where a comma"),
        ('{"a": 1} {}', "f:1:10: is not JSON: '{' where the end of the document"),
        ('{"a": "x\ny"}', "f:1:7: a: is not JSON: the text that begins here has no end"),
        ('{"a": "\\x"}', "f:1:8: a: is not JSON: invalid \\escape"),
        ('{"a": 1} // note', "f:1:10: is not JSON: '/'"),
        ("[1]", "f:1:1: a configuration is a mapping of names to settings, not a list"),
        ("null", "f:1:1: a configuration is a mapping of names to settings, not a single value"),
    ],
)  # fmt: skip
def test_broken_json_is_refused_with_line_and_column(text: str, start: str) -> None:
    (mistake,) = mistakes(text, "json")
    assert mistake.startswith(start)
    assert "hunter2" not in mistake


# TOML

TOML = '''\
title = "x" # note
a.b = 1
text = """
[not.a.table]
k = "]" """
raw = \'\'\'
key = 1 \'\'\'
[t.u]
k = [1, # one
  {z = 2, "y".q = "}"}]
"q.r" = 1979-05-27 07:32:00
[[arr]]
n = 1
[[arr]]
n = 0x10
[arr.sub]
m = inf_ = 3
'''.replace("inf_ = ", "")


def test_toml_keys_are_found_where_they_stand_and_their_duplicates_with_both_positions() -> None:
    tree = read_text(TOML, format="toml")
    assert tree.value["t"]["u"] == {"k": [1, {"z": 2, "y": {"q": "}"}}], "q.r": "1979-05-27T07:32:00"}
    found = places(tree)
    assert found[("title",)] == (1, 1)
    assert found[("a", "b")] == (2, 3)
    assert found[("raw",)] == (6, 1)
    assert found[("t", "u")] == (8, 4)
    assert found[("t", "u", "k", 1)] == (10, 3)
    assert found[("t", "u", "k", 1, "y", "q")] == (10, 15)
    assert found[("t", "u", "q.r")] == (11, 1)
    assert found[("arr", 1, "n")] == (15, 1)
    assert found[("arr", 1, "sub", "m")] == (17, 1)

    assert mistakes("a = 1\na = 2\n[b]\nc = 1\n[b]\n[[d]]\nx = 1\n[[d]]\nx = 1\nx = 2\n", "toml") == [
        "f:2:1: a: the key is already given at line 1, column 1",
        "f:5:2: b: the key is already given at line 3, column 2",
        "f:10:1: d[1].x: the key is already given at line 9, column 1",
    ]


def test_every_toml_path_has_a_mark_of_its_own() -> None:
    def paths(value: Any, at: tuple[str | int, ...] = ()) -> set[tuple[str | int, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return {at}.union(*(paths(item, (*at, key)) for key, item in inner))

    tree = read_text(TOML, format="toml")
    assert set(tree.marks) == paths(tree.value) == paths(tomllib.loads(TOML))


@for_each_row("key", ['"a\\u00e9\\n"', "'a\\u'", '"x y"', "bare-1", '"#"', "'='", '""'])
def test_a_toml_key_has_the_name_the_reader_gives_it(key: str) -> None:
    tree = read_text(f"[t]\n{key} = 1", format="toml")
    (name,) = tree.value["t"]
    assert places(tree)[("t", name)] == (2, 1)


@for_each_row(
    ("text", "start"),
    [
        ("a = = 1", "f:1:5: is not TOML: Invalid value"),
        ("a = 1\nb\n", "f:2:2: is not TOML"),
        ("a = ", "f:1:5: is not TOML"),
        ("a = 1\n[a]\n", "f:2:3: is not TOML: Cannot"),
        ("a = [1", "f:1:7: is not TOML"),
        ("a = nan", "f:1:1: a: a number is finite"),
        ("[t]\na = -inf", "f:2:1: t.a: a number is finite"),
        ("a = 0x" + "f" * 17, "f:1:1: a: the number does not fit in 64 bits"),
        ("a = " + "9" * 5000, "f: is not TOML that can be read"),
        ('a = "\\u0000"', "f:1:1: a: text with the character U+0000"),
    ],
)
def test_broken_toml_is_refused_with_line_and_column(text: str, start: str) -> None:
    (mistake,) = mistakes(text, "toml")
    assert mistake.startswith(start)


# All three


def test_the_three_formats_say_the_same() -> None:
    as_yaml = read_text('a: {b: [1, 2.5, x], c: true}\n"429": "on"\n')
    as_json = read_text('{"a": {"b": [1, 2.5, "x"], "c": true}, "429": "on"}', format="json")
    as_toml = read_text('429 = "on"\n[a]\nb = [1, 2.5, "x"]\nc = true\n', format="toml")
    assert as_yaml.value == as_json.value == as_toml.value
