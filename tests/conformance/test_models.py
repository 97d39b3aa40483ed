"""Each store against a model that is too simple to be wrong, step by step, in orders nobody thought of."""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec import structs

from reefknot.audit.port import AuditEntry
from reefknot.errors import LeaseLostError
from reefknot.idempotency.model import Busy, Claim, Claimed, Done, Ending, Hit, KeyRecord, Released, Uncertain
from reefknot.queue.model.work import Interrupted, Quarantine, Settled, Snooze, TryAgain, WorkDone, WorkItem, WorkState
from reefknot.queue.port.work_queue import EVERYTHING, Enqueued, Held, Settlement, WorkClaim
from reefknot.runtime.clocks import VirtualClock
from reefknot.stores.memory import MemoryStore, MemoryWorkQueue
from reefknot.stores.memory.store import MemoryIdempotencyStore
from reefknot.stores.port import Store
from reefknot.stores.sqlite import SqliteStore
from reefknot.testing.conformance.harness import event

KEYS = st.sampled_from(["a", "b", "c"])
RETENTION = 100.0
STEPS = settings(max_examples=25, stateful_step_count=40, deadline=None)


class Machine(RuleBasedStateMachine):
    """A store of its own, time that moves by hand, and a count of the events that must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = VirtualClock()
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.open()
        self.events = 0

    def open(self) -> Store:
        return MemoryStore(self.clock, retention=RETENTION)

    def run(self, call: Any) -> Any:
        return self.runner.run(asyncio.wait_for(call, 20))

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def every_change_has_its_event_and_the_chain_holds(self) -> None:
        head = self.run(self.store.audit.head())
        assert head.sequence == self.events
        assert self.run(self.store.audit.verify()) == []


class OnSqlite(Machine):
    """The same machine on a file, closed and opened again now and then."""

    def open(self) -> Store:
        store = SqliteStore(self.folder / "state.db", self.clock, retention=RETENTION, inline=True)
        self.runner.run(store.start())
        return store

    @rule()
    def the_process_restarts(self) -> None:
        self.run(self.store.close())
        self.store = self.open()


class Idempotency(Machine):
    """The model: key → [state, claim, when the lease ends, when it is forgotten, result, guarded]."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, list[Any]] = {}
        self.claims: list[Claim] = []
        self.fences = 0
        self.callers = 0

    def known(self, key: str) -> list[Any] | None:
        entry = self.model.get(key)
        if entry is None or entry[0] == "unknown" or entry[3] > self.clock.now():
            return entry
        live = entry[0] == "held" and (entry[5] or entry[2] > self.clock.now())
        return entry if live else None

    @rule(key=KEYS, lease=st.sampled_from([2.0, 10.0]), guard=st.booleans())
    def claim(self, key: str, lease: float, guard: bool) -> None:
        self.callers += 1
        owner = f"caller-{self.callers}"
        call = self.store.idempotency.claim(key, owner=owner, lease=lease, guard=guard, events=[event("claim")])
        answer = self.run(call)
        entry = self.known(key)
        now = self.clock.now()
        expired = entry is not None and entry[0] == "held" and entry[2] <= now
        if entry is None or entry[0] == "released" or (expired and not entry[5]):
            assert isinstance(answer, Claimed)
            assert answer.taken_over == expired
            assert answer.claim.fence > self.fences
            self.fences = answer.claim.fence
            self.claims.append(answer.claim)
            self.model[key] = ["held", answer.claim, now + lease, now + lease + RETENTION, None, guard]
            self.events += 1
        elif entry[0] == "done":
            assert isinstance(answer, Hit)
            assert answer.record.result == entry[4]
        elif entry[0] == "unknown" or expired:
            assert isinstance(answer, Uncertain)
            entry[0] = "unknown"
        else:
            assert isinstance(answer, Busy)
            assert answer.record.owner == entry[1].owner

    @rule(which=st.integers(0, 50), result=st.sampled_from(["1", "2"]), release=st.booleans())
    def finish(self, which: int, result: str, release: bool) -> None:
        if not self.claims:
            return
        claim = self.claims[-1 - which % len(self.claims)]
        entry = self.model.get(claim.key)
        ending = Released() if release else Done(result)
        new = ["released", None] if release else ["done", result]
        call = self.store.idempotency.finish(claim, ending, events=[event("end")])
        mine = entry is not None and entry[1] == claim
        if mine and entry is not None and entry[0] in ("held", "unknown"):
            self.run(call)
            entry[0], entry[4] = new
            entry[3] = self.clock.now() + RETENTION
            self.events += 1
        elif mine and entry is not None and [entry[0], entry[4]] == new:
            self.run(call)  # said before
        else:
            try:
                self.run(call)
            except LeaseLostError:
                return
            raise AssertionError("a stale claim was taken")

    @rule()
    def purge(self) -> None:
        gone = [key for key in self.model if self.known(key) is None]
        assert self.run(self.store.idempotency.purge()) == len(gone)
        for key in gone:
            del self.model[key]

    @invariant()
    def everybody_reads_what_the_model_holds(self) -> None:
        for key in ("a", "b", "c"):
            record = self.run(self.store.idempotency.get(key))
            entry = self.known(key)
            assert (record is None) == (entry is None)
            if record is not None and entry is not None:
                names = {"held": "in_progress"}
                assert (record.state, record.result) == (names.get(entry[0], entry[0]), entry[4])


class SqliteIdempotency(OnSqlite, Idempotency): ...


class Work(Machine):
    """The model: id → [state, due, lease end, fence, attempts, crashes, priority, arrival, owner]."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, list[Any]] = {}
        self.held: list[Held] = []
        self.arrivals = 0

    def wall(self) -> int:
        return round(self.clock.wall() * 1000)

    def steady(self) -> int:
        return int(self.clock.now() * 1000)

    @rule(work_id=st.sampled_from("pqrstuv"), priority=st.integers(0, 1), later=st.sampled_from([0, 3000]))
    def enqueue(self, work_id: str, priority: int, later: int) -> None:
        due = self.wall() + later
        item = WorkItem(work_id, "t", priority=priority, due_at=due, payload=work_id.encode())
        (answer,) = self.run(self.store.work.enqueue([item], events=[event("admission")]))
        if work_id in self.model:
            assert answer is Enqueued.DUPLICATE
            return
        assert answer is Enqueued.ACCEPTED
        self.arrivals += 1
        self.events += 1
        self.model[work_id] = ["pending", due, 0, 0, 0, 0, priority, self.arrivals, ""]

    @rule(n=st.integers(1, 3), owner=st.sampled_from(["w1", "w2"]), newest=st.booleans())
    def claim(self, n: int, owner: str, newest: bool) -> None:
        for entry in self.model.values():
            if entry[0] == "running" and entry[2] <= self.steady():
                entry[5] += 1
                entry[0] = "quarantined" if entry[5] >= 3 else "pending"
                entry[1] = min(entry[1], self.wall())
                self.events += 1
        sign = -1 if newest else 1
        due = [name for name, entry in self.model.items() if entry[0] == "pending" and entry[1] <= self.wall()]
        due.sort(key=lambda name: (-self.model[name][6], sign * self.model[name][1], sign * self.model[name][7]))
        terms = WorkClaim(owner=owner, lease=10, newest_first=newest, crash_events=lambda _: [event("crashed")])
        taken = self.run(self.store.work.claim(n, terms))
        assert [item.id for item in taken] == due[:n]
        for item in taken:
            entry = self.model[item.id]
            entry[0], entry[2], entry[3], entry[8] = "running", self.steady() + 10_000, entry[3] + 1, owner
            assert (item.fence, item.attempts, item.crashes) == (entry[3], entry[4], entry[5])
            assert item.payload == item.id.encode()
            self.held.append(Held(item.id, owner, item.fence))

    @rule(which=st.integers(0, 50), how=st.sampled_from(["done", "again", "snooze", "back", "aside"]))
    def settle(self, which: int, how: str) -> None:
        if not self.held:
            return
        held = self.held[-1 - which % len(self.held)]
        entry = self.model.get(held.id)
        soon = self.wall() + 2000
        endings: dict[str, Settled] = {"done": WorkDone("1"), "again": TryAgain(soon), "snooze": Snooze(soon)}
        endings |= {"back": Interrupted(), "aside": Quarantine("bad")}
        settlement = Settlement(held.id, held.owner, held.fence, endings[how], (event(how),))
        ours = entry is not None and entry[0] == "running" and (entry[8], entry[3]) == (held.owner, held.fence)
        assert self.run(self.store.work.settle([settlement])) == [ours]
        if not ours or entry is None:
            return
        self.events += 1
        entry[0] = {"done": "succeeded", "aside": "quarantined"}.get(how, "pending")
        entry[1] = {"again": soon, "snooze": soon, "back": min(entry[1], self.wall())}.get(how, entry[1])
        entry[4] += how in ("done", "again", "aside")

    @rule(which=st.integers(0, 50))
    def renew(self, which: int) -> None:
        if not self.held:
            return
        held = self.held[-1 - which % len(self.held)]
        entry = self.model.get(held.id)
        ours = entry is not None and entry[0] == "running" and (entry[8], entry[3]) == (held.owner, held.fence)
        assert self.run(self.store.work.renew([held], lease=10)) == [ours]
        if ours and entry is not None:
            entry[2] = self.steady() + 10_000

    @rule(work_id=st.sampled_from("pqrstuv"))
    def cancel(self, work_id: str) -> None:
        entry = self.model.get(work_id)
        may = entry is not None and entry[0] in ("pending", "running")
        assert self.run(self.store.work.cancel(work_id, events=[event("cancelled")])) == may
        if may and entry is not None:
            entry[0] = "cancelled"
            self.events += 1

    @rule()
    def requeue_all(self) -> None:
        aside = sorted(name for name, entry in self.model.items() if entry[0] == "quarantined")
        assert self.run(self.store.quarantine.requeue(EVERYTHING, who="ann", events=[event("requeued")])) == aside
        self.events += bool(aside)
        for name in aside:
            self.model[name][0] = "pending"
            self.model[name][1] = self.wall()
            self.model[name][4] = self.model[name][5] = 0

    @rule()
    def purge(self) -> None:
        ended = [name for name, entry in self.model.items() if entry[0] in ("succeeded", "cancelled")]
        assert self.run(self.store.work.purge(self.wall() + 1)) == len(ended)
        for name in ended:
            del self.model[name]
        self.held = [held for held in self.held if held.id in self.model]

    @invariant()
    def nothing_is_lost_and_nothing_is_invented(self) -> None:
        items = {item.id: item for item in self.run(self.store.work.search()).items}
        assert {name: item.state for name, item in items.items()} == {
            name: WorkState(entry[0]) for name, entry in self.model.items()
        }


class SqliteWork(OnSqlite, Work): ...


@pytest.mark.parametrize("machine", [Idempotency, Work, SqliteIdempotency, SqliteWork])
def test_a_store_does_what_its_model_does(machine: type[Machine]) -> None:
    run_state_machine_as_test(machine, settings=STEPS)


class ForgetsFences(MemoryIdempotencyStore):
    """The broken variant: whoever comes late still writes."""

    async def finish(self, claim: Claim, ending: Ending, *, events: Sequence[AuditEntry] = ()) -> KeyRecord:
        record = await self.get(claim.key)
        if record is not None:
            claim = Claim(record.key, record.owner, record.fence)
        return await super().finish(claim, ending, events=events)


class ForgetsLeases(MemoryWorkQueue):
    """The broken variant: a claim looks only at what is due, and an owner is whoever says so."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        items = [(one, self.table.items.get(one.id)) for one in settlements]
        trusted = [
            one if item is None else structs.replace(one, owner=item.owner, fence=item.fence) for one, item in items
        ]
        return await super().settle(trusted)


class WithoutFences(Idempotency):
    def open(self) -> Store:
        store = MemoryStore(self.clock, retention=RETENTION)
        store.idempotency.__class__ = ForgetsFences
        return store


class WithoutOwners(Work):
    def open(self) -> Store:
        store = MemoryStore(self.clock, retention=RETENTION)
        store.work.__class__ = ForgetsLeases
        return store


@pytest.mark.parametrize(("broken", "likely"), [(WithoutFences, 1), (WithoutOwners, 8)])
def test_the_models_catch_a_store_that_lets_a_late_owner_write(broken: type[Machine], likely: int) -> None:
    """From a seed that is likely to catch it soon."""
    thorough = settings(STEPS, max_examples=300, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(seed(likely)(broken), settings=thorough)
