"""
Versions of work items: an item in quarantine whose payload a person has edited continues as a new item.

The item itself is discarded and keeps its payload byte for byte. The new item, with the edited payload, has the next
version of its id, and each names the other in its history.
"""

import re

from reefknot.core.time import Moment
from reefknot.queue.model.work import (
    ROUTER,
    HistoryEntry,
    WorkItem,
    WorkState,
    assignment_and_tenant,
    deadline_again,
    discard,
    is_ingestion,
    record_id,
)

_VERSIONED = re.compile(r"(.*)~([1-9][0-9]{0,8})", re.DOTALL)


def next_version(name: str) -> str:
    """The id of the version after this one: `order-7~2` for `order-7`, then `order-7~3`."""
    found = _VERSIONED.fullmatch(name)
    return f"{name}~2" if found is None else f"{found[1]}~{int(found[2]) + 1}"


def next_record(record: str) -> str:
    """The record of the next version, given that of an item: see `record_id`."""
    name, tenant = assignment_and_tenant(record)
    return record_id(next_version(name), tenant)


def replaced_reason(name: str) -> str:
    """The reason for which the item of this id was discarded whose next version runs instead."""
    return f"replaced by {next_version(name)}"


def is_replaced(item: WorkItem) -> bool:
    """Whether the next version of an item runs instead of it."""
    last = item.history[-1].why if item.history else ""
    return item.state is WorkState.DISCARDED and last == replaced_reason(item.assignment_id)


def replaced(item: WorkItem, payload: bytes, now: Moment, *, who: str, why: str = "") -> tuple[WorkItem, WorkItem]:
    """
    A quarantined item as discarded, and its next version with another payload.

    The next version has all of its time. An assignment begins as a submission, a job of a source in its own class.
    """
    name = item.assignment_id
    link = HistoryEntry(now.wall, "replaces", f"{name}: {why}" if why else name, who)
    new = WorkItem(
        id=next_record(item.id),
        kind=item.kind,
        resource_class=item.resource_class if is_ingestion(item) else ROUTER,
        source=item.source,
        tenant_id=item.tenant_id,
        correlation_id=item.correlation_id,
        trace_id=item.trace_id,
        priority=item.priority,
        due_at=now.wall,
        deadline_at=deadline_again(item, now),
        created_at=now.wall,
        updated_at=now.wall,
        history=(link,),
        pool=item.pool,
        payload=payload,
    )
    return discard(item, now, who=who, reason=replaced_reason(name)), new
