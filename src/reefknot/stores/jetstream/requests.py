"""
Requests on their way to the server: many at a time, whose answers arrive on one subscription; and their errors.

nats-py has a coroutine, a timer and parsed headers for each request. Here a request is one line and one future, and the
earliest deadline has the only timer. Which error a request without an answer ends with is decided in `connection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf
from typing import Any

from msgspec import Struct

from reefknot.errors import StorePermissionError, StoreUnavailableError
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream.wire import LIMITS, Heard

Outcome = Heard | Exception


class _Unanswered(Struct):
    subjects: Sequence[str]
    deadline: float
    outcome: asyncio.Future[Outcome]


class UnansweredError(StoreUnavailableError):
    """A request was sent and not answered: it may have been carried out."""


class NobodyThereError(StoreUnavailableError):
    """A request had no responder: JetStream is off, or a stream has no leader at the moment. Nothing was stored."""


class RefusedError(StoreUnavailableError):
    """JetStream's refusal of a request, by its number."""

    def __init__(self, store: str, number: int, text: str) -> None:
        way_out = LIMITS.get(number, "check the server's log")
        super().__init__(store, f"the server refuses a request: {text} ({number})", way_out)
        self.number = number
        self.text = text


class NotOfThisRoleError(StorePermissionError):
    """No role of this user may use the subject: there is no permission that may come back."""


class Requests:
    """The requests of one connection that are not answered yet."""

    def __init__(self, inbox: str = "_INBOX") -> None:
        self._inbox = f"{inbox}.{new_id()}"
        self._numbers = count(1)
        self._waiting: dict[str, _Unanswered] = {}
        """By the subject of the answer."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    @property
    def answers(self) -> str:
        """The subject of all answers, with a wildcard."""
        return f"{self._inbox}.*"

    def add(self, subjects: Sequence[str], timeout: float) -> tuple[str, asyncio.Future[Outcome]]:
        """
        The subject of the answer to a new request, and its outcome: the answer, or an error as a value.

        `subjects` are those that the request is sent to: several for a batch.
        """
        loop = asyncio.get_running_loop()
        reply, deadline = f"{self._inbox}.{next(self._numbers)}", loop.time() + timeout
        outcome: asyncio.Future[Outcome] = loop.create_future()
        self._waiting[reply] = _Unanswered(subjects, deadline, outcome)
        if deadline < self._timer_at:
            self._set_timer(loop, deadline)
        return reply, outcome

    @contextmanager
    def expecting(self, subject: str, timeout: float) -> Iterator[asyncio.Future[Any]]:
        """
        A future for the end of an answer that arrives in parts. It ends with an error as a value when the time is over,
        and when this user may not publish to the subject that asks.
        """
        name, outcome = self.add((subject,), timeout)
        try:
            yield outcome
        finally:
            self.remove(name)

    def remove(self, reply: str) -> None:
        """Wait no longer for this answer: its caller has gone."""
        self._waiting.pop(reply, None)

    def hear(self, message: Heard) -> None:
        """Pass an answer to its request; one that comes too late is dropped."""
        request = self._waiting.pop(message.subject, None)
        if request is not None and not request.outcome.done():
            request.outcome.set_result(message)

    def fail(self, why: Callable[[], Exception], concerns: Callable[[str], bool] = lambda subject: True) -> int:
        """End the requests whose subject this concerns with an error; returns how many there were."""
        found = [reply for reply, one in self._waiting.items() if any(map(concerns, one.subjects))]
        for reply in found:
            self._end(reply, why())
        return len(found)

    def _end(self, reply: str, error: Exception) -> None:
        request = self._waiting.pop(reply)
        if not request.outcome.done():
            request.outcome.set_result(error)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = None if deadline == inf else loop.call_at(deadline, self._time_out, loop)

    def _time_out(self, loop: asyncio.AbstractEventLoop) -> None:
        now = self._timer_at
        for reply in [reply for reply, one in self._waiting.items() if one.deadline <= now]:
            self._end(reply, TimeoutError())
        self._set_timer(loop, min((one.deadline for one in self._waiting.values()), default=inf))
