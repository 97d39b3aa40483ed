"""Spans of the library, of jobs in one process and of syncs, as a tracer provider gets them."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import structs
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider

import reefknot as rk
from reefknot.app.system import System, running_system
from reefknot.console import traces
from reefknot.core.failure import FailureType
from reefknot.errors import ParameterError, SourceError
from reefknot.ingest.port import FetchRequest, Page
from reefknot.policy.settings import Settings, load_settings
from reefknot.queue.model import messages
from reefknot.queue.model.messages import AssignmentOptions, ExecAssignment, ExecResult, Job
from reefknot.retrying.retrier import Retrier
from reefknot.runtime.tracing import current_trace_id, current_traceparent, tracing
from reefknot.testing import run_virtual
from tests.unit.ingest.world import World, in_world, page
from tests.unit.retrying.flaky import AsyncFlaky, Flaky

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
T = TypeVar("T")
DOWN = ConnectionError("down")


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [one for one in self.all() if one.name == name]

    def tree(self, parent: ReadableSpan | None = None) -> list[Any]:
        """Names, each with what is below it; a span whose parent was not recorded is a root."""
        known = {one.context.span_id for one in self.all()}
        below = {one: one.parent.span_id if one.parent and one.parent.span_id in known else None for one in self.all()}
        wanted = parent and parent.context.span_id
        found = [one for one, above in below.items() if above == wanted]
        return [(one.name, self.tree(one)) if self.tree(one) else one.name for one in found]

    def outcomes(self, name: str) -> list[Any]:
        return [attributes(one).get("reefknot.outcome") for one in self.named(name)]


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    traces.enable(made.provider)
    yield made
    traces.disable()


def op(name: str, attempts: int) -> tuple[str, list[str]]:
    return f"reefknot.retry {name}", ["reefknot.attempt"] * attempts


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


QUICK: dict[str, Any] = {"attempts": 3, "base_delay": 0.0, "log": False, "name": "work"}


def in_loop(work: Flaky) -> None:
    for attempt in Retrier(**QUICK).attempts():
        with attempt:
            attempt.value = work()


async def in_async_loop(work: AsyncFlaky) -> None:
    async for attempt in Retrier(**QUICK).attempts():
        with attempt:
            attempt.value = await work()


def awaited(call: Callable[[AsyncFlaky], Any]) -> Callable[[Flaky], object]:
    return lambda work: run_virtual(call(AsyncFlaky(*work.errors)))


def in_generator(work: Flaky) -> None:
    @rk.retry(**QUICK)
    def items() -> Iterator[object]:
        yield work()

    assert list(items()) == ["ok"]


def in_async_generator(work: Flaky) -> None:
    @rk.retry(**QUICK)
    async def items() -> AsyncIterator[object]:
        yield work()

    async def read() -> list[object]:
        return [one async for one in items()]

    assert run_virtual(read()) == ["ok"]


WAYS: dict[str, Callable[[Flaky], object]] = {
    "decorator": lambda work: rk.retry(**QUICK)(work)(),
    "deadline": lambda work: rk.retry(**QUICK, deadline=9)(work)(),
    "throttle": lambda work: rk.retry(**QUICK, throttle=True)(work)(),
    "thread": lambda work: rk.retry(**QUICK, attempt_timeout=9, in_thread=True)(work)(),
    "on_result": lambda work: rk.retry(**QUICK, on_result=lambda value: value is None)(work)(),
    "breaker": lambda work: rk.retry(**QUICK, breaker=rk.CircuitBreaker("b"))(work)(),
    "call": lambda work: Retrier(**QUICK).call(work),
    "run": lambda work: Retrier(**QUICK).run(work),
    "loop": in_loop,
    "generator": in_generator,
    "async": awaited(lambda work: rk.retry(**QUICK)(work)()),
    "async deadline": awaited(lambda work: rk.retry(**QUICK, deadline=9)(work)()),
    "async breaker": awaited(lambda work: rk.retry(**QUICK, breaker=rk.CircuitBreaker("b"))(work)()),
    "arun": awaited(lambda work: Retrier(**QUICK).arun(work)),
    "async loop": awaited(in_async_loop),
    "async generator": in_async_generator,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_retry_is_an_operation_with_a_child_for_each_attempt(spans: Spans, way: str) -> None:
    WAYS[way](Flaky())
    assert spans.tree() == [op("work", 1)]
    assert spans.outcomes("reefknot.retry work") == ["succeeded"]
    spans.exporter.clear()
    WAYS[way](Flaky(DOWN, DOWN))
    assert spans.tree() == [op("work", 3)]
    assert spans.outcomes("reefknot.attempt") == ["retried", "retried", "succeeded"]
    assert spans.outcomes("reefknot.retry work") == ["recovered"]
    assert trace.get_current_span() is trace.INVALID_SPAN
    spans.exporter.clear()
    traces.disable()
    WAYS[way](Flaky(DOWN))
    assert spans.all() == (), "while tracing is off no way writes a span"
    assert (current_traceparent(), current_trace_id()) == (None, None)


def test_a_call_that_gives_up_is_an_error_with_its_reason_and_a_wait_that_was_asked_for_is_none(spans: Spans) -> None:
    with pytest.raises(ConnectionError):
        rk.retry(**QUICK)(Flaky(*[ConnectionError("password=hunter2 refused\x1b[2J")] * 3))()
    *attempts, operation = spans.all()
    assert attributes(operation).items() >= {"reefknot.reason": "attempts_spent", "reefknot.attempts": 3}.items()
    assert spans.outcomes("reefknot.attempt") == ["retried", "retried", "failed"]
    for one in (*attempts, operation):
        assert one.status.status_code is trace.StatusCode.ERROR
        (event,) = one.events
        message = str((event.attributes or {})["exception.message"])
        assert message == one.status.description == "ConnectionError: password=[redacted] refused\\x1b[2J"
        assert (event.attributes or {})["exception.type"] == "builtins.ConnectionError"
    spans.exporter.clear()

    policy = rk.RetryPolicy(max_attempts=3, base_delay=0.0)
    manager, work = rk.RetryManager(), AsyncFlaky(rk.RetryAfter(0.0))
    run_virtual(manager.execute_with_retry(rk.RetryCategory.KV_PUT, "store it", work, policy=policy))
    assert spans.tree() == [op("RETRY_KV_PUT: store it", 2)], "a retry manager is an operation too"
    assert [one.status.status_code for one in spans.all()] == [trace.StatusCode.UNSET] * 3


def test_spans_of_the_work_are_below_their_attempt_and_nothing_is_current_while_it_waits(spans: Spans) -> None:
    tracer, current = spans.provider.get_tracer("own"), list[object]()

    @rk.retry(attempts=2, base_delay=0.0, log=False, name="outer", on_retry=lambda _: None, wait=lambda _: 0.0)
    def work(numbers: list[int]) -> None:
        with tracer.start_as_current_span("own"):
            current.append(current_trace_id())
            numbers.append(1)
            if len(numbers) == 1:
                raise DOWN

    with tracer.start_as_current_span("caller"):
        work([])
    assert spans.tree() == [("caller", [("reefknot.retry outer", [("reefknot.attempt", ["own"])] * 2)])]
    assert current == [f"{spans.all()[0].context.trace_id:032x}"] * 2


def test_a_call_that_is_cancelled_stopped_or_left_ends_its_spans(spans: Spans) -> None:
    @rk.retry(**QUICK)
    async def sleeps() -> None:
        await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(sleeps())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_virtual(cancelled())
    assert spans.tree() == [op("work", 1)]
    spans.exporter.clear()

    for attempt in Retrier(**QUICK).attempts():
        if attempt.number == 2:
            break
        with attempt:
            raise DOWN
    assert spans.tree() == [op("work", 1)]
    assert spans.outcomes("reefknot.retry work") == [None]
    spans.exporter.clear()

    with pytest.raises(KeyboardInterrupt):
        rk.retry(**QUICK)(Flaky(KeyboardInterrupt()))()
    assert spans.tree() == [op("work", 1)]
    spans.exporter.clear()

    stop = threading.Event()

    @rk.retry(**QUICK | {"base_delay": 5.0}, jitter="none", stop=stop)
    def work() -> None:
        threading.Timer(0.02, stop.set).start()
        raise DOWN

    with pytest.raises(ConnectionError):
        work()
    assert spans.tree() == [op("work", 1)]
    assert attributes(spans.all()[-1])["reefknot.reason"] == "stopped"


STEPS = """\
import asyncio
import reefknot as rk

@rk.block("traced.flaky")
async def flaky(inputs, context):
    if context.attempt <= inputs.get("failures", 0):
        raise ConnectionError(f"attempt {context.attempt}")
    await asyncio.sleep(inputs.get("seconds", 0))
    return {"traceparent": context.traceparent, "trace_id": context.trace_id}
"""


def job(name: str, *, traceparent: str | None = None, deadline_ms: int | None = None, **payload: Any) -> ExecAssignment:
    correlation = None if traceparent is None else messages.Correlation(None, traceparent)
    options = AssignmentOptions(deadline_ms=deadline_ms)
    return ExecAssignment(name, "r", Job("traced.flaky", payload), correlation=correlation, options=options)


@pytest.fixture
def system_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "traced_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_settings(None, environ={}, cwd=tmp_path)


def working(settings: Settings, *jobs: ExecAssignment, work: Callable[[System], Awaitable[T]] | None = None) -> Any:
    """The result of the job that is submitted to a system, or what `work` gives."""

    async def main() -> Any:
        async with running_system("memory:", settings, modules=("traced_steps",), drain=0) as system:
            async with asyncio.timeout(30):
                return await (await system.submit(jobs[0])) if work is None else await work(system)

    return asyncio.run(main())


SUBMITTED = "reefknot.submit traced.flaky"


def test_a_job_in_memory_is_one_span_below_its_submission(spans: Spans, system_settings: Settings) -> None:
    result = working(system_settings, job("a", failures=2))
    assert spans.tree() == [(SUBMITTED, [("reefknot.job traced.flaky", ["reefknot.attempt"] * 3)])]
    last = spans.named("reefknot.attempt")[-1]
    trace_id = f"{last.context.trace_id:032x}"
    assert result.output == {"traceparent": f"00-{trace_id}-{last.context.span_id:016x}-01", "trace_id": trace_id}
    assert result.trace_id == trace_id


def test_a_submission_goes_on_below_its_span_and_keeps_its_trace_id(spans: Spans, system_settings: Settings) -> None:
    named = structs.replace(job("a"), correlation=messages.Correlation("order-7", TRACEPARENT))
    assert working(system_settings, named).trace_id == "order-7"
    assert {f"{one.context.trace_id:032x}" for one in spans.all()} == {TRACEPARENT[3:35]}
    (submitted,), (ended,) = spans.named(SUBMITTED), spans.named("reefknot.job traced.flaky")
    assert submitted.parent is not None
    assert f"{submitted.parent.span_id:016x}" == TRACEPARENT[36:52]
    assert attributes(ended)["reefknot.trace_id"] == "order-7"


def test_a_job_without_a_traceparent_is_a_trace_with_one_root(spans: Spans, system_settings: Settings) -> None:
    """As one that was submitted while its client did not trace."""

    async def work(system: System) -> ExecResult:
        tracer, tracing.tracer = tracing.tracer, None
        waiting = await system.submit(job("a", failures=1))
        tracing.tracer = tracer
        return await waiting

    working(system_settings, work=work)
    assert spans.tree() == [("reefknot.job traced.flaky", ["reefknot.attempt"] * 2)]
    assert len({one.context.trace_id for one in spans.all()}) == 1


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_router_sends_the_span_as_a_standard_header(spans: Spans, system_settings: Settings, is_traced: bool) -> None:
    if not is_traced:
        traces.disable()

    async def work(system: System) -> dict[str, str]:
        heard = system.store.transport().subscribe(messages.assign_subject("worker-1"))
        await (await system.submit(job("a", traceparent=TRACEPARENT)))
        return dict((await anext(aiter(heard))).headers)

    headers = working(system_settings, work=work)
    assert headers["trace_id"] == TRACEPARENT[3:35]
    assert headers["traceparent"][:36] == TRACEPARENT[:36]
    assert (headers["traceparent"] == TRACEPARENT) is not is_traced


def test_ends_without_an_attempt_or_in_one_are_recorded_too(spans: Spans, system_settings: Settings) -> None:
    """A deadline that passes while the worker pauses; jobs that are cancelled while they wait and while they run."""

    async def work(system: System) -> list[ExecResult]:
        assert system.router is not None
        system.workers[0].pause()
        late, cancelled = await system.submit(job("late", deadline_ms=50)), await system.submit(job("cancelled"))
        await system.router.cancel("cancelled", "not wanted")
        ended = [await late, await cancelled]
        system.workers[0].resume()
        running = await system.submit(job("running", seconds=60))
        while not system.workers[0].steps.running:  # noqa: ASYNC110 - it does not say when it does
            await asyncio.sleep(0.005)
        await system.router.cancel("running")
        return [*ended, await running]

    assert [one.status.value for one in working(system_settings, work=work)] == ["timeout", "cancelled", "cancelled"]
    attempted = (SUBMITTED, [("reefknot.job traced.flaky", ["reefknot.attempt"])])
    without = (SUBMITTED, ["reefknot.job traced.flaky"])
    assert sorted(spans.tree(), key=str) == sorted([attempted, without, without], key=str)
    ended = {attributes(one)["reefknot.job_id"]: attributes(one) for one in spans.named("reefknot.job traced.flaky")}
    assert (ended["late"]["reefknot.outcome"], ended["late"]["reefknot.attempts"]) == ("timeout", 0)
    assert ended["cancelled"]["reefknot.outcome"] == ended["running"]["reefknot.outcome"] == "cancelled"


def test_a_sync_is_a_span_with_its_attempts_and_each_attempt_has_its_pages(spans: Spans) -> None:
    async def story(world: World) -> None:
        calls = 0

        async def fetch(request: FetchRequest) -> Page:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ConnectionError("connection refused, password=hunter2")
            number = int(request.cursor or "0")
            return page(f"a{number}", cursor=str(number + 1), is_last=number >= 1)

        async def fetch_item(request: FetchRequest) -> Page:
            raise SourceError("no such folder", FailureType.PERMANENT)

        await world.start(world.source(fetch), world.source(fetch_item, name="other"))
        await world.job("sync")
        await world.job("broken", source="other")
        await asyncio.sleep(300)

    in_world(story)

    pages = [["reefknot.page"] * 2, ["reefknot.page"]]
    good = ("reefknot.sync local_files", [("reefknot.attempt", one) for one in pages])
    bad = ("reefknot.sync local_files", [("reefknot.attempt", ["reefknot.page"])])
    assert sorted(spans.tree(), key=str) == sorted([bad, good], key=str)
    assert sorted(spans.outcomes("reefknot.sync local_files")) == ["quarantined", "recovered"]
    assert "hunter2" not in "".join(one.to_json() for one in spans.all())


def test_every_process_knows_the_span_of_an_operation_by_its_key(spans: Spans) -> None:
    """A worker that takes over continues the same operation; another key is another one."""
    one, other = traces.OtelTracer(TracerProvider()), traces.OtelTracer(TracerProvider())
    assert one.operation("a/0", TRACEPARENT, None) == other.operation("a/0", TRACEPARENT, None)
    assert one.operation("a/0", None, None) == other.operation("a/0", None, "order-7")
    assert one.operation("a/0", None, None) != one.operation("a/1", None, None)
    assert one.operation("a/0", None, TRACEPARENT[3:35])[3:35] == TRACEPARENT[3:35]
    assert one.operation("a/0", TRACEPARENT[:-2] + "00", None).endswith("-00")


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_a_sampler_keeps_whole_jobs_or_nothing_of_them(ratio: float) -> None:
    made = Spans()
    made.provider.sampler = ParentBased(TraceIdRatioBased(ratio) if ratio else ALWAYS_OFF)
    traces.enable(made.provider)
    tracer = tracing.tracer
    assert tracer is not None
    for number in range(40):
        operation = tracer.operation(f"job {number}", None, None)
        tracer.start("reefknot.attempt", {}, parent=operation).end()
        tracer.record(operation, "reefknot.job", {}, parent=None, began=1.0, error="")
    kept = {one.context.trace_id for one in made.all()}
    assert made.tree() == [("reefknot.job", ["reefknot.attempt"])] * len(kept)
    assert (len(kept) == 0, len(kept) == 40) == (ratio == 0.0, ratio == 1.0)


def test_a_provider_without_ids_of_its_own_choice_gets_attempts_below_the_caller(spans: Spans) -> None:
    """Not the SDK's: an operation cannot be recorded there, and nothing breaks."""
    traces.enable(NoOpTracerProvider())
    tracer = tracing.tracer
    assert tracer is not None
    assert (tracer.operation("a", TRACEPARENT, None), tracer.operation("a", None, None)) == (TRACEPARENT, "")
    tracer.start("reefknot.attempt", {}, parent="").end()
    tracer.record("", "reefknot.job", {}, parent=None, began=1.0, error="")
    WAYS["decorator"](Flaky(DOWN))


def test_without_a_provider_or_the_extra_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    with pytest.raises(ParameterError, match="set_tracer_provider"):
        traces.enable()
    with pytest.raises(ParameterError, match="a TracerProvider of OpenTelemetry"):
        traces.enable("otlp")  # type: ignore[arg-type]  # the mistake
    assert tracing.tracer is None
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[otel\]' in a checkout"):
        traces.enable()


URL = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, ""),
        ({**URL, "OTEL_SDK_DISABLED": "TRUE"}, ""),
        ({**URL, "OTEL_TRACES_EXPORTER": "none"}, ""),
        (
            {"OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER: 'zipkin' is not accepted; accepted: otlp, console, none",
        ),
        ({**URL, PROTOCOL: "grpc"}, f"{PROTOCOL}: 'grpc' is not accepted; accepted: http/protobuf"),
        (
            {**URL, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", PROTOCOL: "http/protobuf"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'grpc' is not accepted; accepted: http/protobuf",
        ),
    ],
)
def test_variables_that_ask_for_no_traces_turn_nothing_on_and_odd_ones_are_a_warning(
    variables: dict[str, str], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    with traces.exported(variables):
        assert tracing.tracer is None
    expected = [f"no traces are written: {warning}"] if warning else []
    assert [one.getMessage() for one in caplog.records] == expected


def test_what_the_sdk_refuses_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise ValueError("OTEL_BSP_MAX_QUEUE_SIZE must be positive, password=hunter2")

    monkeypatch.setattr(traces, "_exporter", refuse)
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    with traces.exported(URL):
        assert tracing.tracer is None
    text = "no traces are written: ValueError: OTEL_BSP_MAX_QUEUE_SIZE must be positive, password=[redacted]"
    assert [one.getMessage() for one in caplog.records] == [text]


def test_lines_about_a_collector_that_is_gone_are_bounded() -> None:
    bounded = traces.BoundedLines()
    lines = [logging.makeLogRecord({"created": 1000.0 + number / 100}) for number in range(200)]
    assert 10 <= sum(bounded.filter(one) for one in lines) <= 13
