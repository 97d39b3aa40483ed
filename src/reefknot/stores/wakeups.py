"""
Wake-ups of work: what a written item touches, and how a queue waits for it, the same for every engine.

A change collects the topics that it touches. Its commit wakes the tasks that wait for one of them, and each of these
looks again: so a wake-up too many costs a look, and one too few a rare look at the clock. A new wake-up is a topic and
the wait that listens to it here, and its call in the port.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from reefknot.queue.model.work import WorkState
from reefknot.queue.port.work_queue import TakeOver
from reefknot.runtime.changes import Waiters

CLASS_TOPIC = "work in "
"""Prefix of a class name: the topic of waiters for claimable work of that class."""
END_TOPIC = "end of "
"""Prefix of an id: the topic of waiters for the end of that item, where an engine has one for each."""
ENDED_TOPIC = "work ended"
"""The topic of waiters for the end of any item."""
LEASES_TOPIC = "leases ended"
LOOK_S = 1.0
"""Longest that a waiter for an end sleeps: it looks again even if no change woke it."""


def topics_of(resource_class: str, state: WorkState, *, end: str) -> tuple[str, ...]:
    """The topics that an item touches when it is written with this class and state; `end` is that of its end."""
    if state is WorkState.PENDING:
        return (CLASS_TOPIC + resource_class,)
    return () if state is WorkState.RUNNING else (end,)


class WakingQueue(ABC):
    """The waiting side of a work queue whose processes all keep their own submissions."""

    led_by_one = False

    def __init__(self, waiters: Waiters) -> None:
        self.waiters = waiters

    def take_submissions(self, take: TakeOver | None) -> None:  # noqa: B027 - there is nothing to do
        """Do nothing: every process keeps its own submissions."""

    @abstractmethod
    async def soonest(self, classes: Sequence[str]) -> float:
        """Seconds until something of these classes, or of any, can be claimed; infinite until a change brings it."""

    async def wait(self, timeout: float, *, classes: Sequence[str] = ()) -> bool:
        topics = (LEASES_TOPIC, *(CLASS_TOPIC + name for name in classes)) if classes else ("",)
        look = partial(self.soonest, classes)
        return await self.waiters.watch(look, *topics, pause=float, timeout=timeout) <= 0
