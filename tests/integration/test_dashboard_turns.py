"""Questions to the dashboard have turns: whoever asks, and however much, the work of the same process goes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from reefknot.console.dashboard import api_types, pages
from reefknot.console.dashboard import site as sites
from reefknot.console.dashboard.api_types import PREFIX
from reefknot.console.dashboard.site import BusyError, Site
from reefknot.console.operations import health
from reefknot.console.operations.operator import SLICE_S, in_slices
from tests.security.site_client import READER, ask, bearer, build, opened_site, stored_work
from tests.stories import InLoop

pytestmark = pytest.mark.real_time

PATIENCE_S = 30


@pytest.fixture
def site(tmp_path: Path) -> InLoop:
    stored_work(tmp_path / "state.db")
    return InLoop(lambda: opened_site(tmp_path / "state.db"))


def asked_by(role: str) -> Any:
    return SimpleNamespace(state=SimpleNamespace(role=role))


async def most_at_once(site: Site, role: str, number: int) -> int:
    """The most of so many questions that had their turn at the same time."""
    now = most = 0

    async def question() -> None:
        nonlocal now, most
        async with site.reading(asked_by(role)):
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(question() for _ in range(number)))
    return most


@asynccontextmanager
async def no_turns(*_: Any) -> AsyncIterator[None]:
    yield


async def test_few_questions_of_a_role_have_their_turn_at_once(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    assert await most_at_once(site, "reader", 20) == 1
    assert await most_at_once(site, "operator", 20) == 2
    monkeypatch.setattr(site, "reading", no_turns)
    assert await most_at_once(site, "reader", 20) == 20, "the control: without turns all are at it at once"


async def test_a_reader_waits_bounded_and_lets_no_operator_wait(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    monkeypatch.setattr(sites, "TURN_S", 0.05)
    app = build(site)
    async with site.reading(asked_by("reader")):
        for target in (f"{PREFIX}/jobs", "/work", "/metrics"):
            refused = await ask(app, "GET", target, [bearer(READER)])
            assert (refused.status, refused.headers["retry-after"]) == (503, "5"), target
            assert "too many questions" in refused.text
        assert (await ask(app, "GET", f"{PREFIX}/jobs", [bearer()])).status == 200
        headers = [bearer(), ("Content-Type", "application/json")]
        body = b'{"job": {"type": "own.step"}}'
        assert (await ask(app, "POST", f"{PREFIX}/jobs", headers, body)).status == 200


async def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    monkeypatch.setattr(sites, "MOST_WAITING", 3)
    async with site.reading(asked_by("reader")):
        waiting = [asyncio.create_task(most_at_once(site, "reader", 1)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await most_at_once(site, "reader", 1)
    assert await asyncio.gather(*waiting) == [1, 1, 1]


async def test_a_page_of_the_api_has_at_most_a_thousand_entries(site: Site) -> None:
    app = build(site)
    for target in ("jobs", "quarantine", "quarantine/groups", "audit"):
        assert (await ask(app, "GET", f"{PREFIX}/{target}?limit=1000", [bearer()])).status == 200
        refused = await ask(app, "GET", f"{PREFIX}/{target}?limit=1001", [bearer()])
        assert (refused.status, refused.json["error"]["parameter"]) == (400, "limit"), target


async def test_a_store_that_does_not_answer_is_told_soon(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """And the page of the health says so, beside all that it knows."""
    assert max(api_types.LOOK_S, pages.LOADING_S) <= 5
    assert health.LOOK_S < pages.LOADING_S
    monkeypatch.setattr(api_types, "LOOK_S", 0.1)
    monkeypatch.setattr(pages, "LOADING_S", 0.1)
    monkeypatch.setattr(health, "LOOK_S", 0.1)
    asked: list[str] = []

    async def never(*_: Any, **__: Any) -> Any:
        asked.append("asked")
        await asyncio.Event().wait()

    app = build(site)
    monkeypatch.setattr(site.store.leases, "owners", never)
    for target in (f"{PREFIX}/jobs", "/work"):
        refused = await ask(app, "GET", target, [bearer()])
        assert (refused.status, refused.headers["retry-after"]) == (503, "5"), target
        assert "the store did not answer in time; check its disk or its server" in refused.text
    assert len(asked) == 2
    monkeypatch.setattr(pages, "LOADING_S", 5.0)
    monkeypatch.setattr(api_types, "LOOK_S", 5.0)
    found = await ask(app, "GET", f"{PREFIX}/doctor", [bearer()])
    findings = {one["check"]: one for one in found.json["findings"]}
    assert (found.status, found.json["ok"]) == (200, False)
    assert findings["python"]["level"] == "ok"
    assert "did not answer within" in findings["store"]["text"]
    page = await ask(app, "GET", "/health", [bearer()])
    assert page.status == 200
    assert "did not answer within" in page.text


async def test_a_long_list_is_made_in_slices() -> None:
    def busy(_: int) -> None:
        until = perf_counter() + SLICE_S / 2
        while perf_counter() < until:
            pass

    async def turns(work: Any) -> int:
        """The turns that the loop has had until the work was done."""
        task, number = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0)
            number += 1
        return number

    async def at_once() -> None:
        for number in range(50):
            busy(number)

    assert await turns(in_slices(busy, range(50))) > 15
    assert await turns(at_once()) < 5, "the control"
