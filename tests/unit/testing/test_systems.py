"""`rk.testing.system` and `system_sync`: submitted work in a test, with hours of retries in milliseconds."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.steps.python import registry
from reefknot.testing import SyncVirtualSystem

pytest_plugins = ["pytester"]
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
PAGE = {"url": "https://shop.example.com/"}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a test registers end with it."""
    monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


def policies(**blocks: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with these policies, by the type of step with `_` for its dot."""
    named = {name.replace("_", "."): {"jitter_type": "none", **policy} for name, policy in blocks.items()}
    retries = {"v2": {"enabled": True, "block_policies": named}}
    return {"worker": {"retries": retries, "queue": {"v2": {"enabled": True}}}}


HOURLY = {"max_attempts": 20, "base_delay_ms": 3_600_000, "max_delay_ms": 3_600_000, "timeout_ms": 864_000_000}


Inputs = Mapping[str, Any]


def own_step(
    name: str, seconds: float = 0.0, *, outputs: Mapping[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """A step that takes its time and gives these outputs, or its attempt."""

    @rk.block(name, **options)
    async def step(inputs: Inputs, context: Any) -> Mapping[str, Any]:
        await asyncio.sleep(seconds)
        return {"attempt": context.attempt} if outputs is None else outputs

    return step


@pytest.fixture
def hourly() -> Callable[..., Any]:
    """A step that fails ten times; its policy waits for an hour after each."""

    @rk.block("shop.charge")
    async def charge(inputs: Inputs, context: Any) -> dict[str, Any]:
        if context.attempt <= 10:
            raise ConnectionError("the gateway is down")
        return {"charged": inputs["id"], "attempt": context.attempt}

    return charge


def test_ten_hours_of_retries_take_less_than_a_second_and_have_the_events_of_production(
    hourly: Callable[..., Any],
) -> None:
    with rk.testing.system_sync(hourly, policies(shop_charge=HOURLY), start=START) as system:
        began = time.process_time()
        job = system.submit("shop.charge", {"id": 7}, assignment_id="order-7")
        assert (job.status(), system.now) == ("pending", START)
        system.drain()
        took = time.process_time() - began
        assert job.status() == "succeeded"
        assert job.result().output == {"charged": 7, "attempt": 11}
        assert system.now - START == pytest.approx(timedelta(hours=10), abs=timedelta(seconds=1))
        kinds = [one["event_type"] for one in system.events(job="order-7")]
        assert [one["delay_seconds"] for one in system.events("retry_attempt")] == [3600.0] * 10
    assert kinds == ["submitted", "routing", "admission", *["retry_attempt"] * 10, "retry_recovered", "completed"]
    assert took < 1.0


@pytest.mark.real_time
async def test_it_works_in_an_ordinary_async_test(hourly: Callable[..., Any]) -> None:
    async with rk.testing.system([hourly], policies(shop_charge=HOURLY), start=START) as system:
        submitted = (system.submit("shop.charge", {"id": name}, assignment_id=name) for name in ("one", "two"))
        jobs = await asyncio.gather(*submitted)
        beats = 0

        async def other() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await system.drain()
        task.cancel()
        assert beats > 1, "the loop of the test goes on meanwhile"
        assert [await job.wait() for job in jobs] == ["succeeded"] * 2
        found = {name: one.output for name, one in (await system.results()).items()}
        assert found == {name: {"charged": name, "attempt": 11} for name in ("one", "two")}
        assert await system.job("one").status() == "succeeded"


async def test_it_works_under_run_virtual_whose_time_stands_still_meanwhile(hourly: Callable[..., Any]) -> None:
    async with asyncio.timeout(5), rk.testing.system([hourly], policies(shop_charge=HOURLY)) as system:
        assert (await system.run("shop.charge", {"id": 1})).retries_used == 10
    assert asyncio.get_running_loop().time() == 0.0


def test_plain_functions_run_in_threads_and_time_waits_for_them() -> None:
    seen: list[str] = []

    @rk.block("shop.render", attempt_timeout=5)
    def render(inputs: Inputs, context: Any) -> dict[str, Any]:
        threading.Event().wait(0.05)
        seen.append(threading.current_thread().name)
        return {"pages": 3}

    with rk.testing.system_sync([render], start=START) as system:
        assert system.run("shop.render").output == {"pages": 3}
        assert system.now - START < timedelta(seconds=1)
    assert seen == ["reefknot-block"]


def test_waits_inside_a_plain_function_take_virtual_time_only_and_keep_its_lease() -> None:
    calls = 0

    @rk.retry(on=ConnectionError, attempts=4, base_delay=60, max_delay=60, jitter="none")
    def fetch() -> int:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise ConnectionError
        return calls

    @rk.block("shop.fetch", attempt_timeout=600, timeout=600)
    def step(inputs: Inputs, context: Any) -> dict[str, Any]:
        return {"calls": fetch(), "attempt": context.attempt}

    with rk.testing.system_sync([step], start=START) as system:
        assert system.run("shop.fetch").output == {"calls": 4, "attempt": 1}
        assert timedelta(seconds=180) <= system.now - START < timedelta(seconds=182)


def test_sleeps_and_time_limits_of_steps_are_virtual() -> None:
    @rk.block("shop.slow", timeout=120, attempt_timeout=30)
    async def slow(inputs: Inputs, context: Any) -> None:
        await asyncio.sleep(20 if context.attempt == 2 else 3600)

    with rk.testing.system_sync([slow], policies(shop_slow={"base_delay_ms": 1000}), start=START) as system:
        result = system.run("shop.slow")
        assert (result.status, result.retries_used) == ("success", 1)
        assert system.now - START == pytest.approx(timedelta(seconds=51), abs=timedelta(seconds=1))


# ---- faults and stand-ins --------------------------------------------------------------------------------------------


def test_a_fault_fails_so_many_executions_and_then_the_step_answers() -> None:
    with rk.testing.system_sync([own_step("shop.mail")]) as system:
        system.fail("shop.mail", times=2, error=ConnectionResetError("reset by peer"))
        assert system.run("shop.mail", {"to": "a@example.com"}).output == {"attempt": 3}
        assert system.calls("shop.mail") == [{"to": "a@example.com"}] * 3
        assert [one["exception_type"] for one in system.events("retry_attempt")] == ["ConnectionResetError"] * 2


def test_an_http_status_is_classified_as_the_step_would_have_it() -> None:
    answer = {"status": 200, "body": "hello"}
    with rk.testing.system_sync() as system:
        system.answer("http.request", answer)
        system.fail("http.request", status=503)
        assert system.run("http.request", PAGE).output == answer
        system.fail("http", status=404)
        refused = system.run("http.request", PAGE)
    assert (refused.status, refused.retries_used) == ("error", 0)


def test_a_fault_may_take_its_time_and_may_last() -> None:
    with rk.testing.system_sync(start=START) as system:
        system.answer("sql.query", lambda inputs, context: {"rows": [], "query": inputs["query"]})
        system.fail("sql.query", times=None, error=ValueError, delay=timedelta(minutes=2))
        failed = system.run("sql.query", {"query": "select 1"}, timeout=600, attempt_timeout=300)
        assert failed.status == "error"
        assert timedelta(minutes=2) <= system.now - START < timedelta(minutes=3)
        system.fail("sql.query", times=0)
        assert system.run("sql.query", {"query": "select 1"}).output == {"rows": [], "query": "select 1"}


def test_a_failed_job_is_quarantined_as_its_configuration_says_and_can_be_retried() -> None:
    config = policies(http_request={"max_attempts": 1})
    config["worker"]["quarantine_failed"] = True
    with rk.testing.system_sync(config=config) as system:
        system.answer("http.request", {"status": 200})
        system.fail("http.request", times=20)
        job = system.submit("http.request", PAGE, assignment_id="order-7")
        assert job.wait() == "quarantined"
        assert [one["id"] for one in system.quarantine()] == ["order-7"]
        system.fail("http.request", times=0)
        job.retry()
        assert job.wait() == "succeeded"


# ---- time ------------------------------------------------------------------------------------------------------------


def test_time_is_moved_by_hand_and_nothing_runs_before_it_is_due() -> None:
    with rk.testing.system_sync([own_step("shop.remind")], start=START) as system:
        job = system.submit("shop.remind", delay=timedelta(hours=1))
        system.advance(3599)
        assert (job.status(), system.now) == ("pending", START + timedelta(seconds=3599))
        system.advance(timedelta(seconds=2))
        assert job.status() == "succeeded"
        later = system.submit("shop.remind", at=START + timedelta(days=40))
        system.drain(within=60)
        assert later.status() == "succeeded"

        waiting, now = system.submit("shop.remind", delay=3600), system.now
        with pytest.raises(rk.ResultPendingError):
            waiting.result(timeout=60)
        assert system.now == now + timedelta(seconds=60), "the result is waited for in virtual time"
        waiting.cancel("not needed")
        assert waiting.wait() == "cancelled"


def test_schedules_of_the_configuration_are_followed() -> None:
    config = {**policies(), "schedules": {"hourly": {"every": "1h", "assignment": {"job": {"type": "shop.report"}}}}}
    with rk.testing.system_sync([own_step("shop.report")], config, start=START) as system:
        system.advance(24 * 3600 + 60)
        assert len(system.calls("shop.report")) == 24


# ---- what is stuck ---------------------------------------------------------------------------------------------------


def test_drain_says_which_jobs_do_not_end_and_why() -> None:
    with rk.testing.system_sync([own_step("shop.wait")]) as system:
        system._simulation.system.workers[0].pause()
        system.submit("shop.wait", assignment_id="order-7")
        with pytest.raises(rk.JobsStuckError, match=r"'order-7': worker-1 is paused; resume with") as raised:
            system.drain()
        assert set(raised.value.jobs) == {"order-7"}
        assert raised.value.seconds < 60, "it is told once nothing moves"


def test_an_outage_that_does_not_end_is_told_when_the_time_is_over() -> None:
    with rk.testing.system_sync() as system:
        system.fail("http.request", times=None)
        for number in range(10):
            system.submit("http.request", PAGE, assignment_id=f"order-{number}")
        with pytest.raises(rk.JobsStuckError, match="10 jobs have not ended after 3600") as raised:
            system.drain(within=3600)
        assert all("has been down since" in why for why in raised.value.jobs.values())
        assert "'shop.unknown' is not known here" in str(system.run("shop.unknown").error_message), "as in production"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"modules": "no_such_steps"}, "modules: no_such_steps: there is no module no_such_steps here"),
        ({"modules": ["json"]}, "modules: json: it has no function under @reefknot.block"),
        ({"modules": [print]}, "a function under @rk.block"),
        ({"modules": [7]}, "accepted: names of modules"),
        ({"modules": 7}, "accepted: names of modules"),
        ({"config": "missing.yaml"}, "missing.yaml: there is no such file"),
        ({"config": {"worker": {"retris": {}}}}, "worker.retris: unknown key"),
        ({"config": 7}, "accepted: the path of a file, a mapping"),
        ({"workers": 0}, "workers"),
        ({"start": "2026"}, "start='2026' is not accepted: a datetime"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(rk.ReefknotError) as raised:
        rk.testing.system_sync(**arguments)
    assert text in str(raised.value)


def print_nothing() -> None: ...


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda system: system.fail("http.reqest"), "did you mean 'http.request'?"),
        (lambda system: system.fail(7), "the type of a step"),
        (lambda system: system.fail("http", times=-1), "times"),
        (lambda system: system.fail("http", error="no"), "an exception, such as"),
        (lambda system: system.fail("http", status=200), "status"),
        (lambda system: system.fail("http", status=500, error=OSError()), "not together with error"),
        (lambda system: system.fail("http", delay=-1), "delay"),
        (lambda system: system.answer("http", 7), "a mapping of outputs"),
        (lambda system: system.answer("http", {"at": object()}), "answer"),
        (lambda system: system.answer("http", print_nothing), "a function of (inputs, context)"),
        (lambda system: system.calls("no"), "a step that this system knows"),
        (lambda system: system.advance(-1), "by=-1 is not accepted"),
        (lambda system: system.advance("1h"), "by='1h' is not accepted"),
        (lambda system: system.drain(within=-1), "within"),
        (lambda system: system.events("retry_attemt"), "retry_attempt"),
        (lambda system: system.job("none").result(), "no job has the id 'none'"),
        (lambda system: system.job("none").cancel(), "no job has the id 'none'"),
        (lambda system: system.job("none").retry(), "no job has the id 'none'"),
        (lambda system: system.submit("http", {}, dealine=3), "did you mean 'deadline'?"),
        (lambda system: system.submit("http", 7), "a mapping of names to JSON values"),
        (lambda system: system.submit_many("http"), "a list of mappings with the arguments of submit"),
        (lambda system: system.submit_many([("http", {}), {"job_type": "http", "dealine": 3}]), "items[1].dealine"),
    ],
)
def test_a_wrong_call_is_refused_and_says_what_is_accepted(
    call: Callable[[Any], object], text: str, shared: Any
) -> None:
    with pytest.raises(rk.ReefknotError) as raised:
        call(shared)
    assert text in str(raised.value)


@pytest.fixture(scope="module")
def shared() -> Iterator[SyncVirtualSystem]:
    with rk.testing.system_sync() as system:
        yield system


def test_a_system_that_has_ended_or_not_begun_says_so() -> None:
    ended = rk.testing.system_sync()
    with pytest.raises(rk.LoopMisuseError, match="has not begun"):
        ended.submit("http.request")
    with ended:
        assert ended.job("none").status() == "unknown"
    for use in (ended.drain, lambda: ended.now, lambda: ended.fail("http"), ended.job("none").status):
        with pytest.raises(rk.LoopMisuseError, match="has ended: use it inside its with block"):
            use()
    with pytest.raises(rk.LoopMisuseError, match="entered once"), ended:
        pass


def test_a_step_that_calls_its_own_system_is_refused() -> None:
    @rk.block("shop.inner")
    def inner(inputs: Inputs, context: Any) -> None:
        system.submit("shop.inner")

    with rk.testing.system_sync([inner]) as system:
        assert "would wait for itself" in str(system.run("shop.inner", retries=0).error_message)


@pytest.mark.real_time
async def test_a_test_that_is_cancelled_leaves_nothing_behind() -> None:
    @rk.block("shop.block", timeout=864000, attempt_timeout=864000)
    async def block(inputs: Inputs, context: Any) -> None:
        started.set()
        await asyncio.sleep(800_000)

    started, before = threading.Event(), threading.enumerate()
    async with rk.testing.system([block]) as system:
        await system.submit("shop.block")
        task = asyncio.create_task(system.drain())
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await system.quarantine()) == []
    assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("reefknot-system")]


# ---- pytest ----------------------------------------------------------------------------------------------------------

STEPS = """
    import reefknot as rk

    @rk.block("plugin.charge")
    async def charge(inputs, context):
        return {"charged": inputs["id"], "attempt": context.attempt}
"""


def test_the_fixture_works_in_plain_tests_and_in_async_ones(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        plugin_steps=STEPS,
        test_plugin="""
        import pytest
        import reefknot as rk

        def test_plain(reefknot_system):
            system = reefknot_system(modules=["plugin_steps"])
            system.fail("plugin.charge", times=2)
            assert system.run("plugin.charge", {"id": 7}).output == {"charged": 7, "attempt": 3}

        def test_two(reefknot_system):
            one, two = reefknot_system(modules="plugin_steps"), reefknot_system(modules="plugin_steps")
            one.submit("plugin.charge", {"id": 7}, assignment_id="a")
            assert (one.job("a").status(), two.job("a").status()) == ("pending", "unknown")

        @pytest.mark.anyio
        async def test_async(anyio_backend_name):
            async with rk.testing.system(modules=["plugin_steps"]) as system:
                assert (await system.run("plugin.charge", {"id": 7})).output == {"charged": 7, "attempt": 1}

        @pytest.fixture
        def anyio_backend():
            return "asyncio"
        """,
    )
    ours = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-W", "error")
    pytester.syspathinsert()
    pytester.runpytest_inprocess(*ours).assert_outcomes(passed=3)


def test_a_configuration_file_is_used_with_its_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKER_RETRIES_V2_ENABLED", "false")
    Path("reefknot.yaml").write_text(
        "engine: sqlite:never.db\n"
        "worker: {retries: {v2: {enabled: true, block_policies: {http.request: {max_attempts: 2}}}}}\n"
    )
    with rk.testing.system_sync(config="reefknot.yaml") as system:
        system.answer("http.request", {"status": 200})
        system.fail("http.request", times=9)
        assert system.run("http.request", PAGE).retries_used == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["reefknot.yaml"]


# ---- what is real ----------------------------------------------------------------------------------------------------


class _Slow(BaseHTTPRequestHandler):
    """Answers after a moment of real time."""

    def do_GET(self) -> None:
        threading.Event().wait(0.05)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the class names it
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_time_waits_for_a_real_server_of_a_standard_step(address: str) -> None:
    config = {**policies(), "blocks": {"http": {"allow": [address]}}}
    with rk.testing.system_sync(config=config, start=START) as system:
        result = system.run("http.request", {"url": f"http://{address}/"}, retries=0)
        assert (result.status, (result.output or {})["body"]) == ("success", "ok"), result.error_message
        assert system.now - START < timedelta(seconds=1)


def test_time_waits_for_a_thread_of_an_async_step() -> None:
    @rk.block("shop.to_thread", attempt_timeout=1)
    async def step(inputs: Inputs, context: Any) -> dict[str, Any]:
        return {"waited": await asyncio.to_thread(threading.Event().wait, 0.05)}

    with rk.testing.system_sync([step], start=START) as system:
        assert system.run("shop.to_thread", retries=0).output == {"waited": False}
        assert system.now - START < timedelta(seconds=1)


def test_a_deadline_ends_a_job_that_waits_for_its_next_attempt() -> None:
    with rk.testing.system_sync(config=policies(http_request=HOURLY), start=START) as system:
        system.fail("http.request", times=None)
        result = system.run("http.request", PAGE, deadline=timedelta(minutes=90))
        assert result.status == "timeout"
        assert system.now - START <= timedelta(minutes=91)


def test_many_jobs_are_submitted_at_once_with_an_answer_for_each() -> None:
    items: list[Any] = [
        ("http.request", PAGE),
        {"job_type": "http.request", "inputs": {"url": "https://b.example.com/"}, "assignment_id": "b"},
        {"job_type": "http.request", "inputs": {"n": 3}, "assignment_id": "taken"},
        {"job_type": "http.request", "assignment_id": "later", "tenant_id": "acme", "delay": timedelta(hours=1)},
    ]
    with rk.testing.system_sync(start=START) as system:
        system.answer("http.request", {"status_code": 200})
        system.submit("http.request", {"n": 1}, assignment_id="taken")
        first, second, taken, later = system.submit_many(items)
        assert isinstance(taken, rk.KeyConflictError)
        jobs = [one for one in (first, second, later) if isinstance(one, rk.testing.SyncVirtualJob)]
        assert [(one.assignment_id, one.tenant_id) for one in jobs[1:]] == [("b", None), ("later", "acme")]
        assert [one.status() for one in jobs] == ["pending"] * 3
        system.drain()
        assert [one.wait() for one in jobs] == ["succeeded"] * 3
        assert system.now - START >= timedelta(hours=1)
        assert system.submit_many([]) == []

    async def main() -> None:
        async with rk.testing.system() as system:
            system.answer("http.request", {"status_code": 200})
            answers = await system.submit_many(items)
            assert [await one.wait() for one in answers if isinstance(one, rk.testing.VirtualJob)] == ["succeeded"] * 4

    asyncio.run(main())


def test_several_workers_share_the_jobs() -> None:
    with rk.testing.system_sync([own_step("shop.share", 1)], workers=3, start=START) as system:
        for _ in range(60):
            system.submit("shop.share")
        system.drain()
        assert {one.worker_id for one in system.results().values()} == {"worker-1", "worker-2", "worker-3"}
        assert {one.status for one in system.results().values()} == {"success"}


def test_the_latest_version_of_a_job_is_itself_where_no_payload_was_edited() -> None:
    step = own_step("shop.latest")
    with rk.testing.system_sync(step) as system:
        system.submit("shop.latest", assignment_id="order-7")
        assert system.job("order-7").latest().wait() == "succeeded"
        assert system.job("order-8").latest().status() == "unknown"

    async def story() -> str:
        async with rk.testing.system(step) as system:
            job = await system.submit("shop.latest")
            return await (await job.latest()).wait()

    assert asyncio.run(story()) == "succeeded"
