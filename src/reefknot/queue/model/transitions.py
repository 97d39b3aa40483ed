"""
Transitions that an operator decides on: values, which `outcome` applies to one item. And versions of items.

An item in quarantine whose payload a person has edited is discarded, and keeps its payload byte for byte. The new item,
with the edited payload, has the next version of its id, and each names the other in its history.
"""

import re
from collections.abc import Sequence

from msgspec import Struct, structs

from reefknot.core.time import Moment
from reefknot.queue.model.work import (
    ROUTER,
    HistoryEntry,
    WorkItem,
    WorkState,
    accepted,
    assignment_and_tenant,
    can_retry,
    deadline_again,
    discard,
    is_ingestion,
    record_id,
    requeue,
)


class Requeue(Struct, frozen=True):
    """Back to the queue from quarantine, or after a failure or a cancellation: a new generation with a fresh budget."""

    who: str
    why: str = ""


class Discard(Struct, frozen=True):
    """Out of quarantine without another attempt. The item stays stored until it is purged."""

    who: str
    reason: str = ""


class Remove(Struct, frozen=True):
    """Out of quarantine and out of the store."""


class Replace(Struct, frozen=True):
    """Discarded, and its next version queued with another payload, unless that version is there already."""

    payload: bytes
    who: str
    why: str = ""


Transition = Requeue | Discard | Remove | Replace


def outcome(item: WorkItem, transition: Transition, now: Moment) -> tuple[WorkItem, ...] | None:
    """The item as it is afterwards, with its next version where it gets one. None: its state does not allow it."""
    match transition:
        case Requeue(who=who, why=why):
            return (requeue(item, now, who=who, why=why),) if can_retry(item) else None
        case _ if item.state is not WorkState.QUARANTINED:
            return None
        case Discard(who=who, reason=reason):
            return (discard(item, now, who=who, reason=reason),)
        case Replace(payload=payload, who=who, why=why):
            return replaced(item, payload, now, who=who, why=why)
        case _:
            return ()


def records_of(ids: Sequence[str], transition: Transition) -> Sequence[str]:
    """The items that a transition of these touches: with their next versions, where they get one."""
    return [*ids, *map(next_record, ids)] if isinstance(transition, Replace) else ids


# ---- versions -------------------------------------------------------------------------------------------------------


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

    The next version has all of its time, and no checkpoint: that was one of the old payload. An assignment begins as a
    submission, a job of a source in its own class.
    """
    name = item.assignment_id
    link = HistoryEntry(now.wall, "replaces", f"{name}: {why}" if why else name, who)
    root = item.family_id if item.extra.gathers else item.extra.root
    again = structs.replace(
        item,
        id=next_record(item.id),
        resource_class=item.resource_class if is_ingestion(item) else ROUTER,
        due_at=now.wall,
        deadline_at=deadline_again(item, now),
        admission="",
        payload=payload,
        extra=structs.replace(item.extra, notes=None, root=root),
    )
    new = structs.replace(accepted(again, now), history=(link,))
    return discard(item, now, who=who, reason=replaced_reason(name)), new
