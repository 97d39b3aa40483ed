"""`PolicyBook`: read, resolve, explain, reload, hand out retriers."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reefknot as rk
from reefknot.config.book import PolicyBook, failure_of, request_of
from reefknot.config.document import Problem
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.core.retry.book import ResolvedPolicy
from reefknot.core.retry.builtin import baseline
from reefknot.core.retry.classify import retryable_code, retryable_status
from reefknot.core.retry.layers import Layer
from reefknot.engines.virtual import VirtualClock
from reefknot.errors import ConfigurationError, ConfigurationMissingError, ParameterError

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


def test_later_files_stand_above_earlier_ones_field_by_field(tmp_path: Path) -> None:
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
        *("two.json", "one.yaml", "three.toml"),
    ]
    assert book.resolve("operation:kv.put").max_attempts == 8


def test_a_null_in_a_later_file_is_a_value(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "retry_policies: {imap_mailbox: {transient_max_attempts: 9}}")
    two = write(tmp_path / "two.yaml", "retry_policies: {imap_mailbox: {transient_max_attempts: null}}")

    assert PolicyBook.load(one, environ={}).resolve("connector:imap_mailbox", failure_type="transient").retries == 9
    assert (
        PolicyBook.load(one, two, environ={}).resolve("connector:imap_mailbox", failure_type="transient").retries == 5
    )


def test_a_list_in_a_later_file_replaces_the_earlier_one(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "operations: {KV_GET: {non_retryable_exceptions: [A, B]}}")
    two = write(tmp_path / "two.yaml", "operations: {KV_GET: {non_retryable_exceptions: [C]}}")

    book = PolicyBook.load(one, two, environ={})
    assert book.resolve("operation:kv.get").non_retryable_exceptions == ("C",)


def test_variables_stand_above_files(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    variable = "REEFKNOT__OPERATIONS__KV_GET__MAX_ATTEMPTS"
    book = PolicyBook.load(path, environ={variable: "8"})

    settled = book.resolve("operation:kv.get").provenance["max_attempts"]
    assert (settled.value, settled.layer, settled.source) == (8, Layer.TARGET, f"environment {variable}")


def test_the_processs_own_variables_are_read_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REEFKNOT__OPERATIONS__KV_GET__MAX_ATTEMPTS", "8")
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)

    assert PolicyBook.load(path).resolve("operation:kv.get").max_attempts == 8
    assert PolicyBook.load(path, environ={}).resolve("operation:kv.get").max_attempts == 7


def test_another_spelling_in_a_later_file_or_variable_stands_above(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "operations: {RETRY_KV_GET: {max_attempts: 6, base_delay: 2}}")
    two = write(tmp_path / "two.yaml", "operations: {kv.get: {max_attempts: 7}}")
    variable = "REEFKNOT__OPERATIONS__KV_GET__MAX_ATTEMPTS"

    assert PolicyBook.load(one, two, environ={}).resolve("operation:kv.get").max_attempts == 7
    settled = PolicyBook.load(one, two, environ={variable: "8"}).resolve("operation:kv.get").provenance
    assert [settled["max_attempts"].value, *(said.value for said in settled["max_attempts"].overrode)] == [8, 7, 6, 3]
    assert settled["base_delay"].value == 2.0


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationMissingError, match="there is no such file"):
        PolicyBook.load(tmp_path / "gone.yaml", environ={})


def test_mistakes_in_several_files_are_told_together(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "operations: {KV_GTE: {}}")
    two = write(tmp_path / "two.yaml", "retry_policies: {imap_mailbx: {}}")

    with pytest.raises(ConfigurationError) as caught:
        PolicyBook.load(one, two, environ={})
    found = cast(list[Problem], caught.value.problems)
    assert [problem.mark.source for problem in found] == [str(one), str(two)]


@pytest.mark.parametrize("form", ["yaml", "json", "toml"])
def test_all_formats_say_the_same(form: Any) -> None:
    text = {
        "yaml": "operations: {KV_GET: {max_attempts: 9, timeout: 2.5}}",
        "json": '{"operations": {"KV_GET": {"max_attempts": 9, "timeout": 2.5}}}',
        "toml": "[operations.KV_GET]\nmax_attempts = 9\ntimeout = 2.5\n",
    }[form]
    book = PolicyBook.loads(text, format=form)

    assert book.hash == PolicyBook.loads("operations: {KV_GET: {timeout: 2.5, max_attempts: 9}}").hash
    assert book.resolve("operation:kv.get").attempt_timeout == 2.5


def test_the_front_of_a_book_read_elsewhere_answers_as_that_book() -> None:
    snapshot = PolicyBook.loads(OPERATIONS % 9).snapshot

    assert PolicyBook.of(snapshot).snapshot is snapshot
    assert PolicyBook.of(snapshot).resolve("operation:kv.get").max_attempts == 9


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


def test_a_reload_of_the_same_policies_changes_no_version(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", OPERATIONS % 7)
    book = PolicyBook.load(path, environ={})
    write(path, "# moved\n\n" + OPERATIONS % 7 + "engine: 'memory:'\n")

    assert not book.reload()
    assert book.version == 1
    assert "engine" in book.dump()
    assert book.resolve("operation:kv.get").provenance["max_attempts"].source.startswith(f"{path}:3:")


def test_a_reload_reads_the_variables_again(tmp_path: Path) -> None:
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


def test_a_retrier_keeps_the_book_it_was_made_from(tmp_path: Path, virtual_time: VirtualClock) -> None:
    """Work in flight keeps its version."""
    path = write(tmp_path / "r.yaml", OPERATIONS % 3)
    book = PolicyBook.load(path, environ={})
    retrier = book.retrier("operation:kv.get")
    write(path, OPERATIONS % 9)
    book.reload()

    assert ran(retrier, ConnectionError()).attempts == 3
    assert ran(book.retrier("operation:kv.get"), ConnectionError()).attempts == 9


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_made_from_what_is_known_of_it() -> None:
    assert failure_of(code="http_error", http_status=429).failure_type is FailureType.RATE_LIMITED
    assert failure_of(code="NETWORK_ERROR").code is ErrorCode.network_error
    assert failure_of(code="3002").code is ErrorCode.connection_timeout
    assert failure_of(code=ErrorCode.internal_error).code is ErrorCode.internal_error
    assert failure_of(http_status=503).code is ErrorCode.http_error
    assert failure_of(message="HTTP 503 from upstream").http_status == 503
    assert failure_of(message="HTTP 503", http_status=500).http_status == 500
    assert failure_of(failure_type="transient").failure_type is FailureType.TRANSIENT
    assert failure_of(failure_type="transient", http_status=404).failure_type is FailureType.TRANSIENT
    assert failure_of(retry_after=3.0).retry_after == 3.0
    assert failure_of(message="permission denied").failure_type is FailureType.PERMANENT


def test_an_exception_is_known_by_its_builtin_ancestors_and_nothing_is_imported() -> None:
    assert failure_of(exception="ConnectionResetError").exceptions == (
        *("builtins.ConnectionResetError", "builtins.ConnectionError", "builtins.OSError", "builtins.Exception"),
    )
    assert failure_of(exception="builtins.TimeoutError").code is ErrorCode.connection_timeout
    assert failure_of(exception="os.system").exceptions == ("os.system",)
    assert failure_of(exception="print").exceptions == ("print",)
    assert failure_of(exception="httpx.ConnectTimeout").exceptions == ("httpx.ConnectTimeout",)
    assert failure_of(exception="TimeoutError", http_status=503).code is ErrorCode.connection_timeout


@pytest.mark.parametrize(
    ("given_", "accepted"),
    [
        ({"code": "http_eror"}, "one of none, invalid_input"),
        ({"code": "9999"}, "one of none, invalid_input"),
        ({"code": "²"}, "one of none, invalid_input"),
        ({"failure_type": "sometimes"}, "one of transient, rate_limited, permanent, unknown"),
        ({"http_status": "503"}, "a whole number, such as 503"),
        ({"http_status": True}, "a whole number, such as 503"),
    ],
)
def test_what_is_no_failure_is_refused_with_what_is_accepted(given_: dict[str, Any], accepted: str) -> None:
    with pytest.raises(ParameterError, match=accepted) as caught:
        PolicyBook().resolve("block:http", **given_)
    assert caught.value.parameter in given_


@pytest.mark.parametrize(
    ("given_", "least"),
    [
        ({"retry_count": -1}, 0),
        ({"retry_count": 1.5}, 0),
        ({"retry_count": True}, 0),
        ({"timeout_ms": 0}, 1),
        ({"timeout_ms": "5"}, 1),
        ({"backoff_ms": -1}, 0),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(given_: dict[str, Any], least: int) -> None:
    with pytest.raises(ParameterError, match=f"a whole number, {least} or more"):
        PolicyBook().resolve("block:http", **given_)


def test_a_request_is_in_milliseconds_and_a_policy_in_seconds() -> None:
    request = request_of(retry_count=0, timeout_ms=1500, backoff_ms=250)
    assert (request.retries, request.time_budget, request.base_delay) == (0, 1.5, 0.25)

    policy = PolicyBook().resolve("block:http", retry_count=0, timeout_ms=1500, backoff_ms=250)
    assert (policy.max_attempts, policy.time_budget, policy.base_delay) == (1, 1.5, 0.25)
    fields = ("max_attempts", "time_budget", "base_delay")
    assert {policy.provenance[name].layer for name in fields} == {Layer.REQUEST}
    assert PolicyBook().resolve("block:http", backoff_ms=0).base_delay == 0.0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 50])
def test_a_requests_count_overrides_up_and_down_but_not_the_veto(count: int) -> None:
    policy = PolicyBook().resolve("block:http", code="invalid_input", retry_count=count)

    assert policy.retries == count
    assert not policy.retryable


@pytest.mark.parametrize("target", ["operation:NATS_PUBLISH", "operation:retry_nats_publish", "operation:nats.publish"])
def test_an_operation_may_be_asked_for_in_any_spelling(target: str) -> None:
    assert PolicyBook().resolve(target).target == "operation:nats.publish"


@pytest.mark.parametrize("target", ["", "http", "block:", "operation:", "worker:http"])
def test_what_is_no_target_is_refused(target: str) -> None:
    with pytest.raises(ParameterError, match="block:<type>, connector:<type> or operation:<name>"):
        PolicyBook().resolve(target)


def test_asking_without_a_failure_is_asking_before_anything_failed() -> None:
    assert PolicyBook().resolve("block:http").retryable
    assert not PolicyBook().resolve("block:http", message="odd").retryable


def test_explaining_says_whether_why_and_when() -> None:
    book = PolicyBook.loads("sources: {inbox: {connector: imap_mailbox, retry: {max_attempts: 2}}}")

    retried = book.explain("connector:imap_mailbox", failure_of(message="timeout"), source="inbox", seed=1)
    assert retried.retries
    assert [wait.retry for wait in retried.schedule] == [0, 1]
    assert all(wait.delay is not None for wait in retried.schedule)
    stopped = book.explain("operation:KV_GET", failure_of(message="timeout"), retry_count=0)
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


class CodedError(Exception):
    def __init__(self, code: ErrorCode) -> None:
        super().__init__("the step failed")
        self.error_code = code


def failing(*errors: Exception) -> Any:
    """Work that fails with each of the errors in turn, and with the last one for ever."""
    left = list(errors)

    def work() -> None:
        raise left.pop(0) if len(left) > 1 else left[0]

    return work


def ran(retrier: rk.Retrier, *errors: Exception) -> Any:
    """The outcome of such work, awaited: only what is awaited can be given a time of its own per attempt."""
    work = failing(*errors)

    async def awaited() -> None:
        work()

    return asyncio.run(retrier.arun(awaited))


@pytest.mark.parametrize(
    ("status", "waits"),
    [(429, [1.0, 2.0, 4.0]), (503, [0.2, 0.4, 0.8, 1.6, 3.2]), (404, []), (400, [])],
)
def test_each_failure_is_retried_as_the_book_says_of_it(
    virtual_time: VirtualClock, status: int, waits: list[float]
) -> None:
    outcome = PolicyBook.loads(HTTP).retrier("block:http").run(failing(StatusError(status)))

    assert virtual_time.waits == pytest.approx(waits)
    assert outcome.attempts == len(waits) + 1


def test_the_policy_changes_with_the_failure_from_attempt_to_attempt(virtual_time: VirtualClock) -> None:
    """503, then 429: the second retry waits as the second of a rate limit's; then 404 ends it."""
    errors = (StatusError(503), StatusError(429), StatusError(404))
    outcome = PolicyBook.loads(HTTP).retrier("block:http").run(failing(*errors))

    assert virtual_time.waits == pytest.approx([0.2, 2.0])
    assert (outcome.attempts, outcome.reason) == (3, rk.Reason.NOT_RETRYABLE)


def test_a_retrier_of_the_book_is_a_policy_for_the_decorator(virtual_time: VirtualClock) -> None:
    book = PolicyBook.loads(
        "operations: {NATS_PUBLISH: {jitter_enabled: false, non_retryable_exceptions: [ValueError]}}"
    )
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


def test_a_plain_function_under_the_decorator_follows_the_book_too(virtual_time: VirtualClock) -> None:
    book = PolicyBook.loads("operations: {KV_GET: {jitter_enabled: false, timeout: null}}")

    @rk.retry(policy=book.retrier("operation:kv.get"))
    def get() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        get()
    assert virtual_time.waits == [0.5, 1.0]


def test_an_operation_that_hangs_is_cut_short_by_the_books_timeout_and_tried_again() -> None:
    book = PolicyBook.loads("operations: {KV_GET: {jitter_enabled: false, timeout: 2, base_delay: 1}}")

    async def main() -> tuple[int, float]:
        outcome = await book.retrier("operation:kv.get").arun(lambda: asyncio.sleep(3600))
        return outcome.attempts, outcome.elapsed

    assert rk.testing.run_virtual(main()) == (3, pytest.approx(2 + 1 + 2 + 2 + 2))


@pytest.mark.parametrize(
    ("message", "executions"),
    [("permission denied", 1), ("connection reset", 8), ("too many requests", 6), ("odd", 6)],
)
def test_a_connector_is_retried_by_the_type_of_its_failure(
    virtual_time: VirtualClock, message: str, executions: int
) -> None:
    outcome = PolicyBook().retrier("connector:imap_mailbox").run(failing(RuntimeError(message)))

    assert outcome.attempts == executions
    assert all(wait == int(wait) for wait in virtual_time.waits)
    if message == "too many requests":
        assert 420 <= virtual_time.waits[0] <= 780


def test_a_source_has_its_own_retrier(virtual_time: VirtualClock) -> None:
    book = PolicyBook.loads("sources: {inbox: {connector: imap_mailbox, retry: {max_attempts: 1}}}")

    assert book.retrier("connector:imap_mailbox", source="inbox").run(failing(TimeoutError())).attempts == 2
    assert book.retrier("connector:imap_mailbox").run(failing(TimeoutError())).attempts == 8


def test_the_options_of_a_retrier_stand_above_the_book(virtual_time: VirtualClock) -> None:
    book = PolicyBook.loads(HTTP)
    retrier = book.retrier("block:http", attempts=2)

    assert retrier.run(failing(StatusError(503))).attempts == 2
    assert retrier.run(failing(StatusError(404))).attempts == 1
    assert retrier.using(attempts=3).run(failing(StatusError(503))).attempts == 3
    assert isinstance(retrier.policy, ResolvedPolicy)
    assert retrier.policy.provenance["max_attempts"].source == "caller"


def test_the_time_budget_of_a_block_ends_its_retries(virtual_time: VirtualClock) -> None:
    """30 s for all of it unless the request says otherwise."""
    book = PolicyBook.loads(
        "worker: {retries: {v2: {default_policy: {max_attempts: 50, jitter_type: none, base_delay_ms: 4000}}}}"
    )
    outcome = book.retrier("block:x").run(failing(ConnectionError()))

    assert virtual_time.waits == pytest.approx([4.0, 8.0, 16.0])
    assert outcome.reason is rk.Reason.BUDGET_SPENT


@pytest.mark.parametrize("code", ErrorCode)
def test_the_baseline_retries_every_failure_but_cancellation(virtual_time: VirtualClock, code: ErrorCode) -> None:
    cancelled = (ErrorCode.cancelled_by_user, ErrorCode.cancelled_by_timeout)

    def resolve(failure: Failure) -> rk.RetryPolicy:
        return baseline(retryable=failure.code not in cancelled)

    outcome = ran(rk.Retrier.following(resolve, baseline(), "step"), CodedError(code))

    assert virtual_time.waits == pytest.approx([] if code in cancelled else [0.1, 0.2, 0.3])
    assert outcome.attempts == (1 if code in cancelled else 4)


@pytest.mark.parametrize("code", [ErrorCode.cancelled_by_user, ErrorCode.cancelled_by_timeout])
@pytest.mark.parametrize("target", ["block:http", "block:billing.render"])
def test_cancellation_is_not_retried_under_v2(virtual_time: VirtualClock, target: str, code: ErrorCode) -> None:
    assert PolicyBook().retrier(target).run(failing(CodedError(code))).attempts == 1


# ---- loaded, dumped, loaded ------------------------------------------------------------------------------------------


FRACTION = st.integers(0, 100).map(lambda number: number / 100)
JITTER = st.sampled_from(["none", "full", "equal", "proportional", "decorrelated"])
STRATEGY = st.sampled_from(["exponential_backoff", "linear_backoff", "fixed_delay", "immediate", "no_retry"])


def some_of(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


BACKOFF: dict[str, st.SearchStrategy[Any]] = {
    "max_attempts": st.integers(0, 100),
    "base_delay_ms": st.integers(0, 900),  # below every cap, so that any mixture of layers makes sense
    "max_delay_ms": st.integers(1000, 90_000) | st.floats(1000, 90_000),
    "jitter_type": JITTER,
    "jitter_factor": FRACTION,
    "exponential_base": st.integers(1, 10),
    "strategy": STRATEGY,
    "max_retry_after_ms": st.integers(0, 900_000),
}
OVERRIDES = st.dictionaries(
    st.sampled_from(["429", "503", "404", "http_error", "network_error", "internal_error"]),
    some_of(**BACKOFF, retryable=st.booleans()),
    max_size=3,
) | st.dictionaries(st.sampled_from(["transient", "rate_limited", "unknown"]), some_of(**BACKOFF), max_size=2)
BLOCKS = st.dictionaries(
    st.sampled_from(["http", "http.request", "fs", "billing"]),
    some_of(**BACKOFF, error_overrides=OVERRIDES),
    max_size=3,
)
HUNDRED = some_of(retryable=st.booleans())
NETWORK = some_of(
    **BACKOFF,
    retryable=st.booleans() | some_of(network_error=st.booleans(), http_error=st.booleans() | st.just("conditional")),
    http_status_mapping=st.fixed_dictionaries(
        {},
        optional={
            "4xx": some_of(
                retryable=st.booleans(),
                exceptions=st.dictionaries(st.sampled_from(["404", "408", "425", "429"]), st.booleans(), max_size=3),
            ),
            "5xx": HUNDRED,
        },
    ),
)
WORKER = some_of(
    enabled=st.booleans(),
    default_policy=some_of(**BACKOFF),
    error_classification=some_of(
        network_errors=NETWORK,
        execution_errors=some_of(**BACKOFF, retryable=some_of(execution_failed=st.booleans())),
        validation_errors=some_of(**BACKOFF, retryable=st.booleans()),
    ),
    block_policies=BLOCKS,
)
CONNECTOR = some_of(
    strategy=STRATEGY,
    max_attempts=st.integers(1, 10),
    base_delay_seconds=st.integers(1, 30),
    max_delay_seconds=st.integers(300, 86400),
    jitter_factor=FRACTION,
    backoff_multiplier=st.integers(1, 10),
    transient_max_attempts=st.none() | st.integers(1, 20),
    rate_limit_delay_seconds=st.none() | st.integers(1, 7200),
    permanent_failures_no_retry=st.booleans(),
)
CONNECTORS = st.sampled_from(["local_files", "obsidian_vault", "imap_mailbox", "github_repository"])
OPERATION = some_of(
    max_attempts=st.integers(1, 100),
    base_delay=FRACTION,
    max_delay=st.integers(2, 100),
    backoff_multiplier=st.floats(1, 10),
    jitter_enabled=st.booleans(),
    jitter_factor=FRACTION,
    timeout=st.none() | st.integers(1, 100),
    retryable_exceptions=st.lists(st.sampled_from(["TimeoutError", "a.b.C", "Fehler ü"]), max_size=2),
)
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "worker": st.builds(lambda v2: {"retries": {"v2": v2}}, WORKER),
        # A large base on the target side would meet a source's own cap, so that both keep to the numbers above.
        "retry_policies": st.dictionaries(CONNECTORS, CONNECTOR, max_size=3),
        "operations": st.dictionaries(
            st.sampled_from(["KV_GET", "nats.publish", "billing.charge"]), OPERATION, max_size=3
        ),
        "sources": st.dictionaries(
            st.sampled_from(["inbox", "notes"]),
            st.builds(lambda connector, retry: {"connector": connector, "retry": retry}, CONNECTORS, CONNECTOR),
            max_size=2,
        ),
    },
)
FAILURES: list[Failure | None] = [
    None,
    *(
        Failure(code, failure_type, "", status)
        for code, failure_type, status in [
            (ErrorCode.http_error, FailureType.RATE_LIMITED, 429),
            (ErrorCode.http_error, FailureType.RATE_LIMITED, 403),
            (ErrorCode.http_error, FailureType.TRANSIENT, 503),
            (ErrorCode.http_error, FailureType.PERMANENT, 404),
            (ErrorCode.http_error, FailureType.TRANSIENT, None),
            (ErrorCode.network_error, FailureType.TRANSIENT, None),
            (ErrorCode.internal_error, FailureType.UNKNOWN, None),
            (ErrorCode.execution_failed, FailureType.PERMANENT, None),
            (ErrorCode.invalid_input, FailureType.UNKNOWN, None),
        ]
    ),
]
TARGETS = ["block:http", "block:http.request", "block:fs", "block:other", "operation:kv.get", "operation:nats.publish"]
TARGETS += [
    "operation:billing.charge",
    "connector:local_files",
    "connector:imap_mailbox",
    "connector:github_repository",
]

few = settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def asked(book: PolicyBook) -> list[tuple[str, str | None, Failure | None, ResolvedPolicy]]:
    """Every question of the tests below, with the book's answer."""
    questions: list[tuple[str, str | None]] = [(target, None) for target in TARGETS]
    questions += [(f"connector:{connector}", source) for source, connector in book.sources.items()]
    return [
        (target, source, failure, book.snapshot.resolve(target, failure, source=source))
        for target, source in questions
        for failure in FAILURES
    ]


def load_valid(configuration: dict[str, Any]) -> PolicyBook:
    """A book; connectors with a base of the built-in above a written cap are no valid configuration, and are mended."""
    for entry in configuration.get("retry_policies", {}).values():
        entry.setdefault("base_delay_seconds", 5)
    for source in configuration.get("sources", {}).values():
        source["retry"].setdefault("base_delay_seconds", 5)
    return PolicyBook.loads(json.dumps(configuration), format="json", name="r.json")


@few
@given(CONFIGURATIONS)
def test_a_book_loaded_dumped_and_loaded_again_is_the_same_book(configuration: dict[str, Any]) -> None:
    book = load_valid(configuration)

    again = PolicyBook.loads(book.dump())

    assert again.hash == book.hash
    assert again.dump() == book.dump()
    assert (again.targets, again.sources) == (book.targets, book.sources)
    for (_, _, _, one), (_, _, _, other) in zip(asked(book), asked(again), strict=True):
        assert one == other
        assert {name: (field.value, field.layer) for name, field in one.provenance.items()} == {
            name: (field.value, field.layer) for name, field in other.provenance.items()
        }


@few
@given(CONFIGURATIONS, CONFIGURATIONS)
def test_two_configurations_have_one_hash_only_when_they_say_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = load_valid(one), load_valid(other)

    if first.hash == second.hash:
        assert [policy for *_, policy in asked(first)] == [policy for *_, policy in asked(second)]


# ---- an independent reading of the layers ----------------------------------------------------------------------------


BLOCK_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", lambda value: value + 1),
    "base_delay": ("base_delay_ms", lambda value: value / 1000),
    "max_delay": ("max_delay_ms", lambda value: value / 1000),
    "jitter": ("jitter_type", str),
    "multiplier": ("exponential_base", float),
    "strategy": ("strategy", str),
}
BLOCK_BUILT_IN = {
    "max_attempts": 4,
    "base_delay": 0.1,
    "max_delay": 30.0,
    "jitter": "full",
    "multiplier": 2.0,
    "strategy": "exponential_backoff",
}


def walk_block(v2: Mapping[str, Any], target: str, failure: Failure | None) -> list[tuple[Layer, Mapping[str, Any]]]:
    """The places that may speak of a block, the nearest first, as C1 lists them."""
    family, own = target.removeprefix("block:").partition(".")[0], target.removeprefix("block:")
    blocks = [v2.get("block_policies", {}).get(name, {}) for name in dict.fromkeys([own, family])]
    walk: list[tuple[Layer, Mapping[str, Any]]] = []
    if failure is not None:
        for block in blocks:
            overrides = block.get("error_overrides", {})
            status = str(failure.http_status)
            if failure.http_status and failure.failure_type is FailureType.RATE_LIMITED and status not in overrides:
                status = "429"
            keys = [status] if failure.http_status else []
            walk += [
                (Layer.OVERRIDE, overrides.get(key, {}))
                for key in [*keys, failure.code.name, failure.failure_type.value]
            ]
    walk += [(Layer.TARGET, block) for block in blocks]
    if failure is not None:
        categories = v2.get("error_classification", {})
        walk.append((Layer.CATEGORY, categories.get(f"{failure.category.value}_errors", {})))
    walk.append((Layer.GLOBAL, v2.get("default_policy", {})))
    return walk


def is_retryable(v2: Mapping[str, Any], target: str, failure: Failure) -> bool:
    """B13, B4 and B5, spelled out without layers."""
    for layer, words in walk_block(v2, target, failure):
        if layer is Layer.OVERRIDE and "retryable" in words:
            return bool(words["retryable"])
    category = v2.get("error_classification", {}).get(f"{failure.category.value}_errors", {})
    said = category.get("retryable")
    code, status = failure.code, failure.http_status
    flag = said.get(code.name) if isinstance(said, dict) else said
    if flag is True and isinstance(said, bool) and code is ErrorCode.http_error:
        flag = "conditional"
    if flag is None:
        flag = "conditional" if code is ErrorCode.http_error else retryable_code(code)
    if flag != "conditional":
        return bool(flag)
    if status is None:
        return True
    if status == 403 and failure.failure_type is FailureType.RATE_LIMITED:
        status = 429
    rules = category.get("http_status_mapping", {}).get(f"{status // 100}xx", {})
    exceptions = rules.get("exceptions", {})
    if str(status) in exceptions:
        return bool(exceptions[str(status)])
    if status in (408, 429):
        return True
    return bool(rules.get("retryable", retryable_status(status)))


@few
@given(CONFIGURATIONS)
def test_the_layer_that_is_named_is_the_one_whose_value_won(configuration: dict[str, Any]) -> None:
    """Every block field, for every failure, against a walk by hand over what was written."""
    v2 = configuration.get("worker", {}).get("retries", {}).get("v2", {})
    for target, _, failure, policy in asked(load_valid(configuration)):
        if not target.startswith("block:"):
            continue
        walk = walk_block(v2, target, failure)
        for field, (word, meaning) in BLOCK_WORDS.items():
            spoken = [(layer, meaning(words[word])) for layer, words in walk if word in words]
            layer, value = spoken[0] if spoken else (Layer.BUILTIN, BLOCK_BUILT_IN[field])
            settled = policy.provenance[field]
            assert (getattr(policy, field), settled.value, settled.layer) == (value, value, layer)
            assert [one.layer for one in settled.overrode] == [*(one for one, _ in spoken[1:]), Layer.BUILTIN][
                : len(spoken)
            ]
        if failure is not None:
            never = policy.strategy == "no_retry"
            assert policy.retryable is (not never and is_retryable(v2, target, failure))


@few
@given(CONFIGURATIONS)
def test_connectors_and_sources_follow_the_written_words(configuration: dict[str, Any]) -> None:
    defaults: dict[str, dict[str, Any]] = {
        "local_files": {"max_attempts": 3, "base_delay_seconds": 30, "max_delay_seconds": 300},
        "obsidian_vault": {"max_attempts": 3, "base_delay_seconds": 30, "max_delay_seconds": 300},
        "imap_mailbox": {
            "max_attempts": 5,
            "base_delay_seconds": 120,
            "max_delay_seconds": 1800,
            "transient_max_attempts": 7,
            "rate_limit_delay_seconds": 600,
        },
        "github_repository": {
            "max_attempts": 5,
            "base_delay_seconds": 300,
            "max_delay_seconds": 3600,
            "rate_limit_delay_seconds": 900,
        },
    }
    book = load_valid(configuration)
    for target, source, failure, policy in asked(book):
        if not target.startswith("connector:"):
            continue
        name = target.removeprefix("connector:")
        entry = defaults[name] | configuration.get("retry_policies", {}).get(name, {})
        own = configuration.get("sources", {}).get(source, {}).get("retry", {}) if source else {}
        kind = None if failure is None else failure.failure_type
        retries, base = entry["max_attempts"], entry["base_delay_seconds"]
        if kind is FailureType.TRANSIENT:
            retries = entry.get("transient_max_attempts") or retries
        if kind is FailureType.RATE_LIMITED:
            base = entry.get("rate_limit_delay_seconds") or base
        retries, base = own.get("max_attempts", retries), own.get("base_delay_seconds", base)
        if kind is FailureType.TRANSIENT and "transient_max_attempts" in own:
            retries = own["transient_max_attempts"] or own.get("max_attempts", entry["max_attempts"])
        if kind is FailureType.RATE_LIMITED and "rate_limit_delay_seconds" in own:
            base = own["rate_limit_delay_seconds"] or own.get("base_delay_seconds", entry["base_delay_seconds"])
        cap = own.get("max_delay_seconds", entry["max_delay_seconds"])

        assert policy.retries == retries
        assert policy.base_delay == base
        assert policy.max_delay == (max(cap, base) if kind is FailureType.RATE_LIMITED else cap)
        if kind is FailureType.PERMANENT and policy.strategy != "no_retry":
            no_retry = own.get("permanent_failures_no_retry", entry.get("permanent_failures_no_retry", True))
            assert policy.retryable is not no_retry
