"""
`Site`: what the pages and the API of one server share: the open store, what may be shown, and who asks.

`refusal_of` turns an error of an operation into a status and a sentence, the same for a page and for the API.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from reefknot.console.operations.operator import Operator
from reefknot.console.operations.sources import NoDocumentsError
from reefknot.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyInProgressError,
    NameTakenError,
    OperationError,
    ParameterError,
    RejectedError,
    StoreError,
    StoreLockedError,
    StorePermissionError,
    StoreUnavailableError,
)
from reefknot.runtime.log import error_text, logger, printable
from reefknot.stores.port.engines import engine_of

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from reefknot.console.dashboard.security import SiteAccess
    from reefknot.core.redaction import Redactor
    from reefknot.policy.settings import Settings
    from reefknot.stores.port import Store

RETRY_AFTER_S = 5
MOST_AT_ONCE = {"operator": 2, "reader": 1}
"""Questions that are answered at the same time, by role: readers do not keep an operator waiting."""
MOST_WAITING = 64
TURN_S = 5.0
"""Longest time to wait for a turn."""
LONGEST_REST_S = 1.0
LOCKED_S = 4.0
"""How long an action waits for a file that others have locked."""
LONGEST_MESSAGE = 2000


class BusyError(OperationError):
    """A question that has to wait for too many others."""

    def __init__(self) -> None:
        super().__init__("too many questions are asked at the same time; ask again in a moment", "temporary")


class Site:
    """The parts that every page and every route of the API uses."""

    def __init__(
        self,
        store: Store,
        *,
        access: SiteAccess,
        redactor: Redactor,
        settings: Settings | None = None,
        shown: str = "",
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`on_lost` is called when the store was found to be gone; its owner may then put another one here."""
        self.store = store
        self.access = access
        self.redactor = redactor
        self.settings = settings
        self.shown = shown
        """The URL of the store for messages, without credentials."""
        self.loss = ""
        """The sentence about a store that is gone, from the task that reopens it; empty while it is open."""
        self.closing = asyncio.Event()
        """Set when the server ends: what streams to a browser ends then."""
        self.page_renderer: Any = None
        """The templates of the pages, once they are mounted."""
        self._on_lost = on_lost
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._waiting: Counter[str] = Counter()

    def plain_operator(self) -> Operator:
        """The operator of questions without a person, such as a view that many browsers share."""
        return Operator(self.store, self.redactor, None, self.settings, self.shown)

    def operator(self, request: HTTPConnection) -> Operator:
        """The operator of a request: the name that was typed at the login, else the user of this process."""
        named = getattr(request.state, "actor", None)
        return Operator(self.store, self.redactor, named, self.settings, self.shown)

    @asynccontextmanager
    async def reading(self, request: HTTPConnection) -> AsyncIterator[None]:
        """
        The turn of a question. Few have one at a time: the steps of this process have the same loop and the same store.

        After a question its place rests, for as long as it took: whatever is asked, half of the time is for others.
        """
        role = getattr(request.state, "role", None) or ""
        turns = self._turns.setdefault(role, asyncio.Semaphore(MOST_AT_ONCE.get(role, 1)))
        if self._waiting[role] >= MOST_WAITING:
            raise BusyError
        self._waiting[role] += 1
        try:
            async with asyncio.timeout(TURN_S):
                await turns.acquire()
        except TimeoutError:
            raise BusyError from None
        finally:
            self._waiting[role] -= 1
        began = perf_counter()
        try:
            yield
        finally:
            rest = min(perf_counter() - began, LONGEST_REST_S)
            asyncio.get_running_loop().call_later(rest, turns.release)

    async def check_unlocked(self) -> None:
        """Refuse an action on a file that another process keeps locked: soon, and before anything was changed."""
        if self.store.path is not None and not self.store.read_only:
            files = engine_of(self.store.identity).files()
            await asyncio.to_thread(files.check_unlocked, self.store.path, LOCKED_S)

    def refusal(self, error: Exception) -> HttpRefusal:
        """The status and the sentence of an error. A store that is gone is reopened, where that is possible."""
        found = refusal_of(error, self.redactor)
        is_gone = isinstance(error, StoreUnavailableError) and not isinstance(error, StoreLockedError)
        if is_gone and self._on_lost is not None:
            if self.loss:  # the store that was closed meanwhile cannot tell why
                found = structs.replace(found, message=self.redactor(self.loss))
            self._on_lost()
        return found


class HttpRefusal(Struct, frozen=True, omit_defaults=True):
    """An error as a page or the API tells it."""

    status: int
    kind: str
    message: str
    parameter: str | None = None
    accepted: str | None = None
    retry_after: int | None = None

    def tree(self) -> dict[str, Any]:
        """The body of the API's answer."""
        given = {"parameter": self.parameter, "accepted": self.accepted}
        reported = {name: text for name, text in given.items() if text is not None}
        return {"error": {"kind": self.kind, "message": self.message, **reported}}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that the status asks for."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


STATUS_OF_KIND = {
    "invalid": 400,
    "not_found": 404,
    "conflict": 409,
    "forbidden": 403,
    "unreachable": 503,
    "temporary": 503,
    "misconfigured": 500,
}


def refusal_of(error: Exception, redactor: Redactor) -> HttpRefusal:
    """The status and the sentence of an error. An unexpected one is an internal error, without its text."""
    match error:
        case ParameterError():
            kind = getattr(error, "kind", "invalid")
            status = STATUS_OF_KIND.get(kind, 400)
            return HttpRefusal(status, kind, _text(error, redactor), error.parameter, redactor(error.accepted))
        case NoDocumentsError():
            return HttpRefusal(404, "not_found", _text(error, redactor))
        case OperationError():
            status = STATUS_OF_KIND.get(error.kind, 500)
            waits = _seconds(error) if status == 503 else None
            return HttpRefusal(status, error.kind, _text(error, redactor), retry_after=waits)
        case StorePermissionError():
            return HttpRefusal(403, "forbidden", _text(error, redactor))
        case StoreError():
            return HttpRefusal(503, "unreachable", _text(error, redactor), retry_after=RETRY_AFTER_S)
        case RejectedError():
            return HttpRefusal(503, "temporary", _text(error, redactor), retry_after=_seconds(error))
        case KeyInProgressError() | NameTakenError() | IdempotencyError():
            return HttpRefusal(409, "conflict", _text(error, redactor))
        case ConfigurationError():
            return HttpRefusal(500, "misconfigured", _text(error, redactor))
        case TimeoutError() | ConnectionError():
            text = "the store did not answer in time; check its disk or its server, and try again"
            return HttpRefusal(503, "unreachable", text, retry_after=RETRY_AFTER_S)
        case _:
            logger().error("dashboard: internal error: %s", redactor(error_text(error)))
            text = f"internal error: {type(error).__name__}; its text is in the log of the server, please report it"
            return HttpRefusal(500, "internal", text)


def _text(error: Exception, redactor: Redactor) -> str:
    return printable(redactor(str(error)), most=LONGEST_MESSAGE)


def _seconds(error: Exception) -> int:
    in_ms = getattr(error, "retry_after_ms", RETRY_AFTER_S * 1000)
    return max(1, round(getattr(error, "retry_after", in_ms / 1000)))
