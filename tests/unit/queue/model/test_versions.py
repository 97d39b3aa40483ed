"""Versions of work items: the ids, and what of an item its next version has."""

from __future__ import annotations

import pytest
from msgspec import structs

from reefknot.core.time import Moment
from reefknot.errors import IllegalMoveError
from reefknot.queue.model.versions import is_replaced, next_record, next_version, replaced, replaced_reason
from reefknot.queue.model.work import ROUTER, WorkItem, WorkState, discard, is_ingestion

NOW = Moment(wall=50_000, steady=7)


def test_versions_count_on_and_a_record_keeps_its_tenant() -> None:
    for name, following in (
        ("order", "order~2"),
        ("order~2", "order~3"),
        ("order~9", "order~10"),
        ("order~0", "order~0~2"),
        ("order~x", "order~x~2"),
        ("a\nb~2", "a\nb~3"),
        ("~2", "~3"),
        ("", "~2"),
    ):
        assert (next_version(name), replaced_reason(name)) == (following, f"replaced by {following}")
    assert [next_record(name) for name in ("acme|order", "|a|b~2")] == ["acme|order~2", "|a|b~3"]


def quarantined(resource_class: str) -> WorkItem:
    item = WorkItem("acme|order", "t", resource_class, "notes", "acme", "r", "tr", 3, deadline_at=6000, payload=b"\xff")
    put_aside = {"state": WorkState.QUARANTINED, "created_at": 1000, "attempts": 4, "crashes": 1, "reason": "bad"}
    return structs.replace(item, **put_aside, failure="{}", admission="{}", pool="io")


@pytest.mark.parametrize(
    ("resource_class", "expected"), [("io@w1", ROUTER), ("ingest.notes", "ingest.notes"), ("ingest.x@w1", ROUTER)]
)
def test_the_next_version_is_the_same_work_with_a_fresh_budget(resource_class: str, expected: str) -> None:
    item = quarantined(resource_class)
    old, new = replaced(item, b"new", NOW, who="ann", why="a typo")
    assert [is_replaced(one) for one in (item, old, new)] == [False, True, False]

    assert (old.state, old.payload, old.reason) == (WorkState.DISCARDED, b"\xff", "bad")
    assert [(one.what, one.why, one.who) for one in old.history] == [("discarded", "replaced by order~2", "ann")]
    assert (new.id, new.state, new.resource_class, new.payload) == ("acme|order~2", WorkState.PENDING, expected, b"new")
    assert (new.kind, new.source, new.tenant_id, new.priority, new.pool) == ("t", "notes", "acme", 3, "io")
    assert (new.correlation_id, new.trace_id, new.due_at, new.deadline_at) == ("r", "tr", 50_000, 55_000)
    assert (new.attempts, new.crashes, new.reason, new.failure, new.admission) == (0, 0, "", None, "")
    assert [(one.what, one.why, one.who) for one in new.history] == [("replaces", "order: a typo", "ann")]
    assert is_ingestion(new) is (expected != ROUTER)


def test_without_a_reason_the_link_is_the_id_alone_and_only_quarantined_work_is_replaced() -> None:
    item = quarantined("io@w1")
    assert replaced(item, b"", NOW, who="ann")[1].history[0].why == "order"
    with pytest.raises(IllegalMoveError):
        replaced(WorkItem("a", "t"), b"", NOW, who="ann")
    assert not is_replaced(discard(item, NOW, who="ann", reason="not wanted"))
    assert not is_replaced(WorkItem("a", "t", state=WorkState.DISCARDED))
