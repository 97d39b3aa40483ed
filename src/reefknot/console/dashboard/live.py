"""
Live updates: each view that is watched is rendered by one task, and the same bytes go to all of its viewers.

A view is rendered when an event was written, and every five seconds for changes without an event, at most once a
second. A view that is slow to render is rendered less often: all views together take a small share of the processor,
however many viewers there are. A viewer has no queue of its own: a slow one gets the newest state and misses those in
between. Views and viewers are bounded, and all of them end with the site.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from reefknot.audit.port import end_of
from reefknot.console.dashboard.security import OPERATOR
from reefknot.errors import OperationError
from reefknot.runtime.changes import Waiters
from reefknot.runtime.tasks import run_in_background

if TYPE_CHECKING:
    from reefknot.console.dashboard.site import Site

REFRESH_S = 5.0
SHORTEST_REST_S = 1.0
LONGEST_REST_S = 5.0
SHARE = 0.01
"""The share of a processor that all live views together take, as far as their costs are known beforehand."""
SENDING_S = 0.0003
"""About the time to send a message to one viewer."""
LOOKED_AT = 8
"""The last renderings by which the cost of a view is known. The quickest counts: others waited for their turn."""
RENDERING_S = 15.0
PING_S = 15.0
MOST_VIEWS = 32
MOST_VIEWERS = 200
_PING = b": ping\n\n"
_CHANGE = "change"


class ViewKey(Struct, frozen=True):
    """A view as its viewers share it: the page, the role, and the query."""

    name: str
    role: str
    asked: tuple[tuple[str, str], ...] = ()


Render = Callable[[ViewKey], Awaitable[tuple[str, float]]]
"""From a view to its text, and the seconds that this took."""


class LiveView:
    """A watched view: the newest message for its viewers, and their number."""

    def __init__(self, key: ViewKey) -> None:
        self.key = key
        self.viewers: set[LiveStream] = set()
        self.version = 0
        self.message = b""
        self.took: deque[float] = deque(maxlen=LOOKED_AT)
        self.waiters = Waiters()

    def publish(self, event: str, text: str) -> None:
        """Hand viewers a new message, unless it is the one that they have."""
        message = b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(text))
        if message != self.message:
            self.message = message
            self.version += 1
            self.waiters.wake(_CHANGE)


class LiveStream(AsyncIterator[bytes]):
    """The messages of a view to one viewer, who has a place from the begin until they end or are closed."""

    def __init__(self, view: LiveView, messages: AsyncGenerator[bytes]) -> None:
        self._viewers = view.viewers
        self._viewers.add(self)
        self._messages = messages

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._messages)
        except BaseException:  # the end of the messages as well
            self._viewers.discard(self)
            raise

    async def aclose(self) -> None:
        self._viewers.discard(self)
        await self._messages.aclose()


class LiveViews:
    """The watched views of a site."""

    def __init__(self, site: Site, render: Render) -> None:
        self._site = site
        self._render = render
        self._views: dict[ViewKey, LiveView] = {}
        self._changes = Waiters()
        self._mark = 0
        self._watching = False

    @property
    def viewers(self) -> int:
        """Browsers that watch now."""
        return sum(len(view.viewers) for view in self._views.values())

    def check_room(self, key: ViewKey) -> None:
        """Refuse a viewer for whom there is no room."""
        views = [one for one in self._views.values() if key.role == OPERATOR or one.key.role == key.role]
        viewers, part = (
            sum(len(one.viewers) for one in views),
            1 if key.role == OPERATOR else 2,
        )  # half is for operators
        if viewers >= MOST_VIEWERS // part or (key not in self._views and len(views) >= MOST_VIEWS // part):
            text = f"too many live views are open: {viewers} viewers of {len(views)} views; close some tabs"
            raise OperationError(text, "temporary")

    def follow(self, key: ViewKey, is_valid: Callable[[], bool] = lambda: True) -> LiveStream:
        """
        The messages of a view, from its next one on, until the site closes, or the session of the viewer ends.

        The newest one may be older than the page that a new viewer has loaded, and lack the effect of their action.
        """
        self.check_room(key)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = LiveView(key)
            run_in_background(self._keep(view), "dashboard: a live view")
        view.message, seen = b"", view.version  # so that the next rendering is a message, whatever it shows
        self._mark += 1
        self._changes.wake(_CHANGE)
        return LiveStream(view, self._messages(view, seen, is_valid))

    async def _messages(self, view: LiveView, seen: int, is_valid: Callable[[], bool]) -> AsyncGenerator[bytes]:
        while not self._site.closing.is_set() and is_valid():
            if view.version != seen:
                seen = view.version
                yield view.message
                continue
            await self._pause(PING_S, view.waiters)
            if view.version == seen and not self._site.closing.is_set() and is_valid():
                yield _PING

    async def _pause(self, seconds: float, waiters: Waiters | None = None) -> None:
        """Wait for the end of the site, or for a change, for at most `seconds`."""
        with (waiters or Waiters()).listening(_CHANGE) as changed:
            closing: asyncio.Future[Any] = asyncio.ensure_future(self._site.closing.wait())
            try:
                await asyncio.wait([changed, closing], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                closing.cancel()

    async def _keep(self, view: LiveView) -> None:
        """Render a view while it has viewers."""
        if not self._watching:
            self._watching = True
            run_in_background(self._watch(), "dashboard: the watch over the log")
        try:
            while view.viewers and not self._site.closing.is_set():
                seen = self._mark
                await self._renew(view)
                cost = min(view.took, default=0.0) + SENDING_S * len(view.viewers)
                rest = min(LONGEST_REST_S, max(SHORTEST_REST_S, cost * len(self._views) / SHARE))
                await self._pause(rest)
                if self._mark == seen and view.viewers:
                    await self._pause(max(0.0, REFRESH_S - rest), self._changes)
        finally:
            del self._views[view.key]

    async def _renew(self, view: LiveView) -> None:
        """Render a view for its viewers."""
        try:
            async with asyncio.timeout(RENDERING_S):
                text, took = await self._render(view.key)
        except Exception as error:
            view.publish("problem", self._site.refusal(error).message)
        else:
            view.took.append(took)
            view.publish("fragment", text)

    async def _watch(self) -> None:
        """Wake all views after an event, for as long as there are views."""
        try:
            while self._views and not self._site.closing.is_set():
                if await self._has_changed():
                    self._mark += 1
                    self._changes.wake(_CHANGE)
                await self._pause(SHORTEST_REST_S / 2)
        finally:
            self._watching = False

    async def _has_changed(self) -> bool:
        """Wait for an event; a store that cannot be asked counts as changed, after a while."""
        log = self._site.store.audit
        try:
            async with asyncio.timeout(RENDERING_S):
                end = await end_of(log)
                return await log.wait(end.sequence, REFRESH_S)
        except Exception:
            await self._pause(REFRESH_S)
            return True
