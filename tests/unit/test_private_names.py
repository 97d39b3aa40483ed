"""
The private and undocumented names of other packages that reefknot uses: one table, with the shape each must have.

Such a name can change in any release of its package. So every package in the table has an upper bound in
pyproject.toml, and a bound is raised only together with a green run of this file.
"""

import ast
import asyncio
import inspect
import os
import re
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "python"

Shape = Callable[[object], bool]


class PrivateName(NamedTuple):
    """One name of another package: its owner, as an object that has it, and the shape it must have there."""

    package: str
    owner: Callable[[], object]
    name: str
    shape: Shape


def is_async(*parameters: str) -> Shape:
    """A coroutine function whose required parameters have these names."""
    return lambda found: inspect.iscoroutinefunction(found) and required(found) == parameters


def is_plain(*parameters: str) -> Shape:
    """A function that is no coroutine function, whose required parameters have these names."""
    return lambda found: callable(found) and not inspect.iscoroutinefunction(found) and required(found) == parameters


def required(fn: object) -> tuple[str, ...]:
    """The names of the parameters without a default."""
    assert callable(fn)
    return tuple(name for name, one in inspect.signature(fn).parameters.items() if one.default is one.empty)


def is_a(*kinds: type) -> Shape:
    return lambda found: isinstance(found, kinds)


def is_none(found: object) -> bool:
    """A task, queue or transport that a client has only while it is connected."""
    return found is None


def subscription() -> Subscription:
    return Subscription(Client(), subject="orders")  # type: ignore[no-untyped-call, unused-ignore]  # untyped there


def is_assigned_in(function: Callable[..., object]) -> Shape:
    """An attribute without a default on the class, which this function assigns."""
    text = inspect.getsource(function)

    def shape(found: object) -> bool:
        return re.search(rf"self\.{found}\b[^=\n]*= ", text) is not None

    return shape


class Drawn(Protocol):
    """Any protocol class."""


def new_loop() -> object:
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


TABLE = [
    # What is sent, and when it leaves.
    PrivateName("nats-py", Client, "_send_command", is_async("cmd")),
    PrivateName("nats-py", Client, "_flush_pending", is_async()),
    PrivateName("nats-py", Client, "_flush_queue", is_none),
    PrivateName("nats-py", Client, "_connect_command", is_plain()),
    PrivateName("nats-py", Client, "_server_info", is_a(dict)),
    # What arrives.
    PrivateName("nats-py", Client, "_process_msg", is_async("sid", "subject", "reply", "data", "headers")),
    PrivateName("nats-py", Client, "_subs", is_a(dict)),
    PrivateName("nats-py", subscription, "_pending_queue", is_a(asyncio.Queue)),
    PrivateName("nats-py", subscription, "_wait_for_msgs_task", is_none),
    PrivateName("nats-py", subscription, "_start", is_plain("error_cb")),
    PrivateName("nats-py", subscription, "_id", is_a(int)),
    PrivateName("nats-py", Client, "_send_unsubscribe", is_async("sid")),
    # Errors, and the tasks of a connection.
    PrivateName("nats-py", Client, "_process_err", is_async("err_msg")),
    PrivateName("nats-py", Client, "_process_op_err", is_async("e")),
    PrivateName("nats-py", Client, "_error_cb", is_async("ex")),
    PrivateName("nats-py", Client, "_attempt_reconnect", is_async()),
    PrivateName("nats-py", Client, "_reading_task", is_none),
    PrivateName("nats-py", Client, "_ping_interval_task", is_none),
    PrivateName("nats-py", Client, "_flusher_task", is_none),
    PrivateName("nats-py", Client, "_reconnection_task", is_none),
    PrivateName("nats-py", Client, "_transport", is_none),
    # Undocumented: the protocol that the dashboard's server derives its own from.
    PrivateName("uvicorn", lambda: H11Protocol, "connection_made", is_plain("self", "transport")),
    PrivateName("uvicorn", lambda: H11Protocol, "on_response_complete", is_plain("self")),
    PrivateName("uvicorn", lambda: H11Protocol, "send_400_response", is_plain("self", "msg")),
    # The interpreter's own. The spread over interpreters runs these on each of them.
    PrivateName(PYTHON, lambda: sys, "_getframe", callable),
    PrivateName(PYTHON, lambda: sys, "_current_frames", callable),
    PrivateName(PYTHON, lambda: os, "_exit", callable),
    PrivateName(PYTHON, lambda: asyncio, "_get_running_loop", callable),
    PrivateName(PYTHON, lambda: socket.socket, "_accept", callable),
    PrivateName(PYTHON, new_loop, "_ready", lambda found: hasattr(found, "__len__")),
    PrivateName(PYTHON, lambda: Drawn, "_is_protocol", lambda found: found is True),
]
ASSIGNED = [
    ("uvicorn", H11Protocol.__init__, ("cycle", "loop", "client", "transport")),
    (
        "uvicorn",
        RequestResponseCycle.__init__,
        ("scope", "message_event", "disconnected", "response_started", "response_complete", "more_body"),
    ),
]
NAMED_TUPLES = {"_asdict", "_replace"}  # public, in spite of their names
ONLY_FROM_3_12 = {"_is_coroutine_marker"}


def has_shape(one: PrivateName) -> bool:
    owner = one.owner()
    return hasattr(owner, one.name) and one.shape(getattr(owner, one.name))


@pytest.mark.parametrize("one", TABLE, ids=lambda one: f"{one.package}:{one.name}")
def test_a_private_name_exists_and_has_the_shape_that_is_relied_on(one: PrivateName) -> None:
    assert has_shape(one)


@pytest.mark.parametrize(("package", "function", "names"), ASSIGNED)
def test_an_undocumented_attribute_is_still_assigned(
    package: str, function: Callable[..., object], names: tuple[str, ...]
) -> None:
    shape = is_assigned_in(function)
    assert [name for name in names if not shape(name)] == [], package


def test_a_function_marked_as_a_coroutine_function_has_a_bare_object_as_its_mark() -> None:
    """`inspect.markcoroutinefunction` came with Python 3.12."""
    mark = getattr(inspect, "markcoroutinefunction", None)
    assert (mark is None) == (sys.version_info < (3, 12))
    assert mark is None or type(mark(lambda: None)._is_coroutine_marker) is object


def test_control_a_name_that_is_gone_has_another_shape_or_is_not_assigned_any_more_is_noticed() -> None:
    changed = [("_gone", is_none), ("_send_command", is_plain("cmd")), ("_send_command", is_async("command"))]
    for name, shape in [*changed, ("_subs", is_none)]:
        assert not has_shape(PrivateName("nats-py", Client, name, shape))
    assert not is_assigned_in(H11Protocol.__init__)("circle")


# ---- the table is complete -------------------------------------------------------------------------------------------

PRIVATE = re.compile(r"_[a-z]\w*$")
DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute)
USING = (ast.Attribute, ast.Call, ast.ImportFrom)
ASKED_BY_NAME = {"getattr", "hasattr", "setattr"}


def own_names(trees: Mapping[str, ast.Module]) -> set[str]:
    """Every name that these modules define themselves: functions, classes, variables and attributes of `self`."""
    names: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, DEFINING)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case _:
                continue
    return names


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every private attribute that a module reads, sets, asks for by name or imports."""
    for node in ast.walk(tree):
        if not isinstance(node, USING):
            continue
        match node:
            case ast.Attribute(attr=name, lineno=line) if PRIVATE.match(name):
                yield line, name
            case ast.Call(func=ast.Name(id=asked), args=[_, ast.Constant(value=str(name)), *_], lineno=line) if (
                asked in ASKED_BY_NAME and PRIVATE.match(name)
            ):
                yield line, name
            case ast.ImportFrom(module=str(module), names=aliases, level=0, lineno=line) if module[:8] != "reefknot":
                yield from ((line, alias.name) for alias in aliases if PRIVATE.match(alias.name))
                yield from ((line, part) for part in module.split(".")[1:] if PRIVATE.match(part))
            case _:
                continue


def not_in_table(sources: Mapping[str, str]) -> list[str]:
    """The private names that are used and neither the sources' own nor in the table, with their places."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    known = own_names(trees) | {one.name for one in TABLE} | NAMED_TUPLES | ONLY_FROM_3_12
    return [
        f"{path}:{line}: {name}"
        for path, tree in sorted(trees.items())
        for line, name in sorted(private_uses(tree))
        if name not in known
    ]


def test_every_private_name_of_another_package_is_in_the_table() -> None:
    """A name that is both ours and theirs, such as `_transport`, is not seen here."""
    files = (ROOT / "src").rglob("*.py")
    assert not_in_table({one.relative_to(ROOT).as_posix(): one.read_text("utf-8") for one in files}) == []


def test_control_a_private_name_that_is_not_in_the_table_is_found() -> None:
    uses = ["client._drain_queue.clear()", "getattr(client, '_drain_queue')"]
    for text in [*uses, "from nats.aio.client import _drain_queue", "from nats._drain_queue import x"]:
        assert not_in_table({"a.py": text}) == ["a.py:1: _drain_queue"]


# ---- and its packages are bounded ------------------------------------------------------------------------------------


def requirements(text: str) -> dict[str, Requirement]:
    """The requirements of a pyproject.toml by name, those of reefknot's users: without the extras for development."""
    project = tomllib.loads(text)["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "bench", "all")]
    return {
        one.name: one for one in map(Requirement, [*project["dependencies"], *(line for e in extras for line in e)])
    }


def is_bounded(one: Requirement) -> bool:
    return any(part.operator in ("<", "<=", "==", "~=") for part in one.specifier)


@pytest.mark.parametrize("package", sorted({one.package for one in TABLE} - {PYTHON}))
def test_a_package_in_the_table_has_an_upper_bound_that_the_installed_version_keeps(package: str) -> None:
    one = requirements((ROOT / "pyproject.toml").read_text("utf-8"))[package]
    assert is_bounded(one)
    assert Version(version(package)) in one.specifier
    assert not is_bounded(Requirement("nats-py[nkeys]>=2.11,!=2.12")), "the control"
