"""
A real Chromium, and a real `reefknot up` in a process of its own whose dashboard it looks at.

Both are started once for each process of the tests. A machine without Chromium fails these tests.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.running import RunningSystem, Watched

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """The browser, and the loop in which its driver works."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    assert program is not None, "no Chromium: install the package chromium-headless-shell (tools/system_packages.sh)"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        loop = asyncio.get_running_loop()
        with running(None):
            yield started, loop
        started.close()


@pytest.fixture
def browser(chromium: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    started, loop = chromium
    with running(loop):
        yield started


@contextmanager
def running(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """
    Name this thread's running loop for a while.

    The driver's loop stays in this thread for as long as the browser is open. Other tests of this process must not take
    it for their own: theirs would refuse to start.
    """
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    """A system that runs, with its dashboard."""
    with RunningSystem.prepared(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture
def visit(browser: Browser, system: RunningSystem) -> Iterator[Callable[..., Watched]]:
    """Open a browser window that is logged in; whatever it complains about fails the test at its end."""
    opened: list[Watched] = []

    def open_window(role: str = "operator", *, shared: bool = True, **more: Any) -> Watched:
        window = Watched(browser, system, role, shared=shared and more.get("java_script_enabled", True), **more)
        opened.append(window)
        return window

    yield open_window
    for window in opened:
        window.close()
