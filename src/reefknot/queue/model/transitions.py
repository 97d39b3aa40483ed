"""Transitions that an operator decides on: values, which `outcome` applies to one item."""

from collections.abc import Sequence

from msgspec import Struct

from reefknot.core.time import Moment
from reefknot.queue.model.edited_work import next_record, replaced
from reefknot.queue.model.work import WorkItem, WorkState, can_retry, discard, requeue


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
        case Remove():
            return ()


def records_of(ids: Sequence[str], transition: Transition) -> Sequence[str]:
    """The items that a transition of these touches: with their next versions, where they get one."""
    return [*ids, *map(next_record, ids)] if isinstance(transition, Replace) else ids
