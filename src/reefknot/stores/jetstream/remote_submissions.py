"""
Submissions that one process sends to the router that leads, by request and answer over core NATS.

The router admits them by its mirror of all open work, keeps them with its own in one batch, and claims them at once. So
a client needs no mirror, and its submissions wait for no second process. Where no router answers, the submitter keeps
them itself. A router that was too slow may have kept them as well: ids are unique, so they are kept once.

The keys of unique work are known to no single process. Each job with a key has an entry `NAME.blob.KEY.unique.ID`,
written in the batch that keeps it. That batch expects the last sequence of all entries of the key, so of two processes
that keep a job at once one is refused, and looks again. An entry alone decides nothing: the job that it names is read
from the stream's leader. When the job ends its entry gets the time that is left to it, or becomes a tombstone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, msgpack

from reefknot.audit.port import AuditEntry
from reefknot.core.time import Moment
from reefknot.errors import StoreError, StorePermissionError, StoreUnavailableError
from reefknot.queue.model.submission import SubmissionRules
from reefknot.queue.model.unique import unique_name
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Enqueue, Outcome, TakeOver
from reefknot.runtime.log import error_text, logger
from reefknot.runtime.tasks import run_in_background
from reefknot.stores.jetstream.connection import Connection
from reefknot.stores.jetstream.reads import gathered
from reefknot.stores.jetstream.requests import NobodyThereError
from reefknot.stores.jetstream.state import State
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


Look = Callable[[Callable[[Moment], None]], Awaitable[None]]
"""Calls a function while nothing in the state is unstored."""


class KeysOf:
    """The holders of the keys of some items, as they were last read."""

    def __init__(self, state: State, look: Look, items: Sequence[WorkItem]) -> None:
        self._state, self._look = state, look
        self._keys = list(dict.fromkeys(name for item in items if (name := unique_name(item))))
        self._revisions: dict[str, int] = {}

    async def read(self) -> None:
        """Read the entries of the keys, and the records of all items that may hold one."""
        names, known = self._state.names, self._state.table.keyed
        found = await gathered(lambda key: self._state.direct.matching(names.keyed(key, "*")), self._keys)
        self._revisions = {
            key: max((one.sequence for one in entries), default=0)
            for key, entries in zip(self._keys, found, strict=True)
        }
        named = [one.body.decode() for entries in found for one in entries if one.body]
        ids = list(dict.fromkeys([*named, *(one for key in self._keys for one in known(key))]))
        records = await gathered(self._state.read_if_readable, ids)
        await self._look(lambda _: self._state.take_records(ids, records))

    def take(self) -> None:
        """Let the change that is made now expect what was read."""
        self._state.key_revisions.update(self._revisions)


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
