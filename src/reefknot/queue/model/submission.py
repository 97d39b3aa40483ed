"""
Admission of submissions, decided in their store by the work that is open there at that moment.

A store counts the open work of each resource class by stage, priority and tenant. `admit_submission` sees these counts,
the slots of all workers and the time that steps take, and returns a value: accept, accept in the place of another, or
reject with the reason and the time to come back. Three bounds:

    by count    a tenth of the places is for work above the default priority; a higher one displaces the lowest
    by tenant   while several tenants wait, none holds more than its share of the places
    by time     work with a deadline is refused when its turn would come too late

Work that is submitted for later takes no place and is ahead of no other work until a router claims it at its due time;
a resource class keeps `SCHEDULED_PLACES` times as much of it as it has places, shared among tenants in the same way.

Tenants take turns within a priority, so a tenant that floods the queue delays itself. Before the first answers a step
is assumed to take `ASSUMED_MS`: the queue opens cautiously, and wider as answers come.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from reefknot.queue.model.admission import (
    LONGEST_WAIT_MS,
    MISSES_MESSAGE,
    SHORTEST_WAIT_MS,
    UNKNOWN_WAIT_MS,
    Accept,
    Arrival,
    Reject,
    RejectReason,
)

DEFAULT_PRIORITY = 0
RESERVED = 10
"""One place in this number is for work above the default priority."""
MARGIN = 0.7
"""
Share of the wait that the rules allow. The worker decides again by its own times; work that passes here should pass
there.
"""
LONG_STEP = 2.0
"""Multiple of the mean service time that must be left after the wait, so that slower steps can end too."""
ASSUMED_MS = 200.0
ASSUMED_WEIGHT = 4
"""Weight of the assumption, in answers."""
SMOOTHING = 0.1
"""Least weight of a new value in a running mean."""
SCHEDULED_PLACES = 10
FULL_MESSAGE = "Queue full, rejecting assignment"
SCHEDULE_MESSAGE = "Too much work is scheduled for later, rejecting assignment"
SHARE_MESSAGE = "The tenant has its share of the queue, rejecting assignment"


EXPIRED = "expired while queued"
"""The reason that is kept with an assignment whose deadline passed before it could run."""
OVERDUE = "no result by its deadline"
"""The reason that is kept with an assignment which a worker was running, and did not end, when its deadline passed."""


class Stage(StrEnum):
    """The stage of an open assignment: at no worker yet, queued for one, running, or submitted for later."""

    SUBMITTED = "submitted"
    QUEUED = "queued"
    RUNNING = "running"
    SCHEDULED = "scheduled"


class SubmissionRules(Struct, frozen=True):
    """The bounds of what may wait for workers, for each resource class."""

    size: int = 1000
    tenant_share: float = 0.5
    max_wait_fraction: float | None = 0.5
    preempt: bool = True
    """Whether an arrival of higher priority displaces the lowest that waits."""


class Capacity(Struct, frozen=True):
    """Slots of one system's workers by resource class, and its router's rules, for all submitters of the store."""

    slots: dict[str, int] = {}
    rules: SubmissionRules | None = None


class ServiceTime(Struct, frozen=True):
    """The mean time for which a step occupies its slot."""

    known: int = 0
    mean_ms: float = ASSUMED_MS

    def after(self, took_ms: float) -> "ServiceTime":
        """The mean with another answer. It follows a service that changes within some twenty answers."""
        known = self.known + 1
        return ServiceTime(known, running_mean(self.mean_ms, took_ms, number=known + ASSUMED_WEIGHT))


def running_mean(mean: float, value: float, *, number: int) -> float:
    """The mean with one more value, its `number`-th. It follows values that change: the latest has a least weight."""
    return mean + (value - mean) * max(SMOOTHING, 1 / number)


Displaceable = tuple[int, str]
"""Priority and tenant of the submission to displace: the oldest of these."""


class Displace(Struct, frozen=True):
    """Accept, in the place of the oldest submission of this priority and tenant."""

    priority: int
    tenant: str


SubmissionVerdict = Accept | Displace | Reject


class OpenWork:
    """The open work of one resource class at one moment; arrivals that are accepted are counted in."""

    __slots__ = ("_counts", "service", "slots")

    def __init__(
        self, counted: Iterable[tuple[str, int, str, int]] = (), *, slots: int = 0, service: ServiceTime | None = None
    ) -> None:
        """`counted` are rows of stage, priority, tenant and number."""
        self._counts: dict[tuple[str, int, str], int] = {
            (stage, priority, tenant): number for stage, priority, tenant, number in counted if number > 0
        }
        self.slots = slots
        self.service = service or ServiceTime()

    def add(self, stage: Stage, priority: int, tenant: str, number: int = 1) -> None:
        key = (stage.value, priority, tenant)
        self._counts[key] = self._counts.get(key, 0) + number

    @property
    def submitted(self) -> int:
        """The number of places taken: submissions that no worker has accepted."""
        return sum(number for (stage, _, _), number in self._counts.items() if stage == Stage.SUBMITTED)

    def submitted_by_tenant(self) -> dict[str, int]:
        return self.by_tenant(Stage.SUBMITTED)

    def by_tenant(self, wanted: Stage) -> dict[str, int]:
        """The number of assignments at this stage that each tenant has."""
        held: dict[str, int] = {}
        for (stage, _, tenant), number in self._counts.items():
            if stage == wanted:
                held[tenant] = held.get(tenant, 0) + number
        return held

    def lowest(self, tenant: str | None = None) -> Displaceable | None:
        """The lowest priority of the submissions (of one tenant), and its tenant that holds the most."""
        found = [
            (priority, -number, name)
            for (stage, priority, name), number in self._counts.items()
            if stage == Stage.SUBMITTED and number > 0 and tenant in (None, name)
        ]
        if not found:
            return None
        priority, _, name = min(found)
        return priority, name

    def ahead(self, priority: int, tenant: str) -> int:
        """The number of assignments whose turn is before that of an arrival; running ones are among them."""
        peers: dict[str, int] = {}
        ahead = 0
        for (stage, one, name), number in self._counts.items():
            if stage == Stage.SCHEDULED:
                continue
            if stage == Stage.RUNNING or one > priority:
                ahead += number
            elif one == priority:
                peers[name] = peers.get(name, 0) + number
        own = peers.pop(tenant, 0)
        return ahead + own + sum(min(number, own + 1) for number in peers.values())

    def wait_ms(self, priority: int, tenant: str) -> float:
        """The time until a slot is free for an arrival; 0 without a worker, because it cannot be estimated then."""
        if self.slots <= 0:
            return 0.0
        turns = self.ahead(priority, tenant) - self.slots + 1
        return max(0, turns) * self.service.mean_ms / self.slots


def admit_submission(work: OpenWork, arrival: Arrival, rules: SubmissionRules) -> Accept | Displace | Reject:
    """Whether, and in whose place, a submission is kept."""
    tenant = arrival.tenant
    wait = work.wait_ms(arrival.priority, tenant)
    if arrival.deadline_ms is not None and rules.max_wait_fraction is not None and wait > 0:
        allowed = MARGIN * rules.max_wait_fraction * arrival.deadline_ms
        if wait > allowed or wait + LONG_STEP * work.service.mean_ms > arrival.deadline_ms:
            ahead = work.ahead(arrival.priority, tenant)
            return Reject(RejectReason.WOULD_MISS_DEADLINE, MISSES_MESSAGE, _retry_after_ms(wait), ahead)
    held = work.submitted_by_tenant()
    taken = sum(held.values())
    own = held.get(tenant, 0)
    most_of_one = max(1, int(rules.tenant_share * rules.size))
    if own < taken and own >= most_of_one:
        return _lower_one(work, arrival, rules, tenant) or Reject(
            RejectReason.QUEUE_FULL, SHARE_MESSAGE, _retry_after_ms(wait), taken
        )
    reserved = rules.size // RESERVED if arrival.priority <= DEFAULT_PRIORITY else 0
    if taken < rules.size - reserved:
        return Accept()
    return _in_place_of(work, arrival, rules, held) or Reject(
        RejectReason.QUEUE_FULL, FULL_MESSAGE, _retry_after_ms(wait), taken
    )


def admit_scheduled(work: OpenWork, tenant: str, rules: SubmissionRules) -> Accept | Reject:
    """Whether work for later is kept: by count, and by the tenant's share of it."""
    held, most = work.by_tenant(Stage.SCHEDULED), SCHEDULED_PLACES * rules.size
    taken, own = sum(held.values()), held.get(tenant, 0)
    if taken >= most or (own < taken and own >= max(1, int(rules.tenant_share * most))):
        return Reject(RejectReason.QUEUE_FULL, SCHEDULE_MESSAGE, LONGEST_WAIT_MS, taken)
    return Accept()


class BatchAdmission:
    """Admission of the arrivals of one batch: each counts for those after it."""

    def __init__(self, read: Callable[[str], tuple[OpenWork, SubmissionRules | None]]) -> None:
        """`read` returns the open work of a resource class, and the rules that a router has published for it."""
        self._read = read
        self._pools: dict[str, tuple[OpenWork, SubmissionRules | None]] = {}

    def admit(self, pool: str, stage: Stage | None, arrival: Arrival, rules: SubmissionRules) -> SubmissionVerdict:
        """Whether, and in whose place, an arrival is kept that then is at this stage."""
        if pool not in self._pools:
            self._pools[pool] = self._read(pool)
        work, published = self._pools[pool]
        verdict: SubmissionVerdict
        if stage is Stage.SCHEDULED:
            verdict = admit_scheduled(work, arrival.tenant, published or rules)
        else:
            verdict = admit_submission(work, arrival, published or rules)
        if not isinstance(verdict, Reject):
            work.add(stage or Stage.SUBMITTED, arrival.priority, arrival.tenant)
        if isinstance(verdict, Displace):
            work.add(Stage.SUBMITTED, verdict.priority, verdict.tenant, -1)
        return verdict


def _in_place_of(work: OpenWork, arrival: Arrival, rules: SubmissionRules, held: Mapping[str, int]) -> Displace | None:
    """The submission that makes room: the lowest below the arrival's priority, or one of a tenant beyond its share."""
    lower = _lower_one(work, arrival, rules)
    if lower is not None:
        return lower
    tenant = arrival.tenant
    greedy = max(held, key=lambda name: held[name], default=tenant)
    share = min(rules.tenant_share, 1 / len({*held, tenant})) * (rules.size - rules.size // RESERVED)
    if greedy == tenant or held[greedy] <= share or held[greedy] <= held.get(tenant, 0) + 1:
        return None
    found = work.lowest(greedy)
    return Displace(*found) if found is not None and found[0] <= arrival.priority else None


def _lower_one(work: OpenWork, arrival: Arrival, rules: SubmissionRules, tenant: str | None = None) -> Displace | None:
    """The lowest submission (of one tenant), if it is below the arrival's priority and may be displaced."""
    lowest = work.lowest(tenant) if rules.preempt else None
    return Displace(*lowest) if lowest is not None and lowest[0] < arrival.priority else None


def _retry_after_ms(wait: float) -> int:
    """The suggested pause before another try: until half of the work ahead has ended."""
    if not wait:
        return UNKNOWN_WAIT_MS
    return int(min(LONGEST_WAIT_MS, max(SHORTEST_WAIT_MS, wait / 2)))


Waiting = tuple[int, int, int]
"""Priority, due time and number of a waiting item."""


def in_turns(queues: Mapping[str, Sequence[Waiting]], n: int, after: str = "") -> list[tuple[str, Waiting]]:
    """
    The next `n` of these queues, each with its tenant: the highest priority first, tenants taking turns within it.

    Each queue is in its own order, priorities descending. The first turn is that of the tenant behind `after`.
    """
    if len(queues) == 1:
        ((name, queue),) = queues.items()
        return [(name, waiting) for waiting in queue[:n]]
    taken: list[tuple[str, Waiting]] = []
    at = dict.fromkeys(queues, 0)
    names = sorted(queues, key=lambda name: (name <= after, name))
    while len(taken) < n:
        left = [name for name in names if at[name] < len(queues[name])]
        if not left:
            break
        highest = max(queues[name][at[name]][0] for name in left)
        for name in left:
            if queues[name][at[name]][0] == highest and len(taken) < n:
                taken.append((name, queues[name][at[name]]))
                at[name] += 1
    return taken
