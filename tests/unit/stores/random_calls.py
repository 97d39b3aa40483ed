"""Calls of a store's work by chance: the same seed makes the same calls where the items are the same."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from reefknot.audit.port import AuditEntry
from reefknot.queue.model import work as core
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.transitions import Discard, Remove, Requeue
from reefknot.queue.model.work import ENDED, ROUTER, Interrupted, Quarantine, Settled, Snooze, WorkItem, WorkState
from reefknot.queue.port.work_queue import Enqueue, Held, Settlement, WorkClaim, WorkFilter
from reefknot.testing.conformance.harness import event

RULES = SubmissionRules(size=12)
CLASSES = ("io@w1", "io@w2", "cpu@w1")
LEASE_S = 10.0
ASIDE = WorkFilter(state=WorkState.QUARANTINED)
STEPS = (
    *("enqueue", "enqueue", "assign", "assign", "claim", "claim", "settle", "settle", "settle", "enqueue_plain"),
    *("renew", "extend", "end_leases", "lease_runs_out", "cancel", "retry", "transfer", "recall", "purge"),
    *("requeue", "discard", "purge_quarantine", "time_passes"),
)


def told(item: WorkItem) -> list[AuditEntry]:
    return [event("told", work_id=item.id)]


class Call(NamedTuple):
    """A call of a part of a store: its work or its leases."""

    part: str
    name: str
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012 - never changed


class RandomCalls:
    """Each step is a few calls, made for the items that are there when it is asked for."""

    def __init__(
        self, seed: int, items: Callable[[], Iterable[WorkItem]], wall: Callable[[], int], prefix: str = "a"
    ) -> None:
        self.rng = Random(seed)
        self._items, self._wall, self._prefix = items, wall, prefix
        self._number = 0
        self.passed = 0.0
        """How many seconds the last step took."""

    def step(self) -> tuple[str, list[Call]]:
        name = self.rng.choice(STEPS)
        self.passed = 0.0
        return name, list(getattr(self, name)())

    def some(self, *states: WorkState, most: int = 3) -> list[WorkItem]:
        found = sorted((one for one in self._items() if one.state in states), key=lambda one: one.id)
        return self.rng.sample(found, min(len(found), self.rng.randint(1, most)))

    def new(self, resource_class: str, pool: str = "") -> WorkItem:
        self._number += 1
        name, due_at = f"{self._prefix}{self._number:03}", self._wall() + self.rng.choice([0, 0, 0, 3000])
        priority, tenant = self.rng.randint(-1, 1), self.rng.choice([None, "", "x", "y"])
        return WorkItem(name, "t", resource_class, pool=pool, priority=priority, tenant_id=tenant, due_at=due_at)

    def held(self) -> list[Held]:
        return [Held(one.id, one.owner, one.fence) for one in self.some(WorkState.RUNNING)]

    def enqueue(self) -> Iterable[Call]:
        items = [self.new(ROUTER, self.rng.choice(["io", "cpu"])) for _ in range(self.rng.randint(1, 6))]
        rules, owner = self.rng.choice([None, RULES, RULES]), self.rng.choice(["", "", "router-1"])
        how = Enqueue(rules=rules, accept_events=told, owner=owner, lease=LEASE_S, drop_events=told)
        yield Call("work", "enqueue", ([*items, *self.some(*WorkState, most=1)], how))

    def enqueue_plain(self) -> Iterable[Call]:
        yield Call("work", "enqueue", ([self.new(self.rng.choice(["io", *CLASSES]))],))

    def assign(self) -> Iterable[Call]:
        open_ones = [one for one in self.some(WorkState.PENDING, WorkState.RUNNING) if core.is_unassigned(one)]
        items = [WorkItem(one.id, "t", f"{one.pool}@w1", due_at=self._wall()) for one in open_ones]
        items.append(self.new("cpu@w1"))
        start = {one.id for one in items if self.rng.random() < 0.5}
        yield Call("work", "assign", (items,), {"start": start, "owner": "w1", "lease": LEASE_S})

    def claim(self) -> Iterable[Call]:
        only = self.rng.choice([None, None, None, {one.id for one in self.some(WorkState.PENDING)}])
        classes = self.rng.choice([(ROUTER,), ("io@w1", "cpu@w1"), ("io",), ()])
        newest_first, isolate = self.rng.random() < 0.2, self.rng.random() < 0.5
        claim = WorkClaim("w1", classes, LEASE_S, newest_first=newest_first, only=only, isolate=isolate)
        yield Call("work", "claim", (self.rng.randint(0, 4), claim))

    def settle(self) -> Iterable[Call]:
        due = self._wall() + self.rng.choice([0, 2000])
        ways: Sequence[Settled] = (
            *(
                core.WorkDone("1"),
                core.WorkFailed("f", None, "r"),
                core.WorkRejected("{}", "r"),
                core.WorkCancelled("{}", "r"),
            ),
            *(core.TryAgain(due, "f", "transient", 5), Snooze(due, "later"), Interrupted(), Quarantine("r", "f")),
        )
        took = [None, 5.0, 900.0]
        done = [
            Settlement(one.id, one.owner, one.fence, self.rng.choice(ways), took_ms=self.rng.choice(took))
            for one in self.some(WorkState.RUNNING)
        ]
        yield from [Call("work", "settle", (done,))] * 2  # they are not held any more the second time

    def renew(self) -> Iterable[Call]:
        yield Call("work", "renew", (self.held(),), {"lease": LEASE_S})

    def extend(self) -> Iterable[Call]:
        yield Call("leases", "extend", (self.held(),), {"lease": 2 * LEASE_S})

    def end_leases(self) -> Iterable[Call]:
        yield Call("leases", "end", ({"router-1"},))

    def lease_runs_out(self) -> Iterable[Call]:
        self.passed = LEASE_S + 1
        yield Call("work", "claim", (0, WorkClaim("w2", crash_events=told)))

    def cancel(self) -> Iterable[Call]:
        return [Call("work", "cancel", (one.id,)) for one in self.some(*WorkState)]

    def retry(self) -> Iterable[Call]:
        ended = sorted(one.id for one in self.some(*ENDED, WorkState.QUARANTINED))
        yield Call("work", "change", (WorkFilter(ids=tuple(ended)), Requeue("me")))

    def transfer(self) -> Iterable[Call]:
        return [Call("work", "transfer", (one.id, self.rng.choice(CLASSES))) for one in self.some(WorkState.PENDING)]

    def recall(self) -> Iterable[Call]:
        yield Call("work", "recall", (self.rng.sample(CLASSES, 2),), {"crash_events": told})

    def purge(self) -> Iterable[Call]:
        yield Call("work", "purge", (self._wall() - self.rng.choice([0, 4000, 20_000]),))

    def requeue(self) -> Iterable[Call]:
        yield Call("work", "change", (ASIDE, Requeue("me")))

    def discard(self) -> Iterable[Call]:
        yield Call("work", "change", (ASIDE, Discard("me")))

    def purge_quarantine(self) -> Iterable[Call]:
        yield Call("work", "change", (ASIDE, Remove()))

    def time_passes(self) -> Iterable[Call]:
        self.passed = self.rng.choice([0.5, 2.0, 5.0])
        return ()
