"""The screenshots of the documents, taken of a shop that runs: `REEFKNOT_SCREENSHOTS=write` renews them."""

import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.running import RunningSystem, Watched

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150_000
IS_WRITTEN = os.environ.get("REEFKNOT_SCREENSHOTS") == "write"
WORKED_S = float(os.environ.get("REEFKNOT_SCREENSHOTS_S", "840")) if IS_WRITTEN else 2.0

POLICY = "max_attempts: 4, base_delay_ms: 400, max_delay_ms: 4000"
MODULE = """\
import asyncio
import reefknot as rk

seen = {}

async def work(inputs, context, *errors):
    number = seen[context.assignment_id] = seen.get(context.assignment_id, 0) + 1
    await asyncio.sleep(inputs.get("takes", 0.05))
    if number <= inputs.get("failures", 0):
        raise errors[number % len(errors)]

@rk.block("order.send")
async def send(inputs, context):
    await work(inputs, context, ConnectionError("payments.example.org closed the connection"),
               TimeoutError("payments.example.org did not answer within 2 s"))
    return {"receipt": f"R-{inputs.get('order', 0)}"}

@rk.block("invoice.render")
async def render(inputs, context):
    await work(inputs, context, ValueError(f"customer {inputs.get('customer')} has no VAT number"))
    return {"pages": 2}

@rk.block("mail.notify")
async def notify(inputs, context):
    await work(inputs, context, ConnectionError("smtp.example.org: connection reset by peer"))
    return {"sent": True}

@rk.block("report.build")
async def build(inputs, context):
    await asyncio.sleep(inputs.get("takes", 0.2))
    return {"rows": 1204}
"""
TENANTS = (None, "acme", "globex")


class Shop:
    """A shop's work: orders, invoices and mails, of which some fail for a while, and few for good."""

    def __init__(self, system: RunningSystem) -> None:
        self.system = system
        self._dice = random.Random(7)
        self._number = 10_400

    def submit(self, name: str, block: str, tenant: str | None = None, **inputs: Any) -> None:
        self.system.submit(name, block, inputs, **({"tenant_id": tenant} if tenant else {}))

    def one(self) -> None:
        """The next piece of work."""
        self._number += 1
        number, tenant, luck = self._number, self._dice.choice(TENANTS), self._dice.random()
        failures = 0 if luck < 0.8 else 1 if luck < 0.93 else 2 if luck < 0.985 else 9
        takes = self._dice.uniform(0.02, 0.4)
        match number % 4:
            case 0:
                bad = {"failures": 9} if luck > 0.95 else {}
                self.submit(f"invoice-{number}", "invoice.render", tenant, customer=4700 + number % 9, **bad)
            case 1:
                self.submit(f"mail-{number}", "mail.notify", tenant, takes=takes, failures=failures)
            case _:
                self.submit(f"order-{number}", "order.send", tenant, order=number, takes=takes, failures=failures)

    def work(self, seconds: float) -> None:
        """Work for so long, with a rush in between."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            self.one()
            time.sleep(0.25 + 0.2 * math.cos(passed / 45))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    folder = tmp_path_factory.mktemp("shop")
    if IS_WRITTEN:  # the pages show it: a name that says nothing about this machine
        folder = Path(tempfile.gettempdir()) / "shop"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    with RunningSystem.prepared(folder, policy=POLICY, places=60, module=MODULE) as running:
        for number, text in enumerate(("returns", "shipping", "opening hours")):
            (running.folder / "notes" / f"{number}-{text}.md").write_text(f"# {text}\n")
        shop = Shop(running)
        shop.work(WORKED_S)
        shop.submit("order-10399", "order.send", "acme", order=10399, takes=0.7, failures=2)
        for number in range(3):
            shop.submit(f"invoice-{number + 1}", "invoice.render", "globex", customer=4711, failures=9)
        running.ended("order-10399", "succeeded", tenant="acme")
        running.ended("invoice-3", "quarantined", tenant="globex")
        for number in range(2):
            shop.submit(f"report-2026-{number + 10}", "report.build", takes=600)
            running.ended(f"report-2026-{number + 10}", "running")
        yield running


def requeue(page: Page) -> None:
    """The dialog of a requeue, with a reason typed."""
    page.click("button[data-act^='Requeue the group']")
    page.fill("#act-because", "the VAT numbers were added")
    page.wait_for_selector("#act-go:enabled")


PHONE = {"viewport": {"width": 390, "height": 780}, "device_scale_factor": 1.5}
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "overview": ("/", {}),
    "overview-dark": ("/", {"color_scheme": "dark"}),
    "work": ("/work", {}),
    "job": ("/work/order-10399?tenant=acme", {}),
    "quarantine": ("/quarantine", {}),
    "quarantine-phone": ("/quarantine", {**PHONE, "color_scheme": "dark"}),
    "requeue": ("/quarantine", {"viewport": {"width": 1100, "height": 700}}),
    "policies": ("/policies?target=block:http&status=429", {}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_screenshot_is_small_enough_to_keep(shop: RunningSystem, browser: Browser, tmp_path: Path, name: str) -> None:
    path, more = TAKEN[name]
    window = Watched(browser, shop, "operator", shared=True, **{"viewport": {"width": 1280, "height": 860}} | more)
    page = window.goto(path, live=not path.startswith("/policies"))
    if name == "requeue":
        requeue(page)
    target = (IMAGES if IS_WRITTEN else tmp_path) / f"{name}.png"
    target.parent.mkdir(exist_ok=True)
    page.screenshot(path=target, animations="disabled")
    window.close()
    assert 5_000 < target.stat().st_size < MOST_BYTES


def test_each_screenshot_is_kept_and_shown_in_the_documents() -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    shown = {name for text in texts for name in re.findall(r"!\[[^\]]+\]\([^)]*images/([a-z-]+)\.png\)", text)}
    assert shown == set(TAKEN)
    assert {path.stem for path in IMAGES.iterdir()} == set(TAKEN)
    assert [path.name for path in IMAGES.iterdir() if path.stat().st_size >= MOST_BYTES] == []
