"""
`PolicyBook`: the policies of a system, read from files, resolved with provenance, explained, and used by retriers.

A book is reloaded only when asked, whole or not at all; policies that were resolved before stay as they were.
"""

import builtins
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, Unpack

from reefknot.core import checks
from reefknot.core.classify import KNOWN_CLASSES, classify, status_in
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.policy import class_name
from reefknot.errors import ParameterError
from reefknot.policy.layers import Tree, environment, merge, read_file, read_text
from reefknot.policy.model.book import Book, Request, ResolvedPolicy, content_hash
from reefknot.policy.model.defaults import builtin_book, operation_target
from reefknot.policy.model.explain import Explanation, explain
from reefknot.retrying.retrier import Retrier
from reefknot.retrying.types import RetryKeywords

MOST_REMEMBERED = 4096


class PolicyBook:
    """All policies of a system, in layers: `load` reads files, `loads` a text; `PolicyBook()` is what is built in."""

    def __init__(self) -> None:
        self._paths: tuple[Path, ...] = ()
        self._environ: Mapping[str, str] | None = None
        self._tree = merge()
        self._book = builtin_book(content_hash(_check().retry_part({})))
        self.version = 1
        self._resolved: dict[object, ResolvedPolicy] = {}

    @classmethod
    def load(cls, *paths: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> Self:
        """Read files, later ones over earlier ones, and `REEFKNOT__…` variables over them."""
        book = cls()
        book._paths = tuple(Path(path) for path in paths)
        book._environ = os.environ if environ is None else environ
        book._tree, book._book = book._read(book._environ)
        return book

    @classmethod
    def loads(cls, text: str, *, format: Literal["yaml", "json", "toml"] = "yaml", name: str = "<text>") -> Self:  # noqa: A002
        """Read one text in one of the three formats."""
        book = cls()
        book._tree = read_text(text, name=name, format=format)
        book._book = _check().checked(book._tree)[1]
        return book

    @classmethod
    def of(cls, book: Book) -> Self:
        """A `PolicyBook` around a snapshot that was read elsewhere."""
        front = cls()
        front._book = book
        return front

    def reload(self) -> bool:
        """
        Read the files again and return whether the policies changed. A mistake is raised, and the old policies stay.

        A book that was not read from files stays as it is.
        """
        if self._environ is None:
            return False
        tree, book = self._read(self._environ)
        changed = book.hash != self._book.hash
        self._tree, self._book = tree, book
        self.version += changed
        return changed

    def _read(self, environ: Mapping[str, str]) -> tuple[Tree, Book]:
        tree = merge(*(read_file(path) for path in self._paths), environment(environ))
        return tree, _check().checked(tree)[1]

    @property
    def hash(self) -> str:
        """The hash of the book's content, independent of where it was written."""
        return self._book.hash

    @property
    def snapshot(self) -> Book:
        """The frozen book in force now."""
        return self._book

    @property
    def targets(self) -> tuple[str, ...]:
        """Every target that has an entry of its own."""
        return tuple(sorted(self._book.targets))

    @property
    def sources(self) -> Mapping[str, str]:
        """Every configured source, with its connector."""
        return {name: connector for name, (connector, _) in self._book.sources.items()}

    def dump(self) -> str:
        """The written settings as YAML; loading it gives the same book."""
        import yaml

        return str(yaml.safe_dump(self._tree.value, sort_keys=False, allow_unicode=True))

    def resolve(
        self,
        target: str,
        *,
        source: str | None = None,
        retry_count: int | None = None,
        timeout_ms: int | None = None,
        backoff_ms: int | None = None,
        **failure: Any,
    ) -> ResolvedPolicy:
        """
        The policy for a target, with the provenance of every field.

        Of the failure: `code`, `http_status`, `failure_type`, `exception`, `message`, `retry_after`. Without any of
        them the result is the policy before anything has failed.
        """
        key: object = (self._book, target, source, retry_count, timeout_ms, backoff_ms, *failure.items())
        try:
            found = self._resolved.get(key)
        except TypeError:  # not hashable: looked at below, and refused there if it is wrong
            key, found = None, None
        if found is None:
            request = request_of(retry_count=retry_count, timeout_ms=timeout_ms, backoff_ms=backoff_ms)
            happened = failure_from_facts(**failure) if failure else None
            found = self._book.resolve(_target(target), happened, source=source, request=request)
            if key is not None and not isinstance(failure.get("message"), str):
                if len(self._resolved) >= MOST_REMEMBERED:
                    self._resolved.clear()
                self._resolved[key] = found
        return found

    def explain(self, target: str, failure: Failure, *, source: str | None = None, **request: Any) -> Explanation:
        """The decision for a failure: whether it is retried, why, and when."""
        seed = request.pop("seed", None)
        policy = self._book.resolve(_target(target), failure, source=source, request=request_of(**request))
        return explain(_target(target), policy, failure, seed=seed)

    def retrier(self, target: str, *, source: str | None = None, **options: Unpack[RetryKeywords]) -> Retrier:
        """
        A retrier that asks the book about every failure. It also serves as `retry(policy=…)`.

        After a reload, calls that begin to fail follow the new book; those under way keep theirs. Time limits are those
        of the book it was made from.
        """
        name = _target(target)
        policy = self._book.resolve(name, source=source)
        return Retrier.following_latest(lambda: self._book.resolver(name, source=source), policy, name).using(**options)


def _check() -> ModuleType:
    """The module that checks files, imported on first use because it costs more than the rest of the book."""
    from reefknot.policy import check

    return check


def request_of(
    *, retry_count: int | None = None, timeout_ms: int | None = None, backoff_ms: int | None = None
) -> Request:
    """The retry settings of one request, checked."""
    given = (("retry_count", retry_count, 0), ("timeout_ms", timeout_ms, 1), ("backoff_ms", backoff_ms, 0))
    for name, value, least in given:
        if value is not None:
            checks.whole_number(name, value, least=least)
    return Request(
        retries=retry_count,
        base_delay=None if backoff_ms is None else backoff_ms / 1000,
        time_budget=None if timeout_ms is None else timeout_ms / 1000,
    )


def failure_from_facts(
    *,
    code: ErrorCode | str | int | None = None,
    http_status: int | None = None,
    failure_type: FailureType | str | None = None,
    exception: str | None = None,
    message: str = "",
    retry_after: float | None = None,
) -> Failure:
    """The failure that the given facts describe."""
    if http_status is not None and (isinstance(http_status, bool) or not isinstance(http_status, int)):
        raise ParameterError("http_status", http_status, "a whole number, such as 503")
    known = _code(code)
    status = http_status if http_status is not None else status_in(message)
    if known is None and status is not None and failure_type is None and exception is None:
        known = ErrorCode.http_error
    return classify(
        message,
        code=known,
        failure_type=None if failure_type is None else checks.choice("failure_type", failure_type, FailureType),
        exceptions=() if exception is None else exception_names(exception),
        http_status=status,
        retry_after=retry_after,
    )


def _target(target: str) -> str:
    kind, _, name = target.partition(":")
    return operation_target(name) if kind == "operation" and name else target


def _code(code: ErrorCode | str | int | None) -> ErrorCode | None:
    if code is None or isinstance(code, ErrorCode):
        return code
    code = str(code)
    if code.isascii() and code.isdigit() and int(code) in {one.value for one in ErrorCode}:
        return ErrorCode(int(code))
    try:
        return ErrorCode[code.lower()]
    except KeyError:
        raise ParameterError("code", code, f"one of {', '.join(one.name for one in ErrorCode)}") from None


# ---- exceptions by their names ---------------------------------------------------------------------------------------

LIBRARIES = frozenset(
    {
        *("asyncio", "concurrent.futures", "http.client", "imaplib", "json", "poplib", "smtplib", "socket", "sqlite3"),
        *("ssl", "subprocess", "urllib.error", "zlib", "anyio", "trio", "nats.errors", "nats.js.errors"),
        *("httpx", "httpx2", "httpcore", "httpcore2", "requests", "requests.exceptions", "urllib3.exceptions"),
        *("aiohttp", "aiohttp.client_exceptions", "botocore.exceptions", "grpc", "google.api_core.exceptions"),
        *("psycopg", "psycopg.errors", "psycopg_pool", "apsw", "imap_tools", "imap_tools.errors"),
        *("reefknot", "reefknot.errors"),
    }
)
"""The modules that may be imported to look up a name: the standard library and well-known clients."""

_HTTPX = {
    **dict.fromkeys(("ConnectTimeout", "ReadTimeout", "WriteTimeout", "PoolTimeout"), "TimeoutException"),
    **dict.fromkeys(("ConnectError", "ReadError", "WriteError", "CloseError"), "NetworkError"),
}
"""The parents of httpx's exceptions, for installations without httpx: a router needs no HTTP client."""


def exception_class(name: str) -> type[BaseException] | None:
    """
    The exception class of this name; None when it does not exist or its module may not be imported.

    The name may come from outside, so only `LIBRARIES` are imported for it; other classes are found if their module is
    loaded already, as those of `--module` are.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if (module := _module(".".join(parts[:length]))) is not None:
            return _class_in(module, parts[length:])
    return _class_in(builtins, parts)


def exception_names(name: str) -> tuple[str, ...]:
    """The names of the class and of its ancestors, as those of an exception that is raised; else the name alone."""
    found = exception_class(name)
    if found is not None:
        return tuple(class_name(cls) for cls in found.__mro__ if cls not in (object, BaseException))
    library, _, bare = name.rpartition(".")
    if library in ("httpx", "httpx2") and bare in _HTTPX:
        return name, f"{library}.{_HTTPX[bare]}"
    return (name,)


def is_known_exception(name: str) -> bool:
    """Whether more than the bare name is known of an exception."""
    return exception_names(name) != (name,) or name in KNOWN_CLASSES


def _module(name: str) -> ModuleType | None:
    if name not in LIBRARIES:
        return sys.modules.get(name)
    try:
        return import_module(name)
    except Exception:  # not installed, or broken
        return None


def _class_in(module: ModuleType, path: list[str]) -> type[BaseException] | None:
    """The exception class at a path of names. Looking for it runs no code, but for a library's own lazy names."""
    found: Any = module
    for part in path:
        lazy = isinstance(found, ModuleType) and found.__name__ in LIBRARIES
        found = getattr(found, part, None) if lazy else getattr_static(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
