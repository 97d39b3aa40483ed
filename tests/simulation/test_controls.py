"""Broken variants of the system. A harness that does not catch them would prove nothing about the whole one."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from reefknot.audit.model.event import Quarantined
from reefknot.queue.model import work as core
from reefknot.queue.model.messages import ExecAssignment
from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import Settlement
from reefknot.queue.router.dispatch import Dispatcher
from reefknot.queue.router.service import Router
from reefknot.queue.worker.admission import AdmissionVerdict, Admitted, IntakeResult, WorkerAdmission
from reefknot.queue.worker.intake import Intake
from reefknot.queue.worker.pool import Pool
from reefknot.queue.worker.service import Worker
from reefknot.queue.worker.settings import WorkerSettings
from reefknot.stores.memory import MemoryStore, MemoryWorkQueue
from tests.simulation.world import run

FEW = 120


class FencelessQueue(MemoryWorkQueue):
    """A late owner's report is taken for true."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        held = []
        items = self.table.items
        for one in settlements:
            item = items.get(one.id)
            if item is not None and item.state is WorkState.PENDING:
                now = self._shared.now()
                self.table.put(core.started(item, owner=one.owner, fence=one.fence, lease_ms=1, now=now), now)
            if item is not None and item.state in (WorkState.PENDING, WorkState.RUNNING):
                items[one.id] = msgspec.structs.replace(items[one.id], owner=one.owner, fence=one.fence)
            held.append(one)
        return await super().settle(held)


class HastyIntake(Intake):
    """Says yes, and keeps it a moment later."""

    async def keep(self, group: Sequence[Admitted]) -> list[IntakeResult]:
        asyncio.get_running_loop().call_later(0.2, self._later, group)
        return [IntakeResult(one.ack) for one in group]

    def _later(self, group: Sequence[Admitted]) -> None:
        asyncio.get_running_loop().create_task(super().keep(group)).add_done_callback(_seen)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class BlindDispatcher(Dispatcher):
    """Sends, and never looks after what it sent."""

    async def look_after(self) -> None: ...

    async def worker_restarted(self, worker_id: str) -> None: ...


class TrustingDispatcher(Dispatcher):
    """Never looks for the result of what was acked."""

    async def _check_acked(self, pending: Any) -> None:
        self._table.asked_again(pending, self._clock.now())


class UnboundedAdmission(WorkerAdmission):
    """Lets everybody in."""

    def undecided(self, assignment: ExecAssignment, pool: Pool) -> bool:
        return False

    def decide(self, assignment: ExecAssignment, pool: Pool, now: float) -> AdmissionVerdict:
        from reefknot.queue.model.admission import Accept

        return AdmissionVerdict(Accept(), {}, at=now)


class CrampedWorker(Worker):
    """Few places, so that somebody who does not mind them is noticed soon."""

    def __init__(self, *given: Any, settings: WorkerSettings, **named: Any) -> None:
        rules = msgspec.structs.replace(settings.rules, size=1)
        super().__init__(*given, settings=msgspec.structs.replace(settings, rules=rules), **named)


def remade(kind: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """A part whose objects are changed when they have been made."""

    class Remade(kind):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            change(self)

    return Remade


def _fenceless(store: Any) -> None:
    store.work = FencelessQueue(store._context, store.audit)


def _hasty(worker: Any) -> None:
    worker.intake.__class__ = HastyIntake


def _blind(router: Any) -> None:
    router.dispatcher.__class__ = BlindDispatcher


def _trusting(router: Any) -> None:
    """It looks in the store neither for itself nor for its callers: it believes that every message arrives."""
    router.dispatcher.__class__ = TrustingDispatcher
    router._callers.names = list


def _unbounded(worker: Any) -> None:
    worker.intake._admissions.__class__ = UnboundedAdmission


def _silent(worker: Any) -> None:
    """It ends work without a word in the record."""
    worker._context.journal.entries = lambda events: []


def _forgetful(worker: Any) -> None:
    """It puts work aside without a word in the record."""
    entries = worker._context.journal.entries
    worker._context.journal.entries = lambda events: entries(
        [one for one in events if not isinstance(one, Quarantined)]
    )


@pytest.mark.parametrize(
    ("part", "kind", "change", "word", "likely"),
    [
        pytest.param("store", MemoryStore, _fenceless, "on record", 9, id="settle without a fence"),
        pytest.param("worker", Worker, _hasty, "was accepted and is not kept", 1, id="ack before keep"),
        pytest.param("router", Router, _blind, "has no result", 10, id="no re-route"),
        pytest.param("router", Router, _trusting, "was not told", 27, id="nobody asks again"),
        pytest.param("worker", CrampedWorker, _unbounded, "places of at most", 8, id="no bound"),
        pytest.param("worker", Worker, _silent, "no event says so", 1, id="no record"),
        pytest.param("worker", Worker, _forgetful, "is quarantined (", 5, id="put aside in silence"),
    ],
)
def test_the_harness_catches_a_broken_system_within_a_few_seeds(
    part: str, kind: type[Any], change: Callable[[Any], None], word: str, likely: int
) -> None:
    """The seed that is likely to catch it is tried first: it saves seconds."""
    for seed in (likely, *range(1, FEW)):
        broken = run(seed, **{f"{part}_class": remade(kind, change)}).broken
        if any(word in line for line in broken):
            return
    pytest.fail(f"{FEW} seeds, and nobody noticed")


def test_few_places_alone_break_no_promise() -> None:
    """The control of the control "no bound"."""
    for seed in range(1, 10):
        assert run(seed, worker_class=CrampedWorker).broken == []


def test_the_harness_catches_workers_that_believe_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the steady clock: with the machine's own, a jump moves due times and deadlines."""
    monkeypatch.setattr("reefknot.queue.worker.service.SteadyClock", lambda clock: clock)
    monkeypatch.setattr("tests.simulation.world.CALM_S", 60.0)

    assert any(run(seed, jumping_workers=True).broken for seed in range(1, FEW))
