"""The settings of a GitHub source: what is accepted, and what a mistake is told."""

from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import ParameterError, ParameterTypeError
from reefknot.ingest.connectors.github_settings import GithubSettings
from reefknot.ingest.port import SourceContext


def settings(**given: Any) -> GithubSettings:
    context = SourceContext("demo", {"repository": "octo/demo", **given}, Path("/etc/reefknot"), lambda reference: "")
    return GithubSettings.of(context)


def test_a_repository_is_enough() -> None:
    found = settings()

    assert found.base_url == "https://api.github.com"
    assert found.content == ("files", "issues", "pull_requests")
    assert found.max_bytes == 1_048_576
    assert found.selects("any/file.md")


def test_everything_may_be_given() -> None:
    place = {"base_url": "https://ghe.example/api/v3/", "branch": "refs/heads/work/next", "ca_file": "ca.pem"}
    chosen = {"include": ["docs/**"], "exclude": ["*.lock"], "content": ["issues", "files"], "max_bytes": 5}
    found = settings(token="env:GITHUB_TOKEN", **place, **chosen)

    assert found.base_url == "https://ghe.example/api/v3"
    assert found.branch == "work/next"
    assert found.content == ("files", "issues")
    assert found.ca_file == Path("/etc/reefknot/ca.pem")


REPOSITRY = r"repositry='\*\*\*' is not accepted: a setting of this connector: .*did you mean 'repository'"


@pytest.mark.parametrize(
    ("key", "values", "told"),
    [
        ("repositry", ("octo/demo",), REPOSITRY),
        ("tokn", ("env:X",), "did you mean 'token'"),
        ("repository", ("demo",), "repository='demo' is not accepted: OWNER/NAME"),
        (
            "repository",
            ("https://github.com/octo/demo.git", "git@github.com:octo/demo.git"),
            "did you mean 'octo/demo'",
        ),
        ("repository", ("octo/demo/../other", "octo/..", "octo/.", "./demo", "../demo", 7), "OWNER/NAME"),
        ("base_url", ("http://ghe.example/api/v3",), "http:// only for this machine"),
        ("base_url", ("https://github.com",), "https://api.github.com for github.com"),
        ("base_url", ("ftp://ghe.example", "https://", "https://ghe.example:port"), "https://HOST"),
        ("base_url", ("https://ghe.example/?q=1",), "https://HOST"),
        ("branch", ("", "a/../b"), "the name of a branch"),
        ("include", ("docs/**",), "a list of at most 200 path patterns"),
        ("exclude", (["/"], [7]), "a list of at most 200 path patterns"),
        ("exclude", (["/docs"], ["../docs"]), "neither begins with / nor leads upwards"),
        ("exclude", (["[z-a]"],), "bad character range"),
        ("content", (["pull_request"],), "did you mean 'pull_requests'"),
        ("content", ([], "files"), "a list of files, issues, pull_requests"),
        ("max_bytes", (0, "1 MiB", True), "a whole number from 1 to 104857600"),
        ("ca_file", ("",), "the path of a file of PEM certificates"),
        ("token", (7,), "env:NAME"),
    ],
)
def test_a_mistake_is_told_with_its_key_and_what_is_accepted(key: str, values: tuple[object, ...], told: str) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=told):
            settings(**{key: value})


def test_without_a_repository_the_error_says_so() -> None:
    with pytest.raises(ParameterError, match="repository=None is not accepted: OWNER/NAME"):
        GithubSettings.of(SourceContext("demo", {}, Path("/"), lambda reference: ""))


def test_a_wrong_type_is_a_type_error_too() -> None:
    with pytest.raises(ParameterTypeError):
        settings(include="docs")


@pytest.mark.parametrize(
    "given",
    [
        {"token": "ghp_canary"},
        {"tokn": "ghp_canary"},
        {"token": "env:"},
        {"base_url": "https://u:ghp_canary@ghe.example"},
    ],
)
def test_a_secret_itself_is_refused_and_not_repeated(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        settings(**given)

    assert "ghp_canary" not in str(refused.value)
    assert "token" in str(refused.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "[::1]"])
def test_http_is_for_this_machine(host: str) -> None:
    assert settings(base_url=f"http://{host}:8080").base_url == f"http://{host}:8080"


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("*.md", ["a.md", "docs/a.md", "docs/deep/a.md"], ["a.mdx", "md", "docs/a.txt"]),
        ("docs", ["docs/a.md", "docs", "src/docs/b"], ["docs2/a", "mydocs/a"]),
        ("docs/", ["docs/a.md", "src/docs/b"], ["docs2/a"]),
        ("docs/[a-c]?.md", ["docs/a1.md", "docs/c2.md"], ["docs/d1.md", "docs/a/.md"]),
        ("[!a]*.md", ["b.md", "x/b.md"], ["a.md"]),
        ("[^]x[", ["^x["], ["ax["]),
        ("a[]b", ["a[]b"], ["ab"]),
        ("docs/**", ["docs/a.md", "docs/deep/b"], ["src/docs/b", "docs2/a"]),
        ("docs/*.md", ["docs/a.md"], ["docs/deep/a.md", "a.md"]),
        ("docs/**/*.md", ["docs/a.md", "docs/deep/deeper/a.md"], ["docs/a.txt", "a.md"]),
        ("**/test_?.py", ["test_a.py", "x/test_b.py"], ["test_ab.py", "x/test_/.py"]),
        ("a+b (1).md", ["a+b (1).md", "x/a+b (1).md"], ["aab (1).md"]),
    ],
)
def test_patterns_fit_paths(pattern: str, fits: list[str], does_not: list[str]) -> None:
    included, excluded = settings(include=[pattern]), settings(exclude=[pattern])

    assert [path for path in fits + does_not if included.selects(path)] == fits
    assert [path for path in fits + does_not if not excluded.selects(path)] == fits


def test_exclude_beats_include() -> None:
    found = settings(include=["docs/**"], exclude=["docs/old"])

    assert found.selects("docs/a.md")
    assert not found.selects("docs/old/a.md")


@pytest.mark.parametrize(
    "given",
    [{"repository": "octo/other"}, {"branch": "next"}, {"include": ["*.md"]}, {"max_bytes": 1}, {"content": ["files"]}],
)
def test_the_scope_is_another_one_when_other_documents_are_meant(given: dict[str, Any]) -> None:
    assert settings(**given).scope != settings().scope


def test_the_scope_does_not_depend_on_how_the_server_is_reached() -> None:
    assert settings(token="env:A", ca_file="a.pem").scope == settings(token="env:B").scope
