"""
Work that waits for other work: the children of a gather are stored as there is room, and it runs when all are over.

    claimed → children left? → store some → waits
            → some of them open? → waits, until the last one ends, or for a pause of at most half a minute
            → all over → routed as any other work, or ended because one of them has failed

Between two looks the record is scheduled work in the store, which has all that a look needs. What a router notes here
only makes the next look come at once; another router finds the same without it.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from zlib import error as ZlibError  # noqa: N812 - a class

from msgspec import DecodeError, structs

from reefknot.audit.assignments import submitted_event
from reefknot.audit.port import AuditEntry
from reefknot.core.failure import ErrorCode
from reefknot.queue.family import named
from reefknot.queue.model.follow_ups import (
    GROUP,
    FollowUp,
    Origin,
    RefusedFollowUp,
    awaited,
    child_items,
    unpacked_children,
)
from reefknot.queue.model.messages import ResultStatus, encode
from reefknot.queue.model.results import UNREADABLE_SUBMISSION, answer_of, unrun_result
from reefknot.queue.model.work import (
    ROUTER,
    Settled,
    Waits,
    WorkItem,
    WorkRejected,
    WorkState,
    assignment_and_tenant,
    is_over,
)
from reefknot.queue.port.work_queue import FollowUps, Held, Settlement
from reefknot.queue.router.completion import Completion
from reefknot.queue.router.pending import ClaimedSubmission, RouterContext
from reefknot.queue.router.submissions import Submissions
from reefknot.runtime.timeouts import STORE_S

AT_ONCE, A_FEW = 200, 10
"""Children that are stored in one step: at most, and a second while there is no room."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, AGAIN_S = 1.0, 30.0, 5.0
BEHIND_S = 0.02
"""The first pause if all ends were heard of, and the store does not show them yet."""
MOST_WATCHED = 200_000
"""Work whose end is listened for; what waits for more is looked at after its pause."""
MOST_UNPACKED = 16
FAILED = "what it waited for failed"


class WaitingWork:
    """The work that waits for other work, as one router looks after it."""

    def __init__(
        self,
        context: RouterContext,
        submissions: Submissions,
        completion: Completion,
        *,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when waiting work is to be routed."""
        self._context = context
        self._submissions = submissions
        self._completion = completion
        self._wake = wake
        self.held: dict[str, Held] = {}
        """What is being looked at, by id."""
        self._open: dict[str, set[str]] = {}
        """By id of what waits: the work that it still waits for, as far as its end was not heard of."""
        self._waiters: dict[str, list[str]] = {}
        """By id of open work: what waits for it."""
        self._heard: dict[str, set[str]] = {}
        """By id of what waits: work whose end was heard of, perhaps before the store shows it here."""
        self._ended: dict[str, set[str]] = {}
        """By id of what is being looked at: work that has ended meanwhile."""
        self._unfolding: set[str] = set()
        """What waits for room for its children."""
        self._pauses: dict[str, float] = {}
        self._unpacked: dict[str, list[FollowUp]] = {}
        self._called: set[str] = set()
        self._calls = asyncio.Event()

    # ---- ends --------------------------------------------------------------------------------------------------------

    def ended(self, work_id: str) -> None:
        """Hear that work has ended: what has waited for it alone is looked at again."""
        for ended in self._ended.values():
            ended.add(work_id)
        for name in self._waiters.pop(work_id, ()):
            left = self._open.get(name)
            if left is not None:
                self._heard.setdefault(name, set()).add(work_id)
                left.discard(work_id)
                if not left:
                    self._call(name)
        if self._unfolding and self._room() >= self._most // 2:
            for name in self._unfolding:
                self._call(name)
            self._unfolding.clear()

    def _call(self, work_id: str) -> None:
        self._called.add(work_id)
        self._calls.set()

    async def serve(self) -> None:
        """Make what was called due."""
        while True:
            await self._calls.wait()
            self._calls.clear()
            called, self._called = self._called, set()
            due_at = int(self._context.clock.wall() * 1000)
            async with asyncio.timeout(STORE_S):
                await asyncio.gather(*(self._context.work.transfer(one, ROUTER, due_at=due_at) for one in called))

    # ---- looks -------------------------------------------------------------------------------------------------------

    async def look(self, claimed: ClaimedSubmission) -> None:
        """Look at waiting work that this router has claimed, and route it, end it, or let it wait again."""
        item = claimed.waits
        assert item is not None
        try:
            if not await self._look(claimed, item):
                self._context.table.add(structs.replace(claimed, waits=None), self._class_of(claimed), self._now())
                self._wake()
        except (DecodeError, ZlibError, ValueError) as error:
            await self._submissions.set_aside(item, claimed.held, f"{UNREADABLE_SUBMISSION}: its children: {error}")
        except Exception:
            with suppress(Exception):  # else its lease runs out
                await self._settle(claimed, Waits(self._due(item, AGAIN_S), item.extra.over))
            raise
        finally:
            self.held.pop(item.id, None)

    def _now(self) -> float:
        return self._context.clock.now()

    def _class_of(self, claimed: ClaimedSubmission) -> str:
        return self._submissions.class_of(claimed.assignment)

    async def _look(self, claimed: ClaimedSubmission, item: WorkItem) -> bool:
        """Whether it has ended or waits on; False: it is ready, or its deadline has passed."""
        wall = self._context.clock.wall()
        if item.deadline_at is not None and wall * 1000 >= item.deadline_at:
            self._forget(item.id)
            return False
        if item.extra.children < item.extra.gathers:
            await self._unfold(claimed, item)
            return True
        records = awaited(item)
        ended = self._ended[item.id] = set()
        try:
            known = await named(self._context.work, records[item.extra.over :])
        finally:
            del self._ended[item.id]
        after, found = frozenset(item.extra.after), [(one, known.get(one)) for one in records[item.extra.over :]]
        states = [_state(record, one, after) for record, one in found]
        succeeded = next((at for at, one in enumerate(states) if one is not WorkState.SUCCEEDED), len(states))
        left = {record for (record, _), one in zip(found, states, strict=True) if one is None} - ended
        if None in states:
            await self._wait(claimed, item, left, over=item.extra.over + succeeded)
            return True
        self._forget(item.id)
        failed = [one for one, state in zip(found, states, strict=True) if state is WorkState.FAILED]
        if failed and not item.extra.return_failures:
            self._fail(claimed, item, failed)
            return True
        if item.kind == GROUP:
            self._end_group(claimed, item, len(failed))
            return True
        return False

    async def _wait(self, claimed: ClaimedSubmission, item: WorkItem, left: set[str], *, over: int) -> None:
        """Let it wait for what is left of the work that it waits for."""
        self._open.pop(item.id, None)
        self._listen(item.id, left)
        is_behind = left <= self._heard.get(item.id, set())
        pause = self._pauses.get(item.id, BEHIND_S if is_behind else FIRST_PAUSE_S)
        self._pauses[item.id] = min(LONGEST_PAUSE_S, pause * 2)
        await self._settle(claimed, Waits(self._due(item, pause), over))
        if self._open.get(item.id) == set():  # the last one ended meanwhile
            self._call(item.id)

    def _listen(self, work_id: str, left: Collection[str]) -> None:
        """Hear of the ends of this work, for what waits for it."""
        if len(self._waiters) < MOST_WATCHED:
            self._open.setdefault(work_id, set()).update(left)
            for record in left:
                waiters = self._waiters.setdefault(record, [])
                if work_id not in waiters:
                    waiters.append(work_id)

    def _due(self, item: WorkItem, pause: float) -> int:
        due_at = int((self._context.clock.wall() + pause) * 1000)
        return due_at if item.deadline_at is None else min(due_at, item.deadline_at)

    def _forget(self, work_id: str) -> None:
        self._open.pop(work_id, None)
        self._heard.pop(work_id, None)
        self._pauses.pop(work_id, None)
        self._unpacked.pop(work_id, None)
        self._unfolding.discard(work_id)

    async def _settle(self, claimed: ClaimedSubmission, settled: Settled, follow: FollowUps | None = None) -> None:
        held = claimed.held
        async with asyncio.timeout(STORE_S):
            report = Settlement(held.id, held.owner, held.fence, settled, follow_ups=follow)
            await self._context.work.settle([report])

    # ---- children ----------------------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """The work that a fan-out lets this router have at a time: a part of its places stays for other work."""
        return max(1, self._context.settings.rules.size // 2)

    def _room(self) -> int:
        return self._most - len(self._context.table)

    async def _unfold(self, claimed: ClaimedSubmission, item: WorkItem) -> None:
        """Store the next children, as far as there is room for them."""
        room = min(AT_ONCE, self._room())
        if room <= 0:  # a few all the same: the router may never be less busy
            self._unfolding.add(item.id)
        every = self._unpacked.get(item.id) or unpacked_children(item)
        while len(self._unpacked) >= MOST_UNPACKED:
            del self._unpacked[next(iter(self._unpacked))]
        self._unpacked[item.id] = every
        await self._submissions.learn_classes()
        traceparent = claimed.assignment.traceparent
        origin = Origin(item, self._context.clock.wall(), traceparent, self._submissions.class_of)
        children = child_items(origin, every, max(room, A_FEW))
        is_last = item.extra.children + len(children) >= item.extra.gathers
        if is_last:
            self._unpacked.pop(item.id, None)

        def refused(found: RefusedFollowUp) -> tuple[Settled, tuple[AuditEntry, ...]]:
            if found.verdict is None:
                text = f"its child {found.item.assignment_id} cannot be stored: other work has this id"
                result = unrun_result(claimed.assignment, ResultStatus.ERROR, ErrorCode.invalid_input, text)
                return WorkRejected(encode(result).decode(), text), ()
            return Waits(self._due(item, found.verdict.retry_after_ms / 1000), 0), ()

        follow = FollowUps(children, self._context.settings.submission_rules, self._submitted, refused)
        self._listen(item.id, [one.id for one in children])
        await self._settle(claimed, Waits(self._due(item, FIRST_PAUSE_S if is_last or room <= 0 else 0.0), 0), follow)

    def _submitted(self, item: WorkItem) -> list[AuditEntry]:
        return self._context.journal.entries([submitted_event(item, self._context.clock.wall())])

    # ---- ends of waiting work ----------------------------------------------------------------------------------------

    def _fail(self, claimed: ClaimedSubmission, item: WorkItem, failed: Sequence[tuple[str, WorkItem | None]]) -> None:
        """End it, because work that it waited for has failed."""
        record, first = failed[0]
        name = assignment_and_tenant(record)[0]
        answer = answer_of(first)
        why = "there is no record of it" if first is None else (answer and answer.error_message) or first.reason
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        text = f"not run: {name}, which it waited for, has failed ({why or 'no reason given'}){more}"
        pending = self._context.table.add(structs.replace(claimed, waits=None), self._class_of(claimed), self._now())
        result = unrun_result(pending.assignment, ResultStatus.ERROR, ErrorCode.execution_failed, text)
        names = [assignment_and_tenant(one)[0] for one, _ in failed[:10]]
        inputs = {"failed": names, "number": len(failed), "of": item.extra.waits}
        self._completion.end(pending, result, self._context.routing(pending, None, FAILED, inputs))

    def _end_group(self, claimed: ClaimedSubmission, item: WorkItem, failed: int) -> None:
        """End a gather that has no job of its own."""
        pending = self._context.table.add(structs.replace(claimed, waits=None), item.pool, self._now())
        result = structs.replace(
            unrun_result(pending.assignment, ResultStatus.SUCCESS, ErrorCode.none, ""),
            error_code=None,
            output={"succeeded": item.extra.waits - failed, "failed": failed},
        )
        self._completion.finish_foreign(pending, result, None)


def _state(record: str, item: WorkItem | None, after: frozenset[str]) -> WorkState | None:
    """Succeeded or failed; None for work that is open, or in quarantine until a person decides."""
    if item is None:  # of a child the record is kept no longer
        return WorkState.FAILED if record in after else WorkState.SUCCEEDED
    if not is_over(item) or item.state is WorkState.QUARANTINED:
        return None
    return WorkState.SUCCEEDED if item.state is WorkState.SUCCEEDED else WorkState.FAILED
