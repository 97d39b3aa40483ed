"""Operations on idempotency keys: shown without secrets, counted, resolved and deleted with an audit event."""

from __future__ import annotations

import pytest

from reefknot.console.operations import idempotency
from reefknot.errors import KeyInProgressError, OperationError
from reefknot.idempotency.model import Claimed, Done, Released, Unknown
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene, names_of


async def keep(scene: OperatorScene, key: str, ending: Done | Unknown | None, *, guard: bool = False) -> None:
    claimed = await scene.world.store.idempotency.claim(key, owner="w1", lease=3600, guard=guard)
    assert isinstance(claimed, Claimed)
    if ending is not None:
        await scene.world.store.idempotency.finish(claimed.claim, ending)


async def test_a_key_is_shown_without_secrets_and_counted(scene: OperatorScene) -> None:
    await keep(scene, "order-7", Done(f'{{"id":7,"note":"{SECRET}","password":"hunter2"}}'))
    found = await idempotency.show_key(scene.operator, "order-7")
    assert (found["state"], found["result"]["id"]) == ("done", 7)
    assert SECRET not in str(found)
    assert "hunter2" not in str(found)
    assert (await idempotency.key_stats(scene.operator))["total"] == 1
    with pytest.raises(OperationError, match="no record for key 'order-8'") as absent:
        await idempotency.show_key(scene.operator, "order-8")
    assert absent.value.kind == "not_found"


async def test_an_unknown_outcome_is_set_once_and_a_recorded_one_is_a_conflict(scene: OperatorScene) -> None:
    await keep(scene, "charge", Unknown(), guard=True)
    await keep(scene, "held", None)
    dry = await idempotency.resolve_key(scene.operator, "charge", Done("7"), dry_run=True)
    assert (dry["outcome"], dry["resolved"]) == ("done", False)
    assert (await idempotency.resolve_key(scene.operator, "charge", Done("7")))["resolved"] is True
    for key, kind in (("charge", "conflict"), ("held", "temporary"), ("absent", "not_found")):
        with pytest.raises(OperationError) as refused:
            await idempotency.resolve_key(scene.operator, key, Released())
        assert refused.value.kind == kind
    assert names_of(await scene.actions()) == [("idempotency.resolve", "charge", "ann")]


async def test_a_key_is_deleted_unless_it_is_held(scene: OperatorScene) -> None:
    await keep(scene, "order-7", Done("7"))
    await keep(scene, "held", None)
    would = await idempotency.forget_key(scene.operator, "order-7", dry_run=True)
    assert (would["forgotten"], would["dry_run"]) == (False, True)
    done = await idempotency.forget_key(scene.operator, "order-7")
    assert (done["forgotten"], done["dry_run"]) == (True, False)
    with pytest.raises(OperationError):
        await idempotency.forget_key(scene.operator, "order-7")
    with pytest.raises(KeyInProgressError):
        await idempotency.forget_key(scene.operator, "held")
    assert names_of(await scene.actions()) == [("idempotency.forget", "order-7", "ann")]
