from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reefknot.policy.layers import Tree, merge, read_text

PLAIN = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3)
SETTLED = st.recursive(
    st.dictionaries(st.sampled_from("xy"), st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2)),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
"""Documents in which a name is always a mapping or never one, as every schema has it."""


def tree_of(value: dict[str, Any], name: str) -> Tree:
    import json

    return read_text(json.dumps(value), name=name, format="json")


def test_later_wins_field_by_field_lists_replace_and_null_is_a_value() -> None:
    below = read_text("a: {x: 1, y: 2}\nlist: [1, 2, 3]\nkept: {deep: {er: 1}}\n", name="below")
    above = read_text("a: {y: 3, z: 4}\nlist: [9]\n", name="above")
    tree = merge(below, above)
    assert tree.value == {"a": {"x": 1, "y": 3, "z": 4}, "list": [9], "kept": {"deep": {"er": 1}}}
    sources = [tree.mark(path).source for path in [("a", "x"), ("a", "y"), ("a", "z"), ("list",), ("kept",)]]
    assert sources == ["below", "above", "above", "above", "below"]
    assert str(tree.mark(("a",))) == "below:1:1"
    assert ("list", 2) not in tree.marks

    # why merging is not associative where kinds differ: the middle layer said null
    assert merge(read_text("a: {x: 1}"), read_text("a: ~")).value == {"a": None}
    assert merge(read_text("a: ~"), read_text("a: {x: 1}")).value == {"a": {"x": 1}}
    layers = [read_text("a: {x: 1}"), read_text("a: ~"), read_text("a: {}")]
    assert merge(*layers).value == {"a": {}}


def test_a_merged_tree_keeps_no_marks_of_what_was_replaced_and_shares_nothing_with_its_parts() -> None:
    tree = merge(read_text("a: {x: {y: [1]}}"), read_text("a: 1", name="above"))
    assert set(tree.marks) == {(), ("a",)}
    assert tree.mark(("a", "x", "y")).source == "above"

    below, above = read_text("a: {x: [1]}"), read_text("b: {y: [1]}")
    tree = merge(below, above)
    tree.value["a"]["x"].append(2)
    tree.value["b"]["y"].append(2)
    assert (below.value, above.value) == ({"a": {"x": [1]}}, {"b": {"y": [1]}})

    assert merge().value == {}
    assert str(merge().mark(("a",))) == "nothing configured"


@given(SETTLED, SETTLED, SETTLED)
def test_merging_is_associative_where_kinds_agree(
    first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]
) -> None:
    one, two, three = tree_of(first, "1"), tree_of(second, "2"), tree_of(third, "3")
    assert merge(merge(one, two), three) == merge(one, merge(two, three)) == merge(one, two, three)


@given(MAPPINGS, MAPPINGS)
def test_every_value_of_a_merged_tree_has_the_mark_of_the_tree_it_came_from(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    one, two = tree_of(first, "1"), tree_of(second, "2")
    merged = merge(one, two)

    def check(value: Any, path: tuple[str | int, ...]) -> int:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        counted = 1
        for key, item in inner:
            counted += check(item, (*path, key))
        if path and not isinstance(value, dict):
            source = two if merged.marks[path].source == "2" else one
            assert source.marks[path] == merged.marks[path]
            found: Any = source.value
            for key in path:
                found = found[key]
            assert found == value
            assert source is two or path not in two.marks
        return counted

    assert check(merged.value, ()) == len(merged.marks)
