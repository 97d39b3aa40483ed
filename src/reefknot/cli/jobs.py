"""
Assignments as one thing.

The store has two pieces of work for an assignment: what a caller handed in, and what a worker took on. A person asks
about one job: the worker's word counts as soon as there is one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from reefknot.cli.observing import time_text
from reefknot.core.messages import encode
from reefknot.core.work import SUBMISSION_ONCE, WorkItem, WorkState, submission_id, submitted
from reefknot.router.desk import CLASS, answer_of

if TYPE_CHECKING:
    from reefknot.core.redaction import Redactor
    from reefknot.ports.store import Store

PAGE = 500


class Job(Struct, frozen=True):
    """Both pieces of work of one assignment; `taken` is the worker's."""

    id: str
    handed_in: WorkItem | None
    taken: WorkItem | None

    @property
    def item(self) -> WorkItem:
        """The one that tells how far it is."""
        found = self.taken or self.handed_in
        assert found is not None  # a job is at least one of them
        return found

    def as_json(self, now_ms: int) -> dict[str, Any]:
        item = self.item
        waits = item.state is WorkState.PENDING
        created = min(one.created_at for one in (self.handed_in, self.taken) if one is not None)
        place = item.resource_class
        return {
            "id": self.id,
            "type": item.kind,
            "state": item.state.value,
            "class": None if place == CLASS else place.partition("@")[0],
            "worker": place.partition("@")[2] or None,
            "attempts": item.attempts,
            "priority": item.priority,
            "reason": item.reason or None,
            "due_at": time_text(item.due_at) if waits else None,
            "due_in_s": max(0.0, (item.due_at - now_ms) / 1000) if waits else None,
            "deadline_at": time_text(item.deadline_at),
            "age_s": max(0.0, (now_ms - created) / 1000),
            "created_at": time_text(created),
            "updated_at": time_text(item.updated_at),
        }

    def details(self, redactor: Redactor) -> dict[str, Any]:
        """What a list leaves out."""
        item = self.item
        chapters = [
            (chapter, one) for one in (self.handed_in, self.taken) if one is not None for chapter in one.history
        ]
        history = [
            {"at": time_text(chapter.at), "what": chapter.what, "why": redactor(chapter.why), "who": chapter.who}
            for chapter, _ in sorted(chapters, key=lambda pair: pair[0].at)
        ]
        return {
            "tenant_id": item.tenant_id,
            "correlation_id": item.correlation_id,
            "trace_id": item.trace_id,
            "generation": item.generation,
            "snoozes": item.snoozes,
            "interruptions": item.interruptions,
            "crashes": item.crashes,
            "assignment": _json_of(self._assignment(), redactor),
            "failure": _json_of(item.failure, redactor),
            "result": _json_of(self._result(), redactor),
            "history": history,
        }

    def _result(self) -> str | bytes | None:
        """The worker's; else what its caller gets."""
        if self.item.result is not None or self.handed_in is None:
            return self.item.result
        try:
            answer = answer_of(self.handed_in)
        except msgspec.DecodeError:
            return None
        return None if answer is None else encode(answer)

    def _assignment(self) -> bytes | None:
        """As it was handed in; of one that came another way, as the worker kept it."""
        if self.handed_in is not None and self.handed_in.payload:
            return self.handed_in.payload
        if self.taken is None or not self.taken.payload:
            return None
        try:
            kept = msgspec.json.decode(self.taken.payload)
        except msgspec.DecodeError:
            return self.taken.payload
        return msgspec.json.encode(kept.get("assignment", kept) if isinstance(kept, dict) else kept)


def _json_of(text: str | bytes | None, redactor: Redactor) -> Any:
    if text is None:
        return None
    try:
        return redactor.tree(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return redactor(text if isinstance(text, str) else text.decode("utf-8", "replace"))


async def get_job(store: Store, name: str) -> Job | None:
    """One job by its id."""
    handed_in = await store.work.get(submission_id(name)) or await store.work.get(SUBMISSION_ONCE + name)
    handed_in = handed_in if handed_in is not None and handed_in.resource_class == CLASS else None
    taken = await _taken(store, name)
    return None if handed_in is None and taken is None else Job(name, handed_in, taken)


async def find_jobs(
    store: Store, *, state: WorkState | None, kind: str | None, after: str, limit: int
) -> AsyncIterator[tuple[str, Job]]:
    """Jobs with the mark from which the next page goes on. What a worker has is told by the worker's piece."""
    told, after = 0, unquote(after)
    while True:
        items = await store.work.find(state=state, kind=kind, after=after, limit=min(PAGE, max(limit, 1)))
        for item in items:
            after = item.id
            job = await _job_of(store, item)
            if job is not None:
                yield quote(after), job
                told += 1
                if told >= limit:
                    return
        if not items:
            return


async def _job_of(store: Store, item: WorkItem) -> Job | None:
    if item.resource_class != CLASS:
        return Job(item.id, None, item)
    name = submitted(item.id)
    return None if await _taken(store, name) is not None else Job(name, item, None)


async def _taken(store: Store, name: str) -> WorkItem | None:
    """The worker's piece. An earlier version's submission may have an id that reads like one."""
    item = await store.work.get(name)
    return None if item is None or item.resource_class == CLASS else item


async def overview(store: Store) -> dict[str, Any]:
    """How many jobs are in each state, and how long the oldest due one waits."""
    snapshot = await store.work.snapshot()
    states = {state.value: 0 for state in WorkState}
    for name, counts in snapshot.counts.items():
        for state, number in counts.items():
            if name != CLASS:
                states[state.value] += number
    handed_in = snapshot.counts.get(CLASS, {})
    return {
        "states": states,
        "waiting_for_router": handed_in.get(WorkState.PENDING, 0),
        "oldest_due_s": max(snapshot.oldest_due_ms.values(), default=0) / 1000,
    }
