"""What the configuration's `blocks` may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reefknot.blocks.settings import Access, BlockSettings, SqlConnection, read_settings
from reefknot.errors import ConfigurationError


@pytest.mark.parametrize("nothing", [None, {}, {"http": None}])
def test_without_a_word_files_and_databases_are_closed(nothing: Any) -> None:
    settings = read_settings(nothing)

    assert settings == BlockSettings()
    assert (settings.fs.roots, settings.sql.connections, settings.http.allow) == ((), {}, ())


def test_relative_paths_are_beneath_the_configuration(tmp_path: Path) -> None:
    given = {
        "fs": {"roots": ["data", "/srv"]},
        "sql": {"connections": {"main": "sqlite:a.db"}},
        "http": {"ca_file": "c"},
    }
    settings = read_settings(given, folder=tmp_path)

    assert settings.fs.roots == (tmp_path / "data", Path("/srv"))
    assert settings.sql.connections["main"].sqlite_path == str(tmp_path / "a.db")
    assert settings.http.ca_file == str(tmp_path / "c")


def test_a_connection_is_for_reading_unless_it_says_write() -> None:
    url = "postgresql://a/b"
    given = {"sql": {"connections": {"a": {"url": url}, "b": {"url": url, "access": "write", "role": "app"}}}}

    assert read_settings(given).sql.connections == {
        "a": SqlConnection(url, Access.READ),
        "b": SqlConnection(url, Access.WRITE, "app"),
    }


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ([], "blocks: [] is not accepted; accepted: a mapping with http, fs, sql"),
        ({"ftp": {}}, "blocks.ftp: no such key; accepted: http, fs, sql"),
        ({"http": {"alow": []}}, "blocks.http.alow: no such key; accepted: allow, max_response_bytes, ca_file"),
        ({"http": {"allow": "a"}}, "blocks.http.allow: 'a' is not accepted; accepted: a list"),
        ({"http": {"allow": ["a", 7]}}, "blocks.http.allow[1]: 7 is not accepted; accepted: a text"),
        ({"http": {"allow": ["127.1"]}}, "blocks.http.allow[0]: '127.1' is not accepted"),
        ({"http": {"max_response_bytes": 0}}, "blocks.http.max_response_bytes: 0 is not accepted"),
        ({"http": {"ca_file": 1}}, "blocks.http.ca_file: 1 is not accepted"),
        ({"fs": {"roots": [""]}}, "blocks.fs.roots[0]: '' is not accepted; accepted: the path of a folder"),
        ({"fs": {"max_bytes": True}}, "blocks.fs.max_bytes: True is not accepted"),
        ({"sql": {"connections": []}}, "blocks.sql.connections: [] is not accepted"),
        ({"sql": {"connections": {"a": {}}}}, "blocks.sql.connections.a.url: None is not accepted"),
        ({"sql": {"connections": {"a": "mysql://x"}}}, "accepted: sqlite:PATH or postgresql://…"),
        ({"sql": {"connections": {"a": "sqlite::memory:"}}}, "accepted: sqlite:PATH with the path of a file"),
        ({"sql": {"connections": {"a": {"url": "sqlite:x", "access": "rw"}}}}, "accepted: read or write"),
        ({"sql": {"connections": {"a": {"url": "sqlite:x", "role": 1}}}}, "a.role: 1 is not accepted"),
        ({"sql": {"allow": ["oracle:x"]}}, "blocks.sql.allow[0]: 'oracle:x' is not accepted"),
    ],
)
def test_a_mistake_is_named_with_its_path(blocks: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError) as wrong:
        read_settings(blocks)
    assert problem in str(wrong.value)


def test_a_listed_url_is_known_as_it_was_written(tmp_path: Path) -> None:
    settings = read_settings({"sql": {"allow": ["sqlite:a.db"]}}, folder=tmp_path)

    assert settings.sql.allow == {"sqlite:a.db": SqlConnection(f"sqlite:{tmp_path / 'a.db'}", Access.READ)}


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as wrong:
        read_settings({"http": {"allow": ["127.1", "10.0.0.0/99"]}, "fs": {"roots": 1}, "x": 1})
    assert len(wrong.value.problems) == 4


def test_a_password_in_a_bad_url_is_not_shown() -> None:
    with pytest.raises(ConfigurationError) as wrong:
        read_settings({"sql": {"connections": {"a": "mysql://me:hunter2@db/x"}}})
    assert "hunter2" not in str(wrong.value)
