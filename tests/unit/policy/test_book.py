"""`PolicyBook`: read, resolve, explain, reload, hand out retriers."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

import reefknot as rk
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy.book import PolicyBook, failure_from_facts, request_of
from reefknot.policy.model.book import Layer, ResolvedPolicy
from reefknot.policy.reading.session import Problem
from reefknot.runtime.clocks import VirtualClock
from tests.rows import for_each_row

OPERATIONS = "operations: {KV_GET: {max_attempts: %d}}\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_book_without_a_file_is_the_book_of_an_empty_one() -> None:
    assert PolicyBook().hash == PolicyBook.loads("").hash == PolicyBook.load(environ={}).hash
    assert PolicyBook.loads(PolicyBook().dump()).hash == PolicyBook().hash
    assert PolicyBook().snapshot.hash == PolicyBook().hash
    assert len(PolicyBook().targets) == 21
    assert PolicyBook().sources == {}
    snapshot = PolicyBook.loads(OPERATIONS % 9).snapshot
    assert PolicyBook.of(snapshot).snapshot is snapshot
    assert PolicyBook.of(snapshot).resolve("operation:kv.get").max_attempts == 9


def test_later_files_stand_above_earlier_ones_and_their_mistakes_are_told_together(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one.yaml", "operations: {KV_GET: {max_attempts: 7, base_delay: 2}, KV_PUT: {max_attempts: 8}}"
    )
    two = write(tmp_path / "two.json", '{"operations": {"KV_GET": {"max_attempts": 9}}}')
    three = write(tmp_path / "three.toml", "[operations.KV_GET]\nmax_delay = 3\n")
    book = PolicyBook.load(one, two, three, environ={})

    policy = book.resolve("operation:kv.get")
    assert (policy.max_attempts, policy.base_delay, policy.max_delay) == (9, 2.0, 3.0)
    sources = [policy.provenance[name].source for name in ("max_attempts", "base_delay", "max_delay")]
    assert [source.removeprefix(f"{tmp_path}/").partition(":")[0] for source in sources] == [
        *("two.json", "one.yaml", "three.toml")
    ]
    assert book.resolve("operation:kv.put").max_attempts == 8

    one = write(tmp_path / "one.yaml", "operations: {KV_GTE: {}}")
    two = write(tmp_path / "two.yaml", "retry_policies: {imap_mailbx: {}}")
    with pytest.raises(ConfigurationError) as caught:
        PolicyBook.load(one, two, environ={})
    found = cast(list[Problem], caught.value.problems)
    assert [problem.mark.source for problem in found] == [str(one), str(two)]


def test_another_spelling_in_a_later_file_or_variable_stands_above(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "operations: {RETRY_KV_GET: {max_attempts: 6, base_delay: 2}}")
    two = write(tmp_path / "two.yaml", "operations: {kv.get: {max_attempts: 7}}")
    variable = "REEFKNOT__OPERATIONS__KV_GET__MAX_ATTEMPTS"

    assert PolicyBook.load(one, two, environ={}).resolve("operation:kv.get").max_attempts == 7
    settled = PolicyBook.load(one, two, environ={variable: "8"}).resolve("operation:kv.get").provenance
    top = settled["max_attempts"]
    assert (top.layer, top.source) == (Layer.TARGET, f"environment {variable}")
    assert [top.value, *(said.value for said in top.overrode)] == [8, 7, 6, 3]
    assert settled["base_delay"].value == 2.0


# ---- reloading -------------------------------------------------------------------------------------------------------


def test_a_reload_swaps_the_policies_their_hash_and_the_version(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    book = PolicyBook.load(path, environ={})
    before, snapshot, handed_out = book.hash, book.snapshot, book.resolve("operation:kv.get")
    write(path, OPERATIONS % 8)
    assert book.resolve("operation:kv.get").max_attempts == 7

    assert book.reload()

    assert book.resolve("operation:kv.get").max_attempts == 8
    assert book.hash != before
    assert book.version == 2
    assert (handed_out.max_attempts, handed_out.book_hash) == (7, before)
    assert snapshot.resolve("operation:kv.get") is handed_out
    assert book.resolve("operation:kv.get").book_hash == book.hash


@pytest.mark.parametrize("broken", ["operations: {KV_GET: {max_attempts: 0}}", "operations: {KV_GTE: {}}", "a: [", ""])
def test_a_broken_file_leaves_everything_as_it_was(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    book = PolicyBook.load(path, environ={})
    before, dumped = book.hash, book.dump()
    if broken:
        write(path, broken)
    else:
        path.unlink()

    with pytest.raises(ConfigurationError):
        book.reload()

    assert (book.hash, book.version, book.dump()) == (before, 1, dumped)
    assert book.resolve("operation:kv.get").max_attempts == 7
    write(path, OPERATIONS % 8)
    assert book.reload()
    assert book.resolve("operation:kv.get").max_attempts == 8


def test_a_reload_of_the_same_policies_changes_no_version_and_reads_the_variables_again(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    book = PolicyBook.load(path, environ={})
    write(path, "# moved\n\n" + OPERATIONS % 7 + "engine: 'memory:'\n")
    assert not book.reload()
    assert book.version == 1
    assert "engine" in book.dump()
    assert book.resolve("operation:kv.get").provenance["max_attempts"].source.startswith(f"{path}:3:")

    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    environ: dict[str, str] = {}
    book = PolicyBook.load(path, environ=environ)
    environ["REEFKNOT__OPERATIONS__KV_GET__MAX_ATTEMPTS"] = "9"
    assert book.reload()
    assert book.resolve("operation:kv.get").max_attempts == 9


@pytest.mark.parametrize("book", [PolicyBook(), PolicyBook.loads(OPERATIONS % 9)])
def test_a_book_that_was_not_read_from_files_stays_as_it_is(book: PolicyBook) -> None:
    before = book.hash

    assert not book.reload()
    assert (book.hash, book.version) == (before, 1)


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_made_from_what_is_known_of_it_and_an_exception_by_its_ancestors() -> None:
    assert failure_from_facts(code="http_error", http_status=429).failure_type is FailureType.RATE_LIMITED
    assert failure_from_facts(code="NETWORK_ERROR").code is ErrorCode.network_error
    assert failure_from_facts(code="3002").code is ErrorCode.connection_timeout
    assert failure_from_facts(code=3003).code is ErrorCode.http_error
    assert failure_from_facts(code=ErrorCode.internal_error).code is ErrorCode.internal_error
    assert failure_from_facts(http_status=503).code is ErrorCode.http_error
    assert failure_from_facts(message="HTTP 503 from upstream").http_status == 503
    assert failure_from_facts(message="HTTP 503", http_status=500).http_status == 500
    assert failure_from_facts(failure_type="transient").failure_type is FailureType.TRANSIENT
    assert failure_from_facts(failure_type="transient", http_status=404).failure_type is FailureType.TRANSIENT
    assert failure_from_facts(retry_after=3.0).retry_after == 3.0
    assert failure_from_facts(message="permission denied").failure_type is FailureType.PERMANENT

    assert failure_from_facts(exception="ConnectionResetError").exceptions == (
        *("builtins.ConnectionResetError", "builtins.ConnectionError", "builtins.OSError", "builtins.Exception"),
    )
    assert failure_from_facts(exception="builtins.TimeoutError").code is ErrorCode.connection_timeout
    assert failure_from_facts(exception="os.system").exceptions == ("os.system",)
    assert failure_from_facts(exception="print").exceptions == ("print",)
    assert failure_from_facts(exception="httpx.ConnectTimeout").code is ErrorCode.connection_timeout
    assert failure_from_facts(exception="TimeoutError", http_status=503).code is ErrorCode.connection_timeout


@for_each_row(
    ("given_", "accepted"),
    [
        *(({"code": wrong}, "one of none, invalid_input") for wrong in ("http_eror", "9999", "²")),
        ({"failure_type": "sometimes"}, "one of transient, rate_limited, permanent, unknown"),
        ({"failure_type": []}, "one of transient, rate_limited, permanent, unknown"),
        *(({"http_status": wrong}, "a whole number, such as 503") for wrong in ("503", True)),
    ],
)
def test_what_is_no_failure_is_refused_with_what_is_accepted(given_: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError, match=accepted) as caught:
        PolicyBook().resolve("block:http", **given_)
    assert caught.value.parameter in given_


@for_each_row(
    ("given_", "least"),
    [
        *(({"retry_count": wrong}, 0) for wrong in (-1, 1.5, True)),
        *(({"timeout_ms": wrong}, 1) for wrong in (0, "5")),
        ({"backoff_ms": -1}, 0),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(given_: dict[str, Any], least: int) -> None:
    with pytest.raises(ParameterError, match=f"a whole number, {least} or more"):
        PolicyBook().resolve("block:http", **given_)


def test_a_request_is_in_milliseconds_and_no_failure_means_before_anything_failed() -> None:
    request = request_of(retry_count=0, timeout_ms=1500, backoff_ms=250)
    assert (request.retries, request.time_budget, request.base_delay) == (0, 1.5, 0.25)
    policy = PolicyBook().resolve("block:http", retry_count=0, timeout_ms=1500, backoff_ms=250)
    assert (policy.max_attempts, policy.time_budget, policy.base_delay) == (1, 1.5, 0.25)
    fields = ("max_attempts", "time_budget", "base_delay")
    assert {policy.provenance[name].layer for name in fields} == {Layer.REQUEST}
    assert PolicyBook().resolve("block:http", backoff_ms=0).base_delay == 0.0

    assert PolicyBook().resolve("block:http").retryable
    assert not PolicyBook().resolve("block:http", message="odd").retryable


def test_explaining_says_whether_why_and_when() -> None:
    book = PolicyBook.loads("sources: {inbox: {connector: imap_mailbox, retry: {max_attempts: 2}}}")

    retried = book.explain("connector:imap_mailbox", failure_from_facts(message="timeout"), source="inbox", seed=1)
    assert retried.retries
    assert [wait.retry for wait in retried.schedule] == [0, 1]
    assert all(wait.delay is not None for wait in retried.schedule)
    stopped = book.explain("operation:KV_GET", failure_from_facts(message="timeout"), retry_count=0)
    assert (stopped.target, stopped.reason) == ("operation:kv.get", rk.Reason.ATTEMPTS_SPENT)


# ---- the retrier really follows the book -----------------------------------------------------------------------------


HTTP = """
worker:
  retries:
    v2:
      default_policy: {jitter_type: none}
      block_policies:
        http:
          max_attempts: 5
          base_delay_ms: 200
          error_overrides:
            "429": {max_attempts: 3, base_delay_ms: 1000, max_delay_ms: 60000}
"""


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("the request failed")
        self.status_code = status


def failing(*errors: Exception) -> Any:
    """Work that fails with each of the errors in turn, and with the last one for ever."""
    left = list(errors)

    def work() -> None:
        raise left.pop(0) if len(left) > 1 else left[0]

    return work


@pytest.mark.parametrize(
    ("statuses", "waits"),
    [
        ([429], [1.0, 2.0, 4.0]),
        ([503], [0.2, 0.4, 0.8, 1.6, 3.2]),
        ([404], []),
        ([400], []),
        ([503, 429, 404], [0.2, 2.0]),  # the second retry waits as the second of a rate limit's; then 404 ends it
    ],
)
def test_each_failure_is_retried_as_the_book_says_of_it(
    virtual_time: VirtualClock, statuses: list[int], waits: list[float]
) -> None:
    errors = [StatusError(status) for status in statuses]
    outcome = PolicyBook.loads(HTTP).retrier("block:http").run(failing(*errors))

    assert virtual_time.waits == pytest.approx(waits)
    assert outcome.attempts == len(waits) + 1
    spent = statuses[-1] in (429, 503)
    assert outcome.reason is (rk.Reason.ATTEMPTS_SPENT if spent else rk.Reason.NOT_RETRYABLE)


def test_a_retrier_of_the_book_is_a_policy_for_the_decorator(virtual_time: VirtualClock) -> None:
    operation = "operations: {NATS_PUBLISH: {jitter_enabled: false, non_retryable_exceptions: [ValueError]}}"
    book = PolicyBook.loads(operation)
    calls: list[int] = []

    @rk.retry(policy=book.retrier("operation:nats.publish"))
    async def publish(error: Exception) -> None:
        calls.append(1)
        raise error

    with pytest.raises(LookupError):
        asyncio.run(publish(LookupError("an operation retries what it does not know")))
    assert (len(calls), virtual_time.waits) == (3, [0.5, 1.0])
    with pytest.raises(ValueError, match="listed"):
        asyncio.run(publish(ValueError("listed")))
    assert len(calls) == 4

    plain = PolicyBook.loads("operations: {KV_GET: {jitter_enabled: false, timeout: null}}")
    with pytest.raises(LookupError):
        rk.retry(policy=plain.retrier("operation:kv.get"))(failing(LookupError()))()
    assert virtual_time.waits[2:] == [0.5, 1.0]


async def test_an_operation_that_hangs_is_cut_short_by_the_books_timeout_and_tried_again() -> None:
    book = PolicyBook.loads("operations: {KV_GET: {jitter_enabled: false, timeout: 2, base_delay: 1}}")
    outcome = await book.retrier("operation:kv.get").arun(lambda: asyncio.sleep(3600))
    assert outcome.attempts == 3
    assert outcome.elapsed == pytest.approx(2 + 1 + 2 + 2 + 2)


@pytest.mark.parametrize(
    ("message", "executions"), [("permission denied", 1), ("connection reset", 8), ("too many requests", 6), ("odd", 6)]
)
def test_a_connector_is_retried_by_the_type_of_its_failure(
    virtual_time: VirtualClock, message: str, executions: int
) -> None:
    outcome = PolicyBook().retrier("connector:imap_mailbox").run(failing(RuntimeError(message)))

    assert outcome.attempts == executions
    assert all(wait == int(wait) for wait in virtual_time.waits)
    if message == "too many requests":
        assert 420 <= virtual_time.waits[0] <= 780


def test_a_source_has_its_own_retrier_and_the_options_of_a_retrier_stand_above_the_book(
    virtual_time: VirtualClock,
) -> None:
    book = PolicyBook.loads("sources: {inbox: {connector: imap_mailbox, retry: {max_attempts: 1}}}")
    assert book.retrier("connector:imap_mailbox", source="inbox").run(failing(TimeoutError())).attempts == 2
    assert book.retrier("connector:imap_mailbox").run(failing(TimeoutError())).attempts == 8

    retrier = PolicyBook.loads(HTTP).retrier("block:http", attempts=2)
    assert retrier.run(failing(StatusError(503))).attempts == 2
    assert retrier.run(failing(StatusError(404))).attempts == 1
    assert retrier.using(attempts=3).run(failing(StatusError(503))).attempts == 3
    assert isinstance(retrier.policy, ResolvedPolicy)
    assert retrier.policy.provenance["max_attempts"].source == "caller"


def test_the_time_budget_of_a_block_ends_its_retries(virtual_time: VirtualClock) -> None:
    """30 s for all of it unless the request says otherwise."""
    policy = "{max_attempts: 50, jitter_type: none, base_delay_ms: 4000}"
    book = PolicyBook.loads(f"worker: {{retries: {{v2: {{default_policy: {policy}}}}}}}")
    outcome = book.retrier("block:x").run(failing(ConnectionError()))

    assert virtual_time.waits == pytest.approx([4.0, 8.0, 16.0])
    assert outcome.reason is rk.Reason.BUDGET_SPENT


def test_after_a_reload_a_retrier_follows_the_new_book_and_a_call_under_way_keeps_its_own(tmp_path: Path) -> None:
    file = tmp_path / "reefknot.yaml"
    file.write_text("operations: {billing.charge: {max_attempts: 3, base_delay: 1, jitter_enabled: false}}")
    book = PolicyBook.load(file, environ={})
    retrier = book.retrier("operation:billing.charge", attempt_timeout=None)
    calls = 0

    def failing() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            file.write_text("operations: {billing.charge: {max_attempts: 5, base_delay: 1, jitter_enabled: false}}")
        if calls == 2:
            book.reload()
        raise ConnectionError("down")

    with rk.testing.no_wait():
        assert retrier.run(failing).attempts == 3
        assert retrier.run(failing).attempts == 5
