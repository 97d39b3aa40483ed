"""
Kills a whole system at a stage of a step, lets a second one carry on over the same store, and prints what both left.

A plan is the stage, the wrong way that is tried, if any, and the address of the store, where that is no file of its
own. Nothing in the product knows of this: what a stage is, is seen in the calls to the store, the transport and the
block, and that is where the process ends.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from reefknot.app.system import System
from reefknot.core.failure import ErrorCode
from reefknot.queue.model import messages
from reefknot.queue.model.work import ROUTER, TryAgain, WorkDone, WorkItem, WorkState, is_workers
from reefknot.queue.port.transport import Transport
from reefknot.queue.port.work_queue import FREELY, Enqueue, Enqueued, Outcome, Settlement, WorkClaim
from reefknot.queue.router.settings import RouterSettings
from reefknot.queue.worker.settings import default_settings
from reefknot.runtime.clocks import clock_of_this_loop
from reefknot.steps.port import BlockContext
from reefknot.stores.opening import open_store
from reefknot.stores.port import Store
from tests.faults.carrying_out import Fork, Life, Plan, Say, carry_out_plans, two_lives

STAGES = ("held", "submitted", "assigned", "started", "acked", "claimed", "running", "waiting", "settled", "published")
"""
Kept, and held by the router, before the caller hears that it was accepted; accepted, and sent to nobody yet; in the
worker's class, not yet acked; the same, and started by the same call; acked; claimed by a slot; its effect done;
waiting for a retry; its result stored, not yet published; published, and its caller has not heard of it.
"""
QUEUED = ("assigned", "acked", "claimed")
"""Here the victim is not started with its assignment: it waits for a slot's claim."""
WORK = [f"a{number}" for number in range(4)]
VICTIM = "a2"
LEASE_S = 1.0
BACKOFF_MS = 1500
SEED = 5
"""With this one the victim draws nearly the whole of its backoff."""
LONGEST_S = 20.0


class Doom:
    """Ends the process at one stage of the victim's life."""

    def __init__(self, stage: str, flaw: str, say: Say) -> None:
        self.stage = stage
        self.flaw = flaw
        self.say = say

    def at(self, stage: str, work_id: str) -> None:
        if stage == self.stage and work_id == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # not one more step of this thread


class DoomedWork:
    """The store's queue, with the places where one can die."""

    def __init__(self, store: Store, doom: Doom) -> None:
        self._work = store.work
        self._doom = doom
        self._late: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    async def enqueue(self, items: Sequence[WorkItem], terms: Enqueue = FREELY, **named: Any) -> list[Outcome]:
        if self._doom.flaw == "promises too early":
            self._late.add(asyncio.get_running_loop().create_task(self._keep_later(items, terms, named)))
            return [Enqueued.ACCEPTED] * len(items)
        kept = await self._work.enqueue(items, terms, **named)
        if terms.owner:  # the router's own from the first moment on
            for item in items:
                self._doom.at("held", item.id)
        return kept

    async def _keep_later(self, items: Sequence[WorkItem], terms: Enqueue, named: dict[str, Any]) -> None:
        await asyncio.sleep(0.1)
        await self._work.enqueue(items, terms, **named)

    async def assign(self, items: Sequence[WorkItem], **named: Any) -> list[WorkItem | None]:
        if self._doom.stage in QUEUED:
            named["start"] = set(named["start"]) - {VICTIM}
        kept = await self._work.assign(items, **named)
        for item in kept:
            if item is not None:
                self._doom.at("started" if item.state is WorkState.RUNNING else "assigned", item.id)
        return kept

    async def claim(self, n: int, claim: WorkClaim) -> list[WorkItem]:
        items = await self._work.claim(n, claim)
        for item in items:
            self._doom.at("held" if item.resource_class == ROUTER else "claimed", item.id)
        return items

    async def settle(self, settlements: Sequence[Settlement]) -> list[bool]:
        for one in settlements:
            if one.id == VICTIM and isinstance(one.settled, TryAgain):
                self._doom.say(["due", VICTIM, one.settled.due_at])
        if self._doom.flaw == "forgets the result" and any(_ends(one) for one in settlements):
            kept = [True] * len(settlements)
        else:
            kept = await self._work.settle([self._as_flawed(one) for one in settlements])
        for one in settlements:
            if isinstance(one.settled, TryAgain):
                self._doom.at("waiting", one.id)
            elif isinstance(one.settled, WorkDone):
                self._doom.at("settled", one.id)
        return kept

    def _as_flawed(self, one: Settlement) -> Settlement:
        if self._doom.flaw != "forgets the wait" or not isinstance(one.settled, TryAgain):
            return one
        return msgspec.structs.replace(one, settled=msgspec.structs.replace(one.settled, due_at=0))


def _ends(one: Settlement) -> bool:
    return one.id == VICTIM and isinstance(one.settled, WorkDone)


class DoomedTransport:
    """An end for messages at which one dies after an ack or a result."""

    def __init__(self, transport: Transport, doom: Doom) -> None:
        self._transport = transport
        self._doom = doom

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def publish(self, subject: str, body: bytes, **named: Any) -> None:
        await self._transport.publish(subject, body, **named)
        if subject in (messages.ACK, messages.RESULT):
            self._doom.at("acked" if subject == messages.ACK else "published", json.loads(body)["assignment_id"])


class DoomedStore:
    """A store whose queue and whose messages are doomed."""

    def __init__(self, store: Store, doom: Doom) -> None:
        self._store = store
        self._doom = doom
        self.work: Any = DoomedWork(store, doom)

    def transport(self, **named: Any) -> Any:
        return DoomedTransport(self._store.transport(**named), self._doom)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Effect:
    """A step that leaves a mark outside, and then may die of it."""

    type = "demo.effect"

    def __init__(self, marks: Path, doom: Doom) -> None:
        self._marks = marks
        self._doom = doom

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return "here"

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> messages.StepResult:
        mark = os.open(self._marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(mark, json.dumps([context.assignment_id, context.attempt, time.time()]).encode() + b"\n")
        os.close(mark)
        self._doom.at("running", context.assignment_id)
        if inputs.get("fails") and context.attempt == 1:
            return messages.StepResult(
                messages.StepStatus.ERROR, ErrorCode.network_error, error_message="not this time"
            )
        return messages.StepResult(outputs={"number": time.time_ns()})  # another run gives another answer

    async def close(self) -> None: ...


def assignment(name: str, stage: str) -> messages.ExecAssignment:
    fails = name == VICTIM and stage == "waiting"
    options = messages.AssignmentOptions(retry=messages.RetryOptions(max_attempts=3, backoff_ms=BACKOFF_MS))
    return messages.ExecAssignment(name, f"r-{name}", messages.Job("demo.effect", {"fails": fails}), options=options)


def url_of(plan: Plan, folder: Path) -> str:
    return "memory:" if plan["flaw"] == "memory" else plan.get("engine") or f"sqlite:{folder / 'state.db'}"


def made(store: Store, folder: Path, doom: Doom) -> System:
    """The system as it is assembled, with short leases and a watched store and transport."""
    settings = default_settings(lease=LEASE_S, heartbeat=0.2, concurrency={"cpu": 1})
    watched: Any = DoomedStore(store, doom)
    blocks = {"demo.effect": Effect(folder / "marks", doom)}
    routing = RouterSettings(lease=LEASE_S)
    return System(watched, clock_of_this_loop(), settings=settings, routing=routing, blocks=blocks, seed=SEED)


async def first_life(plan: Plan, folder: Path, say: Say) -> None:
    doom = Doom(plan["stage"], plan["flaw"], say)
    async with open_store(url_of(plan, folder)) as store:
        system = made(store, folder, doom)
        await system.start()
        answers = {}
        # Alone, the victim meets a free slot, which starts it with its assignment.
        for name in sorted(WORK, key=lambda one: one != VICTIM) if plan["stage"] == "started" else WORK:
            answers[name] = await system.router.submit(assignment(name, plan["stage"]))
            answers[name].add_done_callback(lambda one: say(["told", one.result().assignment_id, _text(one.result())]))
            say(["accepted", name])
            doom.at("submitted", name)
        await asyncio.wait(answers.values(), timeout=LONGEST_S)


async def second_life(plan: Plan, folder: Path, said: list[Any]) -> dict[str, Any]:
    """It is asked for nothing but the results; then everything once more, as a caller does who is not sure."""
    accepted = [words[1] for words in said if words[0] == "accepted"]
    doom = Doom("", plan["flaw"] if plan["flaw"] == "forgets the wait" else "", lambda said: None)
    async with open_store(url_of(plan, folder)) as store:
        victim = await store.work.get(VICTIM)
        in_a_slot = victim is not None and is_workers(victim) and victim.state is WorkState.RUNNING
        system = made(store, folder, doom)
        await system.start()
        ends = asyncio.get_running_loop().time() + (3.0 if plan["flaw"] in LOSING else LONGEST_S)
        results = {}
        for name in accepted:
            left = max(0.0, ends - asyncio.get_running_loop().time())
            found = await system.router.submissions.result(name, left)
            results[name] = None if found is None else _text(found)
        await asyncio.sleep(0.3)  # whoever would answer a second time has had its time to
        again = {}
        for name in (one for one, found in results.items() if found is not None):
            again[name] = _text(
                await asyncio.wait_for(await system.router.submit(assignment(name, plan["stage"])), 10.0)
            )
        items = {name: await store.work.get(name) for name in accepted}
        await system.stop()
        return {
            "results": results,
            "again": again,
            "in_a_slot": in_a_slot,
            "crashes": {name: item.crashes for name, item in items.items() if item is not None},
            "attempts": {name: item.attempts for name, item in items.items() if item is not None},
            "tampered": [str(one) for one in await store.audit.verify()],
        }


LOSING = ("memory", "promises too early")


def _text(result: Any) -> str:
    return messages.encode(result).decode()


def one(folder: Path, plan: Plan) -> Life:
    """One death, and the life after it."""
    marks = folder / "marks"
    seen = two_lives(plan, Fork(lambda say: first_life(plan, folder, say)), partial(second_life, plan, folder))
    lines = marks.read_text().splitlines() if marks.exists() else []
    return {**seen, "effects": [json.loads(line) for line in lines]}


if __name__ == "__main__":
    carry_out_plans(one)
