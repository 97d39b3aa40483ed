"""
The show: eight short scenes of a service that fails on purpose and a system that copes, in about 25 seconds.

The first three scenes use the library, the others a system in a process of its own (`reefknot up`), which is killed on
the way. Commands are the ones that a person would type, and what is shown beneath them is what they print. The folder
with configuration, store and log is kept, so that one can go on where the show ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from shlex import join, quote
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import reefknot as rk
from reefknot.console.cli import main as command_line
from reefknot.console.cli.app import exit_for
from reefknot.console.cli.config import FILES, recommended
from reefknot.demo.tour import LOOPBACK, OK, STOPPED_BY_SIGNAL, Response, Service, Tour, deadline, logged_from, recovery
from reefknot.errors import QueueFullError
from reefknot.runtime.log import printable

if TYPE_CHECKING:
    from reefknot.queue.client import Client, Handle
    from reefknot.queue.model.messages import ExecResult

PATIENCE_S = 60.0
"""Most seconds that anything here is waited for, on a busy machine."""
REDRAWN_EVERY_S = 0.1
BAR = 24
QUEUE_SIZE = 12


class Pace:
    """The length of pauses and of slow calls, and the number of calls at once."""

    def __init__(self, *, fast: bool) -> None:
        self.pause = 0.05 if fast else 1.1
        self.slow = 0.15 if fast else 0.25
        self.burst = 30 if fast else 70


class CtrlC:
    """
    Ctrl-C of the visitor, from entering to leaving the block.

    Python drops an exception in a callback of the garbage collector, and with it a Ctrl-C that comes in that moment. So
    it is also noted here, and the show asks for it before each command and while it waits.
    """

    def __init__(self) -> None:
        self._came = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.default_int_handler(number, frame)

    def check(self) -> None:
        """Raise the interrupt that was dropped, if there was one."""
        if self._came:
            raise KeyboardInterrupt


class Show(Tour):
    """The eight scenes, in a folder of their own."""

    def __init__(self, service: FlakyService, folder: Path, pace: Pace, ctrl_c: CtrlC) -> None:
        super().__init__(service, sleep)
        self._ctrl_c = ctrl_c
        self.flaky = service
        self.folder = folder
        self.url = f"sqlite:{folder / '.reefknot' / 'state.db'}"
        self.pace = pace
        self.system: subprocess.Popen[bytes] | None = None

    def play(self) -> None:
        """Play all scenes, and stop the system whatever happens."""
        scenes: tuple[Callable[[], None], ...] = (
            lambda: recovery(self),
            lambda: deadline(self),
            self.same_order_twice,
            self.killed,
            self.overload,
            self.quarantine,
            self.explain,
            self.tamper,
        )
        try:
            for scene in scenes:
                scene()
                self._ctrl_c.check()
                sleep(self.pace.pause)
        finally:
            self.stop_system()

    # ---- scenes -----------------------------------------------------------------------------------------------------

    def same_order_twice(self) -> None:
        self.scene("The same order twice, and a third time", '@rk.idempotent(key=lambda order: f"charge:{order}")')
        self.service.script("/charge", OK)

        @rk.idempotent(key=lambda order: f"charge:{order}")
        async def charge(order: str) -> dict[str, str]:
            await self.afetch("/charge")
            return {"receipt": f"r-{order}"}

        async def callers() -> list[dict[str, str]]:
            async with rk.open_store(self.url):
                both = await asyncio.gather(charge("order-7"), charge("order-7"))
                return [*both, await charge("order-7")]

        receipts = asyncio.run(callers())
        self.conclude(
            f"{len(receipts)} callers, {self.service.requests} charge; each got the receipt {receipts[0]['receipt']!r}"
        )

    def killed(self) -> None:
        self.scene("kill -9, and nothing is lost", "$ reefknot up")
        self.start_system()
        names = [f"order-{number}" for number in range(1, 9)]
        handles = self.with_client(lambda client: self._submit(client, names))
        self.line(f"{len(handles)} orders are accepted: they are on disk")
        self.wait_for(lambda: self._states().get("succeeded", 0) >= 2)
        assert self.system is not None
        self.line(f"$ kill -9 {self.system.pid}", "cyan")
        self.system.kill()
        self.system.wait(PATIENCE_S)
        left = ", ".join(f"{number} {state}" for state, number in self._states().items() if number)
        self.line(f"left in the store: {left}")
        self.start_system()
        self.line("$ reefknot up", "cyan")
        results = self.with_client(lambda client: self._run(client, names, "/slow"))  # the same ids are the same jobs
        good = sum(one.status.value == "success" for one in results)
        self.conclude(f"{good} of {len(handles)} succeeded, {len(handles) - good} lost")

    def overload(self) -> None:
        burst = self.pace.burst
        self.scene(
            f"{burst} slow calls at once into short queues",
            "a full queue refuses and says when to come back; the caller waits that long and submits again",
        )
        load = Load(burst)
        results = self.with_client(lambda client: self._burst(client, load))
        good = sum(one.status.value == "success" for one in results)
        self.conclude(f"{good} of {burst} succeeded; the queue was full {load.refused} times, and nothing piled up")

    def quarantine(self) -> None:
        self.scene("A job that cannot succeed waits for a person", "404 is not retried: the job goes to quarantine")
        names = ["invoice-1"]
        self.with_client(lambda client: self._run(client, names, "/gone"))
        self.command("quarantine", "list")
        self.flaky.repaired = True
        self.line("the page is back, so the job may try again")
        self.command("quarantine", "requeue", "invoice-1")
        results = self.with_client(lambda client: self._run(client, names, "/gone"))
        self.conclude(f"invoice-1: {results[0].status.value}")

    def explain(self) -> None:
        self.scene("Why, and when: ask before anything fails", "the policy book, and the line that decides")
        for status in ("404", "503", "429"):
            self.command("policy", "explain", "--target", "block:http", "--status", status, lines=1)

    def tamper(self) -> None:
        self.scene("A record of the audit log is changed", "every event is chained to the one before it by its hash")
        self.stop_system()
        self.command("audit", "verify")
        self.command("store", "backup", "copy.db")
        change = "UPDATE audit SET body = replace(body, 'order-7', 'order-8') WHERE work_id = 'order-7'"
        self.line(f'$ sqlite3 copy.db "{change}"', "cyan")
        with closing(sqlite3.connect(self.folder / "copy.db")) as connection:
            connection.execute(change)
            connection.commit()
        code = self.command("audit", "verify", "--engine", "sqlite:copy.db", lines=3)
        self.conclude(f"the copy is not what was written: exit code {code}")

    # ---- commands and the system -------------------------------------------------------------------------------------

    def command(self, *words: str, lines: int = 12) -> int:
        """Run a command in the folder, and print it with the first lines of what it prints."""
        self.line(f"$ reefknot {join(words)}", "cyan")
        code, out, err = self._run_command(*words)
        shown = [line for line in (out + err).splitlines() if line.strip()]
        for line in shown[:lines]:
            self.line(line)
        return code

    def _run_command(self, *words: str) -> tuple[int, str, str]:
        self._ctrl_c.check()
        out, err = StringIO(), StringIO()
        with chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            code = command_line(words)
        if code == STOPPED_BY_SIGNAL:
            raise KeyboardInterrupt
        return code, out.getvalue(), err.getvalue()

    def _states(self) -> dict[str, int]:
        """The number of jobs in the store by state."""
        _, out, _ = self._run_command("job", "list", "--json")
        states: dict[str, int] = json.loads(out)["states"]
        return states

    def start_system(self) -> None:
        """Start `reefknot up` in the folder, and wait until it is ready."""
        log = self.folder / "up.log"
        begin = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self.system = subprocess.Popen(
                [sys.executable, "-m", "reefknot", "up", "--log-format", "text"],
                cwd=self.folder,
                env={**os.environ, "REEFKNOT__DASHBOARD__ENABLED": "false"},  # the visitor starts one at the end
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the show, which then stops the system
            )
        self.wait_for(lambda: b"up until Ctrl-C" in log.read_bytes()[begin:])

    def stop_system(self) -> None:
        """Shut the system down in order; one that does not end in time is killed."""
        system, self.system = self.system, None
        if system is None or system.poll() is not None:
            return
        system.send_signal(signal.SIGTERM)
        try:
            system.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            system.kill()
            system.wait()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds; a system that ended, or that takes too long, is an error."""
        ends = monotonic() + PATIENCE_S
        while not holds():
            self._ctrl_c.check()
            if (self.system is not None and self.system.poll() is not None) or monotonic() > ends:
                raise TimeoutError(f"the system did not do its part; see {self.folder / 'up.log'}")
            sleep(0.02)

    # ---- work --------------------------------------------------------------------------------------------------------

    def with_client(self, work: Callable[[Client], Any]) -> Any:
        """The result of `work(client)`, in an event loop of its own."""

        async def main() -> Any:
            async with rk.connect(self.url, size=QUEUE_SIZE) as client:
                return await work(client)

        return asyncio.run(main())

    async def _submit(self, client: Client, names: list[str], path: str = "/slow") -> list[Handle]:
        address = f"http://{LOOPBACK}:{self.service.port}{path}"
        return [await client.submit("http.request", {"url": f"{address}/{name}"}, assignment_id=name) for name in names]

    async def _run(self, client: Client, names: list[str], path: str) -> list[ExecResult]:
        return [await handle.result(PATIENCE_S) for handle in await self._submit(client, names, path)]

    async def _burst(self, client: Client, load: Load) -> list[ExecResult]:
        async def one(number: int) -> ExecResult:
            while True:
                try:
                    (handle,) = await self._submit(client, [f"burst-{number}"])
                except QueueFullError as error:
                    load.refused += 1
                    await asyncio.sleep(error.retry_after)
                else:
                    result = await handle.result(PATIENCE_S)
                    load.done += 1
                    return result

        drawing = asyncio.ensure_future(self._draw_load(client, load))
        try:
            return list(await asyncio.gather(*map(one, range(load.total))))
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
            self._put_load(load, last=True)

    async def _draw_load(self, client: Client, load: Load) -> None:
        from reefknot.queue.presence import living_systems

        while True:
            for system in await living_systems(client.store):
                for worker in system["workers"]:
                    load.level = str(worker["classes"]["io"]["status"])
            self._put_load(load)
            await asyncio.sleep(REDRAWN_EVERY_S)

    def _put_load(self, load: Load, *, last: bool = False) -> None:
        """Draw the load as a line over itself; where that is impossible, print the last one alone."""
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"\r{printable(str(load))[:width]}\x1b[K" + ("\n" if last else ""))
            sys.stdout.flush()
        elif last:
            self.line(str(load).strip())


class Load:
    """The progress of many calls at once, as a line."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.refused = 0
        self.level = "healthy"

    def __str__(self) -> str:
        full = round(BAR * self.done / self.total)
        bar = "█" * full + "·" * (BAR - full)
        return f"   {bar} {self.done} of {self.total} done; worker {self.level}; refused {self.refused} times"


# ---- the setting -----------------------------------------------------------------------------------------------------

CHANGES = (
    (
        "      max_queue_size: 1000",
        f"      resource_pools: {{io: {{max_queue_size: 5, max_concurrency: 4}}}}\n      max_queue_size: {QUEUE_SIZE}",
    ),
    ("    allow: []", "    allow: ['{address}']"),
)
"""Replacements in the file that `reefknot init` writes."""


class FlakyService(Service):
    """A service with scripted responses; besides, `/slow/…` takes long, and `/gone/…` is 404 until `repaired`."""

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.repaired = False
        self._slow = slow

    def respond(self, path: str) -> Response:
        if path.startswith("/gone/"):
            return OK if self.repaired else Response(404)
        if not path.startswith("/slow/"):
            return super().respond(path)
        sleep(self._slow)
        return OK


def set_up(folder: Path, port: int) -> None:
    """Write the configuration, and the folder that its file steps may use."""
    text = recommended()
    for old, new in CHANGES:
        if text.count(old) != 1:
            raise LookupError(f"the recommended configuration has {text.count(old)} times {old!r}, once was expected")
        text = text.replace(old, new.replace("{address}", f"{LOOPBACK}:{port}"))
    (folder / FILES).mkdir(parents=True, exist_ok=True)
    (folder / "reefknot.yaml").write_text(text, encoding="utf-8")


# ---- main ------------------------------------------------------------------------------------------------------------


def main(*, fast: bool = False, keep: str | None = None) -> int:
    """Play the show and return its exit code."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # for a terminal without the block character
    pace = Pace(fast=fast)
    folder = Path(keep).absolute() if keep else Path(tempfile.mkdtemp(prefix="reefknot-demo-"))
    try:
        with ExitStack() as opened:
            service = opened.enter_context(FlakyService(pace.slow))
            opened.enter_context(_quiet_environment())
            opened.enter_context(logged_from(logging.CRITICAL + 1))
            set_up(folder, service.port)
            show = Show(service, folder, pace, opened.enter_context(CtrlC()))
            show.line(f"A service that fails on purpose listens on {LOOPBACK}:{service.port}.")
            show.play()
            _say_what_is_kept(show)
    except KeyboardInterrupt:
        print(f"\nstopped; what there was is in {folder}", file=sys.stderr)
        return STOPPED_BY_SIGNAL
    except Exception as error:  # the same words and codes as on the command line
        code, lines = exit_for(error)
        print("\n".join(lines), file=sys.stderr)
        return code
    return 0


def _say_what_is_kept(show: Show) -> None:
    name = "reefknot" if shutil.which("reefknot") else quote(str(Path(sys.executable).with_name("reefknot")))
    show.line("")
    show.line(f"Configuration, store and log are kept. Go on with: cd {quote(str(show.folder))}", "bold")
    for words in ("top", "job show invoice-1", "audit tail", "dashboard", "up"):
        show.line(f"{name} {words}", "cyan")


@contextmanager
def _quiet_environment() -> Iterator[None]:
    """Inside, no variable of the visitor changes the configuration, and tables fit the terminal."""
    before = dict(os.environ)
    for name in [one for one in os.environ if one.startswith(("REEFKNOT", "WORKER_"))]:
        del os.environ[name]
    os.environ["COLUMNS"] = str(min(100, os.get_terminal_size().columns - 3) if sys.stdout.isatty() else 100)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
