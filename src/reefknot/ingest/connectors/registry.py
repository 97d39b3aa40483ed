"""
The connectors by name: the built-in ones, those of installed packages, and one's own under `@connector`.

`@connector("team_wiki")` registers a class that takes a `SourceContext` and has `fetch`, or an async function
`fetch(request)`; it is found by `--module`, or by an entry point of the group `reefknot.connectors`. A built-in
connector is imported when a source uses it, because each of them needs a library of its own.
"""

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from reefknot.core.checks import suggest
from reefknot.core.failure import FailureType
from reefknot.errors import ConfigurationError, ParameterError, ParameterTypeError, SourceError
from reefknot.ingest.port import Connector, ConnectorFactory, Document, FetchRequest, KnownItems, Page, SourceContext
from reefknot.runtime.user_modules import import_user_module

GROUP = "reefknot.connectors"
BUILTIN: Mapping[str, str] = {
    "local_files": "reefknot.ingest.connectors.local_files:LocalFiles",
    "obsidian_vault": "reefknot.ingest.connectors.obsidian_vault:ObsidianVault",
    "imap_mailbox": "reefknot.ingest.connectors.imap_mailbox:ImapMailbox",
    "github_repository": "reefknot.ingest.connectors.github_repository:GithubRepository",
}
"""Module and class of each built-in connector."""
_TYPE = re.compile(r"[a-z][a-z0-9_]{2,63}")  # what a configuration accepts as a connector of one's own
_ACCEPTED_TYPE = "a name of 3 to 64 lower-case letters, digits and _, a letter first: team_wiki"
_ACCEPTED_THING = (
    "a class that takes a SourceContext and has `async def fetch(self, request)`, "
    "or an async function of (request) or (context, request)"
)

Thing = TypeVar("Thing", bound=Callable[..., Any])


class OwnConnector:
    """A connector of one's own, complete: what it does not define says so when it is asked for."""

    def __init__(self, type_name: str, made: Any) -> None:
        self._type = type_name
        self._made = made
        self.is_testable = hasattr(made, "test")
        if hasattr(made, "watch"):  # an attribute only where there is something to watch: that is how it is asked
            self.watch: Callable[[], AsyncIterator[None]] = made.watch

    async def fetch(self, request: FetchRequest) -> Page:
        page = await self._made.fetch(request)
        if not isinstance(page, Page):
            self._refuse("fetch", page, "a reefknot Page")
        assert isinstance(page, Page)
        return page

    async def fetch_item(self, location: str, known: KnownItems) -> Document | None:
        if not hasattr(self._made, "fetch_item"):
            text = (
                f"the connector {self._type} cannot read {location} by itself: it has no method fetch_item; "
                "add one, or let `fetch` return the item again"
            )
            raise SourceError(text, FailureType.PERMANENT)
        item = await self._made.fetch_item(location, known)
        if item is not None and not isinstance(item, Document):
            self._refuse("fetch_item", item, "a reefknot Document or None")
        assert item is None or isinstance(item, Document)
        return item

    async def test(self) -> str:
        if not self.is_testable:
            return f"its settings are accepted, and nothing was reached: the connector {self._type} has no method test"
        return str(await self._made.test())

    async def close(self) -> None:
        if hasattr(self._made, "close"):
            await self._made.close()

    def _refuse(self, method: str, answer: object, accepted: str) -> None:
        text = f"{method} of the connector {self._type} returned {type(answer).__name__}; accepted: {accepted}"
        raise SourceError(text, FailureType.PERMANENT)


class _FetchFunction:
    """An async function as the `fetch` of a connector."""

    def __init__(self, function: Callable[..., Awaitable[Page]], arguments: tuple[SourceContext, ...]) -> None:
        self._function = function
        self._arguments = arguments

    async def fetch(self, request: FetchRequest) -> Page:
        return await self._function(*self._arguments, request)


class ConnectorRegistry:
    """Factories of connectors by their type; a type has one."""

    def __init__(self) -> None:
        self._things: dict[str, Callable[..., Any]] = {}

    def add(self, type_name: str, thing: Callable[..., Any]) -> None:
        """Register a class or a function. One that is imported again replaces itself."""
        _check_type(type_name)
        _check_thing(thing)
        known = self._things.get(type_name)
        if known is not None and _home_of(known) != _home_of(thing):
            raise ParameterError("type_name", type_name, "a type that no other connector has")
        self._things[type_name] = thing

    def factories(self) -> dict[str, ConnectorFactory]:
        return {name: partial(_make, name, thing) for name, thing in self._things.items()}

    def homes(self) -> dict[str, tuple[str, str]]:
        """Module and name of every class and function, by type."""
        return {name: _home_of(thing) for name, thing in self._things.items()}


registry = ConnectorRegistry()
"""The registry that `@connector` fills. A process has one, like it has one `sys.modules`."""


def connector(type_name: str, *, into: ConnectorRegistry | None = None) -> Callable[[Thing], Thing]:
    """
    Register a connector of this type; the class or function stays what it is.

    A class takes a `SourceContext` and has `fetch`; `fetch_item`, `test`, `close` and `watch` are optional. A small
    connector is an async function of `(request)` or `(context, request)` that returns a `Page`.
    """
    _check_type(type_name)

    def register(thing: Thing) -> Thing:
        (registry if into is None else into).add(type_name, thing)
        return thing

    return register


def load_connectors(name: str, *, path: str | None = None) -> dict[str, ConnectorFactory]:
    """
    Import a module, so that its `@connector`s register. Returns all that are registered.

    `name` is a module's name (`pkg.sources`) or its file; `path` is the folder in which it is looked for.
    """
    before = registry.homes()
    module = import_user_module(name, path=path).__name__
    after = registry.homes()
    if after == before and not any(home == module for home, _ in after.values()):
        raise ConfigurationError([f"--module {name}: it has no class or function under @reefknot.connector"])
    return registry.factories()


def offered_connectors(found: Iterable[EntryPoint] | None = None) -> dict[str, ConnectorFactory]:
    """The connectors that installed packages offer: a class or an async function, under the entry's name."""
    offered, problems = ConnectorRegistry(), []
    for entry in _installed() if found is None else found:
        try:
            offered.add(entry.name, entry.load())
        except Exception as error:  # a third party's package
            problems.append(f"entry point {entry.name} = {entry.value}: {type(error).__name__}: {error}")
    if problems:
        raise ConfigurationError(problems)
    return offered.factories()


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """The connectors of installed packages, looked for once: every sync asks, and each look reads all metadata."""
    return tuple(entry_points(group=GROUP))


def builtin_connectors() -> dict[str, ConnectorFactory]:
    """The connectors of this package. Each is imported when it makes its first connector."""
    return {name: partial(_make_builtin, name) for name in BUILTIN}


def connector_named(
    type_name: str, *, own: ConnectorRegistry | None = None, found: Iterable[EntryPoint] | None = None
) -> ConnectorFactory:
    """
    The factory of a connector: a built-in one, one's own (`own`, by default all under `@connector`), or an offered one.

    Raises `ParameterError` with the known types for any other name.
    """
    offered, registered = offered_connectors(found), (registry if own is None else own).factories()
    if twice := sorted(offered.keys() & registered.keys()):
        text = f"connector {twice[0]}: an installed package offers another one of this type; give it another name"
        raise ConfigurationError([text])
    known = offered | registered | builtin_connectors()
    if type_name not in known:
        accepted = f"one of {', '.join(known)}; one of your own comes by --module{suggest(str(type_name), known)}"
        raise ParameterError("connector", type_name, accepted)
    return known[type_name]


def _make_builtin(type_name: str, context: SourceContext) -> Connector:
    module, _, cls = BUILTIN[type_name].partition(":")
    try:
        factory: ConnectorFactory = getattr(import_module(module), cls)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("reefknot"):
            raise
        text = f"connector {type_name} needs the extra 'ingest': pip install '.[ingest]' in a checkout ({error})"
        raise ConfigurationError([text]) from error
    return factory(context)


def _make(type_name: str, thing: Callable[..., Any], context: SourceContext) -> Connector:
    if isinstance(thing, type):
        own: Callable[[SourceContext], Any] = thing
        return OwnConnector(type_name, own(context))
    return OwnConnector(type_name, _FetchFunction(thing, (context,) if _binds(thing, 2) else ()))


def _check_type(type_name: object) -> None:
    if not isinstance(type_name, str):
        raise ParameterTypeError("type_name", type_name, _ACCEPTED_TYPE)
    if not _TYPE.fullmatch(type_name):
        raise ParameterError("type_name", type_name, _ACCEPTED_TYPE)
    if type_name in BUILTIN:
        raise ParameterError("type_name", type_name, f"a name that is not built in ({', '.join(BUILTIN)})")


def _check_thing(thing: Any) -> None:
    if inspect.isclass(thing):
        fits = inspect.iscoroutinefunction(getattr(thing, "fetch", None)) and _binds(thing, 1)
    else:
        fits = inspect.iscoroutinefunction(thing) and (_binds(thing, 1) or _binds(thing, 2))
    if not fits:
        raise ParameterTypeError("connector", thing, _ACCEPTED_THING)


def _binds(function: Callable[..., Any], arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        return False
    return True


def _home_of(thing: Any) -> tuple[str, str]:
    return str(getattr(thing, "__module__", "")), str(getattr(thing, "__qualname__", ""))
