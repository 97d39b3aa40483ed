"""`reefknot idempotency`."""

from pathlib import Path

import pytest

from reefknot.audit.model.event import OperatorAction
from reefknot.idempotency.model import Claimed, Done
from reefknot.stores.port import Store
from tests.unit.console.cli import work_items
from tests.unit.console.cli.audit_events import in_store
from tests.unit.console.cli.running import Commands

CANARY = "Canary-4e1f9"


@pytest.fixture
def store(store: Path) -> Path:
    """`order-7` is done, `order-8` is held."""

    async def fill(opened: Store) -> None:
        done = await opened.idempotency.claim("order-7", owner="w1")
        assert isinstance(done, Claimed)
        result = f'{{"id":7,"note":"sent with {CANARY}","password":"hunter2"}}'
        await opened.idempotency.finish(done.claim, Done(result))
        await opened.idempotency.claim("order-8", owner="w2", lease=3600)

    in_store(store, fill)
    return store


def test_show_hides_what_is_secret_by_name_and_by_configuration(rk: Commands, store: Path) -> None:
    assert CANARY in rk("idempotency", "show", "order-7").out, "the control: nothing says yet that it is secret"
    rk.environment.setenv("THE_SECRET", CANARY)
    rk.write("secrets:\n  mail: env:THE_SECRET\n")
    for words in ([], ["--json"]):
        out = rk("idempotency", "show", "order-7", *words).out
        assert CANARY not in out
        assert "hunter2" not in out
        assert "[redacted]" in out


def test_without_a_name_the_systems_user_did_it_and_a_secret_key_is_not_recorded(rk: Commands, store: Path) -> None:
    rk.environment.setattr("getpass.getuser", lambda: "bob")
    rk.environment.setenv("THE_SECRET", "order-7")
    rk.write("secrets:\n  key: env:THE_SECRET\n  gone: env:NOT_SET_HERE\n")
    assert rk("idempotency", "forget", "order-7").code == 0
    (action,) = work_items.events(store)
    assert isinstance(action, OperatorAction)
    assert (action.actor, action.subject) == ("bob", "[redacted]")


def test_show_tells_when_a_lease_ends_and_an_outcome_nested_too_deeply_is_refused(rk: Commands, store: Path) -> None:
    in_store(store, lambda opened: opened.idempotency.claim("over", owner="me", lease=0))
    held, over = (rk("idempotency", "show", key, "--json").json for key in ("order-8", "over"))
    assert 0 < held["lease_seconds_left"] <= 3600
    assert held["lease_ends_at"] > held["created_at"]
    assert (over["lease_seconds_left"], over["lease_ends_at"]) == (0, None)
    ended = rk("idempotency", "resolve", "order-8", "--done", "[" * 50_000)
    assert (ended.code, "--done" in ended.err) == (2, True)
