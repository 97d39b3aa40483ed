"""The names that are promises, and what the first of them costs to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import reefknot
from reefknot import errors
from reefknot.retrying.plan import OTHER_FIELDS, POLICY_FIELDS
from reefknot.retrying.types import PolicyFields, RetryKeywords

HEAVY = {"typing", "re", "msgspec", "asyncio", "logging", "inspect", "dataclasses", "pydantic", "yaml", "apsw"}
PROMISED = {
    *("retry", "using", "Retrier", "RetryPolicy", "RetryStrategy", "Jitter", "CircuitBreaker", "RetryThrottle"),
    *("RetryAfter", "http_errors", "classify_failure", "Outcome", "AttemptRecord", "RetryEvent", "FailedAttempt"),
    *("Reason", "RetryKeywords"),
    *("ErrorCode", "FailureType", "Failure", "BreakerState", "testing"),
}


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has loaded after running `code`, beyond what it starts with."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-E", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def with_path(code: str) -> str:
    paths = [str(Path(reefknot.__file__).parent.parent), *(path for path in sys.path if "site-packages" in path)]
    return f"sys.path[:0] = {paths!r}\n{code}"


@pytest.mark.parametrize("name", reefknot.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(reefknot, name) is not None


def test_the_promised_names_are_public() -> None:
    assert set(reefknot.__all__) >= PROMISED
    assert sorted(reefknot.__all__) == dir(reefknot)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'retyr'"):
        reefknot.retyr  # type: ignore[attr-defined]  # noqa: B018 - that is the test


def test_checkers_see_the_same_names_from_the_same_places() -> None:
    """The names under TYPE_CHECKING, and where they come from, are those that are loaded lazily."""
    tree = ast.parse(Path(reefknot.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }
    assert seen == {**reefknot._HOME_OF, "testing": "reefknot"}
    assert set(seen) == set(reefknot.__all__) - {"__version__"}


def test_every_error_of_the_library_proper_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    in_tree = {name for name in raised if name in (errors.__doc__ or "")}
    assert raised == in_tree


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


def test_importing_retry_does_not_load_what_it_does_not_need() -> None:
    loaded = modules_after(with_path("from reefknot import retry"))
    assert "reefknot.retrying.decorator" in loaded
    assert not loaded & HEAVY


def test_decorating_and_a_first_try_success_load_nothing_more() -> None:
    code = "from reefknot import retry\n@retry(attempts=3, deadline=10)\ndef f(): return 1\nassert f() == 1"
    assert not modules_after(with_path(code)) & HEAVY


def test_control_the_whole_surface_does_load_them() -> None:
    """So the check above can fail."""
    assert modules_after(with_path("import reefknot; reefknot.Retrier")) & HEAVY >= {"typing", "re", "msgspec"}


def test_the_options_that_run_are_those_that_are_typed() -> None:
    typed_apart = {"fallback"}  # by overloads: its type is part of what the decorated function returns
    assert RetryKeywords.__annotations__.keys() | typed_apart == POLICY_FIELDS | OTHER_FIELDS
    assert PolicyFields.__annotations__.keys() == POLICY_FIELDS
    assert not POLICY_FIELDS & OTHER_FIELDS


def test_what_users_catch_of_it_is_public() -> None:
    """Every error is one that user code may meet."""
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(reefknot.__all__)
