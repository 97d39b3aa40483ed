"""Connectors by name: the built-in ones, those of packages, and one's own."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import ConfigurationError, ParameterError, ParameterTypeError, SourceError
from reefknot.ingest.connectors import registry as registry_module
from reefknot.ingest.connectors.github_repository import GithubRepository
from reefknot.ingest.connectors.registry import (
    BUILTIN,
    ConnectorRegistry,
    builtin_connectors,
    connector,
    connector_named,
    load_connectors,
    offered_connectors,
)
from reefknot.ingest.port import Connector, Document, FetchRequest, KnownItem, KnownItems, Page, SourceContext
from tests.unit.ingest.connectors.memory_sink import failing


class Nothing:
    """No known items."""

    async def at(self, locations: object) -> dict[str, KnownItem]:
        return {}

    async def like(self, fingerprint: str) -> list[KnownItem]:
        return []

    async def after(self, location: str, limit: int, *, prefix: str = "") -> list[KnownItem]:
        return []


REQUEST = FetchRequest("", Nothing())
CONTEXT = SourceContext("mine", {"colour": "red"}, Path("/"), lambda reference: "")
PAPER = Document("1", "paper", "1")


def own_registry(thing: Any) -> ConnectorRegistry:
    """A registry with one connector of one's own, team_wiki."""
    own = ConnectorRegistry()
    connector("team_wiki", into=own)(thing)
    return own


def made(thing: Any) -> Connector:
    return connector_named("team_wiki", own=own_registry(thing), found=[])(CONTEXT)


async def cursor_of(one: Connector) -> str:
    return (await one.fetch(REQUEST)).cursor


class Small:
    def __init__(self, context: SourceContext) -> None:
        self.context = context

    async def fetch(self, request: FetchRequest) -> Page:
        return Page(cursor=self.context.settings["colour"])


class Whole(Small):
    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        return PAPER if location == "paper" else None

    async def test(self) -> str:
        return "a wiki"

    async def close(self) -> None:
        self.context.settings["closed"]

    async def watch(self) -> AsyncIterator[None]:
        yield None


async def test_a_class_is_made_with_the_settings_of_its_source_and_a_function_is_a_small_connector() -> None:
    async def fetch(request: FetchRequest) -> Page:
        return Page(cursor="alone")

    async def fetch_with_context(context: SourceContext, request: FetchRequest) -> Page:
        return Page(cursor=context.settings["colour"])

    assert [await cursor_of(made(thing)) for thing in (Small, fetch, fetch_with_context)] == ["red", "alone", "red"]


async def test_what_a_class_does_not_define_says_so() -> None:
    small = made(Small)

    assert (await small.test()).endswith("nothing was reached: the connector team_wiki has no method test")
    await small.close()
    assert not hasattr(small, "watch")
    with failing("team_wiki cannot read paper by itself: it has no method fetch_item"):
        await small.fetch_item("paper", Nothing())


async def test_what_a_class_defines_is_used() -> None:
    whole = made(Whole)

    assert [await whole.fetch_item(place, Nothing()) for place in ("paper", "stone")] == [PAPER, None]
    assert await whole.test() == "a wiki"
    assert hasattr(whole, "watch")
    with pytest.raises(KeyError, match="closed"):
        await whole.close()


@pytest.mark.parametrize("answer", [None, {"documents": []}])
async def test_a_fetch_that_returns_no_page_is_told_so(answer: object) -> None:
    async def fetch(request: FetchRequest) -> Any:
        return answer

    with pytest.raises(SourceError, match=f"fetch of the connector team_wiki returned {type(answer).__name__}; acc"):
        await made(fetch).fetch(REQUEST)


class NoFetch:
    def __init__(self, context: SourceContext) -> None: ...


class PlainFetch(NoFetch):
    def fetch(self, request: FetchRequest) -> Page:
        return Page("")


class TwoArguments:
    def __init__(self, context: SourceContext, more: int) -> None: ...

    async def fetch(self, request: FetchRequest) -> Page:
        return Page("")


def plain(request: FetchRequest) -> Page:
    return Page("")


async def of_three(a: int, b: int, c: int) -> Page:
    return Page("")


@pytest.mark.parametrize("thing", [NoFetch, PlainFetch, TwoArguments, plain, of_three, 7])
def test_what_cannot_be_a_connector_is_refused_at_once(thing: Any) -> None:
    with pytest.raises(ParameterTypeError, match="a class that takes a SourceContext and has `async def fetch"):
        connector("team_wiki", into=ConnectorRegistry())(thing)


@pytest.mark.parametrize("name", ["", "ab", "Team", "team-wiki", "team.wiki", "1wiki", "x" * 65, "a b c"])
def test_a_name_that_a_configuration_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ParameterError, match="3 to 64 lower-case letters"):
        connector(name)


def test_a_name_is_a_text() -> None:
    with pytest.raises(ParameterTypeError):
        connector(7)  # type: ignore[arg-type]  # what this test is about


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_connector_is_not_replaced(name: str) -> None:
    with pytest.raises(ParameterError, match="a name that is not built in"):
        connector(name, into=ConnectorRegistry())


def test_a_type_has_one_connector() -> None:
    own = own_registry(Small)
    connector("team_wiki", into=own)(Small)  # its module was imported again

    with pytest.raises(ParameterError, match="a type that no other connector has"):
        connector("team_wiki", into=own)(Whole)


def test_an_unknown_type_is_told_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ParameterError) as refused:
        connector_named("github_repo", own=own_registry(Small), found=[])

    assert str(refused.value) == (
        "connector='github_repo' is not accepted: one of team_wiki, local_files, obsidian_vault, imap_mailbox, "
        "github_repository; one of your own comes by --module; did you mean 'github_repository'?"
    )


def test_the_built_in_connectors_are_known_and_imported_when_they_are_made() -> None:
    assert list(builtin_connectors()) == ["local_files", "obsidian_vault", "imap_mailbox", "github_repository"]
    context = SourceContext("demo", {"repository": "octo/demo"}, Path("/"), lambda reference: "")

    assert isinstance(connector_named("github_repository", found=[])(context), GithubRepository)


def test_a_library_that_is_not_installed_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'httpx2'", name="httpx2")

    monkeypatch.setattr(registry_module, "import_module", missing)

    with pytest.raises(ConfigurationError, match=r"github_repository needs the extra 'ingest': pip install '\.\[in"):
        builtin_connectors()["github_repository"](CONTEXT)


# ---- modules and packages --------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(registry_module, "registry", ConnectorRegistry())
    yield tmp_path / "sources_of_mine.py"
    sys.modules.pop("sources_of_mine", None)


SOURCE = """
from reefknot.ingest.connectors.registry import connector
from reefknot.ingest.port import Page

@connector("team_wiki")
async def fetch(request):
    return Page(cursor="loaded")
"""


@pytest.mark.parametrize("name", ["sources_of_mine", "sources_of_mine.py", "./sources_of_mine.py"])
def test_a_module_brings_its_connectors(module: Path, name: str) -> None:
    module.write_text(SOURCE)

    assert list(load_connectors(name, path=str(module.parent))) == ["team_wiki"]
    assert list(load_connectors(name, path=str(module.parent))) == ["team_wiki"], "a second time, too"
    assert asyncio.run(cursor_of(connector_named("team_wiki", found=[])(CONTEXT))) == "loaded"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "it has no class or function under @reefknot.connector"),
        ("x = 1\n1 / 0", "sources_of_mine.py:2: ZeroDivisionError"),
        (None, "there is no module sources_of_mine here"),
    ],
)
def test_a_module_that_brings_none_is_a_configuration_error(module: Path, text: str | None, problem: str) -> None:
    if text is not None:
        module.write_text(text)

    with pytest.raises(ConfigurationError, match=f"--module sources_of_mine: .*{problem}"):
        load_connectors("sources_of_mine", path=str(module.parent))


def entry(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{attribute}", registry_module.GROUP)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, sys.modules[Small.__module__]))


@pytest.mark.usefixtures("importable")
async def test_a_package_offers_connectors_by_entry_points() -> None:
    factory = connector_named("offered_wiki", own=ConnectorRegistry(), found=[entry("offered_wiki", "Small")])

    assert await cursor_of(factory(CONTEXT)) == "red"


def test_installed_packages_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        looks.append(group)
        return []

    monkeypatch.setattr(registry_module, "entry_points", entry_points)
    registry_module._installed.cache_clear()
    try:
        for _ in range(3):
            connector_named("local_files", own=ConnectorRegistry())
    finally:
        registry_module._installed.cache_clear()

    assert looks == [registry_module.GROUP]


@pytest.mark.usefixtures("importable")
def test_every_entry_point_that_cannot_be_used_is_named() -> None:
    offers = [entry("offered_wiki", "nothing"), entry("local_files", "Small"), entry("plain_one", "plain")]

    with pytest.raises(ConfigurationError) as wrong:
        offered_connectors(offers)

    assert [str(one).partition(" = ")[0] for one in wrong.value.problems] == [
        f"entry point {one.name}" for one in offers
    ]


@pytest.mark.usefixtures("importable")
def test_one_s_own_and_a_package_s_connector_of_one_name_are_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="connector team_wiki: an installed package offers another one"):
        connector_named("team_wiki", own=own_registry(Whole), found=[entry("team_wiki", "Small")])
