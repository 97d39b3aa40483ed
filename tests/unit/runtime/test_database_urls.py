"""`sqlite:` URLs: each spelling names one file, and the same one wherever a store is named."""

import asyncio
import os
from pathlib import Path

import pytest

import reefknot as rk
from reefknot.errors import ParameterError
from reefknot.runtime.database_urls import sqlite_path
from tests.unit.console.cli.running import Commands

SPELLINGS = {
    **dict.fromkeys(("sqlite:a.db", "sqlite:./a.db", "sqlite:///a.db", "sqlite:///./a.db"), "{here}/a.db"),
    **dict.fromkeys(("sqlite:{here}/a.db", "sqlite:////{here}/a.db", "sqlite://///{here}/a.db"), "{here}/a.db"),
    "sqlite:in/a.db": "{here}/in/a.db",
    "sqlite:~/a.db": "{home}/a.db",
    "sqlite:///~/a.db": "{home}/a.db",
    "sqlite:./~/a.db": "{here}/~/a.db",
    "sqlite:a?b.db": "{here}/a?b.db",
}
REFUSED = {
    **dict.fromkeys(("", " ", "a.db", "sqlite"), "sqlite:PATH, nats://HOST:PORT or memory:"),
    **dict.fromkeys(("sqlite:", "sqlite: ", "sqlite://", "sqlite:///", "sqlite:////"), "the path of a file is missing"),
    **dict.fromkeys(("sqlite::memory:", "sqlite://:memory:", "sqlite:///:memory:"), "a store in memory is memory:"),
    "sqlite:file::memory:?cache=shared": "a store in memory is memory:",
    **dict.fromkeys(("sqlite:file:a.db", "sqlite:///file:a.db"), "file: URLs are not supported"),
    "sqlite://a.db": "two slashes begin with a host",
    "sqlite:///a.db?timeout=5": "options after ? are not supported",
    "sqlite:~no-such-user/a.db": "no home folder is known for ~no-such-user",
}


@pytest.fixture
def home(rk_commands: Commands) -> Path:
    made = rk_commands.folder / "home"
    made.mkdir()
    rk_commands.environment.setenv("HOME", str(made))
    return made


@pytest.fixture(name="rk_commands")
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


def filled(text: str, commands: Commands, home: Path) -> str:
    """The text with the folders in it. Before `{here}` stand as many slashes as are written, its own one included."""
    return text.replace("/{here}", str(commands.folder)).replace("{here}", str(commands.folder)).format(home=home)


def stores_in(folder: Path) -> list[str]:
    return [str(one) for one in folder.rglob("*.db")]


@pytest.mark.parametrize(("spelling", "file"), SPELLINGS.items())
@pytest.mark.parametrize("place", ["--engine", "configuration", "environment", "open_store", "connect"])
def test_a_spelling_names_the_same_file_everywhere(
    place: str, spelling: str, file: str, rk_commands: Commands, home: Path
) -> None:
    url, expected = filled(spelling, rk_commands, home), filled(file, rk_commands, home)
    submit = ("submit", "--type", "own.step")
    match place:
        case "--engine":
            assert rk_commands(*submit, "--engine", url).code == 0
        case "configuration":
            rk_commands.write(f"engine: '{url}'\n")
            assert rk_commands(*submit).code == 0
        case "environment":
            rk_commands.environment.setenv("REEFKNOT__ENGINE", url)
            assert rk_commands(*submit).code == 0
        case "open_store":
            asyncio.run(opened_and_closed(url))
        case _:
            asyncio.run(connected(url))

    assert stores_in(rk_commands.folder) == [expected]


async def opened_and_closed(url: str) -> None:
    async with rk.open_store(url):
        pass


async def connected(url: str) -> None:
    async with rk.connect(url):
        pass


@pytest.mark.parametrize(("url", "reason"), REFUSED.items())
def test_a_url_that_names_no_file_is_refused_everywhere(url: str, reason: str, rk_commands: Commands) -> None:
    for opening in (opened_and_closed, connected):
        with pytest.raises(ParameterError) as refused:
            asyncio.run(opening(url))
        assert reason in str(refused.value)
    for words in (("submit", "--type", "own.step"), ("job", "list"), ("up", "--for", "0"), ("audit", "verify")):
        ended = rk_commands(*words, "--engine", url)
        assert (ended.code, ended.out) == (2, ""), words
        assert reason in ended.err
    rk_commands.write(f"engine: '{url}'\n")
    assert rk_commands("submit", "--type", "own.step").code == 78

    assert [one.name for one in rk_commands.folder.iterdir()] == ["reefknot.yaml"], "nothing was made"


def test_the_same_slashes_name_a_store_that_is_audited_and_a_path_that_was_resolved_stays_the_same(
    rk_commands: Commands, tmp_path: Path
) -> None:
    assert rk_commands("submit", "--type", "own.step", "--engine", "sqlite:///a.db").code == 0
    for url in ("sqlite:a.db", "sqlite:///a.db", f"sqlite:///{rk_commands.folder}/a.db"):
        assert rk_commands("audit", "verify", url).code == 0, url

    # paths are handed on as URLs inside: one may begin with two slashes, which must not become a host
    path = sqlite_path(f"sqlite:////{tmp_path}/a.db")
    assert path == os.path.normpath(path)
    assert sqlite_path(f"sqlite:{path}") == path
