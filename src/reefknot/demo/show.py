"""
The show: a whole system at work for about a minute, `reefknot up` with something to do.

Six scenes, one after the other, while the live feed prints the audited events. Work is submitted as any other process
would do it: through the store. The times of the scenes are shares of the whole, so a short show has them all. The
configuration is the recommended one with short queues, quarantine for failed work, and the three resources that the
steps may reach.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from reefknot.cli.app import exit_for
from reefknot.cli.config import recommended
from reefknot.cli.serve import UpSession, startup
from reefknot.cli.stores import polled
from reefknot.demo.tour import DOWN, LOOPBACK, OK, Response, Service, line_printer, logged_from
from reefknot.errors import QueueFullError, ResultPendingError

if TYPE_CHECKING:
    from reefknot.app.system import System
    from reefknot.cli.live_feed import PrintLine
    from reefknot.core.messages import ExecResult
    from reefknot.router.client import Client, Handle

USUAL_S = 50.0
FAST_S = 6.0
DRAIN_S = 3.0
REQUEUED_S = 5.0
PATIENCE_S = 15.0
"""Extra seconds for the last scene on a busy machine."""
BURST = 90
SLOW_SHARE = 0.008
Step = tuple[str, dict[str, Any], str]
"""Type, inputs and assignment id."""
_INSERT = "INSERT INTO report (place, said) VALUES (?, ?)"
_COLOURS = {
    "retry": "yellow",
    "recovered": "green",
    "given up": "red",
    "quarantined": "bold red",
    "rejected": "magenta",
    "more": "dim",
    "operator": "bold cyan",
    "scene": "bold",
    "note": "cyan",
    "healthy": "green",
    "degraded": "yellow",
    "overloaded": "magenta",
    "critical": "bold magenta",
}


class Show:
    """The six scenes."""

    def __init__(self, service: FlakyService, url: str, seconds: float, say: PrintLine) -> None:
        self._service = service
        self._url = url
        self._seconds = seconds
        self._say = say
        self._scene = 0
        self._began = monotonic()
        self._address = f"http://{LOOPBACK}:{service.port}"

    async def play(self, system: System) -> None:
        """Play all scenes; the system shuts down afterwards."""
        from reefknot.app.stores import connect

        self._began = monotonic()
        async with connect(self._url, size=QUEUE_SIZE) as client:
            for scene, until in (
                (self.calm, 0.16),
                (self.unlucky, 0.34),
                (self.burst, 0.58),
                (self.poison, 0.68),
                (self.outage, 0.88),
                (self.operator, 1.0),
            ):
                await scene(client)
                await self._until(until)

    # ---- scenes -----------------------------------------------------------------------------------------------------

    async def calm(self, client: Client) -> None:
        self._title(
            "Steps that succeed: a file, a database, an HTTP call", "the live feed prints nothing for a success"
        )
        results = await self._all(
            client,
            ("fs.blob_put", {"path": "log.txt", "content": "calm sea\n", "overwrite": True}, "write-log"),
            ("fs.blob_get", {"path": "greeting.txt"}, "read-greeting"),
            ("sql.query", {"connection": "weather", "query": _INSERT, "params": ["Kiel", "calm"]}, "insert-report"),
            self._call("/calm", "call-service"),
        )
        self._conclude(results)

    async def unlucky(self, client: Client) -> None:
        self._title("A service that fails now and then", "503 is retried with exponential backoff, and recovers")
        places = zip((1, 2, 1, 3), "abcd", strict=True)
        calls = [self._call(f"/unlucky/place-{number}", f"unlucky-{number}{letter}") for number, letter in places]
        self._conclude(await self._all(client, *calls))

    async def burst(self, client: Client) -> None:
        self._title(
            f"{BURST} slow calls at once into short queues",
            "the worker rejects what does not fit, the router queues some, the caller gets a retry_after",
        )
        rejections = 0

        async def one(number: int) -> ExecResult | None:
            nonlocal rejections
            while True:
                try:
                    return (await self._all(client, self._call(f"/slow/{number}", f"burst-{number}")))[0]
                except QueueFullError as error:
                    rejections += 1
                    await asyncio.sleep(min(error.retry_after, self._seconds / 50))

        results = await asyncio.gather(*map(one, range(BURST)))
        self._say("note", f"   the queue was full {rejections} times; the caller waited and submitted again")
        self._conclude(results)

    async def poison(self, client: Client) -> None:
        self._title("Work that can never succeed", "not retried; quarantined until an operator decides")
        results = await self._all(
            client,
            self._call("/gone/page", "poison-404"),
            ("fs.blob_get", {"path": "../../etc/passwd"}, "poison-path"),
            ("sql.query", {"connection": "weather", "query": "SELEKT 1"}, "poison-sql"),
        )
        self._conclude(results)

    async def outage(self, client: Client) -> None:
        self._title(
            "An outage of the service, and its recovery", "backoff grows meanwhile; retries recover once it is back"
        )
        self._service.down = True
        calls = [self._call("/calm", f"outage-{number}") for number in range(6)]
        waiting = asyncio.ensure_future(self._all(client, *calls))
        try:
            await asyncio.sleep(min(0.6, self._seconds / 40))
        finally:
            self._service.down = False
        self._say("note", "   the service is back")
        self._conclude(await waiting)

    async def operator(self, client: Client) -> None:
        from reefknot import clock
        from reefknot.audit.journal import Journal, envelope
        from reefknot.core.audit.event import OperatorAction
        from reefknot.ports.work_queue import QuarantineFilter

        self._title(
            "An operator looks at the quarantine", "reefknot quarantine list; reefknot quarantine requeue poison-404"
        )
        for item in await client.store.quarantine.find():
            tries = "1 attempt" if item.attempts == 1 else f"{item.attempts} attempts"
            self._say("", f"   {item.id:<12} {item.kind:<13} {tries}  {item.reason}")
        self._service.repaired = True
        self._say("note", "   the missing page is back, so its job is requeued")
        action = OperatorAction(
            **envelope(wall=clock.wall()), actor="you", action="quarantine.requeue", subject="poison-404"
        )
        chosen = QuarantineFilter(ids=("poison-404",))
        await client.store.quarantine.requeue(chosen, who="you", events=Journal(None).entries([action]))
        ended = await polled(
            lambda: client.store.work.get("poison-404"),
            REQUEUED_S,
            enough=lambda item: item is not None and item.state.value not in ("pending", "running"),
        )
        self._say("scene", f"   => poison-404 {'unknown' if ended is None else ended.state.value}")

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _call(self, path: str, name: str) -> Step:
        return "http.request", {"url": f"{self._address}{path}"}, name

    async def _all(self, client: Client, *steps: Step) -> list[ExecResult | None]:
        handles = [await client.submit(kind, inputs, assignment_id=name) for kind, inputs, name in steps]
        return list(await asyncio.gather(*map(self._result, handles)))

    async def _result(self, handle: Handle) -> ExecResult | None:
        try:
            return await handle.result(self._seconds)
        except ResultPendingError:
            return None

    def _conclude(self, results: list[ExecResult | None]) -> None:
        ends = [("no result" if one is None else one.status.value) for one in results]
        counts = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
        retried = [one.retries_used for one in results if one is not None and isinstance(one.retries_used, int)]
        self._say("scene", f"   => {counts}; {sum(retried)} retries")

    def _title(self, title: str, what: str) -> None:
        self._scene += 1
        self._say("", "")
        self._say("scene", f"{self._scene}. {title}")
        self._say("note", f"   {what}")

    async def _until(self, share: float) -> None:
        await asyncio.sleep(max(0.2, self._began + share * self._seconds - monotonic()))


# ---- the setting -----------------------------------------------------------------------------------------------------

QUEUE_SIZE = 12
_POOLS = "      resource_pools:\n        io: {max_queue_size: 5, max_concurrency: 4}\n"
CHANGES = (
    ("worker:\n", "worker:\n  quarantine_failed: true # failed work waits for an operator\n"),
    ("      max_queue_size: 1000\n", f"      max_queue_size: {QUEUE_SIZE} # short, to show a full queue\n{_POOLS}"),
    ("        http:\n          max_attempts: 5\n", "        http:\n          max_attempts: 3\n"),
)
"""Replacements in the file that `reefknot init` writes."""


class FlakyService(Service):
    """
    A weather service: `/unlucky/place-N` fails N times first, `/slow/…` takes long, `/gone/…` is 404.

    While `down`, every request gets 503. Once `repaired`, `/gone/…` is there.
    """

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.down = False
        self.repaired = False
        self.answered = 0
        self._slow = slow
        self._asked: Counter[str] = Counter()
        self._counting = threading.Lock()

    def respond(self, path: str) -> Response:
        with self._counting:
            self._asked[path] += 1
            self.requests += 1
            earlier = self._asked[path] - 1
        if self.down:
            return DOWN
        if path.startswith("/slow/"):
            sleep(self._slow)
        elif path.startswith("/gone/") and not self.repaired:
            return Response(404)
        elif path.startswith("/unlucky/") and earlier < int(path.rpartition("-")[2]):
            return DOWN
        with self._counting:
            self.answered += 1
        return OK


def set_up(folder: Path, port: int) -> Path:
    """Write files, a database and the configuration, and return the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "files").mkdir(exist_ok=True)
    (folder / "files" / "greeting.txt").write_text("ahoy\n", encoding="utf-8")
    with closing(sqlite3.connect(folder / "weather.db")) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS report (id INTEGER PRIMARY KEY, place TEXT, said TEXT)")
        connection.commit()
    path = folder / "reefknot.yaml"
    path.write_text(configuration(port), encoding="utf-8")
    return path


def configuration(port: int) -> str:
    """The recommended file with the replacements of the show."""
    text = recommended()
    for old, new in CHANGES:
        if text.count(old) != 1:
            raise LookupError(f"the recommended configuration has {text.count(old)} times {old!r}, once was expected")
        text = text.replace(old, new)
    return (
        f"{text}\nblocks:\n  http:\n    allow: ['{LOOPBACK}:{port}']\n  fs:\n    roots: [files]\n"
        "  sql:\n    connections:\n      weather: {url: 'sqlite:weather.db', access: write}\n"
    )


# ---- main ------------------------------------------------------------------------------------------------------------


def main(seconds: float, *, keep: str | None = None, seed: int = 1) -> int:
    """Play the show and return its exit code."""
    print_styled = line_printer()

    def say(kind: str, line: str) -> None:
        print_styled(line, _COLOURS.get(kind, ""))

    with ExitStack() as opened:
        folder = Path(keep).absolute() if keep else Path(opened.enter_context(tempfile.TemporaryDirectory()))
        service = opened.enter_context(FlakyService(slow=min(0.4, seconds * SLOW_SHARE)))
        try:
            config = set_up(folder, service.port)
            opened.enter_context(_quiet_environment())
            opened.enter_context(logged_from(logging.ERROR))  # the live feed prints every retry
            start = startup(f"sqlite:{folder / 'state.db'}", str(config))
            say("scene", f"A service that fails on purpose listens on {LOOPBACK}:{service.port}.")
            say("", f"Configuration, files, database and store are in {folder}. Ctrl-C shuts it down in order.")
            show = Show(service, start.url, seconds, say)
            session = UpSession(start, seed=seed, print_line=say, welcome=False)
            code = asyncio.run(session.serve(seconds + PATIENCE_S, drain=DRAIN_S, beside=show.play))
        except Exception as error:  # the same words and codes as on the command line
            exit_code, lines = exit_for(error)
            for line in lines:
                print(line, file=sys.stderr)
            return exit_code
        say("", f"The service got {service.requests} requests and answered {service.answered} of them with 200.")
        if keep:
            say("note", f"Look around: reefknot job list --engine sqlite:{folder / 'state.db'}")
        say("", "Read on in docs/guides/running.md; `python -m reefknot.demo --retry` is a tour of retries alone.")
    return code


@contextmanager
def _quiet_environment() -> Iterator[None]:
    """Hide this shell's reefknot variables, so that the show is the same everywhere."""
    prefixes = ("REEFKNOT_", "WORKER_RETRIES_V2_", "WORKER_QUEUE_V2_")
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(prefixes)}
    try:
        yield
    finally:
        os.environ.update(taken)
