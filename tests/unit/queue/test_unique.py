"""Unique work from a caller's side: clients, systems under test, the command line's way in, and bad input."""

from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

import reefknot as rk
from reefknot.errors import ParameterError, ParameterTypeError, QueueFullError
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.arguments import SubmitItem
from reefknot.queue.model.messages import ExecAssignment
from reefknot.stores.port import Store
from tests.workshop import Shop, work


@rk.block("note.keep")
def keep(inputs: dict[str, Any], context: rk.BlockContext) -> dict[str, Any]:
    return {"kept": inputs.get("note", "")}


async def nobody(_: Store) -> bool:
    return False


async def test_a_second_submission_gets_the_job_that_is_there(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, has_router=nobody)
    first = await client.submit("a.b", {"n": 1}, unique="report", for_=60)
    again = await client.submit("a.b", {"n": 2}, unique="report", tenant_id=None)
    assert (first.is_new, again.is_new) == (True, False)
    assert again.assignment_id == first.assignment_id
    await again.cancel("enough")
    assert await again.status() == "cancelled"
    assert not (await client.hand_in(work("other"), unique="report")).is_new
    shop.clock.sleep(60)
    assert (await client.hand_in(work("other"), unique="report", for_=timedelta(minutes=1))).is_new


async def test_the_same_key_of_another_tenant_is_another_job(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    acme = await client.submit("a.b", unique="report", tenant_id="acme")
    assert (await client.submit("a.b", unique="report", tenant_id="other")).is_new
    again = await client.submit("a.b", unique="report", tenant_id="acme")
    assert (again.assignment_id, again.tenant_id, again.is_new) == (acme.assignment_id, "acme", False)


async def test_two_items_of_one_batch_with_one_key_are_one_job(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    first, second, plain = await client.submit_many(
        [
            {"job_type": "a.b", "unique": "report", "for_": 60},
            {"job_type": "a.b", "unique": "report"},
            {"job_type": "a.b"},
        ]
    )
    assert isinstance(first, Handle)
    assert isinstance(second, Handle)
    assert isinstance(plain, Handle)
    assert (first.is_new, second.is_new, plain.is_new) == (True, False, True)
    assert second.assignment_id == first.assignment_id != plain.assignment_id


async def test_a_key_that_is_held_is_answered_although_the_queue_is_full(shop: Shop) -> None:
    client = Client(shop.store, shop.clock, size=1)
    first = await client.submit("a.b", unique="report")
    with pytest.raises(QueueFullError):
        await client.submit("a.b")
    assert (await client.submit("a.b", unique="report")).assignment_id == first.assignment_id


async def test_plain_work_is_stored_without_a_word_about_keys(shop: Shop) -> None:
    client = Client(shop.store, shop.clock)
    handle = await client.submit("a.b")
    item = await shop.store.work.get(handle.assignment_id)
    assert item is not None
    assert item.extra == type(item.extra)()


WRONG: list[tuple[dict[str, Any], type[ParameterError], str]] = [
    ({"unique": ""}, ParameterError, "unique"),
    ({"unique": "a" * 257}, ParameterError, "unique"),
    ({"unique": "two\nlines"}, ParameterError, "unique"),
    ({"unique": 7}, ParameterTypeError, "unique"),
    ({"for_": 60}, ParameterError, "for_"),
    ({"unique": "a", "for_": -1}, ParameterError, "for_"),
    ({"unique": "a", "for_": timedelta(days=31)}, ParameterError, "for_"),
    ({"unique": "a", "for_": "1h"}, ParameterTypeError, "for_"),
    ({"unique": "a", "for_": True}, ParameterTypeError, "for_"),
]


@pytest.mark.parametrize(("options", "kind", "name"), WRONG, ids=[str(one[0])[:30] for one in WRONG])
async def test_bad_input_is_refused_at_the_call(
    shop: Shop, options: dict[str, Any], kind: type[ParameterError], name: str
) -> None:
    client = Client(shop.store, shop.clock)
    assignment: ExecAssignment = work("a")
    with pytest.raises(kind) as refused:
        await client.submit("a.b", **options)
    assert refused.value.parameter == name
    with pytest.raises(kind):
        await client.hand_in(assignment, **options)
    with pytest.raises(kind) as refused:
        await client.submit_many([("a.b", None), cast("SubmitItem", {"job_type": "a.b", **options})])
    assert refused.value.parameter == f"items[1].{name}"
    assert (await shop.store.work.search()).items == []


def test_a_client_without_a_loop_has_it_too(tmp_path: Path) -> None:
    with rk.connect_sync(f"sqlite:{tmp_path / 'state.db'}") as client:
        first = client.submit("a.b", unique="report")
        assert client.submit("a.b", unique="report").assignment_id == first.assignment_id
        assert not client.hand_in({"job": {"type": "a.b"}}, unique="report").is_new
        pair = client.submit_many([{"job_type": "a.b", "unique": "x"}] * 2)
        assert [isinstance(one, rk.SyncHandle) and one.is_new for one in pair] == [True, False]


def test_a_system_under_test_has_it_too() -> None:
    with rk.testing.system_sync(modules=[keep]) as system:
        first = system.submit("note.keep", {"note": "a"}, unique="note", for_=3600)
        again = system.submit("note.keep", {"note": "b"}, unique="note")
        assert (first.is_new, again.is_new) == (True, False)
        assert again.result().output == {"kept": "a"}
        assert not system.submit("note.keep", {"note": "b"}, unique="note").is_new
        system.advance(3600)
        assert system.run("note.keep", {"note": "c"}, unique="note").output == {"kept": "c"}
        assert len(system.calls("note.keep")) == 2
