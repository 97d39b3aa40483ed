"""`reefknot idempotency`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reefknot.core.audit.event import OperatorAction, decode
from reefknot.core.idempotency import Claimed, Done
from reefknot.ports.store import Store
from tests.unit.cli.recorded import in_store
from tests.unit.cli.running import Commands

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


@pytest.mark.parametrize("verb", ["show", "stats", "forget"])
def test_help_shows_an_example(rk: Commands, verb: str) -> None:
    assert f"    reefknot idempotency {verb}" in rk("idempotency", verb, "--help").out


def test_show_tells_what_is_recorded(rk: Commands, store: Path) -> None:
    found = rk("idempotency", "show", "order-7", "--json").json

    assert (found["state"], found["owner"], found["result"]["id"]) == ("done", "w1", 7)
    assert "done" in rk("idempotency", "show", "order-7").out


def test_show_hides_what_is_secret_by_name_and_by_configuration(rk: Commands, store: Path) -> None:
    assert CANARY in rk("idempotency", "show", "order-7").out, "the control: nothing says yet that it is secret"
    rk.environment.setenv("THE_SECRET", CANARY)
    rk.write("secrets:\n  mail: env:THE_SECRET\n")
    for words in ([], ["--json"]):
        out = rk("idempotency", "show", "order-7", *words).out
        assert CANARY not in out
        assert "hunter2" not in out
        assert "[redacted]" in out


def test_a_key_that_is_not_there_is_said(rk: Commands, store: Path) -> None:
    for verb in ("show", "forget"):
        ended = rk("idempotency", verb, "order-9")
        assert (ended.code, "no record for key 'order-9'" in ended.err) == (1, True)


@pytest.mark.parametrize("key", ["", "x" * 513])
def test_a_key_that_can_be_none_is_refused(rk: Commands, store: Path, key: str) -> None:
    assert rk("idempotency", "show", key).code == 2


def test_stats_count_every_state(rk: Commands, store: Path) -> None:
    assert rk("idempotency", "stats", "--json").json == {
        "in_progress": 1,
        "done": 1,
        "failed": 0,
        "released": 0,
        "unknown": 0,
        "total": 2,
    }
    assert "in_progress" in rk("idempotency", "stats").out


def test_forgetting_goes_on_record_with_who_did_it(rk: Commands, store: Path) -> None:
    ended = rk("idempotency", "forget", "order-7", "--as", "ann", "--json")
    action = events(store)[-1]

    assert ended.json == {"key": "order-7", "state": "done", "forgotten": True, "actor": "ann"}
    assert isinstance(action, OperatorAction)
    assert (action.actor, action.action, action.subject) == ("ann", "idempotency.forget", "order-7")
    assert rk("idempotency", "show", "order-7").code == 1
    assert rk("audit", "verify").code == 0


def test_without_a_name_the_user_of_the_system_did_it(rk: Commands, store: Path) -> None:
    rk.environment.setattr("getpass.getuser", lambda: "bob")
    rk("idempotency", "forget", "order-7")

    assert events(store)[-1].actor == "bob"


def test_a_dry_run_changes_nothing(rk: Commands, store: Path) -> None:
    ended = rk("idempotency", "forget", "order-7", "--dry-run")

    assert (ended.code, "would be forgotten" in ended.out) == (0, True)
    assert events(store) == []
    assert rk("idempotency", "show", "order-7").code == 0


def test_a_key_that_somebody_holds_is_refused_for_now_and_nothing_is_on_record(rk: Commands, store: Path) -> None:
    ended = rk("idempotency", "forget", "order-8")

    assert (ended.code, "in progress at w2" in ended.err) == (75, True)
    assert events(store) == []


def test_a_secret_in_a_key_does_not_reach_the_record(rk: Commands, store: Path) -> None:
    rk.environment.setenv("THE_SECRET", "order-7")
    rk.write("secrets:\n  key: env:THE_SECRET\n  gone: env:NOT_SET_HERE\n")
    rk("idempotency", "forget", "order-7")

    assert events(store)[-1].subject == "[redacted]"
