"""Live views: one rendering for all viewers, at most one a second, bounded, and ended with the site."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from reefknot.console.dashboard import live
from reefknot.console.dashboard.live import LiveStream, LiveViews, ViewKey
from reefknot.console.dashboard.site import HttpRefusal, refusal_of
from reefknot.core.redaction import Redactor
from reefknot.errors import OperationError, StoreUnavailableError
from reefknot.runtime.changes import Waiters
from tests.stories import InLoop

WORK = ViewKey("work", "operator")
AWAY = StoreUnavailableError("state.db", "the store is away", "start it")


class Scene:
    """A site with a log that a test writes to, and a rendering that counts."""

    def __init__(self) -> None:
        self.heeded: list[Exception] = []
        self.log = SimpleNamespace(sequence=0, waiters=Waiters(), is_away=False)
        self.log.head = self._head
        self.log.wait = self._wait
        self.site: Any = SimpleNamespace(  # what live views need of one
            closing=asyncio.Event(), redactor=Redactor(()), store=SimpleNamespace(audit=self.log), refusal=self._refusal
        )
        self.rendered: list[float] = []
        self.content: Callable[[], str] = lambda: f"event {self.log.sequence}"
        self.took = 0.001
        site: Any = self.site
        self.views = LiveViews(site, self._render)

    def _refusal(self, error: Exception) -> HttpRefusal:
        self.heeded.append(error)
        return refusal_of(error, Redactor(()))

    async def _head(self) -> Any:
        if self.log.is_away:
            raise AWAY
        return SimpleNamespace(chain="c", sequence=self.log.sequence)

    async def _wait(self, after: int, timeout: float) -> bool:
        with self.log.waiters.listening("log") as changed:
            if self.log.sequence <= after:
                await asyncio.wait([changed], timeout=timeout)
        return bool(self.log.sequence > after)

    def write(self) -> None:
        self.log.sequence += 1
        self.log.waiters.wake("log")

    async def _render(self, key: ViewKey) -> tuple[str, float]:
        self.rendered.append(asyncio.get_running_loop().time())
        if self.log.is_away:
            raise AWAY
        return f"{key.name}: {self.content()}", self.took


@pytest.fixture
def scene() -> InLoop:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Scene]:
        made = Scene()
        yield made
        made.site.closing.set()

    return InLoop(opened)


async def next_of(stream: LiveStream) -> str:
    async with asyncio.timeout(60):
        return (await anext(stream)).decode()


async def test_all_viewers_of_a_view_get_the_same_bytes_of_one_rendering(scene: Scene) -> None:
    found = await asyncio.gather(*(anext(scene.views.follow(WORK)) for _ in range(50)))
    assert len(scene.rendered) == 1
    assert len({id(one) for one in found}) == 1
    assert found[0] == b'event: fragment\ndata: "work: event 0"\n\n'


async def test_an_event_renews_a_view_and_a_flood_of_them_once_a_second(scene: Scene) -> None:
    assert "event 0" in await next_of(scene.views.follow(WORK))
    began = asyncio.get_running_loop().time()
    for _ in range(1000):
        scene.write()
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began >= 9.9
    assert 5 <= len(scene.rendered) <= 12


async def test_without_events_a_view_is_renewed_every_five_seconds_for_its_ages(scene: Scene) -> None:
    scene.content = lambda: str(len(scene.rendered))
    stream = scene.views.follow(WORK)
    await next_of(stream)
    await next_of(stream)
    first, second = scene.rendered
    assert second - first == pytest.approx(5, abs=0.6)


async def test_what_has_not_changed_is_not_sent_again_but_the_connection_is_kept(scene: Scene) -> None:
    scene.content = lambda: "the same"
    stream = scene.views.follow(WORK)
    assert "the same" in await next_of(stream)
    assert await next_of(stream) == ": ping\n\n"
    assert len(scene.rendered) >= 3


async def test_a_viewer_who_comes_later_gets_nothing_that_is_older_than_their_page(scene: Scene) -> None:
    """A page that is loaded again after an action, while the view of before is still there."""
    shown = ["running"]
    scene.content = lambda: shown[0]
    before = scene.views.follow(WORK)
    assert "running" in await next_of(before)
    await before.aclose()
    shown[0] = "paused"  # without an event: a worker reports its state in a status
    again, began = scene.views.follow(WORK), asyncio.get_running_loop().time()
    assert "paused" in await next_of(again)
    assert asyncio.get_running_loop().time() - began <= live.SHORTEST_REST_S + 0.1
    assert "paused" in await next_of(scene.views.follow(WORK)), "and a message even when nothing has changed"


async def test_a_slow_viewer_gets_the_newest_state(scene: Scene) -> None:
    slow, quick = scene.views.follow(WORK), scene.views.follow(WORK)
    await next_of(slow)
    await next_of(quick)
    for _ in range(5):
        scene.write()
        await next_of(quick)
    assert "event 5" in await next_of(slow)


async def test_a_view_that_takes_long_rests_longer(scene: Scene) -> None:
    scene.took = 0.05
    stream = scene.views.follow(WORK)
    for _ in range(4):
        await next_of(stream)
        scene.write()
    gaps = [later - before for before, later in zip(scene.rendered, scene.rendered[1:], strict=False)]
    assert min(gaps) >= 0.05 / live.SHARE


async def test_a_view_without_viewers_is_not_rendered(scene: Scene) -> None:
    stream = scene.views.follow(WORK)
    await next_of(stream)
    assert scene.views.viewers == 1
    await stream.aclose()
    await asyncio.sleep(20)
    number = len(scene.rendered)
    await asyncio.sleep(60)
    assert (len(scene.rendered), scene.views.viewers) == (number, 0)


def of_type(place: int, role: str = "operator") -> ViewKey:
    return ViewKey("work", role, (("type", str(place)),))


async def test_views_and_viewers_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWS", 3)
    monkeypatch.setattr(live, "MOST_VIEWERS", 5)
    streams = [scene.views.follow(of_type(place)) for place in range(3)]
    with pytest.raises(OperationError, match="too many live views"):
        scene.views.check_room(ViewKey("audit", "operator"))
    streams += [scene.views.follow(of_type(0)) for _ in range(2)]
    with pytest.raises(OperationError, match="close some tabs"):
        scene.views.follow(of_type(0))
    await streams.pop().aclose()  # its place is free again, though nothing was read of it
    for one in (*streams, scene.views.follow(of_type(0))):
        await next_of(one)


async def test_half_of_the_places_are_for_operators(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_VIEWS", 6)
    monkeypatch.setattr(live, "MOST_VIEWERS", 8)
    for one in [scene.views.follow(of_type(place, "reader")) for place in (0, 1, 2, 0)]:
        await next_of(one)
    for key in (ViewKey("audit", "reader"), of_type(0, "reader")):
        with pytest.raises(OperationError, match="too many live views"):
            scene.views.check_room(key)
    scene.views.check_room(ViewKey("audit", "operator"))


async def test_a_stream_ends_with_the_session_of_its_viewer_and_sends_nothing_more(scene: Scene) -> None:
    valid = True
    mine, other = scene.views.follow(WORK, lambda: valid), scene.views.follow(WORK)
    assert "event 0" in await next_of(mine)
    assert "event 0" in await next_of(other)
    valid = False
    scene.write()
    with pytest.raises(StopAsyncIteration):
        await next_of(mine)
    assert "event 1" in await next_of(other)
    assert scene.views.viewers == 1


async def test_all_streams_end_with_the_site(scene: Scene) -> None:
    streams = [scene.views.follow(ViewKey("work", role)) for role in ("operator", "reader")]
    for one in streams:
        await next_of(one)
    ends = [asyncio.ensure_future(anext(one, None)) for one in streams]
    await asyncio.sleep(0)
    scene.site.closing.set()
    _, late = await asyncio.wait(ends, timeout=1)
    assert (late, scene.views.viewers) == (set(), 0)


async def test_a_store_that_is_away_is_told_and_watched_until_it_is_back(scene: Scene) -> None:
    stream = scene.views.follow(WORK)
    await next_of(stream)
    scene.log.is_away = True
    told = await next_of(stream)
    assert told.startswith("event: problem\n")
    assert "the store is away" in told
    assert scene.heeded[:1] == [AWAY]  # the site opens it again
    scene.log.is_away = False
    scene.write()
    assert "event 1" in await next_of(stream)
