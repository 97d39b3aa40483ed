"""`reefknot idempotency`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reefknot.audit.model.event import OperatorAction, decode
from reefknot.idempotency.model import Claimed, Done, Unknown
from reefknot.stores.port import Store
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands

CANARY = "Canary-4e1f9"


@pytest.fixture
def store(rk: Commands) -> Path:
    """`order-7` is done, `order-8` is held."""
    path = rk.folder / ".reefknot" / "state.db"

    async def fill(opened: Store) -> None:
        done = await opened.idempotency.claim("order-7", owner="w1")
        assert isinstance(done, Claimed)
        result = f'{{"id":7,"note":"sent with {CANARY}","password":"hunter2"}}'
        await opened.idempotency.finish(done.claim, Done(result))
        await opened.idempotency.claim("order-8", owner="w2", lease=3600)

    in_store(path, fill)
    return path


def events(path: Path) -> list[Any]:
    async def read(opened: Store) -> list[Any]:
        return [decode(kept.entry.body) for kept in await opened.audit.read()]

    return in_store(path, read)


def test_show_hides_what_is_secret_by_name_and_by_configuration(rk: Commands, store: Path) -> None:
    assert CANARY in rk("idempotency", "show", "order-7").out, "the control: nothing says yet that it is secret"
    rk.environment.setenv("THE_SECRET", CANARY)
    rk.write("secrets:\n  mail: env:THE_SECRET\n")
    for words in ([], ["--json"]):
        out = rk("idempotency", "show", "order-7", *words).out
        assert CANARY not in out
        assert "hunter2" not in out
        assert "[redacted]" in out


@pytest.mark.parametrize("key", ["", "x" * 513])
def test_a_key_that_can_be_none_is_refused(rk: Commands, store: Path, key: str) -> None:
    assert rk("idempotency", "show", key).code == 2


def test_forgetting_is_audited_with_the_actor(rk: Commands, store: Path) -> None:
    ended = rk("idempotency", "forget", "order-7", "--as", "ann", "--json")
    action = events(store)[-1]

    assert ended.json == {"key": "order-7", "state": "done", "forgotten": True, "actor": "ann", "dry_run": False}
    assert isinstance(action, OperatorAction)
    assert (action.actor, action.action, action.subject) == ("ann", "idempotency.forget", "order-7")
    assert rk("idempotency", "show", "order-7").code == 1
    assert rk("audit", "verify").code == 0


def test_without_a_name_the_user_of_the_system_did_it(rk: Commands, store: Path) -> None:
    rk.environment.setattr("getpass.getuser", lambda: "bob")
    rk("idempotency", "forget", "order-7")

    assert events(store)[-1].actor == "bob"


def test_a_secret_in_a_key_does_not_reach_the_record(rk: Commands, store: Path) -> None:
    rk.environment.setenv("THE_SECRET", "order-7")
    rk.write("secrets:\n  key: env:THE_SECRET\n  gone: env:NOT_SET_HERE\n")
    rk("idempotency", "forget", "order-7")

    assert events(store)[-1].subject == "[redacted]"


def test_show_tells_when_a_lease_ends(rk: Commands) -> None:
    async def hold(store: Store) -> None:
        await store.idempotency.claim("held", owner="me", lease=600)
        await store.idempotency.claim("over", owner="me", lease=0)

    in_store(rk.folder / "state.db", hold)
    held = rk("idempotency", "show", "held", "--engine", "sqlite:state.db", "--json").json
    over = rk("idempotency", "show", "over", "--engine", "sqlite:state.db", "--json").json

    assert 0 < held["lease_seconds_left"] <= 600
    assert held["lease_ends_at"] > held["created_at"]
    assert (over["lease_seconds_left"], over["lease_ends_at"]) == (0, None)


# ---- resolving ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unknown(store: Path) -> Path:
    """Beside the others, nobody knows what came of `order-5`."""

    async def fill(opened: Store) -> None:
        claimed = await opened.idempotency.claim("order-5", owner="w1", guard=True)
        assert isinstance(claimed, Claimed)
        await opened.idempotency.finish(claimed.claim, Unknown('{"message":"no answer"}'))

    in_store(store, fill)
    return store


@pytest.mark.parametrize(
    ("words", "state", "result", "failure"),
    [
        (["--done", '{"b": 1, "a": 2}'], "done", {"a": 2, "b": 1}, None),
        (["--done", "null"], "done", None, None),
        (["--failed", "the bank said no"], "failed", None, {"message": "the bank said no"}),
        (["--released"], "released", None, None),
    ],
)
def test_an_operator_sets_an_unknown_outcome_and_that_is_audited(
    rk: Commands, unknown: Path, words: list[str], state: str, result: object, failure: object
) -> None:
    ended = rk("idempotency", "resolve", "order-5", *words, "--as", "ann", "--json")

    assert ended.json == {"key": "order-5", "outcome": state, "resolved": True, "actor": "ann", "dry_run": False}
    found = rk("idempotency", "show", "order-5", "--json").json
    assert (found["state"], found["result"], found["failure"]) == (state, result, failure)
    action = events(unknown)[-1]
    assert (action.actor, action.action, action.subject) == ("ann", "idempotency.resolve", "order-5")
    assert action.details == {"outcome": state}, "a result is the caller's, and in no event"
    assert rk("audit", "verify").code == 0


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
@pytest.mark.parametrize(("key", "code", "said"), [("order-7", 1, "is done"), ("order-8", 75, "a caller holds it")])
def test_only_an_unknown_outcome_is_resolved(
    rk: Commands, unknown: Path, key: str, code: int, said: str, dry_run: list[str]
) -> None:
    ended = rk("idempotency", "resolve", key, "--released", *dry_run)

    assert (ended.code, said in ended.err) == (code, True)
    assert events(unknown) == []
    assert rk("idempotency", "resolve", "order-9", "--released", *dry_run).code == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--released", "--failed", "no"],
        ["--done", "1", "--released"],
        ["--done", "{not json"],
        ["--done", "[" * 50_000],
    ],
)
def test_the_outcome_is_given_once_and_as_json(rk: Commands, unknown: Path, words: list[str]) -> None:
    ended = rk("idempotency", "resolve", "order-5", *words)

    assert (ended.code, "--done" in ended.err) == (2, True)
    assert rk("idempotency", "show", "order-5", "--json").json["state"] == "unknown"
