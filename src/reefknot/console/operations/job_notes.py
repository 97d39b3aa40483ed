"""
Notes of steps for people: how far jobs have come, the checkpoint they go on from, and their lines of log.

The record of a job has its progress. The rest is read by the job's id, and only where a step has said something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.console.operations.values import time_text
from reefknot.queue.model.notes import CHECKPOINT, LINES, StepLog, StepProgress
from reefknot.queue.model.work import WorkState, is_workers
from reefknot.queue.port.work_queue import WorkFilter

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.queue.model.work import WorkItem
    from reefknot.stores.port import Store

MOST_SHOWN = 10
MOST_LOOKED_AT = 200
"""Running jobs among which those that tell their progress are looked for."""


def progress_fields(item: WorkItem) -> dict[str, Any] | None:
    """The progress of a job, if its step tells it: numbers, a share in percent where the whole is known, a text."""
    progress = None if item.extra.notes is None else item.extra.notes.progress
    if progress is None:
        return None
    return {"done": progress.done, "of": progress.of, "percent": progress.percent, "text": progress.text}


def progress_in_words(fields: dict[str, Any]) -> str:
    """`3 of 10 (30 %), resizing`."""
    return str(StepProgress(fields["done"], fields["of"], fields["text"]))


async def kept_parts(store: Store, item: WorkItem) -> dict[str, bytes]:
    """The parts of a job's notes; for a job whose step said nothing, without a read."""
    return {} if item.extra.notes is None else await store.work.notes(item.id)


def checkpoint_fields(operator: Operator, item: WorkItem, parts: dict[str, bytes]) -> dict[str, Any] | None:
    """The last checkpoint of a job: when it was stored, the number there were, its value. Secrets are hidden."""
    notes = item.extra.notes
    if notes is None or not notes.checkpoints or CHECKPOINT not in parts:
        return None
    value = operator.redactor.tree(msgspec.json.decode(parts[CHECKPOINT]))
    return {"at": time_text(notes.checkpoint_at), "number": notes.checkpoints, "value": value}


def log_fields(operator: Operator, parts: dict[str, bytes], after: int = 0) -> dict[str, Any]:
    """The lines of a job behind line number `after`, in order; `dropped` counts the first ones, which are gone."""
    log = StepLog.read(parts.get(LINES))
    lines = [
        {"number": number, "at": time_text(one.at), "attempt": one.attempt, "text": operator.redactor(one.text)}
        for number, one in enumerate(log.lines, log.dropped + 1)
        if number > after
    ]
    return {"lines": lines, "dropped": log.dropped}


async def steps_under_way(store: Store) -> list[dict[str, Any]]:
    """Jobs that run now and tell their progress, the newest first; some, if there are many."""
    page = await store.work.search(WorkFilter(state=WorkState.RUNNING), limit=MOST_LOOKED_AT)
    found = [(item, fields) for item in page.items if (fields := progress_fields(item)) and is_workers(item)]
    return [
        {
            "id": item.assignment_id,
            "tenant_id": item.tenant_id,
            "type": item.kind,
            "worker": item.resource_class.rpartition("@")[2],
            "began_at": time_text(item.updated_at),
            "progress": fields,
        }
        for item, fields in found[:MOST_SHOWN]
    ]
