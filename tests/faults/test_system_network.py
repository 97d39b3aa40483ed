"""
The network slow, cut, reset and silent at every step of `http.request`, through the whole system.

All cases run side by side in one system; each has its own proxy. Nothing may hang past its deadline by more than a
second, and every result says what happened.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from reefknot.app.system import System, running_system
from reefknot.policy.settings import load_settings
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, ExecResult, Job, ResultStatus
from tests.faults.proxy import Fault, Trouble, Way, nobody_accepts, nobody_there, proxied

BODY = 50_000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nX-Padding: %s\r\nContent-Length: %d\r\n\r\n" % (
    b"p" * 200,
    BODY,
)
UPLOAD = 400_000
BUDGET_MS, ATTEMPT_MS = 900, 350
End = tuple[ExecResult | None, float]
"""A result, None when there was none in time, and how long it took."""

STEPS: dict[str, tuple[Way, int]] = {
    "before the request": (Way.UP, 0),
    "in the request's head": (Way.UP, 40),
    "in the request's body": (Way.UP, UPLOAD // 2),
    "before the answer": (Way.DOWN, 0),
    "in the answer's head": (Way.DOWN, 60),
    "in the answer's body": (Way.DOWN, len(HEAD) + BODY // 2),
    "before the last byte": (Way.DOWN, len(HEAD) + BODY - 1),
}
FAULTS = (Fault.CUT, Fault.RESET, Fault.STALL, Fault.SLOW)


@dataclass(frozen=True)
class Case:
    """One request: where it goes, what it is told, what must come of it."""

    name: str
    trouble: Trouble
    options: AssignmentOptions
    attempt_ms: int | None = None
    statuses: tuple[ResultStatus, ...] = (ResultStatus.SUCCESS,)
    codes: tuple[str | None, ...] = (None,)
    limit_s: float = BUDGET_MS / 1000
    retries: int | None = None
    port: int | None = None

    def request(self, port: int) -> ExecAssignment:
        inputs = {"url": f"http://127.0.0.1:{port}/", "method": "POST", "body": "u" * UPLOAD}
        if self.attempt_ms is not None:
            inputs["timeout_ms"] = self.attempt_ms  # type: ignore[assignment]
        return ExecAssignment(self.name, "r", Job("http.request", inputs), options=self.options)


BROKEN = (ResultStatus.ERROR,), ("NETWORK_ERROR",)
SILENT = (ResultStatus.ERROR,), ("CONNECTION_TIMEOUT",)
OUT_OF_TIME = (ResultStatus.TIMEOUT,), ("CANCELLED_BY_TIMEOUT", "CONNECTION_TIMEOUT")
DEADLINE = AssignmentOptions(deadline_ms=BUDGET_MS, retry_count=0)
BUDGET = AssignmentOptions(timeout_ms=BUDGET_MS, retry_count=0)
PATIENT = AssignmentOptions(timeout_ms=20_000, retry_count=0)
AGAIN = AssignmentOptions(timeout_ms=20_000, retry_count=2)


def at_every_step() -> list[Case]:
    cases = []
    for step, (way, at) in STEPS.items():
        for fault in FAULTS:
            trouble = Trouble(fault, way, at)
            loud = fault in (Fault.CUT, Fault.RESET)
            if fault is Fault.SLOW and step == "before the last byte":
                cases.append(Case(f"{fault}, {step}", trouble, BUDGET))
                continue
            ends = BROKEN if loud else SILENT
            cases.append(Case(f"{fault}, {step}, one attempt", trouble, PATIENT, ATTEMPT_MS, *ends, ATTEMPT_MS / 1000))
            if not loud:
                cases.append(Case(f"{fault}, {step}, budget", trouble, BUDGET, None, *OUT_OF_TIME))
                cases.append(Case(f"{fault}, {step}, deadline", trouble, DEADLINE, None, *OUT_OF_TIME))
            once = Trouble(fault, way, at, times=1)
            cases.append(Case(f"{fault}, {step}, then well", once, AGAIN, ATTEMPT_MS, limit_s=2.0, retries=1))
    return cases


def before_any_connection(there: int, accepts: int) -> list[Case]:
    none = Trouble()
    half = ATTEMPT_MS / 1000
    return [
        Case("refused", none, PATIENT, ATTEMPT_MS, *BROKEN, half, port=there),
        Case("never accepted, one attempt", none, PATIENT, ATTEMPT_MS, *SILENT, half, port=accepts),
        Case("never accepted, budget", none, BUDGET, None, *OUT_OF_TIME, port=accepts),
        Case("never accepted, deadline", none, DEADLINE, None, *OUT_OF_TIME, port=accepts),
        Case("never accepted, retried until the deadline", none,
             AssignmentOptions(deadline_ms=BUDGET_MS, retry_count=9), 150, *OUT_OF_TIME, port=accepts),
    ]  # fmt: skip


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that is well: it reads the whole request, then answers."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            writer.write(HEAD + b"b" * BODY)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        return
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def a_server() -> AsyncIterator[int]:
    """Its port."""
    talking: set[asyncio.Task[None]] = set()

    def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(_answer(reader, writer))
        talking.add(task)
        task.add_done_callback(lambda _: writer.transport.abort())  # also of one that was stopped before it began

    server = await asyncio.start_server(came, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def a_system(folder: Path) -> AsyncIterator[tuple[System, int]]:
    """And the port of a server that is well."""
    config = folder / "reefknot.yaml"
    config.write_text(
        "worker: {queue: {v2: {enabled: true, resource_pools: {io: {max_concurrency: 100}}}}, "
        "retries: {v2: {enabled: true, default_policy: {base_delay_ms: 10, max_delay_ms: 20}}}}\n"
        "blocks: {http: {allow: [127.0.0.1]}}\n"
    )
    settings = load_settings(str(config), environ={}, cwd=folder)
    async with a_server() as port, running_system("memory:", settings, drain=0.0) as system:
        await asyncio.sleep(0.1)
        # The first request of a process loads certificates, which takes its time.
        await (await system.submit(Case("warm", Trouble(), PATIENT).request(port)))
        yield system, port


async def tried(system: System, case: Case, port: int) -> End:
    """Its result, None when there was none in time, and how long it took."""
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        if case.port is None:
            port = (await stack.enter_async_context(proxied(port, case.trouble))).port
        began = loop.time()
        try:
            async with asyncio.timeout(case.limit_s + 3.0):
                result = await (await system.submit(case.request(case.port or port)))
        except TimeoutError:
            return None, loop.time() - began
        return result, loop.time() - began


def complaints(cases: Sequence[Case], ends: Sequence[End]) -> list[str]:
    said = []
    for case, (result, took) in zip(cases, ends, strict=True):
        if result is None or took > case.limit_s + 1.0:
            said.append(f"{case.name}: hangs ({took:.2f} s, limit {case.limit_s:.2f} s)")
        elif result.status not in case.statuses or result.error_code not in case.codes:
            said.append(f"{case.name}: {result.status} {result.error_code} {result.error_message}")
        elif case.retries is not None and result.retries_used != case.retries:
            said.append(f"{case.name}: {result.retries_used} retries")
        elif result.status is ResultStatus.SUCCESS and len((result.output or {})["body"]) != BODY:
            said.append(f"{case.name}: a success with half an answer")
    return said


async def once_more(system: System, case: Case, end: End, port: int) -> End:
    """Alone, if it came to a bad end beside thirty others: a machine that stalls is not the system that hangs."""
    if not complaints([case], [end]):
        return end
    return await tried(system, replace(case, name=f"{case.name}, alone"), port)


@pytest.mark.slow
# A connection that is made in the very moment its attempt is called off is closed by the collector: anyio, on which the
# client stands, has let go of it by then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_hangs_past_its_deadline_wherever_the_network_fails(tmp_path: Path) -> None:
    async def story() -> tuple[list[Case], list[End]]:
        with nobody_there() as there, nobody_accepts() as accepts:
            cases = [*at_every_step(), *before_any_connection(there, accepts)]
            async with a_system(tmp_path) as (system, port):
                ends = []
                for start in range(0, len(cases), 30):
                    some = cases[start : start + 30]
                    ends += await asyncio.gather(*(tried(system, case, port) for case in some))
                return cases, [await once_more(system, *one, port) for one in zip(cases, ends, strict=True)]

    cases, ends = asyncio.run(story())
    assert len(cases) > 70
    assert complaints(cases, ends) == []


@pytest.mark.slow
def test_without_trouble_the_same_request_succeeds_through_the_proxy(tmp_path: Path) -> None:
    """The control of the server and the proxy: it is the faults that fail."""

    async def story() -> list[str]:
        case = Case("well", Trouble(), DEADLINE, retries=0)
        async with a_system(tmp_path) as (system, port):
            end = await tried(system, case, port)
            return complaints([case], [await once_more(system, case, end, port)])

    assert asyncio.run(story()) == []


@pytest.mark.slow
def test_without_limits_a_silent_network_hangs_and_a_caller_can_still_call_it_off(tmp_path: Path) -> None:
    """The control of the clock: nothing but the limits ends these requests."""

    async def story() -> tuple[list[str], list[ExecResult]]:
        patient = [
            Case(f"{fault}, {step}", Trouble(fault, *STEPS[step]), PATIENT, None, limit_s=0.3)
            for fault in (Fault.STALL, Fault.SLOW)
            for step in ("before the answer", "in the answer's body")
        ]
        async with a_system(tmp_path) as (system, port), contextlib.AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(proxied(port, one.trouble)) for one in patient]
            waiting = [await system.submit(one.request(p.port)) for one, p in zip(patient, proxies, strict=True)]
            await asyncio.wait(waiting, timeout=1.5)
            hung = complaints(patient, [(None, 1.5) if not one.done() else (one.result(), 0.0) for one in waiting])
            for one in patient:
                await system.router.cancel(one.name)
            return hung, await asyncio.wait_for(asyncio.gather(*waiting), 15.0)  # they would take 20 s by themselves

    hung, ends = asyncio.run(story())
    assert len(hung) == 4
    assert all("hangs" in one for one in hung)
    assert {one.status for one in ends} == {ResultStatus.CANCELLED}
