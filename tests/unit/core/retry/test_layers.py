"""Who said what, and who wins."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reefknot.core.retry.book import NOTHING_SAID, Layer, Patch, Said, merge, patch, settle

FIELDS = st.sampled_from(["max_attempts", "base_delay", "jitter"])
PATCHES: st.SearchStrategy[Patch] = st.builds(
    patch, st.sampled_from(Layer), st.sampled_from(["a.yaml:1", "b.yaml:2"]), st.dictionaries(FIELDS, st.integers(0, 9))
)


@given(PATCHES, PATCHES, PATCHES)
def test_merging_is_associative(a: Patch, b: Patch, c: Patch) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@given(PATCHES)
def test_nothing_said_changes_nothing(a: Patch) -> None:
    assert merge(a, NOTHING_SAID) == a == merge(NOTHING_SAID, a)


@given(st.lists(PATCHES, max_size=6))
def test_the_named_layer_is_always_the_one_whose_value_won(patches: list[Patch]) -> None:
    settled = settle(patches)

    for field, winner in settled.items():
        speakers = [one[field] for one in patches if field in one]
        last = speakers[-1]
        assert (winner.value, winner.layer, winner.source) == (last.value, last.layer, last.source)
        assert winner.overrode == tuple(reversed(speakers[:-1]))


@given(st.lists(PATCHES, max_size=6))
def test_a_field_that_nobody_spoke_of_is_not_there(patches: list[Patch]) -> None:
    assert set(settle(patches)) == {field for one in patches for field in one}


def test_said_none_beats_said_something() -> None:
    settled = settle([patch(Layer.BUILTIN, "x", {"time_budget": 30}), patch(Layer.TARGET, "y", {"time_budget": None})])

    assert settled["time_budget"].value is None
    assert settled["time_budget"].overrode == (Said(30, Layer.BUILTIN, "x"),)


def test_a_patch_cannot_be_changed_afterwards() -> None:
    fields: dict[str, Any] = {"max_attempts": 3}
    one = patch(Layer.GLOBAL, "x", fields)
    fields["max_attempts"] = 9

    assert one["max_attempts"].value == 3


def test_layers_rank_from_the_built_in_to_the_request() -> None:
    ranked = sorted(Layer, key=lambda layer: layer.rank)

    assert [layer.value for layer in ranked] == [
        *("builtin", "global", "category", "target", "override", "source", "request"),
    ]
