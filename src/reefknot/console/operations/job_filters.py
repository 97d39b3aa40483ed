"""
Jobs as a person asks for them: `JobFilter` of lists and actions, and `SelectedJobs`, those that an action is for.

A field of the filter is here, with the place where a page asks for it in `FORM`, in the port's `WorkFilter`, and a flag
of `reefknot job`; a store may need a condition.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Struct

from reefknot.console.operations import bulk
from reefknot.console.operations.values import ParameterUseError, check_texts, one_of, time_ms
from reefknot.core.time import Moment
from reefknot.errors import OperationError
from reefknot.queue.model.work import WorkItem, WorkState, record_id, visible_state
from reefknot.queue.port.work_queue import WorkFilter
from reefknot.queue.presence import gone_owners

if TYPE_CHECKING:
    from reefknot.stores.port import Store

_STATES = {one.value: one for one in WorkState}

# ---- the moment of a look --------------------------------------------------------------------------------------------


class Now(NamedTuple):
    """The moment of a look at a store, and the owners whose processes have ended by then."""

    moment: Moment
    gone: Sequence[str]


async def now_in(store: Store) -> Now:
    """The moment, and the owners of running work that are gone."""
    return Now(store.moment(), await gone_owners(store))


async def state_in_words(store: Store, item: WorkItem) -> str:
    """The visible state of a job in a message."""
    now = await now_in(store)
    return visible_state(item, now.moment, gone=now.gone).value


# ---- filter ---------------------------------------------------------------------------------------------------------


class JobFilter(Struct, frozen=True, kw_only=True):
    """Jobs, as a person asks for them. A job must match every given field."""

    state: str | None = None
    type: str | None = None
    tenant: str | None = None
    source: str | None = None
    connector: str | None = None
    resource_class: str | None = None
    """The resource class that it runs in, or waits for."""
    error: str | None = None
    """A text in the reason, or in the last failure's code, type or message, in capital or small letters."""
    since: str | None = None
    """The earliest submission: a time, or an age."""
    before: str | None = None
    """The latest submission."""
    correlation: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        given = self.filters()
        others = given.keys() - {"state", "since", "before"}
        check_texts(**{name: given[name] for name in others if isinstance(given[name], str)})
        if self.connector is not None and self.type not in (None, self.connector):
            raise ParameterUseError(
                "connector", "not together with another type, which its jobs have; give one of them"
            )
        self.filter(Now(Moment(0, 0), ()))

    def filters(self) -> dict[str, Any]:
        """The given fields of `FILTERS`."""
        return {name: given for name in FILTERS if (given := getattr(self, name)) is not None}

    def filter(self, now: Now) -> WorkFilter:
        """The filter of the store at this moment, from which ages count."""
        at = datetime.fromtimestamp(now.moment.wall / 1000, UTC)
        return WorkFilter(
            state=None if self.state is None else one_of("state", self.state, _STATES),
            kind=self.type or self.connector,
            tenant_id=self.tenant,
            source=self.source,
            error=self.error,
            since=time_ms("since", self.since, now=at) or 0,
            before=time_ms("before", self.before, now=at),
            only_ingestion=self.connector is not None,
            gone=tuple(now.gone),
            correlation_id=self.correlation,
            trace_id=self.trace,
            pool=self.resource_class,
        )


FILTERS: tuple[str, ...] = JobFilter.__struct_fields__
"""The fields by which jobs are selected, in a list and for an action."""


class FormField(NamedTuple):
    """A field of a filter as a form asks for it: its label, and an example of what is accepted."""

    label: str
    example: str


FORM = {
    "type": FormField("Block", "http.request"),
    "connector": FormField("Connector", "imap_mailbox"),
    "source": FormField("Source", "name"),
    "tenant": FormField("Tenant", "acme"),
    "error": FormField("Error", "timeout"),
    "since": FormField("Younger than", "15m, 2h, 7d"),
    "before": FormField("Older than", "15m, 2h, 7d"),
}
"""The fields that a page asks for as text, in its order; a state is chosen from a list."""


# ---- selection ------------------------------------------------------------------------------------------------------


class JobChoice(JobFilter, frozen=True, kw_only=True):
    """The jobs of an action: named ones, or those that match every given field. `tenant` is that of the named ones."""

    STATES: ClassVar[dict[str, WorkState]] = {}
    """By their names: the visible states of the jobs that a filter may select."""
    PARTICIPLE: ClassVar[str] = ""
    ACCEPTED: ClassVar[str] = ""
    """The states in which a job that is named may be changed, in words."""

    ids: tuple[str, ...] = ()
    reason: str | None = None
    """A text in the reason."""
    all: bool = False

    def __post_init__(self) -> None:
        JobFilter.__post_init__(self)
        check_texts(reason=self.reason)
        if self.ids and (self.all or self.state is not None):
            text = "not together with ids, which name the jobs whatever their state; give one of them"
            raise ParameterUseError("all" if self.all else "state", text)
        if not self.ids and not self.filters() and not self.all:
            raise OperationError(f"select jobs by ids, a filter ({', '.join((*FILTERS, 'reason'))}), or all", "invalid")
        self.selection()

    def filters(self) -> dict[str, Any]:
        """The given fields that select jobs which are not named."""
        given = JobFilter.filters(self) | ({} if self.reason is None else {"reason": self.reason})
        if self.ids:
            given.pop("tenant", None)  # it belongs to the ids then
        return given

    @classmethod
    def accepts(cls, item: WorkItem) -> bool:
        """Whether a job that is named may be changed."""
        return item.state in cls.STATES.values()

    def selection(self) -> SelectedJobs:
        """The jobs that are selected at this moment."""
        chosen = list(self.STATES.values()) if self.state is None else [one_of("state", self.state, self.STATES)]
        names = tuple(dict.fromkeys(record_id(one, self.tenant) for one in self.ids))
        return SelectedJobs(names, tuple(chosen), self)


class SelectedJobs(Struct, frozen=True):
    """The selected jobs, the newest first."""

    ids: tuple[str, ...]
    states: tuple[WorkState, ...]
    """The visible states that a filter selects."""
    choice: JobChoice

    def of(self, ids: tuple[str, ...]) -> SelectedJobs:
        return msgspec.structs.replace(self, ids=ids)

    async def count(self, store: Store) -> dict[str, int]:
        return await bulk.counted(self.chunks(store))

    async def chunks(self, store: Store) -> AsyncIterator[list[WorkItem]]:
        now = await now_in(store)
        tenant = None if self.ids else self.choice.tenant
        which = msgspec.structs.replace(self.choice.filter(now), tenant_id=tenant, reason=self.choice.reason)
        if self.ids:
            named_ones = [await store.work.get(one) for one in self.ids]
            found = [item for item in named_ones if item and self.choice.accepts(item) and which.matches(item)]
            if found:
                yield found
            return
        for state in self.states:
            after, which = "", msgspec.structs.replace(which, state=state)
            while True:
                page = await store.work.search(which, after=after, limit=bulk.CHUNK)
                if page.items:
                    yield page.items
                if not (after := page.after):
                    break

    async def missing(self, store: Store, item: WorkItem | None) -> str:
        cannot = f"cannot be {self.choice.PARTICIPLE}"
        if item is None:
            return f"{cannot}: there is no such job; `job list` lists all jobs"
        state = await state_in_words(store, item)
        if self.choice.accepts(item):
            return f"does not match the filter: it is {state}"
        return f"{cannot}: it is {state}; accepted: {self.choice.ACCEPTED}"
