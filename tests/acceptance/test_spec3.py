"""
Per-connector retry policies: the document's test plan, by its names.

The words of failures are S3's, with those of decision B3; all of them are in `tests/unit/core/test_classify.py`.
"""

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError

import pytest
from pydantic import ValidationError

import reefknot as rk
from reefknot.core.backoff import delay_before
from reefknot.core.classify import is_transient
from reefknot.core.failure import FailureType
from reefknot.core.policy import RetryStrategy
from reefknot.errors import ConfigurationError, SourceError
from reefknot.ingest.port import FetchRequest, Page
from reefknot.ingest.telemetry import TelemetryRecorder
from reefknot.policy.model.defaults import JobType
from reefknot.queue.model.source_health import SourceCondition
from reefknot.queue.model.work import Budget, WorkState
from reefknot.retrying.failures import failure_from
from tests.pace import slowness
from tests.unit.ingest.world import World, in_world, page

T = TypeVar("T")
DOCUMENT = Path(__file__).parent / "samples" / "spec3-connectors.yaml"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "retry_policies.yaml"
    path.write_text(text)
    return path


def policy(**fields: Any) -> rk.ConnectorPolicy:
    return rk.ConnectorPolicy(connector_type=JobType.LOCAL_FILES, **fields)


def test_policy_registry_defaults() -> None:
    """Numbers as written: retries and seconds. Where code and YAML of the document differ, the YAML holds (C7)."""
    for job_type, expected in {
        JobType.LOCAL_FILES: (3, 30, 300, 0.2, None, None),
        JobType.OBSIDIAN_VAULT: (3, 30, 300, 0.2, None, None),
        JobType.IMAP_MAILBOX: (5, 120, 1800, 0.3, 7, 600),
        JobType.GITHUB_REPOSITORY: (5, 300, 3600, 0.25, None, 900),
    }.items():
        found = rk.RetryPolicyRegistry().get_policy(job_type)
        assert found.connector_type is job_type
        assert (found.strategy, found.backoff_multiplier) == (RetryStrategy.EXPONENTIAL_BACKOFF, 2.0)
        assert found.permanent_failures_no_retry is True
        waits = (found.base_delay_seconds, found.max_delay_seconds, found.jitter_factor)
        assert (found.max_attempts, *waits, found.transient_max_attempts, found.rate_limit_delay_seconds) == expected


def test_policy_configuration_loading() -> None:
    """The document's own file says what is built in, so that every connector comes out the same."""
    assert rk.RetryPolicyRegistry(DOCUMENT).list_policies() == rk.RetryPolicyRegistry().list_policies()
    written, built_in = rk.PolicyBook.load(DOCUMENT, environ={}), rk.PolicyBook()
    for target, kind in product([f"connector:{one.value}" for one in JobType], FailureType):
        assert written.resolve(target, failure_type=kind) == built_in.resolve(target, failure_type=kind)


def test_invalid_retry_policy_rejection(tmp_path: Path) -> None:
    for line, message in {
        "strategy: exponential": "'exponential' is not accepted; accepted: 'exponential_backoff'",
        "max_attempts: three": "'three' is not accepted; accepted: a whole number",
        "base_delay_seconds: 1.5": "1.5 is not accepted; accepted: a whole number",
        "permanent_failures_no_retry: maybe": "'maybe' is not accepted; accepted: true or false",
        "max_atempts: 3": "unknown key; accepted: backoff_multiplier",
        "base_delay_seconds: 301": "the base delay of 301 s is above the cap of 300 s",
        "max_attempts: null": "null is not a value here",
    }.items():
        path = written(tmp_path, f"retry_policies:\n  local_files:\n    {line}\n")
        with pytest.raises(ConfigurationError) as caught:
            rk.RetryPolicyRegistry(path)
        assert f"{path}:3:5: retry_policies.local_files." in str(caught.value)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "least", "most", "step"),
    [
        ("max_attempts", 1, 10, 1),
        ("base_delay_seconds", 1, 3600, 1),
        ("max_delay_seconds", 1, 86400, 1),
        ("jitter_factor", 0.0, 1.0, 0.01),
        ("backoff_multiplier", 1.0, 10.0, 0.01),
        ("transient_max_attempts", 1, 20, 1),
        ("rate_limit_delay_seconds", 1, 7200, 1),
    ],
)
def test_retry_policy_bounds_checking(tmp_path: Path, field: str, least: float, most: float, step: float) -> None:
    """In code and in a file alike: the bounds themselves are in, one step beyond is out."""
    beside: dict[str, Any] = {"base_delay_seconds": 1} if field == "max_delay_seconds" else {}
    beside |= {"max_delay_seconds": 86400} if field == "base_delay_seconds" else {}
    also = "".join(f", {name}: {value}" for name, value in beside.items())

    def load(value: float) -> object:
        path = written(tmp_path, f"retry_policies: {{local_files: {{{field}: {value}{also}}}}}")
        return getattr(rk.RetryPolicyRegistry(path).get_policy("local_files"), field)

    for value in (least, most):
        assert getattr(policy(**{field: value}, **beside), field) == value
        assert load(value) == value
    for value in (least - step, most + step):
        with pytest.raises(ValidationError):
            policy(**{field: value}, **beside)
        with pytest.raises(ConfigurationError, match=f"out of bounds; accepted: from {least:g}|from {least}"):
            load(value)


def test_retry_policy_calculation() -> None:
    for strategy, delays in {
        RetryStrategy.EXPONENTIAL_BACKOFF: [60, 120, 240, 480],
        RetryStrategy.LINEAR_BACKOFF: [60, 120, 180, 240],
        RetryStrategy.FIXED_DELAY: [60, 60, 60, 60],
        RetryStrategy.IMMEDIATE: [0, 0, 0, 0],
        RetryStrategy.NO_RETRY: [0, 0, 0, 0],
    }.items():
        found = policy(strategy=strategy, jitter_factor=0.0)
        assert [found.calculate_delay(attempt) for attempt in range(4)] == delays, strategy


@pytest.mark.parametrize(("attempt", "least", "most"), [(0, 48, 72), (1, 96, 144), (2, 192, 288)])
def test_jitter_distribution(attempt: int, least: int, most: int) -> None:
    """The document's samples: 60 s ± 12, 120 s ± 24, 240 s ± 48."""
    delays = [policy().calculate_delay(attempt) for _ in range(2000)]
    assert least <= min(delays)
    assert max(delays) <= most
    spread = most - least
    assert min(delays) < least + spread * 0.1
    assert max(delays) > most - spread * 0.1
    assert abs(sum(delays) / len(delays) - (least + most) / 2) < spread * 0.06


def test_without_the_connectors_rule_a_wait_keeps_its_fractions() -> None:
    """The control: it is `whole_seconds` that cuts."""
    fractions = rk.PolicyBook().resolve("connector:my.own").replace(whole_seconds=False)
    assert delay_before(0, fractions, draw=0.04) == pytest.approx(48.96)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run it in so many threads that begin together; the results, by number. An error in any of them is raised here."""
    gate = threading.Barrier(count)

    def body(number: int) -> T:
        gate.wait(10)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(body, range(count), timeout=20))


def test_concurrent_retry_scheduling() -> None:
    """Eight threads spend the budgets of their own jobs from one registry: each job gets exactly its retries."""
    registry = rk.RetryPolicyRegistry()
    types = list(JobType)

    def schedule(number: int) -> list[int]:
        spent = []
        for job in range(48):
            found = registry.get_policy(types[job % 4])
            budget = rk.RetryBudget(f"{number}/{job}", types[job % 4])
            while budget.can_retry(found):
                budget.spend(budget.next_delay(found))
            spent.append(budget.attempts)
        return spent

    assert in_threads(8, schedule) == [[3, 3, 5, 5] * 12] * 8


def test_concurrent_retry_scheduling_while_policies_are_set() -> None:
    """A reader sees the old policy or the new one, never a mixture and never none."""
    registry = rk.RetryPolicyRegistry()
    few, many = policy(max_attempts=1, base_delay_seconds=1), policy(max_attempts=9, base_delay_seconds=9)
    registry.set_policy(few)

    def read_or_write(number: int) -> set[tuple[int, int]]:
        seen = set()
        for step in range(300):
            if number % 2:
                registry.set_policy(many if step % 2 else few)
                registry.set_policy(rk.ConnectorPolicy(connector_type=f"custom-{number}-{step % 7}"))
            else:
                found = registry.get_policy(JobType.LOCAL_FILES)
                seen.add((found.max_attempts, found.base_delay_seconds))
                registry.list_policies()
        return seen

    assert set().union(*in_threads(4, read_or_write)) <= {(1, 1), (9, 9)}
    assert len(registry.list_policies()) == 4 + 2 * 7


def test_jitter_overhead() -> None:
    """No benchmark: only that chance is no more than a small part of a delay that is waited for in seconds."""
    found = policy()
    started = time.process_time()
    for attempt in range(1000):
        found.calculate_delay(attempt % 5)
    assert time.process_time() - started < 1.0 * slowness()


PERMANENT, RATE_LIMITED = FailureType.PERMANENT, FailureType.RATE_LIMITED
TRANSIENT, UNKNOWN = FailureType.TRANSIENT, FailureType.UNKNOWN

TEXTS = {
    PERMANENT: "unauthorized|Unauthorized: token expired|forbidden|403 Forbidden|Error 401: bad credentials"
    "|Error 403: no access to this repository|authentication failed|AuthenticationFailed|permission denied"
    "|access denied|invalid credentials|file not found|HTTP 404 on a network share",
    RATE_LIMITED: "throttled by the server|ThrottlingException: throttle|too many connections|too many requests"
    "|rate limit exceeded|403: rate limit exceeded for this token|quota exceeded|HTTP 429",
    TRANSIENT: "deadline exceeded|connection failed|connection error|connection closed by peer|no route to host"
    "|network is unreachable|connection refused|connection reset by peer|timed out|503 Service Unavailable",
    UNKNOWN: "report-4013.pdf is damaged|folder 403abc|unauthorizable",
}


class ForbiddenError(Exception):
    """A 403 with the headers of the answer."""

    def __init__(self, message: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status_code = 403
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class DeclaredError(Exception):
    """An exception that says itself what it is."""

    def __init__(self, failure_type: FailureType) -> None:
        super().__init__("")
        self.failure_type = failure_type


@pytest.mark.parametrize("kind", TEXTS)
def test_every_text_means_what_the_documents_say_also_when_an_exception_says_it_or_nothing(kind: FailureType) -> None:
    for text in TEXTS[kind].split("|"):
        assert rk.classify_failure(text) is kind, text
        assert rk.classify_failure(text, RuntimeError("oops")) is kind, text
        assert rk.classify_failure("", RuntimeError(text)) is kind, text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "Permission denied"), PERMANENT),
        *(
            (error(), TRANSIENT)
            for error in (TimeoutError, ConnectionResetError, ConnectionRefusedError, BrokenPipeError)
        ),
        (ForbiddenError(Retry_After="60"), RATE_LIMITED),
        (ForbiddenError(X_RateLimit_Remaining="0"), RATE_LIMITED),
        (ForbiddenError("API rate limit exceeded"), RATE_LIMITED),
        (ForbiddenError(X_RateLimit_Remaining="12"), PERMANENT),
        *((DeclaredError(kind), kind) for kind in (TRANSIENT, RATE_LIMITED, PERMANENT)),
    ],
)
@pytest.mark.parametrize("message", ["", "sync failed", "network timeout", "permission denied", "not found"])
def test_what_an_exception_is_or_declares_beats_words(error: Exception, expected: FailureType, message: str) -> None:
    assert rk.classify_failure(message, error) is expected


@pytest.mark.parametrize("name", ["EHOSTUNREACH", "ENETUNREACH", "ENETDOWN", "EHOSTDOWN"])
def test_an_unreachable_network_is_transient_also_as_a_plain_os_error(name: str) -> None:
    error = OSError(getattr(errno, name), "what the system says")
    calls = []

    @rk.retry(attempts=2, base_delay=0)
    def fetch() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return "fine"

    assert fetch() == "fine"
    assert is_transient(failure_from(URLError(error)))
    assert not is_transient(failure_from(OSError(errno.ENOSPC, "no space left")))


def test_a_connector_of_ones_own_begins_with_the_generic_defaults() -> None:
    book = rk.PolicyBook.loads("retry_policies: {carrier_pigeon: {max_attempts: 2, max_retry_after_seconds: 7200}}")
    policy = book.resolve("connector:carrier_pigeon")
    assert (policy.max_attempts, policy.base_delay, policy.max_delay, policy.max_retry_after) == (3, 60, 1800, 7200)
    kv = rk.PolicyBook.loads("operations: {KV_GET: {max_retry_after: 9}}").resolve("operation:KV_GET")
    assert kv.max_retry_after == 9
    with pytest.raises(rk.ConfigurationError, match="did you mean 'imap_mailbox'"):
        rk.PolicyBook.loads("retry_policies: {imap_mailbx: {}}")


HOUR = 3600.0


class Source:
    """A source that fails a number of times, then works. `calls` are the times of all executions."""

    def __init__(self, *errors: Exception, then: Exception | None = None) -> None:
        self._errors = list(errors)
        self._then = then
        self.calls: list[float] = []

    async def __call__(self, request: FetchRequest) -> Page:
        self.calls.append(asyncio.get_running_loop().time())
        error = self._errors.pop(0) if self._errors else self._then
        if error is not None:
            raise error
        return page()

    @property
    def waits(self) -> list[float]:
        return [after - before for before, after in zip(self.calls, self.calls[1:], strict=False)]


def refused() -> Exception:
    return ConnectionRefusedError("connection refused")


# ---- integration tests: test_connector_specific_retries, test_rate_limit_retry, test_permanent_failure_no_retry ------


@pytest.mark.parametrize(
    ("connector", "executions", "first"),
    [
        ("local_files", 4, (24, 36)),
        ("obsidian_vault", 4, (24, 36)),
        ("imap_mailbox", 8, (84, 156)),
        ("github_repository", 6, (225, 375)),
        ("my.own", 4, (48, 72)),
    ],
)
async def test_each_has_its_own_policy(world: World, connector: str, executions: int, first: tuple[int, int]) -> None:
    source = Source(then=refused())
    await world.start(world.source(source, connector=connector))
    await world.job("job", connector=connector, n=1)
    await asyncio.sleep(6 * HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, executions)
    assert first[0] <= source.waits[0] <= first[1] + 1


@pytest.mark.parametrize(("connector", "delay"), [("imap_mailbox", 600), ("github_repository", 900)])
async def test_rate_limited_failures_wait_longer_and_cool_the_source(world: World, connector: str, delay: int) -> None:
    source = Source(SourceError("too many requests", FailureType.RATE_LIMITED))
    orchestrator = await world.start(world.source(source, connector=connector, max_concurrency=1))
    for n in range(4):
        await world.job(f"job-{n}", connector=connector, n=n)
    await asyncio.sleep(60)
    assert len(source.calls) == 1, "one limit cools the source, not every job in turn"
    health = orchestrator.records.known("notes").health
    assert health.condition(world.store.moment().wall) is SourceCondition.COOLING
    await asyncio.sleep(2 * HOUR)
    assert {await world.state(f"job-{n}") for n in range(4)} == {WorkState.SUCCEEDED}
    assert 0.7 * delay <= source.waits[0] <= 1.3 * delay
    items = [await world.item(f"job-{n}") for n in range(4)]
    assert [item.attempts for item in items] == [1, 1, 1, 1], "a limit spends nothing, of no job"
    assert sorted(item.snoozes for item in items) == [0, 0, 0, 1], "the job that met the limit was put off"


@pytest.mark.parametrize("kind", [FailureType.RATE_LIMITED, FailureType.TRANSIENT])
async def test_a_server_that_asks_for_a_long_wait_cools_the_source_alone(world: World, kind: FailureType) -> None:
    source = Source(SourceError("come back later", kind, retry_after=5 * HOUR))
    await world.start(world.source(source, connector="github_repository"))
    await world.job("job", connector="github_repository", n=1)
    await asyncio.sleep(6 * HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.snoozes) == (WorkState.SUCCEEDED, 1, 1)
    assert 5 * HOUR <= source.waits[0] <= 5 * HOUR + 10


async def test_permanent_failures_are_not_retried(world: World) -> None:
    source = Source(then=PermissionError("permission denied"))
    await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, 1)


async def test_a_registry_of_the_program_decides_instead_of_the_book(world: World) -> None:
    registry = rk.RetryPolicyRegistry()
    registry.set_policy(rk.ConnectorPolicy(connector_type="local_files", max_attempts=1, base_delay_seconds=7))
    source = Source(then=refused())
    await world.start(world.source(source), retry_policy_registry=registry)
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert len(source.calls) == 2
    assert 5 <= source.waits[0] <= 10


# ---- test_retry_budget_cleanup, test_concurrent_retry_scheduling -----------------------------------------------------


async def test_the_budget_is_in_the_job_and_survives_a_restart_and_ends_with_the_job(world: World) -> None:
    source = Source(refused(), refused())
    orchestrator = await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(1)
    await orchestrator.stop()
    budget = (await world.item("job")).budget
    assert (budget.attempts, budget.failure_type, budget.trigger) == (1, "transient", "retry")
    assert budget.first_attempt_at is not None
    assert 24_000 <= budget.total_delay_ms <= 36_000
    await world.start(world.source(source))
    await asyncio.sleep(HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.budget) == (WorkState.SUCCEEDED, 3, Budget())


async def test_a_requeue_keeps_the_id_begins_a_fresh_budget_and_may_be_quarantined_again(world: World) -> None:
    source = Source(then=refused())
    await world.start(world.source(source))
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    payload = (await world.item("job")).payload
    assert await world.jobs.requeue(["job"], who="ann", why="the disk is back") == ["job"]
    await asyncio.sleep(HOUR)
    item = await world.item("job")
    assert (item.state, item.attempts, item.generation) == (WorkState.QUARANTINED, 4, 1)
    assert item.budget == Budget(), "cleared with the quarantine"
    assert (len(source.calls), item.payload) == (8, payload)
    assert [one.what for one in item.history].count("quarantined") == 2


async def test_many_jobs_fail_side_by_side_and_each_has_a_budget_of_its_own(world: World) -> None:
    failed: dict[Any, int] = {}

    async def fetch(request: FetchRequest) -> Page:
        name = request.payload["n"]
        failed[name] = failed.get(name, 0) + 1
        if failed[name] <= name % 4:
            raise ValueError("odd")
        return page()

    await world.start(world.source(fetch, max_concurrency=8), max_concurrency=8)
    for n in range(200):
        await world.job(f"job-{n}", n=n)
    await asyncio.sleep(2 * HOUR)
    items = [await world.item(f"job-{n}") for n in range(200)]
    assert {item.state for item in items} == {WorkState.SUCCEEDED}
    assert [item.attempts for item in items] == [n % 4 + 1 for n in range(200)]


def test_the_two_log_lines_have_the_keys_of_the_document(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        await world.start(world.source(Source(then=refused())))
        await world.job("job", n=1)
        await asyncio.sleep(HOUR)

    with caplog.at_level(logging.INFO, logger="reefknot"):
        in_world(story)
    retries = [one.__dict__ for one in caplog.records if one.message == "Scheduling retry"]
    job: dict[str, object] = {"ingestion_job_id": "job", "job_type": "local_files", "max_attempts": 3}
    assert [one["attempt"] for one in retries] == [1, 2, 3]
    for one in retries:
        assert one.items() >= (job | {"levelname": "INFO", "failure_type": "transient"}).items()
        assert isinstance(one["delay_seconds"], int)
    (end,) = [one for one in caplog.records if one.message == "Retry budget exhausted, quarantining job"]
    assert end.__dict__.items() >= (job | {"attempts": 3}).items()


# ---- test_retry_telemetry --------------------------------------------------------------------------------------------


async def test_the_telemetry_has_the_schema_of_the_document_and_survives_restarts(world: World) -> None:
    orchestrator = await world.start(world.source(Source(refused(), ValueError("odd"))))
    await world.job("job-1", n=1)
    await asyncio.sleep(HOUR)
    await orchestrator.stop()
    await world.start(world.source(Source(PermissionError("denied"))))
    await world.job("job-2", n=2)
    await asyncio.sleep(HOUR)
    by_type = {"transient": 1, "rate_limited": 0, "permanent": 0, "unknown": 1}
    counts = {"total_retries": 2, "successful_retries": 1, "failed_retries": 1}
    expected = {"local_files": {**counts, "avg_attempts_until_success": 3.0, "by_failure_type": by_type}}
    assert await TelemetryRecorder(world.store.values).retry_metrics() == {"retry_metrics": expected}


async def test_a_failing_telemetry_or_audit_stops_neither_retry_nor_quarantine(world: World) -> None:
    """A peer's job hung for ever because its metrics raised."""

    class Broken(TelemetryRecorder):
        async def flush(self) -> None:
            raise OSError("no space left on device")

    source = Source(refused(), then=PermissionError("denied"))
    await world.start(world.source(source), telemetry=Broken())
    await world.job("job", n=1)
    await asyncio.sleep(HOUR)
    assert (await world.state("job"), len(source.calls)) == (WorkState.QUARANTINED, 2)
