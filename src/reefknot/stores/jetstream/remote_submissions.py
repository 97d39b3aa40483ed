"""
Submissions that one process sends to the router that leads, by request and answer over core NATS.

The router admits them by its mirror of all open work, keeps them with its own in one batch, and claims them at once. So
a client needs no mirror, and its submissions wait for no second process. Where no router answers, the submitter keeps
them itself. A router that was too slow may have kept them as well: ids are unique, so they are kept once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, msgpack

from reefknot.audit.port import AuditEntry
from reefknot.errors import StoreError, StorePermissionError, StoreUnavailableError
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueue, Outcome, TakeOver
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import run_in_background
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.requests import NobodyThereError
from reefknot.stores.jetstream.streams import Names
from reefknot.stores.jetstream.wire import Heard

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

ANSWER_S = 2.0
"""How long a submitter waits for the router before it keeps its submissions itself."""
MOST_AT_ONCE = 256
"""Requests that a router takes at once; of more, each submitter keeps its own."""


class SubmissionRequest(Struct, frozen=True, array_like=True):
    """Items with the events of each, and the rules of their submitter."""

    items: list[WorkItem]
    rules: SubmissionRules
    events: list[list[AuditEntry]]


Answers = list[Outcome]
_submission_request = msgpack.Decoder(SubmissionRequest)
_answers = msgpack.Decoder(Answers)


class RemoteSubmissions:
    """Submissions that this process sends to the router that leads, or receives as that router."""

    def __init__(self, connection: Connection, names: Names) -> None:
        self._connection = connection
        self._subject = names.submissions
        self._take: TakeOver | None = None
        self._subscription: Subscription | None = None
        self._changing = asyncio.Lock()
        self._under_way = 0

    # ---- submitters --------------------------------------------------------------------------------------------------

    async def ask(self, items: Sequence[WorkItem], terms: Enqueue) -> tuple[Answers | None, bool]:
        """
        The router's answers, or None where the submitter has to keep the items itself; and whether the router may have
        kept them all the same.
        """
        if terms.rules is None or terms.accept_events is None:
            return None, False
        events = [list(terms.accept_events(item)) for item in items]
        body = msgpack.encode(SubmissionRequest(list(items), terms.rules, events))
        if len(body) > self._connection.max_payload:
            return None, False
        try:
            answer = await self._connection.request(self._subject, body, timeout=ANSWER_S)
            return (_answers.decode(answer.data), False) if answer.data else (None, True)
        except NobodyThereError:
            return None, False
        except StorePermissionError:
            raise
        except (StoreUnavailableError, msgspec.DecodeError) as error:
            logger().debug("no router took a submission over (%s); it is kept from here", error_text(error))
            return None, True

    # ---- the router --------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether this process takes submissions over."""
        return self._take is not None

    def serve(self, take: TakeOver | None) -> None:
        """Take over what others submit, or stop."""
        self._take = take
        run_in_background(self._subscribe(), "taking over submissions")

    async def _subscribe(self) -> None:
        async with self._changing:
            with suppress(StoreError):  # a lost connection subscribes again by itself, a closed one needs nothing
                if self._take is not None and self._subscription is None:
                    self._subscription = await self._connection.listen(self._subject, self._hear)
                elif self._take is None and self._subscription is not None:
                    subscription, self._subscription = self._subscription, None
                    await self._connection.unsubscribe([subscription])

    def _hear(self, message: Heard) -> None:
        if message.reply.startswith("_INBOX."):  # no answer is a record, whatever a sender asks for
            run_in_background(self._answer(message), "a submission of another process")

    async def _answer(self, message: Heard) -> None:
        body = b""
        self._under_way += 1
        try:
            if self._take is not None and self._under_way <= MOST_AT_ONCE:
                found = _submission_request.decode(message.data)
                body = msgpack.encode(await self._take(found.items, found.rules, found.events))
        except (StoreError, TimeoutError, ValueError) as error:
            logger().info("submissions of another process were not taken over (%s)", error_text(error))
        finally:
            self._under_way -= 1
            with suppress(StoreError):
                await self._connection.publish(message.reply, body)
