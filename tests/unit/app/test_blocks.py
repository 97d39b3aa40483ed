"""The configuration's `blocks`: what it may say, and what the blocks get from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from reefknot.app.blocks import block_settings, check_roots
from reefknot.errors import ConfigurationError
from reefknot.policy.settings import load_settings
from reefknot.steps.python import BlockSettings
from reefknot.steps.sql_rows import Access, SqlConnection

KEYS = {
    "blocks": ["http", "fs", "sql"],
    "blocks.http": ["allow", "max_response_bytes", "ca_file"],
    "blocks.fs": ["roots", "max_bytes"],
    "blocks.sql": ["connections", "allow", "max_rows", "max_bytes"],
    "blocks.sql.connections.a": ["url", "access", "role", "functions"],
}


def settings_of(folder: Path, blocks: Any) -> BlockSettings:
    (folder / "reefknot.json").write_text(json.dumps({"blocks": blocks}))
    return block_settings(load_settings(environ={}, cwd=folder))


def mistakes(folder: Path, blocks: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as wrong:
        settings_of(folder, blocks)
    return [str(problem).replace(f"{folder}/", "") for problem in wrong.value.problems]


@pytest.mark.parametrize("nothing", [None, {}, {"http": None}, {"fs": None, "sql": None}])
def test_without_a_word_files_and_databases_are_closed(nothing: Any, tmp_path: Path) -> None:
    settings = block_settings(load_settings(environ={}, cwd=tmp_path))
    assert settings == (settings if nothing is None else settings_of(tmp_path, nothing)) == BlockSettings()
    assert (settings.fs.roots, settings.sql.connections, settings.http.allow) == ((), {}, ())


def test_relative_paths_are_beneath_the_configuration(tmp_path: Path) -> None:
    sql = {"connections": {"main": "sqlite:a.db"}, "allow": ["sqlite:a.db"]}
    settings = settings_of(tmp_path, {"fs": {"roots": ["data", "/srv"]}, "sql": sql, "http": {"ca_file": "c"}})
    assert settings.fs.roots == (tmp_path / "data", Path("/srv"))
    assert settings.sql.connections["main"].sqlite_path == str(tmp_path / "a.db")
    assert settings.sql.allow == {"sqlite:a.db": SqlConnection(f"sqlite:{tmp_path / 'a.db'}", Access.READ)}
    assert settings.http.ca_file == str(tmp_path / "c")


def test_a_connection_is_for_reading_unless_it_says_write(tmp_path: Path) -> None:
    url = "postgresql://a/b"
    entries = [{"url": url}, {"url": url, "access": "write", "role": "app"}, url, {"url": url, "functions": ["a.b"]}]
    found = settings_of(tmp_path, {"sql": {"connections": dict(zip("abcd", entries, strict=True))}}).sql.connections
    reads = SqlConnection(url, Access.READ)
    kept = [reads, SqlConnection(url, Access.WRITE, "app"), reads, SqlConnection(url, Access.READ, functions=("a.b",))]
    assert list(found.values()) == kept


SQL_URL = "accepted: sqlite:PATH or postgresql://…"
SQL_FILE = "accepted: sqlite:PATH with the path of a file"
URL_KEYS = "accepted: access, functions, role, url"
HTTP_KEYS = "accepted: allow, ca_file, max_response_bytes; did you mean 'allow'?"


@pytest.mark.parametrize(
    ("section", "said", "problem"),
    [
        ("http", {"alow": []}, f"blocks.http.alow: unknown key; {HTTP_KEYS}"),
        ("http", 5, "blocks.http: 5 is not accepted; accepted: a mapping of allow, ca_file, max_response_bytes"),
        ("http", {"allow": "a"}, "blocks.http.allow: 'a' is not accepted; accepted: a list"),
        ("http", {"allow": None}, "blocks.http.allow: null is not accepted; accepted: a list"),
        ("http", {"allow": ["a", 7]}, ":1:37: blocks.http.allow[1]: 7 is not accepted; accepted: text"),
        ("http", {"allow": ["127.1"]}, ":1:32: blocks.http.allow[0]: '127.1' is not accepted; accepted: a host, an"),
        ("http", {"max_response_bytes": 0}, "0 is out of bounds; accepted: from 1 to 67108864"),
        ("http", {"max_response_bytes": 67108865}, "67108865 is out of bounds; accepted: from 1 to 67108864"),
        ("http", {"ca_file": 1}, "blocks.http.ca_file: 1 is not accepted; accepted: text"),
        ("http", {"ca_file": ""}, "blocks.http.ca_file: '' is not accepted; accepted: text that is not empty"),
        ("fs", {"roots": 1}, "blocks.fs.roots: 1 is not accepted; accepted: a list"),
        ("fs", {"roots": [""]}, "blocks.fs.roots[0]: '' is not accepted; accepted: text that is not empty"),
        ("fs", {"max_bytes": True}, "blocks.fs.max_bytes: true is not accepted; accepted: a whole number"),
        ("sql", {"connections": []}, "blocks.sql.connections: a list is not accepted; accepted: a mapping"),
        ("sql", {"connections": {"a": {}}}, "blocks.sql.connections.a.url: missing"),
        ("sql", {"connections": {"a": None}}, "blocks.sql.connections.a: null is not accepted"),
        ("sql", {"connections": {"a": {"url": 1}}}, "a.url: 1 is not accepted; accepted: text"),
        ("sql", {"connections": {"a": "mysql://x"}}, f"connections.a: 'mysql://x' is not accepted; {SQL_URL}"),
        ("sql", {"connections": {"a": {"url": "x"}}}, f"connections.a.url: 'x' is not accepted; {SQL_URL}"),
        ("sql", {"connections": {"a": "sqlite::memory:"}}, SQL_FILE),
        ("sql", {"connections": {"a": "sqlite://"}}, SQL_FILE),
        ("sql", {"connections": {"a": {"url": "sqlite:x", "access": "rw"}}}, "accepted: 'read' or 'write'"),
        ("sql", {"connections": {"a": {"url": "sqlite:x", "role": 1}}}, "a.role: 1 is not accepted"),
        ("sql", {"connections": {"a": {"url": "sqlite:x", "rol": 1}}}, f"a.rol: unknown key; {URL_KEYS}"),
        ("sql", {"allow": ["oracle:x"]}, f"blocks.sql.allow[0]: 'oracle:x' is not accepted; {SQL_URL}"),
        ("sql", {"max_rows": 1_000_001}, "1000001 is out of bounds; accepted: from 1 to 1000000"),
        ("ftp", {}, "blocks.ftp: unknown key; accepted: fs, http, sql"),
    ],
)
def test_a_mistake_is_named_with_its_position_and_path(section: str, said: Any, problem: str, tmp_path: Path) -> None:
    (mistake,) = mistakes(tmp_path, {section: said})
    assert mistake.startswith("reefknot.json:1:")
    assert problem in mistake


def test_all_mistakes_of_the_schema_or_of_addresses_are_reported_at_once(tmp_path: Path) -> None:
    wrong = {"http": {"allow": [1, 2]}, "fs": {"roots": 1}, "sql": {"connections": {"a": "x", "b": {}}}, "x": 1}
    assert [line.split(": ")[1] for line in mistakes(tmp_path, wrong)] == [
        *("blocks.http.allow[0]", "blocks.http.allow[1]", "blocks.fs.roots"),
        *("blocks.sql.connections.a", "blocks.sql.connections.b.url", "blocks.x"),
    ]
    assert len(mistakes(tmp_path, {"http": {"allow": ["127.1", "localhost", "10.0.0.0/99"]}})) == 2
    assert mistakes(tmp_path, []) == [
        "reefknot.json:1:2: blocks: a list is not accepted; accepted: a mapping of fs, http, sql, or no such key at all"
    ]


@pytest.mark.parametrize(
    "sql", [{"connections": {"a": "mysql://me:hunter2@db/x"}}, {"allow": ["oracle://me:hunter2@db"]}]
)
def test_a_password_in_a_bad_url_is_not_shown(sql: Any, tmp_path: Path) -> None:
    assert "hunter2" not in "".join(mistakes(tmp_path, {"sql": sql}))


def test_a_key_that_is_no_key_names_those_that_are(tmp_path: Path) -> None:
    for path, keys in KEYS.items():
        given: dict[str, Any] = {"unheard_of": 1}
        for part in reversed(path.split(".")[1:]):
            given = {part: given}
        said = f"{path}.unheard_of: unknown key; accepted: {', '.join(sorted(keys))}"
        assert said in "".join(mistakes(tmp_path, given))


@pytest.mark.parametrize("path", ["a/link.py", "linked/steps.py", "a/../data/steps.py", "data", "data/", "a/.."])
def test_a_file_is_beneath_a_root_wherever_links_and_dots_lead_to_it(path: str, tmp_path: Path) -> None:
    for folder in ("data", "a", "a/b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "steps.py").touch()
    (tmp_path / "a" / "link.py").symlink_to("../data/steps.py")
    (tmp_path / "linked").symlink_to("data")
    root = "." if path == "a/.." else "data"
    (tmp_path / "reefknot.json").write_text(json.dumps({"blocks": {"fs": {"roots": [root]}}}))
    settings = load_settings(environ={}, cwd=tmp_path)
    with pytest.raises(ConfigurationError, match="holds the module steps"):
        check_roots(settings, [("the module steps", str(tmp_path / path))])
    if root == "data":
        check_roots(settings, [("another module", str(tmp_path / one)) for one in ("a/b", "a", "data.py", "none")])
