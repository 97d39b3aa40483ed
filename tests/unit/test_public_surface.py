"""The names that are promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import reefknot
from reefknot import errors
from reefknot.retrying.plan import OTHER_FIELDS, POLICY_FIELDS
from reefknot.retrying.types import PolicyFields, RetryKeywords

PROMISED = {
    *("retry", "using", "Retrier", "RetryPolicy", "RetryStrategy", "Jitter", "CircuitBreaker", "RetryThrottle"),
    *("RetryAfter", "http_errors", "classify_failure", "Outcome", "AttemptRecord", "RetryEvent", "FailedAttempt"),
    *("Reason", "RetryKeywords"),
    *("ErrorCode", "FailureType", "Failure", "BreakerState", "testing"),
}


@pytest.mark.parametrize("name", reefknot.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(reefknot, name) is not None


def test_the_promised_names_and_every_error_are_public() -> None:
    assert set(reefknot.__all__) >= PROMISED
    assert sorted(reefknot.__all__) == dir(reefknot)
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(reefknot.__all__), "user code may meet every one of them"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'retyr'"):
        reefknot.retyr  # type: ignore[attr-defined]  # noqa: B018 - that is the test


def test_checkers_see_the_same_names_from_the_same_places() -> None:
    """The names under TYPE_CHECKING, and where they come from, are those that are loaded lazily."""
    blocks = [node for node in ast.parse(Path(reefknot.__file__).read_text()).body if isinstance(node, ast.If)]
    (block,) = [node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname is not None}
    assert seen == {**reefknot._HOME_OF, "testing": "reefknot"}
    assert set(seen) == set(reefknot.__all__) - {"__version__"}


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    """Every class stands in the drawing beneath its parent."""
    doc = errors.__doc__ or ""
    drawn: dict[str, int] = {}
    for line in doc.splitlines():
        name = line.strip(" │├└─").split(" ")[0]
        value = getattr(errors, name, None) if name else None
        if isinstance(value, type):
            drawn[name] = len(line) - len(line.lstrip(" │├└─"))
    parents: list[tuple[int, str]] = []
    for name, indent in drawn.items():
        while parents and parents[-1][0] >= indent:
            parents.pop()
        if parents:
            assert issubclass(getattr(errors, name), getattr(errors, parents[-1][1])), name
        parents.append((indent, name))
    assert next(iter(drawn)) == "ReefknotError"


def test_the_options_that_run_are_those_that_are_typed() -> None:
    typed_apart = {"fallback"}  # by overloads: its type is part of what the decorated function returns
    assert RetryKeywords.__annotations__.keys() | typed_apart == POLICY_FIELDS | OTHER_FIELDS
    assert PolicyFields.__annotations__.keys() == POLICY_FIELDS
    assert not POLICY_FIELDS & OTHER_FIELDS
