"""Operations on the quarantine: groups, counts before a change, bounded answers, edited payloads."""

from typing import Any

import pytest

from reefknot.console.operations import bulk, quarantine
from reefknot.console.words.events import describe
from reefknot.errors import OperationError, ParameterError
from reefknot.queue.model.messages import ExecAssignment, Job, encode
from reefknot.queue.model.work import Quarantine, WorkItem
from reefknot.queue.port.work_queue import Settlement, WorkClaim
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene

PAYLOAD = {"path": "a.txt", "password": "hunter2hunter2"}


async def kept(scene: OperatorScene, *names: str, message: str = "it answered 503", tenant: str | None = None) -> None:
    work = scene.world.store.work
    for name in names:
        record = f"{tenant}|{name}" if tenant else name
        body = encode(ExecAssignment(name, "r", Job("fs.blob_get", PAYLOAD), tenant_id=tenant))
        await work.enqueue([WorkItem(record, "fs.blob_get", tenant_id=tenant, payload=body)])
        (held,) = await work.claim(1, WorkClaim(owner="w", only=[record]))
        settled = Quarantine(f"attempts_spent {SECRET}", f'{{"code": "HTTP_ERROR", "message": "{message}"}}')
        assert await work.settle([Settlement(record, "w", held.fence, settled)]) == [True]


async def test_groups_lists_and_stats_count_the_same_jobs_without_secrets(scene: OperatorScene) -> None:
    await kept(scene, "a", "b", message="order 17 was refused")
    await kept(scene, "c", message="no route")
    groups = await quarantine.quarantine_groups(scene.operator, quarantine.QuarantineQuery(limit=1))
    assert [(one["count"], one["code"]) for one in groups["groups"]] == [(2, "HTTP_ERROR")]
    assert (groups["total"], groups["ungrouped"]) == (2, 0)
    (largest,) = groups["groups"]
    assert (list(largest["types"]), largest["message"]) == (["fs.blob_get"], "order 17 was refused")
    assert largest["oldest_at"] <= largest["newest_at"]
    fingerprint = largest["fingerprint"]
    of_type = await quarantine.quarantine_groups(scene.operator, quarantine.QuarantineQuery(type="other.type"))
    assert of_type["groups"] == []
    listed = await quarantine.list_quarantined(scene.operator, quarantine.QuarantineQuery(fingerprint=fingerprint))
    assert [one["id"] for one in listed["items"]] == ["a", "b"]
    stats = await quarantine.quarantine_stats(scene.operator)
    assert (stats["total"], stats["by_type"]) == (3, {"fs.blob_get": 3})
    shown = await quarantine.show_quarantined(scene.operator, "a")
    assert shown["assignment"]["job"]["payload"]["path"] == "a.txt"
    for found in (groups, listed, stats, shown):
        assert SECRET not in str(found)
        assert "hunter2" not in str(found)
    with pytest.raises(OperationError, match="'nobody' is not in quarantine") as absent:
        await quarantine.show_quarantined(scene.operator, "nobody")
    assert absent.value.kind == "not_found"


async def test_the_sentence_of_an_action_on_many_has_their_number_filter_and_reason(scene: OperatorScene) -> None:
    await kept(scene, "a", "b", "c")
    await quarantine.requeue_jobs(scene.operator, quarantine.QuarantineQuery(ids=("c",)))
    groups = await quarantine.quarantine_groups(scene.operator, quarantine.QuarantineQuery())
    fingerprint = groups["groups"][0]["fingerprint"]
    await quarantine.discard_jobs(
        scene.operator, quarantine.QuarantineQuery(fingerprint=fingerprint), because="the service is gone"
    )
    found = [describe(one) for one in await scene.actions()]
    assert found == [
        ("operator", "ann: quarantine.requeue c"),
        ("operator", f"ann: quarantine.discard 2 jobs of fingerprint {fingerprint}: the service is gone"),
    ]


async def test_an_answer_is_bounded_a_listener_hears_all(scene: OperatorScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_NAMED", 3)
    monkeypatch.setattr(bulk, "CHUNK", 2)
    await kept(scene, *"abcde")
    heard: list[str] = []
    listener = bulk.BulkListener(on_changed=heard.extend)
    done = await quarantine.requeue_jobs(scene.operator, quarantine.QuarantineQuery(all=True), listener=listener)
    assert (done["requeued"], done["count"], heard) == (["a", "b", "c"], 5, list("abcde"))


def test_a_query_with_bad_syntax_is_refused_by_its_parameter() -> None:
    bad = {"before": "soon", "reason": "", "limit": 0, "tenant": " ", "error": "", "since": "soon"}
    queries: list[dict[str, Any]] = [*({name: value} for name, value in bad.items()), {"all": True, "ids": ("a",)}]
    for fields in queries:
        with pytest.raises(ParameterError) as refused:
            quarantine.QuarantineQuery(**fields)
        assert refused.value.parameter == next(iter(fields))
