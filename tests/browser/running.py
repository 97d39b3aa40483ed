"""A running system, and a browser window that is watched for everything it complains about."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any, Self
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from playwright.sync_api import Browser, Dialog, Page

OPERATOR, READER = "operator-token-of-a-test", "reader-token-of-a-test"
PATIENCE_S = 60.0
MOST_MS = 30_000
"""The longest wait for a page; one that is right never takes it."""

CONFIG = Template("""\
worker:
  quarantine_failed: true
  retries:
    v2:
      enabled: true
      default_policy: {$policy, jitter_type: equal}
      error_classification:
        network_errors: {retryable: {network_error: true}, max_attempts: 3}
      breaker: {enabled: false}  # several jobs fail in a row and have to end: an outage is not the subject
  queue: {v2: {enabled: true, max_queue_size: $places}}
sources:
  notes: {connector: local_files, path: notes}
schedules:
  nightly: {cron: "0 3 * * *", assignment: {job: {type: own.flaky, payload: {}}}}
dashboard:
  port: $port
  operator_token: env:TEST_OPERATOR_TOKEN
  reader_token: env:TEST_READER_TOKEN
""")
QUICK = "max_attempts: 3, base_delay_ms: 50, max_delay_ms: 200"
MODULE = """\
import asyncio
import reefknot as rk

seen = {}

@rk.block("own.flaky")
async def flaky(inputs, context):
    seen[context.assignment_id] = seen.get(context.assignment_id, 0) + 1
    if seen[context.assignment_id] <= inputs.get("failures", 0):
        raise ConnectionError(inputs.get("text", "the gateway hung up"))
    return {"ok": True}

@rk.block("own.broken")
async def broken(inputs, context):
    if inputs.get("text"):
        raise ValueError(inputs["text"])
    return {"mended": True}

@rk.block("own.nap")
async def nap(inputs, context):
    await asyncio.sleep(inputs.get("seconds", 60))
    return {}
"""


class RunningSystem:
    """`reefknot up` in a folder, as a process of its own, and its HTTP API."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.sessions: dict[str, Any] = {}
        """By role: what a browser keeps of a login."""
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def prepared(
        cls, folder: Path, *, port: int = 0, policy: str = QUICK, places: int = 200, module: str = MODULE
    ) -> RunningSystem:
        """A system in this folder, with all that it needs there; `port` 0 is a free one."""
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "notes" / "a.md").write_text("# a reef knot\n")
        (folder / "reefknot.yaml").write_text(CONFIG.substitute(port=port, policy=policy, places=places))
        (folder / "steps.py").write_text(module)
        return cls(folder)

    def __enter__(self) -> Self:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("REEFKNOT", "WORKER_"))}
        tokens = {"TEST_OPERATOR_TOKEN": OPERATOR, "TEST_READER_TOKEN": READER}
        log = self.folder / "up.log"
        with log.open("w") as file:
            words = [sys.executable, "-m", "reefknot", "up", "--drain", "0", "--module", "steps"]
            env = kept | tokens | {"PYTHONUTF8": "1", "COLUMNS": "200", "REEFKNOT_LOG_FORMAT": "text"}
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "text": True}
            self._process = subprocess.Popen(words, cwd=self.folder, env=env, **streams)

        def is_served() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, log.read_text()
            lines = [line for line in log.read_text().splitlines() if line.startswith("dashboard: http")]
            self.url = lines[0].removeprefix("dashboard: ").strip().rstrip("/") if lines else ""
            return bool(self.url)

        until(is_served)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def kill(self) -> None:
        """End the process as a power cut would."""
        self.__exit__()

    def ask(self, path: str, body: Any = None, **asked: str) -> Any:
        """An answer of the HTTP API, to the operator."""
        query = f"?{urlencode(asked)}" if asked else ""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
        request = Request(f"{self.url}/api/v1{path}{query}", data, headers)
        with urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)

    def submit(self, name: str, block: str, payload: dict[str, Any] | None = None, **more: Any) -> str:
        """Submit a job, and give its id."""
        job = {"type": block, "payload": payload or {}}
        self.ask("/jobs", {"assignment_id": name, "request_id": f"r-{name}", "job": job, **more})
        return name

    def quarantined(self, name: str, text: str, tenant: str | None = None) -> str:
        """Submit a job that fails with this text, and wait for its end in quarantine."""
        of_tenant = {} if tenant is None else {"tenant": tenant}
        self.submit(name, "own.broken", {"text": text}, **({} if tenant is None else {"tenant_id": tenant}))
        self.ended(name, "quarantined", **of_tenant)
        return name

    def job(self, name: str, **asked: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask(f"/jobs/{quote(name, safe='')}", **asked)
        return found

    def ended(self, name: str, state: str, **asked: str) -> None:
        """Wait until a job is in this state."""
        until(lambda: self.job(name, **asked)["state"] == state)

    def actions(self) -> list[dict[str, Any]]:
        """The audited actions of operators, the newest first."""
        found = self.ask("/audit", type="operator_action", limit="50")
        return [one["event"] for one in found["events"]]


class Watched:
    """
    A window: console messages, failed scripts, dialogs and violations of the content policy are collected.

    It is logged in and shows the overview. With `shared` the first login of a role serves all later windows, which
    begin empty; a test that ends or replaces its session needs one of its own.
    """

    def __init__(
        self, browser: Browser, system: RunningSystem, role: str, *, shared: bool = False, **more: Any
    ) -> None:
        self.system = system
        self.complaints: list[str] = []
        self.expected = ""
        """A text that a complaint may have."""
        known = system.sessions.get(role) if shared else None
        usual: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}, "storage_state": known}
        self._context = browser.new_context(**usual | more)
        self._context.set_default_timeout(MOST_MS)
        self._context.add_init_script(
            "document.addEventListener('securitypolicyviolation', (event) => console.error(event.violatedDirective))"
        )
        self.page: Page = self._context.new_page()
        self.page.on("console", lambda message: self._hear(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        self.page.on("dialog", self._refuse)
        if known is None:
            self._log_in(OPERATOR if role == "operator" else READER, has_script=more.get("java_script_enabled", True))
        if shared and known is None:
            system.sessions[role] = self._context.storage_state()

    def _log_in(self, token: str, *, has_script: bool) -> None:
        if has_script:
            self.page.goto(f"{self.system.url}/login#token={token}")
        else:
            self.page.goto(f"{self.system.url}/login")
            self.page.fill("input[name=token]", token)
            self.page.click("button[type=submit]")
        self.page.wait_for_url(f"{self.system.url}/")
        self.page.wait_for_selector("#main")

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _refuse(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def goto(self, path: str, *, live: bool = False) -> Page:
        """A page, and with `live` as soon as its live stream has begun."""
        self.page.goto(f"{self.system.url}{path}")
        self.page.wait_for_selector("#main")  # what is loaded first has no data: its script brings the page
        if live:
            self.page.wait_for_selector("#live-state[data-state=live]")
        return self.page

    def close(self) -> None:
        self._context.close()
        assert [one for one in self.complaints if not self.expected or self.expected not in one] == []


def until(holds: Callable[[], bool]) -> None:
    """A bounded wait for another process."""
    ends = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.05)
