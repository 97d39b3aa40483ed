"""
Strategies by name: those that are built in, and those of installed packages.

A package offers one as an entry point of the group `reefknot.strategies`. Only what a configuration names is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reefknot.config.document import suggest
from reefknot.config.positions import shortened
from reefknot.core.retry.policy import OWN_STRATEGIES, RetryStrategy
from reefknot.core.retry.strategies import register
from reefknot.errors import ParameterError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "reefknot.strategies"


def strategy_named(name: str) -> RetryStrategy | str:
    """The strategy of a name that `problem_with` has nothing against."""
    return name if name in OWN_STRATEGIES else RetryStrategy(name)


def problem_with(name: str) -> str:
    """What is wrong with a strategy's name, "" when it can be used; then it is loaded."""
    if name in OWN_STRATEGIES or name in set(RetryStrategy):
        return ""
    offered = {point.name: point for point in _offered()}
    if name not in offered:
        hint = suggest(name, [*RetryStrategy, *offered])
        return f"{shortened(name)!r} is not accepted; accepted: {accepted()}{hint}"
    try:
        register(name, offered[name].load())
    except ParameterError as error:
        return f"the strategy cannot be used: {error}"
    except Exception as error:  # another package's code: whatever it raises
        return f"the strategy cannot be loaded ({type(error).__name__}: {shortened(str(error), 200)})"
    return ""


def accepted() -> str:
    """The names that a configuration may use, in words."""
    known = ", ".join(repr(str(one)) for one in [*RetryStrategy, *sorted(point.name for point in _offered())])
    return f"{known}, or what an installed package offers as an entry point of {GROUP}"


def load_all() -> list[str]:
    """Everything that is offered, for who decides what others have recorded. Gives what could not be loaded."""
    return [problem for point in _offered() if (problem := problem_with(point.name))]


def _offered() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points

    yield from entry_points(group=GROUP)
