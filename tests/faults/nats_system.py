"""
Router and workers as processes of their own over one store on NATS, under load while something breaks; what is left.

    python -m tests.faults.nats_system FLAW worker start --engine nats://…

is `reefknot` with short leases, and with one decision broken if FLAW is not `none`. The load comes from another process
than theirs: some of it fails at first and is tried again later, some is due later. `judge` reads the evidence alone.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

import reefknot as rk
from reefknot.console.nats_servers import NatsServer, running_nats
from reefknot.errors import StoreError
from reefknot.queue.model.messages import ExecResult, encode
from reefknot.queue.port.work_queue import Settlement
from reefknot.stores.jetstream.connection import Connection, options_from_url
from reefknot.stores.jetstream.streams import OPEN, Names
from reefknot.stores.opening import open_store
from tests.faults.carrying_out import IN_MEMORY
from tests.warm_commands import WarmCommand

ROOT = Path(__file__).parents[2]
LEASE_S = 5.0
READY_S = 60.0
ANSWERED_S = 90.0
"""How long an accepted assignment is waited for, after the load and after whatever broke."""
SCHEDULED_S = 1.5
LATE_S = 0.3
CONFIG = """\
worker:
  queue: {v2: {enabled: true, max_queue_size: 5000}}
  retries:
    v2:
      enabled: true
      throttle: {enabled: false}
      default_policy: {max_attempts: 4, base_delay_ms: 800, jitter_type: none}
router: {lease_seconds: 5, max_queue_size: 5000}
"""
STEPS = """\
import asyncio
import time
import reefknot as rk

@rk.block("own.note")
async def note(inputs, context):
    with open("effects.txt", "a") as file:
        file.write(f"{context.assignment_id} {context.attempt}\\n")
    await asyncio.sleep(inputs["seconds"])
    if inputs["fails"] and context.attempt == 1:
        raise ConnectionError("not this time")
    return {"number": time.time_ns()}  # another run gives another answer
"""


# ---- the parts -------------------------------------------------------------------------------------------------------


class Parts:
    """Routers and workers of one test, each a process with a log of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self._processes: dict[str, WarmCommand] = {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reefknot.yaml").write_text(CONFIG)
        (folder / "noting.py").write_text(STEPS)

    async def start(self, name: str, *, url: str = "", flaw: str = "none") -> None:
        """Start a part, `router-1` or `worker-2`; returns when it says that it is ready."""
        kind = name.partition("-")[0]
        starts = {"up": ["up"], "dashboard": ["dashboard", "--port", "0"]}
        words = starts.get(kind, [kind, "start", f"--{kind}-id", name])
        words = [*words, "--engine", url or self.url, *(["--module", "noting"] if kind in ("worker", "up") else [])]
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        program = ["tests.faults.nats_system", flaw, *words, "--log-level", "info"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        with log.open("wb") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self._processes[name] = WarmCommand(program, cwd=self.folder, env=environment, **streams)
        async with asyncio.timeout(READY_S):
            while not any(word in self.log(name) for word in (" is ready", "serving ", "Ctrl-C")):
                assert self._processes[name].poll() is None, self.log(name)
                await asyncio.sleep(0.05)

    async def ended(self, name: str, within: float) -> int:
        """The exit code of a part that ends by itself; an error when it runs for longer."""
        async with asyncio.timeout(within):
            while (code := self._processes[name].poll()) is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        return code

    def is_running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait(30)

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(30)

    def effects(self) -> Counter[str]:
        """How often each assignment's step began."""
        path = self.folder / "effects.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0].rstrip("+") for line in lines)


@contextmanager
def servers_in_memory(count: int = 1) -> Iterator[list[NatsServer]]:
    """Servers for one test to harm. A killed process loses nothing of a file system in memory, and nobody waits."""
    with (
        TemporaryDirectory(dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None) as folder,
        running_nats(Path(folder), count=count) as servers,
    ):
        yield servers


async def kill_and_restart(server: NatsServer, *, away_s: float = 0.0) -> None:
    """kill -9, and the same server again over the same data. The load goes on meanwhile."""
    os.kill(server.pid, signal.SIGKILL)
    await asyncio.to_thread(server.wait_until_ended, 10.0)
    await asyncio.sleep(away_s)
    server.start()
    await asyncio.to_thread(server.wait_until_ready)


async def forget_open_work(url: str) -> None:
    """What no server may do: lose the records of work that it has acknowledged."""
    options = options_from_url(url)
    connection, names = Connection(options), Names(options.name)
    await connection.open()
    await connection.api(f"STREAM.PURGE.{names.state}", {"filter": names.all_work(OPEN)})
    await connection.close()


# ---- the load --------------------------------------------------------------------------------------------------------


@dataclass
class Evidence:
    """What a load left behind."""

    accepted: list[str] = field(default_factory=list)
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    """Ids whose submission raised an error, with it: nothing was promised."""
    told: dict[str, str] = field(default_factory=dict)
    """What the submitting process was told about each; an error counts as told nothing."""
    again: dict[str, str] = field(default_factory=dict)
    """What another caller is told afterwards."""
    statuses: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    attempts: dict[str, int] = field(default_factory=dict)
    crashes: dict[str, int] = field(default_factory=dict)
    tampered: list[str] = field(default_factory=list)
    took: list[tuple[float, float]] = field(default_factory=list)
    """When each plain request was sent, in monotonic time, and how long it took."""
    repeats: list[str] = field(default_factory=list)
    """Accepted ones of which the answer said that there was such a job before; each was submitted once."""
    kept_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    told_at: dict[str, float] = field(default_factory=dict)
    """When each was accepted, when its result was in the store, and when its caller had it; wall time."""

    def __str__(self) -> str:
        doubles = sum(times > 1 for times in self.effects.values())
        return (
            f"{len(self.accepted)} accepted, {len(self.refused)} refused, {dict(self.statuses)}, {doubles} begun twice,"
            f" {sum(self.crashes.values())} crashes"
        )


def judge(found: Evidence, *, deaths: bool = True) -> list[str]:
    """Every promise that was broken. Without `deaths` nobody's work was taken from it, and nothing ran twice."""
    wrong = []
    for name in found.accepted:
        if name not in found.told:
            wrong.append(f"lost: {name}")
        elif found.again.get(name) != found.told[name]:
            wrong.append(f"more than one result: {name}: {found.told[name]}, {found.again.get(name)}")
        if not found.effects[name]:
            wrong.append(f"never done: {name}")
        if found.effects[name] > found.attempts.get(name, 0) + found.crashes.get(name, 0):
            wrong.append(f"done {found.effects[name]} times: {name}, {found.attempts.get(name)} attempts on record")
        if not deaths and found.crashes.get(name, 0):
            wrong.append(f"counted as a crash, and nobody died: {name}")
    wrong += [f"new, and taken for a repeat: {name}" for name in found.repeats]
    if set(found.statuses) - {"success"}:
        wrong.append(f"failed: {dict(found.statuses)}")
    return wrong + [f"the audit chain: {one}" for one in found.tampered]


ALWAYS = ((-inf, inf),)


def waited_too_long(found: Evidence, calm: Sequence[tuple[float, float]] = ALWAYS, *, within: float = 2.0) -> list[str]:
    """The callers who went without a result that was there for more than `within` seconds of one calm time."""
    late = []
    for name, told_at in found.told_at.items():
        there_at = max(found.ended_at.get(name, told_at), found.kept_at[name])
        waited = [min(ends, told_at) - max(begins, there_at) for begins, ends in calm]
        if (longest := max(waited, default=0.0)) > within:
            late.append(f"{name}: {longest:.1f} s")
    return late


@dataclass
class Calm:
    """The times between faults, in wall time."""

    since: float = field(default_factory=time.time)
    times: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Something is broken, and well again after the block."""
        self.times.append((self.since, time.time()))
        yield
        self.since = time.time()

    def ends(self) -> list[tuple[float, float]]:
        """All of them, now that nothing breaks any more."""
        return [*self.times, (self.since, inf)]


class Load:
    """Requests by the clock, from the clients of this process in turn, until it is stopped."""

    def __init__(self, clients: Sequence[Any], per_second: float, patience: float) -> None:
        self._patience = patience
        self.found = Evidence()
        self._clients = cycle(clients)
        self._per_second = per_second
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self._is_over:
            for number in range(len(self._tasks), int((loop.time() - began) * self._per_second)):
                self._tasks.append(loop.create_task(self.ask(f"a{number}", **_kind_of(number))))
            await asyncio.sleep(0.01)

    async def ask(self, name: str, *, seconds: float = 0.0, fails: bool = False, delay: float | None = None) -> None:
        """Submit one assignment, and wait for its result."""
        found, sent = self.found, time.monotonic()
        inputs = found.inputs[name] = {"seconds": seconds, "fails": fails}
        try:
            handle = await next(self._clients).submit("own.note", inputs, assignment_id=name, delay=delay)
        except Exception as error:
            found.refused.append(f"{name}: {error}")
            return
        found.accepted.append(name)
        found.kept_at[name] = time.time()
        if not handle.is_new:
            found.repeats.append(name)
        ends = time.monotonic() + self._patience
        while time.monotonic() < ends:
            try:
                result = await handle.result(ends - time.monotonic())
            except (StoreError, TimeoutError, rk.ReefknotError):
                await asyncio.sleep(0.2)
                continue
            found.told[name], found.told_at[name] = _text(result), time.time()
            found.statuses[result.status.value] += 1
            if not fails and delay is None:
                found.took.append((sent, time.monotonic() - sent))
            return

    async def stop(self) -> None:
        """Send no more, and wait for what is under way."""
        self._is_over = True
        await asyncio.gather(*self._tasks)


def _kind_of(number: int) -> dict[str, Any]:
    """Every tenth fails at first and is tried again later, every tenth is due later; some take a while."""
    kinds: dict[int, dict[str, Any]] = {3: {"fails": True}, 7: {"delay": SCHEDULED_S}, 5: {"seconds": 0.3}}
    return kinds.get(number % 10, {})


def _text(result: ExecResult) -> str:
    return encode(result).decode()


@asynccontextmanager
async def loaded(
    parts: Parts, *, per_second: float = 30.0, url: str = "", patience: float = ANSWERED_S, clients: int = 1
) -> AsyncIterator[Load]:
    """A load for as long as the block lasts; its evidence is complete after it."""
    async with AsyncExitStack() as opened:
        connected = [await opened.enter_async_context(rk.connect(url or parts.url)) for _ in range(clients)]
        load = Load(connected, per_second, patience)
        running = asyncio.create_task(load.run())
        try:
            yield load
        finally:
            await load.stop()
            await running
    await look(parts, load.found)


async def look(parts: Parts, found: Evidence) -> None:
    """What another caller finds when everything is over."""
    async with open_store(parts.url) as store, rk.connect(parts.url) as client:
        few = asyncio.Semaphore(32)

        async def once_more(name: str) -> None:
            async with few:
                handle = await client.submit("own.note", found.inputs[name], assignment_id=name)
                with suppress(rk.ReefknotError):
                    found.again[name] = _text(await handle.result(20.0))
                item = await store.work.get(name)
            if item is not None:
                found.attempts[name], found.crashes[name] = item.attempts, item.crashes
                found.ended_at[name] = item.updated_at / 1000

        await asyncio.gather(*map(once_more, found.told))
        found.tampered = [str(one) for one in await store.audit.verify()]
    found.effects = parts.effects()
    print(found)


# ---- a part, with what is broken in it -------------------------------------------------------------------------------


def _shorten_leases() -> None:
    from reefknot.app import system

    usual = system.worker_settings
    system.worker_settings = lambda settings: msgspec.structs.replace(usual(settings), lease=LEASE_S, heartbeat=0.5)


def _look_at_no_fence() -> None:
    """Whoever reports last wins, also when the work has ended."""
    from reefknot.queue.model import work
    from reefknot.stores.jetstream.work import JetStreamWorkQueue

    async def settle_anyway(self: JetStreamWorkQueue, settlements: Sequence[Settlement]) -> list[bool]:
        ids = [one.id for one in settlements]
        for _ in range(20):  # until the mirror is up to date: it drops work that has ended
            await self.load(ids)
            answers = await self.write(lambda now: self.table.settle(settlements, now=now), ids=ids)
            if all(answers):
                break
            await asyncio.sleep(0.1)
        return answers

    settle = work.settle
    work.settle = lambda item, *more: settle(msgspec.structs.replace(item, state=work.WorkState.RUNNING), *more)
    work.holds = lambda item, **_: item is not None
    JetStreamWorkQueue.settle = settle_anyway  # type: ignore[method-assign]


def _watch_nothing() -> None:
    """The stream may be gone: no process looks."""
    from reefknot.stores.jetstream.store import StoreWatch

    async def look(self: StoreWatch) -> None:
        self._connection.trust(True)

    StoreWatch.look = look  # type: ignore[method-assign]


def _wait_for_no_election() -> None:
    from reefknot.stores.jetstream import streams

    streams.ELECTION_S = streams.PATIENCE_S = 1.0


def _look_for_no_batch() -> None:
    from reefknot.stores.jetstream.commits import Commits

    async def unknown(self: Commits, message: object, commit_id: str) -> None:
        return None

    Commits._found = unknown  # type: ignore[method-assign]


def _announce_no_ends() -> None:
    """No flaw of a part, but a network that loses each message about an end."""
    from reefknot.stores.jetstream.commits import Commits

    async def say_nothing(self: Commits, over: object) -> None:
        """The message is lost."""

    Commits._announce_ends = say_nothing  # type: ignore[method-assign]


def _repeat_and_swap(repeated: Callable[[bytes], bytes] = lambda body: body) -> None:
    """No flaw of a part, but a network that brings every message twice, and every third one late."""
    from reefknot.stores.jetstream.transport import _Subscriber

    offer, numbers = _Subscriber.offer, count(1)

    def twice(self: _Subscriber, delivery: Any, taken: Any, message_id: str = "") -> None:
        again = msgspec.structs.replace(delivery, body=repeated(delivery.body))
        for one in (delivery, again):
            if next(numbers) % 3:
                offer(self, one, taken)
            else:
                asyncio.get_running_loop().call_later(LATE_S, offer, self, one, taken)

    _Subscriber.offer = twice  # type: ignore[method-assign]


def _take_repeats_for_new() -> None:
    """Every repeated assignment is work of its own."""
    _repeat_and_swap(lambda body: re.sub(rb'"assignment_id":"(\w+)"', rb'"assignment_id":"\1+"', body))


FLAWS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "nobody looks at the fence": _look_at_no_fence,
    "nobody looks for a batch": _look_for_no_batch,
    "nobody watches the store": _watch_nothing,
    "nobody waits for an election": _wait_for_no_election,
    "ends are not announced": _announce_no_ends,
    "repeated and swapped": _repeat_and_swap,
    "repeats are new": _take_repeats_for_new,
}


if __name__ == "__main__":
    from reefknot.console.cli import main

    _shorten_leases()
    FLAWS[sys.argv.pop(1)]()
    sys.exit(main())
