"""Settings of folders, patterns, and locations that are valid text whatever a file is called."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.ingest.connectors.file_selection import MAX_BYTES, Patterns, location_of, parts_of, read_settings
from reefknot.ingest.port import SourceContext


def settings(**given: Any) -> Any:
    return read_settings(SourceContext("s", {"path": "notes", **given}, Path("/base"), str))


def wanted(*paths: str, include: tuple[str, ...] = ("**",), exclude: tuple[str, ...] = ()) -> list[str]:
    patterns = Patterns(include, exclude)
    return [path for path in paths if patterns.wants(tuple(path.split("/")))]


# ---- settings --------------------------------------------------------------------------------------------------------


def test_the_defaults_read_every_visible_file_up_to_10_mib_and_follow_no_link() -> None:
    found = settings()

    assert (found.include, found.exclude, found.max_bytes) == (("**",), (), MAX_BYTES)
    assert (found.follow_symlinks, found.link_targets, found.allow_empty) == (False, (), False)


def test_a_relative_path_is_beneath_the_folder_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")

    assert settings().path == Path("/base/notes")
    assert settings(path="/abs").path == Path("/abs")
    assert settings(path="~/notes").path == Path("/home/somebody/notes")


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ParameterError, match=r"incldue=.*include, exclude.*did you mean 'include'") as caught:
        settings(incldue=["*.md"])

    assert caught.value.parameter == "incldue"


@pytest.mark.parametrize(
    ("key", "values", "accepted"),
    [
        ("path", (1, "", "a\0b"), "the path of a folder"),
        ("path", ("~no-such-user-here/x",), "the home folder in it is not known"),
        ("include", ("*.md", [1]), "a list of patterns"),
        ("exclude", (["/etc"],), "neither begins with /"),
        ("exclude", (["a/../b"],), "leads upwards"),
        ("exclude", ([""],), "a list of patterns"),
        ("exclude", (["x" * 1001],), "at most 1000 characters"),
        ("exclude", (["x"] * 1001,), "at most 1000"),
        ("max_bytes", ("10 MB", True, -1), "a whole number from 0"),
        ("follow_symlinks", ("yes",), "True or False"),
        ("link_targets", ("/data",), "a list of folders"),
        ("allow_empty", (1,), "True or False"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_accepted(key: str, values: tuple[object, ...], accepted: str) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=accepted) as caught:
            settings(**{key: value})
        assert caught.value.parameter == key


def test_a_source_without_a_path_is_refused() -> None:
    with pytest.raises(ParameterError, match="the folder to read"):
        read_settings(SourceContext("s", {}, Path("/base"), str))


def test_a_value_of_another_type_is_told_apart() -> None:
    with pytest.raises(ParameterTypeError):
        settings(include="*.md")


# ---- patterns --------------------------------------------------------------------------------------------------------


def test_hidden_files_and_folders_are_wanted_only_when_a_pattern_spells_the_dot() -> None:
    paths = ("a.md", ".env", ".git/config", "x/.hidden/y", ".github/w/ci.yml", ".github/.cache/x")

    assert wanted(*paths) == ["a.md"]
    assert wanted(*paths, include=("**", ".github/**")) == ["a.md", ".github/w/ci.yml"]
    assert wanted(*paths, include=(".env",)) == [".env"]
    assert wanted(*paths, include=("x/.*/*",)) == ["x/.hidden/y"]


def test_a_pattern_without_a_slash_is_meant_at_any_depth() -> None:
    assert wanted("a.md", "x/y/b.md", "x/c.txt", include=("*.md",)) == ["a.md", "x/y/b.md"]
    assert wanted("a.md", "x/y/b.md", include=("./*.md",)) == ["a.md"]


def test_two_stars_stand_for_any_number_of_folders_none_included() -> None:
    paths = ("n/a.md", "n/x/a.md", "n/x/y/a.md", "m/a.md")

    assert wanted(*paths, include=("n/**/a.md",)) == ["n/a.md", "n/x/a.md", "n/x/y/a.md"]
    assert wanted(*paths, include=("n/*/a.md",)) == ["n/x/a.md"]
    assert wanted(*paths, include=("**/x/**",)) == ["n/x/a.md", "n/x/y/a.md"]


def test_a_pattern_that_matches_a_folder_means_everything_in_it() -> None:
    paths = ("build/x/y.o", "src/build/z.o", "src/a.c")

    assert wanted(*paths, exclude=("build/",)) == ["src/a.c"]
    assert wanted(*paths, exclude=("src/build",)) == ["build/x/y.o", "src/a.c"]
    assert wanted(*paths, include=("src",)) == ["src/build/z.o", "src/a.c"]


def test_exclude_wins_and_reaches_hidden_names() -> None:
    paths = ("a.md", "drafts/b.md", ".c/cache/d")

    assert wanted(*paths, include=("**", ".c/**"), exclude=("drafts/**", "cache")) == ["a.md"]


def test_a_folder_is_entered_only_when_something_in_it_may_be_wanted() -> None:
    patterns = Patterns(("docs/**/*.md",), ("docs/old",))

    assert [patterns.may_hold(parts) for parts in [(), ("docs",), ("docs", "x")]] == [True] * 3
    assert [patterns.may_hold(parts) for parts in [("src",), ("docs", "old"), ("docs", "old", "x")]] == [False] * 3


def test_a_hostile_pattern_takes_no_time() -> None:
    assert wanted("a" * 250, include=("*a" * 100 + "b",)) == []
    assert wanted("/".join("a" * 100), include=("**/a/" * 100 + "b",)) == []


# ---- locations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "location"),
    [
        (b"plain.md", "plain.md"),
        ("Ä ö.md".encode(), "Ä ö.md"),
        (b"a\nb", "a\\x0ab"),
        (b"a\xffb", "a\\xffb"),
        (b"a\\xffb", "a\\\\xffb"),
        ("a\u0085".encode(), "a\\xc2\\x85"),
    ],
)
def test_a_name_that_is_no_text_gets_a_location_that_is(name: bytes, location: str) -> None:
    assert location_of(("x", os.fsdecode(name))) == f"x/{location}"
    assert parts_of(f"x/{location}") == ("x", os.fsdecode(name))


@given(
    st.lists(st.binary(min_size=1, max_size=20).filter(lambda name: not {0, 47} & set(name)), min_size=1, max_size=3)
)
def test_every_path_has_one_location_and_is_found_by_it(names: list[bytes]) -> None:
    parts = tuple(map(os.fsdecode, names))
    location = location_of(parts)

    assert location.encode().decode() == location
    assert "\n" not in location
    assert parts_of(location) == (None if {".", ".."} & set(parts) else parts)


@pytest.mark.parametrize(
    "text", ["", "/", "/etc/passwd", "a//b", "../x", "a/../b", ".", "a\0b", "a\\x2fb", "a\\", "\ud800"]
)
def test_a_text_that_is_no_location_leads_nowhere(text: str) -> None:
    assert parts_of(text) is None
