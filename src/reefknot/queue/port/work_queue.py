"""
The work queue: where work waits, who runs it, and where its result is kept.

Accepted means kept. A claim is one atomic step with a lease and a fence. Work whose lease has run out is handed out
again by the next claim, which counts a crash. An event is stored in the same transaction as the change it describes. A
caller that knows that an owner is gone may end its lease early: if the owner is alive after all, the work may run
twice, but never gets two results, because every new claim has a new fence.

An operator decides about work that has its result: `change` applies a transition to all items that match a filter.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct, structs

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.errors import ParameterError
from reefknot.queue.model.admission import Reject
from reefknot.queue.model.failure_groups import FailureGroups, fingerprint_of, has_error
from reefknot.queue.model.follow_ups import RefusedFollowUp, admitted, with_children
from reefknot.queue.model.notes import Notes
from reefknot.queue.model.submission import BatchAdmission, SubmissionRules
from reefknot.queue.model.transitions import Transition
from reefknot.queue.model.work import (
    CRASH_LIMIT,
    Settled,
    WorkItem,
    WorkState,
    is_ingestion,
    is_over,
    settle,
    visible_state,
)
from reefknot.queue.port.transport import Notice


class Held(Struct, frozen=True, gc=False):
    """An item that an owner believes it holds."""

    id: str
    owner: str
    fence: int

    @classmethod
    def of(cls, item: WorkItem) -> "Held":
        """The claim of an item that was just claimed."""
        return cls(item.id, item.owner, item.fence)


class Leases(Protocol):
    """The leases of all work in a store."""

    async def owners(self, *, silent_for: float = 0.0, classes: Sequence[str] = ()) -> list[str]:
        """
        The owners of running work of these classes, or of all, each once.

        With `silent_for`, those without a renewal in that many seconds.
        """

    async def end(self, owners: Collection[str]) -> int:
        """End the leases of owners that are gone for good; the next claim counts a crash. Returns how many ended."""

    def extend(self, held: Sequence[Held], *, lease: float) -> None:
        """
        Hold work for longer, as `WorkQueue.renew` does, from any thread and without the event loop of the store.

        It blocks its thread. Items that are lost are left out.
        """

    def give_back(self, held: Sequence[Held]) -> None:
        """
        Give work back as a shutdown does (`Interrupted`), from any thread and without the event loop of the store.

        For a process that ends at once: nothing else of it may change the work meanwhile. It blocks its thread.
        """


FIRST_FENCE = 1
"""The fence of an item's first owner."""


ItemEvents = Callable[[WorkItem], Iterable[AuditEntry]]
"""The events of an item that was accepted or displaced, or whose owner vanished, given the item as it is afterwards."""


class Enqueued(StrEnum):
    """The outcome of enqueueing an item."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


class Taken(NamedTuple):
    """The outcome for an item whose key another one holds: nothing was kept. See `reefknot.queue.model.unique`."""

    id: str
    """The record of the other."""


Outcome = Enqueued | Taken | Reject
"""The outcome of enqueueing one item."""


class Enqueue(Struct, frozen=True):
    """The terms on which items are enqueued."""

    rules: SubmissionRules | None = None
    """Those of admission; without, everything is accepted. The rules that a router has published come before them."""
    owner: str = ""
    """Holds at once what is accepted, as if it had claimed it first, with the fence `FIRST_FENCE`."""
    lease: float = 60.0
    accept_events: ItemEvents | None = None
    """The events of each accepted item."""
    drop_events: ItemEvents | None = None
    """The events of each item that is displaced."""


class WorkClaim(Struct, frozen=True):
    """The claim of an owner: which work it takes, in which order, and for how long."""

    owner: str
    classes: Sequence[str] = ()
    """The resource classes; all, when none is named."""
    lease: float = 60.0
    newest_first: bool = False
    only: Collection[str] | None = None
    """The ids that are meant, the oldest first; None for all."""
    isolate: bool = False
    """Whether a suspect (`is_suspect`) comes by itself: what is behind it waits for the next claim."""
    crash_limit: int = CRASH_LIMIT
    crash_events: ItemEvents | None = None
    """The events of each item whose lease ran out."""


class FollowUps(Struct):
    """
    Items that are stored in the step that keeps a report, all of them or none: the children of the reported item.

    One that is refused (see `follow_ups.admitted`) changes the report: `refused` says into what, and into which events.
    """

    items: tuple[WorkItem, ...]
    rules: SubmissionRules
    events: ItemEvents
    """The events of each item that is stored."""
    refused: Callable[[RefusedFollowUp], tuple[Settled, tuple[AuditEntry, ...]]]
    instead: Settled | None = None
    """What the store has kept in place of the report. It is set by the store."""

    def admit(
        self, parent: WorkItem, known: Mapping[str, WorkItem], arrivals: BatchAdmission, now: Moment
    ) -> tuple[list[WorkItem], list[AuditEntry]]:
        """The items to store, and their events; or none, and the events in place of the report's: see `instead`."""
        found = admitted(parent, self.items, known, arrivals, self.rules, now)
        if isinstance(found, RefusedFollowUp):
            self.instead, events = self.refused(found)
            return [], list(events)
        self.instead = None
        return found, [event for item in found for event in self.events(item)]

    def settle(self, parent: WorkItem, settled: Settled, now: Moment) -> WorkItem:
        """The parent after its report, with its children counted; or after what was kept in its place."""
        if self.instead is not None:
            return settle(parent, self.instead, now)
        return with_children(settle(parent, settled, now), len(self.items))


class Settlement(Struct, frozen=True, gc=False):
    """An owner's report about one item it holds."""

    id: str
    owner: str
    fence: int
    settled: Settled
    events: tuple[AuditEntry, ...] = ()
    took_ms: float | None = None
    """How long the attempt had its slot, when that tells the speed of the service."""
    notice: Notice | None = None
    """The message about it. The store sends it in the same step, if it can and the report is kept."""
    notes: Notes | None = None
    """What the step has said and is not stored yet."""
    follow_ups: FollowUps | None = None

    @property
    def is_kept_as_reported(self) -> bool:
        """Whether the store, if it has kept the report, has not changed it because of a refused follow-up."""
        return self.follow_ups is None or self.follow_ups.instead is None

    @property
    def kept_as(self) -> Settled:
        """The report as the store has kept it."""
        return self.settled if self.follow_ups is None else self.follow_ups.instead or self.settled


class WorkSnapshot(Struct, frozen=True):
    """The queue at one moment: item counts by class and visible state, and how long the oldest item has been due."""

    counts: dict[str, dict[WorkState, int]]
    oldest_ms: dict[str, int] = {}
    """By class, of those where something that is due waits."""

    @property
    def oldest_due_ms(self) -> int:
        """The wait of the oldest due item of all classes."""
        return max(self.oldest_ms.values(), default=0)


def events_to_keep(
    items: Sequence[WorkItem], answers: Sequence[Outcome], events: Sequence[AuditEntry]
) -> Sequence[AuditEntry]:
    """The events of `enqueue` that are audited, given the outcomes of its items. An event names an assignment's id."""
    accepted = [item for item, answer in zip(items, answers, strict=True) if answer is Enqueued.ACCEPTED]
    if len(accepted) == len(items):
        return events
    refused = {item.assignment_id for item in items} - {item.assignment_id for item in accepted}
    return [event for event in events if event.work_id not in refused] if accepted else ()


SAME_IN_BOTH = ("kind", "assignment_id", "correlation_id", "trace_id", "pool", "tenant_id", "source")
"""The fields of a filter that an item must have with the same value. Every store finds items by any of them."""


class WorkFilter(Struct, frozen=True, repr_omit_defaults=True):
    """A filter for all work of a store. All given fields must match; an empty filter matches all."""

    state: WorkState | None = None
    """In a search with `gone`, the visible one (`visible_state`)."""
    kind: str | None = None
    tenant_id: str | None = None
    source: str | None = None
    error: str | None = None
    """A text in the reason, or in the last failure's code, type or message, in capital or small letters."""
    since: int = 0
    """The earliest creation, ms UTC."""
    before: int | None = None
    """Created before, ms UTC."""
    only_ingestion: bool = False
    """Whether only jobs of sources are meant, which no assignment is."""
    gone: tuple[str, ...] | None = None
    """Owners whose processes have ended."""
    assignment_id: str | None = None
    """Its id, whatever its tenant."""
    correlation_id: str | None = None
    trace_id: str | None = None
    pool: str | None = None
    """The resource class that it runs in, or waits for."""
    ids: tuple[str, ...] | None = None
    """The items that are meant; none, when it is empty."""
    reason: str | None = None
    """A text in the reason."""
    fingerprint: str | None = None
    """See `reefknot.queue.model.failure_groups`."""
    changed_since: int | None = None
    """The earliest last change, ms UTC: of quarantined work, the quarantining."""
    changed_before: int | None = None
    classes: tuple[str, ...] = ()
    """Resource classes, of which only open items are meant. Not together with `gone` (`ParameterError`)."""

    def __post_init__(self) -> None:
        if self.classes and self.gone is not None:
            raise ParameterError("classes", list(self.classes), "not together with gone; give one of them")

    def shows(self, item: WorkItem, now: Moment) -> bool:
        """Whether a search at this moment finds the item."""
        state = item.state if self.gone is None else visible_state(item, now, gone=self.gone)
        return self.state in (None, state) and self.matches(item)

    def matches(self, item: WorkItem) -> bool:
        """Whether the item matches in everything but its state."""
        return (
            all((given := getattr(self, name)) is None or given == getattr(item, name) for name in SAME_IN_BOTH)
            and item.created_at >= self.since
            and (self.before is None or item.created_at < self.before)
            and (self.changed_since is None or item.updated_at >= self.changed_since)
            and (self.changed_before is None or item.updated_at < self.changed_before)
            and (self.ids is None or item.id in self.ids)
            and (self.reason is None or self.reason in item.reason)
            and (not self.classes or (item.resource_class in self.classes and not is_over(item)))
            and not (self.only_ingestion and not is_ingestion(item))
            and (self.error is None or has_error(item, self.error))
            and (self.fingerprint is None or fingerprint_of(item) == self.fingerprint)
        )


EVERYTHING = WorkFilter()


class WorkPage(Struct, frozen=True):
    """A page of a search."""

    items: list[WorkItem]
    after: str = ""
    """The id after which the next page begins; empty when there is none. With fewer items than asked for, the search
    has reached its limit for one page, and items that it has not read may match."""

    @classmethod
    def of(cls, found: Sequence[WorkItem], limit: int) -> "WorkPage":
        """The page of these, which were all that there are up to the limit."""
        items = [structs.replace(item, payload=b"") for item in found]
        return cls(items, items[-1].id if 0 < len(items) == limit else "")


class QuarantineStats(Struct, frozen=True):
    """The number of items in quarantine, by kind, source and reason."""

    total: int
    by_kind: dict[str, int]
    by_source: dict[str, int]
    by_reason: dict[str, int]
    oldest_at: int | None


TakeOver = Callable[[Sequence[WorkItem], SubmissionRules, Sequence[Sequence[AuditEntry]]], Awaitable[list[Outcome]]]
"""Keeps what another process submits: the items, the rules of its admission, and the events of each."""
FREELY = Enqueue()
"""Without admission, and for no owner."""


NO_NOTES: Mapping[str, Mapping[str, bytes]] = {}


class WorkQueue(Protocol):
    """A queue of work: stores what is enqueued, hands it out to owners of claims, and records how it ended."""

    async def enqueue(
        self, items: Sequence[WorkItem], terms: Enqueue = FREELY, *, events: Sequence[AuditEntry] = ()
    ) -> list[Outcome]:
        """
        Keep these, in one step. An id that is there already is a duplicate, whatever state it is in; a key that another
        item holds is taken.

        With `rules` admission decides, in the same step, by what is open in that moment (`admit_submission`): a
        refusal writes nothing, and an item that is displaced ends as dropped. The events are kept when at least one
        item was accepted, except those that tell (by their `work_id`) of an item that was not.
        """

    @property
    def led_by_one(self) -> bool:
        """Whether one router at a time should claim submissions: several would each follow all, or divide batches."""

    def take_submissions(self, take: TakeOver | None) -> None:
        """
        From now on, let the router of this process keep what others submit; None ends that.

        Where every process can keep its own submissions at the same cost, this does nothing.
        """

    async def assign(
        self,
        items: Sequence[WorkItem],
        *,
        start: Collection[str] = (),
        owner: str = "",
        lease: float = 60.0,
        events: Sequence[AuditEntry] = (),
    ) -> list[WorkItem | None]:
        """
        Accept these for a worker, in one step. Returns each item as it is kept.

        An open submission of the same id, kind and correlation moves to the item's class: one record, one result. An
        id that is not there yet is new. None: a worker has it already, or it has ended. The items whose ids are in
        `start` are the `owner`'s at once, as if it had claimed them; but a suspect, which has to run alone, is not.
        Events of items that were not accepted go.
        """

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        """
        Take up to `n` due items: highest priority first, then oldest. Within a priority tenants take turns.

        First, every lease of the claim's classes that ran out comes back as a crash. With `n` 0 nothing else happens.
        """

    async def renew(self, held: Sequence[Held], *, lease: float = 60.0) -> list[bool]:
        """Hold them for longer. False: that one is lost, stop working on it."""

    async def note(self, held: Held, notes: Notes) -> bool:
        """
        Keep what a running step says of itself, and hold it for another lease, in one step.

        False: it is lost, and nothing of that was kept.
        """

    async def notes(self, work_id: str) -> dict[str, bytes]:
        """The parts of an item's notes (`CHECKPOINT`, `LINES`), as they were last kept."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        """
        Report, in one step. False: that lease was lost, and nothing of its report was kept.

        The follow-ups of a report are stored in the same step. If one of them is refused, none is, and the report is
        changed (`FollowUps.instead`); its notice is not sent then.
        """

    async def cancel(self, work_id: str, *, reason: str = "", who: str = "", events: Sequence[AuditEntry] = ()) -> bool:
        """Call it off, pending or running. False when there is no such item or it has ended."""

    async def change(
        self, which: WorkFilter, transition: Transition, *, dry_run: bool = False, events: Sequence[AuditEntry] = ()
    ) -> list[str]:
        """
        Change all items that match a filter and are in a state that the transition takes, in one step.

        Returns their ids, in order; a dry run changes nothing. The events are kept when an item was changed. A store on
        a server takes several steps for more than a hundred items, and keeps the events with the first.
        """

    async def transfer(self, work_id: str, resource_class: str, *, due_at: int | None = None) -> bool:
        """
        Bring a pending item over to another class, whose claimers then find it; with `due_at` (ms UTC), due then.

        False when it is not pending.
        """

    async def open_classes(self) -> list[str]:
        """The resource classes that have pending or running items."""

    async def recall(self, classes: Sequence[str], *, crash_events: ItemEvents | None = None) -> int:
        """
        Bring the pending items of workers that are gone back to the class `ROUTER`. Returns how many there were.

        First, every lease of these classes that ran out comes back as a crash, as in `claim`.
        """

    async def get(self, work_id: str) -> WorkItem | None:
        """The item with its payload, if there is one."""

    async def named(self, ids: Sequence[str]) -> list[WorkItem]:
        """Items of these ids, as far as there are any, without payloads, in no order."""

    async def search(
        self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100, oldest_first: bool = False
    ) -> WorkPage:
        """
        Items that match a filter, the newest first, without payloads; `after` is that of the page before.

        A search reads a bounded number of items, and says where the next one goes on. Behind an id that is gone there
        is nothing.
        """

    async def by_id(self, which: WorkFilter = EVERYTHING, *, after: str = "", limit: int = 100) -> list[WorkItem]:
        """Items that match a filter, in the order of their ids, without payloads."""

    async def count(self, which: WorkFilter = EVERYTHING) -> dict[str, int]:
        """The number of items that match a filter by kind, the most frequent first."""

    async def groups(self, which: WorkFilter = EVERYTHING) -> FailureGroups:
        """The items that match a filter, grouped by the fingerprints of their failures."""

    async def quarantine_stats(self) -> QuarantineStats:
        """The number of items in quarantine, by kind, source and reason."""

    async def snapshot(self, gone: Collection[str] = ()) -> WorkSnapshot:
        """The queue at this moment, by class and `visible_state`; `gone` are owners whose processes have ended."""

    async def purge(self, before: int) -> int:
        """Remove items that ended before this time (ms UTC), and tell how many went. Quarantine stays."""

    async def wait(self, timeout: float, *, classes: Sequence[str] = ()) -> bool:
        """Wait until there may be something to claim, at most `timeout` seconds. False: there is nothing."""

    async def ended(self, work_id: str, timeout: float) -> WorkItem | None:
        """The item as soon as it has ended (quarantine included), or None after `timeout` seconds."""

    def records(self) -> AsyncIterator[list[WorkItem]]:
        """All items as they are stored, with payloads, in the order of their arrival, a bounded page at a time."""

    async def adopt(self, items: Sequence[WorkItem], notes: Mapping[str, Mapping[str, bytes]] = NO_NOTES) -> int:
        """
        Keep the items of another store as they are, as the latest arrivals, without an event; with the parts of their
        notes, by their ids.

        An id that is there already is left as it is. So a call that was interrupted is repeated, with all earlier ones
        and in the same order. Returns how many are new.
        """
