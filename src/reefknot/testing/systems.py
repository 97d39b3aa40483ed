"""
`system` and `system_sync`: a router, workers and a store in memory for a test, in virtual time.

The system has an event loop of its own, in a thread of its own, which runs only while the test waits for a call:
between two calls nothing moves, neither a job nor the time. So a test is an ordinary `def` or `async def`, under any
plugin of pytest, and the same test goes the same way every time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import datetime, timedelta
from math import inf
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from reefknot.app.blocks import Modules, blocks_of, warn_of_lost_retries
from reefknot.console.operations.audit import EventQuery
from reefknot.core import checks
from reefknot.errors import (
    KeyConflictError,
    LoopMisuseError,
    ParameterError,
    ParameterTypeError,
    QueueFullError,
    UnknownJobError,
)
from reefknot.policy.layers import Tree, load_tree
from reefknot.policy.reading.session import Mark
from reefknot.policy.settings import Settings, settings_of
from reefknot.queue.client import Client, Handle
from reefknot.queue.model.arguments import SubmitItem, SubmitOptions
from reefknot.queue.model.messages import ExecResult
from reefknot.queue.model.results import answer_of
from reefknot.queue.model.work import WorkItem, record_id
from reefknot.runtime.clocks import EPOCH, VirtualLoop
from reefknot.runtime.event_loops import require_asyncio
from reefknot.testing.faults import MOST_FAULTS, Answer, WrappedBlock, fault
from reefknot.testing.simulation import Simulation

T = TypeVar("T")
J = TypeVar("J", "VirtualJob", "SyncVirtualJob")

MOST_WORKERS = 16
WITHIN_S = 7 * 86_400.0
"""Virtual time that jobs have to end, from the last moment one is scheduled for."""
V2 = {"worker": {"retries": {"v2": {"enabled": True}}, "queue": {"v2": {"enabled": True}}}}
"""The configuration without one: v2 with its built-in policies."""

Config = str | PathLike[str] | Mapping[str, Any] | None
Seconds = float | timedelta
Items = Iterable[SubmitItem | tuple[str, Mapping[str, Any] | None]]
Refusal = QueueFullError | KeyConflictError
"""The answer of `submit_many` for an item that is not stored."""

_inside: ContextVar[bool] = ContextVar("reefknot_system_under_test", default=False)
"""Whether this code runs in a system under test, so that a call of that system would wait for itself."""

# ---- arguments -------------------------------------------------------------------------------------------------------


def _seconds(name: str, given: Seconds) -> float:
    return checks.seconds(name, given, or_zero=True)


def _settings(config: Config) -> Settings:
    """The checked settings of a file, of a mapping, or of neither. The environment does not change them."""
    if config is None or isinstance(config, Mapping):
        tree = Tree(dict(V2 if config is None else config), {(): Mark("config")})
        return settings_of(tree, None, environ={})
    if not isinstance(config, str | PathLike):
        raise ParameterTypeError("config", config, "the path of a file, a mapping as in such a file, or None")
    tree, path = load_tree(fspath(config), environ={}, cwd=Path.cwd())
    return settings_of(tree, path, environ={})


def _start(start: datetime | None) -> float:
    if start is None:
        return EPOCH
    if not isinstance(start, datetime):
        raise ParameterTypeError("start", start, "a datetime, or None; without a zone it is local")
    return start.timestamp()


# ---- the thread ------------------------------------------------------------------------------------------------------


class _LoopThread:
    """The thread with the loop in virtual time. It runs one call after the other, and nothing in between."""

    def __init__(self, simulation: Callable[[VirtualLoop], Simulation]) -> None:
        self._threads = ThreadPoolExecutor(1, "reefknot-system")
        self._loop = VirtualLoop()
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        self._task: asyncio.Task[Any] | None = None
        self.simulation = simulation(self._loop)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, after those that were begun before."""
        return self._threads.submit(self._runner.run, self._entered(work))

    async def _entered(self, work: Coroutine[Any, Any, T]) -> T:
        _inside.set(True)
        self._task = asyncio.current_task()
        try:
            return await work
        finally:
            self._task = None

    def cancel(self) -> None:
        """Cancel the call that runs."""
        task = self._task
        if task is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """End the loop and the thread, once no call runs."""
        try:
            self._threads.submit(self._runner.close).result()
        finally:
            self._threads.shutdown()


# ---- systems ---------------------------------------------------------------------------------------------------------


class _SystemUnderTest:
    """The part of a system under test that needs no loop: faults, stand-ins, and the time."""

    def __init__(
        self, modules: Modules = (), config: Config = None, *, workers: int = 1, start: datetime | None = None
    ) -> None:
        self._workers = checks.whole_number("workers", workers, least=1, most=MOST_WORKERS)
        self._start = _start(start)
        self._settings = _settings(config)
        self._given = blocks_of(self._settings, modules, store="memory:")
        warn_of_lost_retries(self._settings, self._given.values())
        self._wrapped: dict[int, WrappedBlock] = {}
        self._thread: _LoopThread | None = None

    def _opened(self) -> Coroutine[Any, Any, None]:
        if self._thread is not None or self._wrapped:
            raise LoopMisuseError("a system under test is entered once; call rk.testing.system() again for another one")

        def simulation(loop: VirtualLoop) -> Simulation:
            self._wrapped = {id(one): WrappedBlock(one, loop) for one in self._given.values()}
            blocks = {name: self._wrapped[id(one)] for name, one in self._given.items()}
            return Simulation(loop, self._settings, blocks, workers=self._workers, start=self._start)

        self._thread = _LoopThread(simulation)
        return self._thread.simulation.open()

    @property
    def _running(self) -> _LoopThread:
        if self._thread is None:
            when = "has ended" if self._wrapped else "has not begun"
            raise LoopMisuseError(f"the system under test {when}: use it inside its with block")
        if _inside.get():
            raise LoopMisuseError(
                "a step cannot call the system under test that runs it, which would wait for itself; "
                "a step submits through rk.connect, or the test does after drain()"
            )
        return self._thread

    @property
    def _simulation(self) -> Simulation:
        return self._running.simulation

    @property
    def now(self) -> datetime:
        """The time of the system, UTC. It moves in calls of this system alone."""
        return self._simulation.now()

    def _wrapped_step(self, step: str) -> WrappedBlock:
        self._running  # noqa: B018 - refuses a system that does not run
        if not isinstance(step, str):
            raise ParameterTypeError("step", step, "the type of a step, such as 'http.request'")
        if step not in self._given:
            known = f"{checks.suggest(step, self._given)} There are: {', '.join(sorted(self._given))}"
            raise ParameterError("step", step, f"a step that this system knows{known.replace('; did', ': did', 1)}")
        return self._wrapped[id(self._given[step])]

    def fail(
        self,
        step: str,
        *,
        times: int | None = 1,
        error: BaseException | type[BaseException] | None = None,
        status: int | None = None,
        delay: Seconds = 0.0,
    ) -> None:
        """
        Fail the next `times` executions of a step, None for all of them; then the step itself runs again.

        An execution raises `error`, or has failed with the HTTP `status`; by default it raises a `ConnectionError`.
        With `delay` it fails after that many seconds of virtual time. 0 `times` ends all faults of the step.
        """
        wrapped = self._wrapped_step(step)
        number = inf if times is None else checks.whole_number("times", times, least=0, most=MOST_FAULTS)
        wrapped.fail(fault(error, status, _seconds("delay", delay)), number)

    def answer(self, step: str, answer: Answer) -> None:
        """
        Answer in place of a step from now on: with these outputs, or those of a function of (inputs, context).

        The step's own code does not run, so nothing checks its inputs. Faults come before answers.
        """
        self._wrapped_step(step).answer(answer)

    def calls(self, step: str) -> list[dict[str, Any]]:
        """The inputs of every execution of a step so far, faults and answers included, the oldest first."""
        return [dict(one) for one in self._wrapped_step(step).inputs]

    # ---- inside the loop --------------------------------------------------------------------------------------------

    async def _submit(self, job_type: str, inputs: Mapping[str, Any] | None, options: SubmitOptions) -> Handle:
        return await self._client.submit(job_type, inputs, **options)

    async def _submit_many(self, items: Items, job: Callable[[Handle], J]) -> list[J | Refusal]:
        answers = await self._client.submit_many(items)
        return [job(one) if isinstance(one, Handle) else one for one in answers]

    @property
    def _running_simulation(self) -> Simulation:
        assert self._thread is not None
        return self._thread.simulation

    @property
    def _client(self) -> Client:
        return self._running_simulation.system.client

    async def _found(self, assignment_id: str, tenant_id: str | None) -> WorkItem:
        item = await self._running_simulation.store.work.get(record_id(assignment_id, tenant_id))
        if item is None:
            raise UnknownJobError(assignment_id, tenant_id=tenant_id)
        return item

    async def _ended(self, assignment_id: str, tenant_id: str | None, timeout: Seconds | None) -> WorkItem:
        item = await self._found(assignment_id, tenant_id)
        seconds = None if timeout is None else _seconds("timeout", timeout)
        return await self._running_simulation.ended(item, seconds, WITHIN_S)

    async def _result(self, assignment_id: str, tenant_id: str | None, timeout: Seconds | None) -> ExecResult:
        result = answer_of(await self._ended(assignment_id, tenant_id, timeout))
        assert result is not None
        return result

    async def _run(self, job_type: str, inputs: Mapping[str, Any] | None, options: SubmitOptions) -> ExecResult:
        handle = await self._submit(job_type, inputs, options)
        return await self._result(handle.assignment_id, handle.tenant_id, None)

    async def _status(self, assignment_id: str, tenant_id: str | None) -> str:
        return await self._client.job(assignment_id, tenant_id).status()

    async def _latest(self, assignment_id: str, tenant_id: str | None) -> tuple[str, str | None]:
        found = await self._client.job(assignment_id, tenant_id).latest()
        return found.assignment_id, found.tenant_id

    async def _wait(self, assignment_id: str, tenant_id: str | None, timeout: Seconds | None) -> str:
        return (await self._ended(assignment_id, tenant_id, timeout)).state.value

    async def _cancel(self, assignment_id: str, tenant_id: str | None, reason: str, tree: bool) -> None:
        await self._client.job(assignment_id, tenant_id).cancel(reason, tree=tree)
        await self._running_simulation.settle()

    async def _retry(self, assignment_id: str, tenant_id: str | None, reason: str) -> None:
        await self._client.job(assignment_id, tenant_id).retry(reason)


class VirtualJob:
    """A job of a system under test. Waiting for its end lets virtual time pass."""

    def __init__(
        self, system: "VirtualSystem", assignment_id: str, tenant_id: str | None, *, is_new: bool = False
    ) -> None:
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id
        self.is_new = is_new
        """Whether this submission created the job; see `Handle`."""
        self._system = system

    async def result(self, timeout: Seconds | None = None) -> ExecResult:
        """The result; `ResultPendingError` when there is none after `timeout` seconds of virtual time."""
        return await self._system._call(self._system._result(self.assignment_id, self.tenant_id, timeout))

    async def wait(self, timeout: Seconds | None = None) -> str:
        """The state at its end: `succeeded`, `failed`, `cancelled`, `quarantined`."""
        return await self._system._call(self._system._wait(self.assignment_id, self.tenant_id, timeout))

    async def latest(self) -> "VirtualJob":
        """The job that runs in place of this one, after a requeue with an edited payload; else itself."""
        found = await self._system._call(self._system._latest(self.assignment_id, self.tenant_id))
        return self._system.job(*found)

    async def status(self) -> str:
        """The state at this moment; `unknown` for an id that no job has. No time passes."""
        return await self._system._call(self._system._status(self.assignment_id, self.tenant_id))

    async def cancel(self, reason: str = "", *, tree: bool = False) -> None:
        """Cancel it, with `tree` what follows it or waits for it too. Its result then says `cancelled`."""
        await self._system._call(self._system._cancel(self.assignment_id, self.tenant_id, reason, tree))

    async def retry(self, reason: str = "") -> None:
        """Run it again, as `reefknot job retry` does."""
        await self._system._call(self._system._retry(self.assignment_id, self.tenant_id, reason))


class VirtualSystem(_SystemUnderTest):
    """A system under test, for an `async def`. See `system`."""

    async def __aenter__(self) -> Self:
        require_asyncio("rk.testing.system")
        try:
            await self._call(self._opened())
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._thread is not None:
            thread = self._running
            try:
                await self._call(thread.simulation.close())
            finally:
                thread.close()
                self._thread = None

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the system's loop. The loop of the test keeps running meanwhile."""
        try:
            thread = self._running
        except BaseException:
            work.close()
            raise
        loop = asyncio.get_running_loop()
        with loop.holding() if isinstance(loop, VirtualLoop) else nullcontext():
            future = asyncio.wrap_future(thread.begin(work))
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                thread.cancel()
                await asyncio.wait([future])
                if not future.cancelled():
                    future.exception()  # else asyncio complains that it was not looked at
                raise

    async def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> VirtualJob:
        """Submit one step, with the options of `Client.submit`. It runs once time passes."""
        return self._job_of(await self._call(self._submit(job_type, inputs, options)))

    async def submit_many(self, items: Items) -> list[VirtualJob | Refusal]:
        """Submit many steps in one transaction, with an answer for each, as `Client.submit_many`."""
        return await self._call(self._submit_many(items, self._job_of))

    def _job_of(self, handle: Handle) -> VirtualJob:
        return VirtualJob(self, handle.assignment_id, handle.tenant_id, is_new=handle.is_new)

    async def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult:
        """Submit one step, and let time pass until it has ended."""
        return await self._call(self._run(job_type, inputs, options))

    def job(self, assignment_id: str, tenant_id: str | None = None) -> VirtualJob:
        """The job with this id."""
        return VirtualJob(self, assignment_id, tenant_id)

    async def drain(self, *, within: Seconds = WITHIN_S) -> None:
        """
        Let time pass until every job has ended; `JobsStuckError` says why those wait that do not.

        `within` is the virtual time that they have, from the last moment for which one is scheduled.
        """
        await self._call(self._simulation.drain(_seconds("within", within)))

    async def advance(self, by: Seconds) -> None:
        """Let this much virtual time pass, and run all that is due meanwhile."""
        await self._call(self._simulation.advance(_seconds("by", by)))

    async def results(self) -> dict[str, ExecResult]:
        """The results of all jobs that have ended, by their ids."""
        return await self._call(self._simulation.results())

    async def events(self, type: str | None = None, *, job: str | None = None) -> list[dict[str, Any]]:  # noqa: A002 - the field's name
        """The audited events of a type, of a job, or all of them, the oldest first."""
        return await self._call(self._simulation.events(EventQuery(type=type, work=job)))

    async def quarantine(self) -> list[dict[str, Any]]:
        """The jobs in quarantine, as `reefknot quarantine list --json` shows them."""
        return await self._call(self._simulation.quarantine())


class SyncVirtualJob:
    """A job of a system under test, for a plain `def`: see `VirtualJob`."""

    def __init__(
        self, system: "SyncVirtualSystem", assignment_id: str, tenant_id: str | None, *, is_new: bool = False
    ) -> None:
        self.assignment_id = assignment_id
        self.tenant_id = tenant_id
        self.is_new = is_new
        """Whether this submission created the job; see `Handle`."""
        self._system = system

    def result(self, timeout: Seconds | None = None) -> ExecResult:
        """The result; `ResultPendingError` when there is none after `timeout` seconds of virtual time."""
        return self._system._call(self._system._result(self.assignment_id, self.tenant_id, timeout))

    def wait(self, timeout: Seconds | None = None) -> str:
        """The state at its end: `succeeded`, `failed`, `cancelled`, `quarantined`."""
        return self._system._call(self._system._wait(self.assignment_id, self.tenant_id, timeout))

    def latest(self) -> "SyncVirtualJob":
        """The job that runs in place of this one, after a requeue with an edited payload; else itself."""
        return self._system.job(*self._system._call(self._system._latest(self.assignment_id, self.tenant_id)))

    def status(self) -> str:
        """The state at this moment; `unknown` for an id that no job has. No time passes."""
        return self._system._call(self._system._status(self.assignment_id, self.tenant_id))

    def cancel(self, reason: str = "", *, tree: bool = False) -> None:
        """Cancel it, with `tree` what follows it or waits for it too. Its result then says `cancelled`."""
        self._system._call(self._system._cancel(self.assignment_id, self.tenant_id, reason, tree))

    def retry(self, reason: str = "") -> None:
        """Run it again, as `reefknot job retry` does."""
        self._system._call(self._system._retry(self.assignment_id, self.tenant_id, reason))


class SyncVirtualSystem(_SystemUnderTest):
    """A system under test, for a plain `def`. See `system_sync`."""

    def __enter__(self) -> Self:
        try:
            self._call(self._opened())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._thread is not None:
            thread = self._running
            try:
                self._call(thread.simulation.close())
            finally:
                thread.close()
                self._thread = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the system's loop."""
        try:
            thread = self._running
        except BaseException:
            work.close()
            raise
        future = thread.begin(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            thread.cancel()
            raise

    def submit(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> SyncVirtualJob:
        """Submit one step, with the options of `Client.submit`. It runs once time passes."""
        return self._job_of(self._call(self._submit(job_type, inputs, options)))

    def submit_many(self, items: Items) -> list[SyncVirtualJob | Refusal]:
        """Submit many steps in one transaction, with an answer for each, as `Client.submit_many`."""
        return self._call(self._submit_many(items, self._job_of))

    def _job_of(self, handle: Handle) -> SyncVirtualJob:
        return SyncVirtualJob(self, handle.assignment_id, handle.tenant_id, is_new=handle.is_new)

    def run(
        self, job_type: str, inputs: Mapping[str, Any] | None = None, **options: Unpack[SubmitOptions]
    ) -> ExecResult:
        """Submit one step, and let time pass until it has ended."""
        return self._call(self._run(job_type, inputs, options))

    def job(self, assignment_id: str, tenant_id: str | None = None) -> SyncVirtualJob:
        """The job with this id."""
        return SyncVirtualJob(self, assignment_id, tenant_id)

    def drain(self, *, within: Seconds = WITHIN_S) -> None:
        """Let time pass until every job has ended; see `VirtualSystem.drain`."""
        self._call(self._simulation.drain(_seconds("within", within)))

    def advance(self, by: Seconds) -> None:
        """Let this much virtual time pass, and run all that is due meanwhile."""
        self._call(self._simulation.advance(_seconds("by", by)))

    def results(self) -> dict[str, ExecResult]:
        """The results of all jobs that have ended, by their ids."""
        return self._call(self._simulation.results())

    def events(self, type: str | None = None, *, job: str | None = None) -> list[dict[str, Any]]:  # noqa: A002 - the field's name
        """The audited events of a type, of a job, or all of them, the oldest first."""
        return self._call(self._simulation.events(EventQuery(type=type, work=job)))

    def quarantine(self) -> list[dict[str, Any]]:
        """The jobs in quarantine, as `reefknot quarantine list --json` shows them."""
        return self._call(self._simulation.quarantine())


def system(
    modules: Modules = (), config: Config = None, *, workers: int = 1, start: datetime | None = None
) -> VirtualSystem:
    """
    A whole system for an `async def` test: `async with rk.testing.system(modules=["steps"]) as system:`.

    `modules` are names of modules with steps, modules, or functions under `@rk.block`. `config` is the path of a
    configuration or a mapping as in one: its policies, queues, schedules and settings of steps hold, its store and its
    sources are not used; None is v2 with the built-in policies. The time begins at `start`, by default at a fixed
    moment.
    """
    return VirtualSystem(modules, config, workers=workers, start=start)


def system_sync(
    modules: Modules = (), config: Config = None, *, workers: int = 1, start: datetime | None = None
) -> SyncVirtualSystem:
    """A whole system for a plain `def` test: `with rk.testing.system_sync(modules=["steps"]) as system:`."""
    return SyncVirtualSystem(modules, config, workers=workers, start=start)
