"""
Sources of documents in words: the state of a source, what a person can do about it, and why it is not synced.

Nothing is changed here, and nothing is read: who asks has the source, its status and the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from reefknot.audit.model.event import FailureRecord
from reefknot.console.operations.values import plural, time_text
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import WorkItem, WorkState, is_over

if TYPE_CHECKING:
    from reefknot.core.redaction import Redactor
    from reefknot.ingest.configured_sources import ConfiguredSource
    from reefknot.ingest.port import SourceCounts
    from reefknot.ingest.sources import SourceRecord, SourceStatus

NEEDS_ATTENTION, NEVER_SYNCED, NOT_CONFIGURED = "needs attention", "never synced", "not configured"
ELSEWHERE, OTHER_CONNECTOR, RETRYING = "kept elsewhere", "other connector", "retrying"
STOPPED, SYNCING, WAITING = "stopped", "syncing", "waiting"

# ---- the state, and what to do ---------------------------------------------------------------------------------------


def state_word(status: SourceStatus, condition: SourceCondition) -> str:
    """The state of a source in the list."""
    if condition is not SourceCondition.HEALTHY:
        return condition.value
    if status.record.full_since:
        return STOPPED
    if status.quarantined:
        return NEEDS_ATTENTION
    if status.sync is not None and status.sync.failure and not is_over(status.sync):
        return RETRYING
    return condition.value if status.record.synced_at else NEVER_SYNCED


def to_do_lines(
    name: str, status: SourceStatus, count: SourceCounts | None, redact: Redactor, *, now: int, due: int | None
) -> list[str]:
    """Lines on what a person can do about a source, and on what happens by itself; `due` is its next sync."""
    sync = status.sync
    if sync is None and count is None and not status.record.health.paused:
        return [f"it has no documents yet: reefknot source run {name}"]
    failure = redact(failure_of(sync))
    lines, others = health_lines(name, status.record, failure, redact, now), status.quarantined
    if failure and sync is not None and sync.state is WorkState.PENDING:
        lines.append(f"its sync failed ({failure}) and is tried again at {time_text(due)}")
    if sync is not None and sync.state is WorkState.QUARANTINED:
        lines.append(f"its sync failed: {failure or redact(sync.reason)}; then: reefknot source run {name}")
        others -= 1
    if status.record.full_since:
        lines.append(stopped_line(name, status))
    elif others > 0:
        lines.append(f"{plural(others, 'item')} could not be read: reefknot quarantine list --source {name}")
    if count is not None and count.problems:
        lines.append(f"{plural(count.problems, 'document')} could be read only in part: reefknot source show {name}")
    return lines


def stopped_line(name: str, status: SourceStatus) -> str:
    """Why the sync of a source does not go on: no further failed item can be remembered; and what to do."""
    since = time_text(status.record.full_since)
    return (
        f"its sync has stopped at {since}, before items that cannot be read, and keeps its place: "
        f"{plural(status.open_jobs, 'job')} of it wait and {status.quarantined} are in quarantine, which is as many as "
        f"ingestion.max_failed_items allows. Mend the cause, then: reefknot quarantine requeue --source {name}"
    )


def sync_word(sync: WorkItem | None) -> str | None:
    """The state of the latest sync of a source, as it is; None when there was none."""
    if sync is None or is_over(sync):
        return None if sync is None else sync.state.value
    if sync.state is WorkState.RUNNING:
        return SYNCING
    return RETRYING if sync.failure else WAITING


def health_lines(name: str, record: SourceRecord, failure: str, redact: Redactor, now: int) -> list[str]:
    """Why none, or few, of the jobs of a source begin."""
    health = record.health
    match health.condition(now):
        case SourceCondition.PAUSED:
            return [f"paused{_by_and_why(record)}: reefknot source resume {name}"]
        case SourceCondition.COOLING:
            until, why = time_text(health.cools_until), redact(health.cooling_reason)
            return [f"no job begins before {until} ({why}); it goes on by itself then"]
        case SourceCondition.RESTING:
            until = time_text(health.rests_until)
            return [f"it does not answer ({failure or 'several jobs failed'}); it is tried again at {until}"]
        case SourceCondition.PROBING | SourceCondition.RECOVERING:
            return ["it did not answer for a while, and is tried with few jobs at first"]
        case SourceCondition.HEALTHY:
            return []


def left_line(name: str, *, documents: int, open_jobs: int, quarantined: int) -> str:
    """The line about a source that is not configured any more, by what is left of it."""
    left = [plural(documents, "document")] if documents else []
    left += [plural(open_jobs, "open job")] if open_jobs else []
    left += [plural(quarantined, "job in quarantine", "jobs in quarantine")] if quarantined else []
    forget = f"reefknot source forget {name} --because TEXT"
    words = ", ".join(left) or "its cursor"
    return f"no longer configured, so its jobs do not run; still stored: {words}. To remove: {forget}"


def failure_of(item: WorkItem | None) -> str:
    """The message of a job's last failure."""
    if item is None or not item.failure:
        return ""
    return msgspec.json.decode(item.failure, type=FailureRecord).message


def _by_and_why(record: SourceRecord) -> str:
    by = f" by {record.paused_by}" if record.paused_by else ""
    return by + (f" because {record.paused_because}" if record.paused_because else "")


# ---- why it is not synced --------------------------------------------------------------------------------------------


class Here(NamedTuple):
    """The place of the documents that an operator reads, and whether the store is a file of this host."""

    documents: str = ""
    is_local: bool = True

    def obstacle(self, source: ConfiguredSource, record: SourceRecord) -> tuple[str, str] | None:
        """The state of a source that is left alone here, and what can be done; None for one that can be synced."""
        full = f"reefknot source run {source.name} --full"
        if record.is_of_other(source.connector):
            text = (
                f"its stored documents come from the connector {record.connector}, and it is {source.connector} now. "
                f"Give it another name; or start again without the stored documents: {full}"
            )
            return OTHER_CONNECTOR, text
        if place := record.elsewhere(self.documents, is_local=self.is_local):
            text = f"its documents and its cursor are in another place: {place}, perhaps on another host. Sync it there"
            return ELSEWHERE, f"{text}, or keep them here from now on: {full}"
        return None


def sync_refusal(source: ConfiguredSource, record: SourceRecord, here: Here, *, full: bool) -> tuple[str, str] | None:
    """The text and the kind of a refusal to sync: the source is paused, or its cursor is in another place or another
    connector's. None: it can be synced."""
    name, obstacle = source.name, here.obstacle(source, record)
    if obstacle is not None and not full:
        state, text = obstacle
        return f"{name}: {text}", "misconfigured" if state == OTHER_CONNECTOR else "temporary"
    if record.health.paused:
        return f"{name} is paused{_by_and_why(record)}; first: reefknot source resume {name}", "temporary"
    return None


def sync_note(name: str, *, is_open: bool, full: bool, has_source: bool, systems: int, shown: str) -> str | None:
    """
    Hints on what to start, or to ask for later, so that a sync is run as it was asked for; None when it will be.

    `has_source` tells whether one of the running `systems` has the source, `shown` is the URL of the store.
    """
    notes = []
    if is_open and full:
        notes.append("a sync of it is under way; ask for a full one when that has ended")
    if not has_source:
        start = f"reefknot up --engine {shown}" if shown else "reefknot up"
        why = f"the systems that run do not have {name}" if systems else "no system runs over this store"
        how = "restart one with this configuration" if systems else "start one"
        notes.append(f"{why}: the job waits; {how}: {start}")
    return "; ".join(notes) or None
