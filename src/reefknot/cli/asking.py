"""
What a command is asked about: the settings in force, a target, a failure, a request.

Names that mean nothing are refused here, with what is accepted and what was perhaps meant, before anything is resolved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from cyclopts import Parameter

from reefknot.cli.exits import CommandError
from reefknot.cli.output import printable, say
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.book import Book, Request

if TYPE_CHECKING:
    from reefknot.config.gates import Gate
    from reefknot.config.settings import Settings

CONTROL_FLOW = frozenset(
    {"KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "asyncio.CancelledError"}
)
"""What is never retried and never classified, whatever a policy says."""

Config = Annotated[str | None, Parameter(help="The configuration file, instead of the one that would be found.")]
Json = Annotated[bool, Parameter(help="JSON on stdout, for programs.")]
Source = Annotated[str | None, Parameter(help="A configured source; its own policy is laid over its connector's.")]
Seed = Annotated[int | None, Parameter(help="Draw the waits with this seed, instead of giving their ranges.")]
Target = Annotated[str | None, Parameter(help="block:TYPE, connector:TYPE or operation:NAME.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Happened:
    """What is known of a failure."""

    error: Annotated[str | None, Parameter(help="Its error code, such as http_error or 3003.")] = None
    status: Annotated[int | None, Parameter(help="Its HTTP status.")] = None
    failure_type: Annotated[str | None, Parameter(help="Its type: transient, rate_limited, permanent or unknown.")] = (
        None
    )
    exception: Annotated[str | None, Parameter(help="Its exception, by name: TimeoutError, httpx.ReadTimeout.")] = None
    message: Annotated[str | None, Parameter(help="Its message.")] = None
    retry_after: Annotated[float | None, Parameter(help="Seconds that the server asked to wait.")] = None

    @property
    def is_control_flow(self) -> bool:
        return (self.exception or "").removeprefix("builtins.") in CONTROL_FLOW

    def failure(self) -> Failure | None:
        """The failure, None when nothing was said of it."""
        if self == Happened():
            return None
        from reefknot.config.book import failure_of
        from reefknot.core.redaction import redact

        code = None if self.error is None else _code(self.error)
        kind = None if self.failure_type is None else one_of("--failure-type", self.failure_type, dict(_TYPES))
        if self.status is not None and not 300 <= self.status <= 599:
            raise CommandError(f"--status: {self.status} is not a failure; accepted: a status from 300 to 599")
        if self.retry_after is not None and not (isfinite(self.retry_after) and self.retry_after >= 0):
            raise CommandError(f"--retry-after: {self.retry_after:g} is not accepted: seconds, 0 or more")
        return failure_of(
            code=code,
            http_status=self.status,
            failure_type=kind,
            exception=self.exception,
            message=redact(self.message or ""),
            retry_after=self.retry_after,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Asked:
    """What one request says of its own retries."""

    retry_count: Annotated[int | None, Parameter(help="The request's retries, over every policy.")] = None
    timeout_ms: Annotated[int | None, Parameter(help="The request's time for all attempts and waits.")] = None

    def request(self) -> Request:
        from reefknot.config.book import request_of

        return request_of(retry_count=self.retry_count, timeout_ms=self.timeout_ms)


_TYPES = {kind.value: kind for kind in FailureType}
T = TypeVar("T")


def one_of(flag: str, given: str, accepted: dict[str, T]) -> T:
    """The value that a word stands for, or an error that names them all."""
    found = accepted.get(given.lower().replace("-", "_"))
    if found is None:
        raise unknown(flag, given, accepted)
    return found


def unknown(flag: str, given: str, accepted: Iterable[str], *, also: str = "", prefix: str = "") -> CommandError:
    """What to say of a word that means nothing. A `prefix` that all share is no likeness."""
    from reefknot.config.document import suggest

    words = list(accepted)
    shown = given if len(given) <= 60 else given[:59] + "…"
    hint = suggest(given.removeprefix(prefix), [word.removeprefix(prefix) for word in words])
    hint = hint.replace("did you mean '", f"did you mean '{prefix}", 1)
    listed = ", ".join(words) or "none is configured"
    return CommandError(f"{flag}: {printable(shown)!r} is not known; accepted: {listed}{also}{hint}")


def _code(given: str) -> ErrorCode:
    names = {code.name: code for code in ErrorCode if code is not ErrorCode.none}
    numbers = {str(code.value): code for code in names.values()}
    return numbers.get(given) or one_of("--error", given, names)


def load(config: str | None) -> Settings:
    """The settings in force, or every mistake in them."""
    with _without_plugins():
        from reefknot.config.settings import load_settings

    return load_settings(config, environ=os.environ, cwd=Path.cwd())


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Plugins of pydantic are for the models of applications. Looking for them is a good part of a cold start."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def settings(config: str | None) -> Settings:
    """The settings in force. What a person should know about them is said on stderr."""
    found = load(config)
    for warning in found.warnings:
        say(f"warning: {warning}")
    return found


class InForce(NamedTuple):
    """What policy commands ask: the book, and whether a worker obeys it."""

    book: Book
    gate: Gate


def in_force(config: str | None) -> InForce:
    """The book and the gate. Where nothing is configured, what reads configuration is not loaded: it takes a while."""
    from reefknot.config.gates import QUEUE, RETRIES, gate
    from reefknot.config.load import find
    from reefknot.config.overlay import PREFIX

    silent = config is None and not any(name.startswith(PREFIX) for name in os.environ)
    if silent and find(None, environ=os.environ, cwd=Path.cwd()) is None:
        from reefknot.core.retry.builtin import builtin_book

        gate(QUEUE, os.environ, None)  # only to hear of a word that it does not know
        return InForce(builtin_book(), gate(RETRIES, os.environ, None))
    found = settings(config)
    return InForce(found.book, found.retries_gate)


def known_target(book: Book, target: str | None, source: str | None = None) -> str:
    """The target as the book spells it. A block may have any name; connectors and operations are known, or refused."""
    from reefknot.core.retry.operations import operation_target

    if source is not None and source not in book.sources:
        raise unknown("--source", source, sorted(book.sources))
    if target is None:
        if source is None:
            raise CommandError("--target is missing; accepted: block:TYPE, connector:TYPE or operation:NAME")
        return f"connector:{book.sources[source][0]}"
    kind, colon, name = target.partition(":")
    if kind not in ("block", "connector", "operation") or not colon or not name or not name.isprintable():
        also = "" if target in book.targets else "; a target is block:TYPE, connector:TYPE or operation:NAME"
        raise unknown("--target", target, sorted(book.targets), also=also)
    if kind == "operation":
        target = operation_target(name)
    known = all_targets(book)
    if kind != "block" and target not in known:
        raise unknown("--target", target, sorted(one for one in known if one.startswith(f"{kind}:")), prefix=f"{kind}:")
    return target


def all_targets(book: Book) -> set[str]:
    """Every target that is built in, configured, or read by a configured source."""
    return {*book.targets, *(f"connector:{connector}" for connector, _ in book.sources.values())}
