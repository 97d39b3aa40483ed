"""The built-in policies: blocks, connectors, operations, and the baseline."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from reefknot.core.backoff import delay_before
from reefknot.core.classify import classify, retryable_code, retryable_status
from reefknot.core.decide import Again, History, decide
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.policy import LONGEST_WAIT, RetryPolicy
from reefknot.policy.model import defaults as builtin
from reefknot.policy.model.book import (
    NO_REQUEST,
    SHOWN_FIELDS,
    FieldValue,
    Layer,
    Patch,
    Request,
    ResolvedPolicy,
    TargetEntry,
    patch,
)
from reefknot.policy.model.defaults import (
    BASE,
    CATEGORIES,
    OPERATIONS,
    OTHERS,
    STATUSES,
    TARGETS,
    UNLISTED,
    JobType,
    RetryCategory,
    baseline,
    builtin_book,
    connector_entry,
    operation_entry,
    operation_target,
    without_retry_after,
)
from tests.rows import for_each_row

INF = float("inf")
NUMBERS = ("max_attempts", "base_delay", "max_delay", "multiplier", "jitter", "jitter_factor")
LIMITS = ("time_budget", "attempt_timeout", "max_retry_after")


def of(policy: RetryPolicy, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(policy, name) for name in names)


def of_type(failure_type: FailureType) -> Failure:
    return Failure(ErrorCode.execution_failed, failure_type)


@for_each_row("block", ["block:http", "block:fs.blob_put", "block:sql", "block:billing.render"])
def test_a_block_has_the_global_default_only(block: str) -> None:
    policy = builtin_book().resolve(block)

    assert of(policy, NUMBERS) == (4, 0.1, 30.0, 2.0, "full", 0.1)
    assert of(policy, LIMITS) == (30.0, INF, 300.0)
    assert (policy.strategy, policy.retryable, policy.whole_seconds) == ("exponential_backoff", True, False)


def test_a_connector_or_an_operation_that_nothing_speaks_of_gets_the_default_of_its_kind() -> None:
    assert (set(OTHERS), set(BASE)) == ({"connector", "operation"}, {"block", "connector", "operation"})
    connector, operation = (
        builtin_book().resolve(target) for target in ("connector:rss_feed", "operation:billing.charge")
    )

    assert of(connector, NUMBERS) == (4, 60.0, 1800.0, 2.0, "proportional", 0.2)
    assert connector.provenance["base_delay"].source == "built-in: connector default"
    assert of(operation, NUMBERS) == (3, 1.0, 30.0, 2.0, "proportional", 0.1)
    assert operation.attempt_timeout == 30.0
    assert operation.provenance["attempt_timeout"].source == "built-in: operation default"


@for_each_row("target", ["connector:imap_mailbox", "connector:local_files", "connector:rss_feed"])
def test_a_permanent_failure_of_a_connector_is_not_retried_and_the_others_are(target: str) -> None:
    verdicts = {one: builtin_book().resolve(target, of_type(one)).retryable for one in FailureType}

    assert verdicts == {one: one is not FailureType.PERMANENT for one in FailureType}


def test_a_mailbox_gets_more_retries_for_passing_failures_and_waits_longer_for_a_limit() -> None:
    asked = [builtin_book().resolve("connector:imap_mailbox", of_type(one)) for one in FailureType]

    assert [(policy.retries, policy.base_delay) for policy in asked] == [(7, 120.0), (5, 600.0), (5, 120.0), (5, 120.0)]


def said_by(source: str, **fields: object) -> dict[str, FieldValue]:
    return {name: FieldValue(value, Layer.BUILTIN, f"built-in: {source}") for name, value in fields.items()}


@for_each_row(
    ("name", "fields", "overrides"),
    [
        ("rss_feed", {"max_delay": 1800.0}, {}),
        ("local_files", {}, {}),
        (
            "imap_mailbox",
            {"max_attempts": 6, "base_delay": 120.0, "max_delay": 1800.0, "jitter_factor": 0.3},
            {FailureType.TRANSIENT: {"max_attempts": 8}, FailureType.RATE_LIMITED: {"base_delay": 600.0}},
        ),
    ],
)
def test_a_connectors_entry_is_called_what_it_is_for_and_speaks_only_of_failures_it_has_numbers_for(
    name: str, fields: dict[str, Any], overrides: dict[Any, dict[str, Any]]
) -> None:
    entry, source = connector_entry(name), f"connector {name}"

    expected = said_by(source, **fields)
    assert {field: entry.policy[field] for field in expected} == expected
    assert name != "imap_mailbox" or dict(entry.policy) == expected
    assert {condition: dict(patch) for condition, patch in entry.overrides.items()} == {
        condition: said_by(source, **words)
        for condition, words in ({FailureType.PERMANENT: {"retryable": False}} | overrides).items()
    }


@for_each_row(
    ("name", "numbers"),
    [
        ("nats.connect", (5, 1.0, 30.0, 10.0)),
        ("kv.get", (3, 0.5, 10.0, 5.0)),
        *((name, (3, 1.0, 30.0, 30.0)) for name in ("a:b", "my.own")),
    ],
)
def test_an_operations_entry_in_full(name: str, numbers: tuple[float, ...]) -> None:
    names = ("max_attempts", "base_delay", "max_delay", "attempt_timeout")

    expected = said_by(f"operation {name}", **dict(zip(names, numbers, strict=True)))
    assert dict(operation_entry(f"operation:{name}").policy) == expected


@for_each_row("code", ErrorCode)
def test_the_flag_of_a_code_is_the_tables_but_for_http_errors(code: ErrorCode) -> None:
    assert builtin._flag(code) == ("conditional" if code is ErrorCode.http_error else retryable_code(code))


def test_the_targets_have_a_row_each_and_what_stands_beneath_is_called_by_its_kind() -> None:
    assert list(TARGETS) == [
        *(f"connector:{job_type.value}" for job_type in JobType),
        *(category.target for category in RetryCategory),
    ]
    assert (len(JobType), len(RetryCategory), list(OPERATIONS)) == (4, 17, list(RetryCategory))
    assert tuple(UNLISTED) == (3, 1.0, 30.0, 30.0)

    book = builtin_book()
    sources = {kind: book.resolve(f"{kind}:x").provenance["strategy"].source for kind in BASE}
    kinds = {"block": "worker", "connector": "connector", "operation": "operation"}
    assert sources == {kind: f"built-in: {name} default" for kind, name in kinds.items()}


@for_each_row("target", ["block:http", *TARGETS])
def test_every_field_of_every_target_is_said_by_the_builtin_layer(target: str) -> None:
    policy = builtin_book("a hash").resolve(target)

    assert set(SHOWN_FIELDS) <= set(policy.provenance)
    assert {field.layer for field in policy.provenance.values()} == {Layer.BUILTIN}
    assert all(field.source.startswith("built-in: ") for field in policy.provenance.values())
    assert (policy.target, policy.book_hash) == (target, "a hash")


@for_each_row("code", ErrorCode)
def test_a_code_is_retried_as_the_table_says(code: ErrorCode) -> None:
    policy = builtin_book().resolve("block:http", Failure(code, FailureType.UNKNOWN))

    assert policy.retryable is retryable_code(code)


@for_each_row("status", [400, 401, 404, 407, 408, 409, 428, 429, 430, 499, 500, 501, 503, 505, 599])
def test_a_status_is_retried_as_the_table_says(status: int) -> None:
    failure = Failure(ErrorCode.http_error, FailureType.UNKNOWN, "", status)
    policy = builtin_book().resolve("block:http", failure)

    assert policy.retryable is retryable_status(status)
    assert policy.provenance["retryable"].source == "built-in: HTTP statuses"
    assert policy.provenance["retryable"].layer is Layer.BUILTIN


def test_only_5xx_and_two_exceptions_are_retried_and_the_table_of_codes_leaves_http_errors_to_it() -> None:
    hundreds = {hundred: said.value for hundred, said in STATUSES.hundreds.items()}
    assert hundreds == {1: False, 2: False, 3: False, 4: False, 5: True}
    assert {status: said.value for status, said in STATUSES.statuses.items()} == {408: True, 429: True}

    flags = {code: said for entry in CATEGORIES.values() for code, said in entry.codes.items()}
    assert set(CATEGORIES) == set(ErrorCategory)
    assert set(flags) == set(ErrorCode)
    assert [code for code, said in flags.items() if said.value == "conditional"] == [ErrorCode.http_error]
    assert {(said.layer, said.source) for said in flags.values()} == {(Layer.BUILTIN, "built-in: error codes")}
    assert all(code.category is category for category, entry in CATEGORIES.items() for code in entry.codes)


def test_the_book_without_a_file_has_no_sources_and_shows_its_hash_and_not_its_layers() -> None:
    book = builtin_book()

    assert (book.hash, book.sources) == ("builtin", {})
    assert isinstance(book.resolve("block:http"), ResolvedPolicy)
    assert repr(builtin_book("0123456789abcdef")) == "<Book 0123456789ab>"


# ---- the baseline ---------------------------------------------------------------------------------------------------


def test_the_baseline_waits_100_200_300_ms_without_cap_or_budget_and_takes_what_its_caller_says() -> None:
    for draw in (0.0, 0.5, 0.99):
        assert [delay_before(k, baseline(), draw=draw) for k in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert baseline(1000).max_delay == LONGEST_WAIT
    assert delay_before(999, baseline(1000), draw=0.0) == pytest.approx(100.0)

    policy, asked = baseline(), baseline(0, timeout=2.5, retryable=False)
    assert (policy.max_attempts, policy.time_budget, policy.attempt_timeout) == (4, INF, 30.0)
    assert (policy.strategy, policy.jitter, policy.retryable) == ("linear_backoff", "none", True)
    assert (asked.max_attempts, asked.attempt_timeout, asked.retryable) == (1, 2.5, False)


def test_the_baseline_does_not_hear_a_hint_and_sees_everything_else_of_a_failure() -> None:
    """Every failure is retried after 100 ms, however long the server asks it to stay away."""
    plain = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "busy", 503)
    hinted = structs.replace(plain, retry_after=400.0)

    assert decide(baseline(), History(1), hinted, 0.5) == Again(400.5)
    assert decide(baseline(), History(1), without_retry_after(hinted), 0.5) == Again(0.1)
    assert without_retry_after(hinted) == plain
    assert without_retry_after(plain) is plain


# ---- the spellings of operations -------------------------------------------------------------------------------------


@for_each_row("category", RetryCategory)
@for_each_row("change", [str.lower, str.upper, str.title, str])
def test_every_spelling_in_any_case_is_the_category(category: RetryCategory, change: type[str]) -> None:
    for spelling in (category.value, category.name, category.spelled, f"RETRY_{category.name}"):
        assert RetryCategory(change(spelling)) is category
        assert operation_target(change(spelling)) == category.target == f"operation:{category.spelled}"


def test_a_category_spells_the_group_and_then_the_rest_and_keeps_the_value_that_says_replay_twice() -> None:
    assert RetryCategory.NATS_STREAM_CREATE.spelled == "nats.stream_create"
    assert RetryCategory.KV_GET.spelled == "kv.get"
    assert RetryCategory.REPLAY_PROCESSING.spelled == "replay.processing"
    for name in ("PROCESSING", "VALIDATION"):
        assert RetryCategory[f"REPLAY_{name}"].value == f"REPLAY_REPLAY_{name}"
    assert operation_target("Billing.Charge") == "operation:billing.charge", "a name of one's own, in lower case"


@for_each_row("value", ["RETRY_NATS_CONECT", "", 7, None, ["RETRY_KV_GET"]])
def test_what_is_no_spelling_is_no_category(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid RetryCategory"):
        RetryCategory(value)


def own(target: str, **fields: Any) -> dict[str, Patch]:
    return {target: patch(Layer.STEP, "steps.py:7", fields)}


def test_a_block_brings_a_policy_of_its_own_and_a_policy_names_what_its_step_set() -> None:
    book = builtin_book()
    target = "block:report.render"

    policy = book.with_blocks(own(target, time_budget=600.0, attempt_timeout=120.0, max_attempts=7)).resolve(target)

    assert (policy.time_budget, policy.attempt_timeout, policy.max_attempts) == (600.0, 120.0, 7)
    origin = policy.provenance["max_attempts"]
    assert (origin.layer, origin.source) == (Layer.STEP, "steps.py:7")
    assert book.resolve(target).time_budget == 30.0
    assert book.with_blocks({}) is book
    assert book.resolve("block:http.request").attempt_timeout == 10.0

    book = builtin_book().with_blocks(own(target, time_budget=600.0, max_attempts=7))
    step = {"time_budget": "steps.py:7", "max_attempts": "steps.py:7"}
    assert book.resolve(target, request=Request(time_budget=600.0)).set_by_step == step
    assert book.resolve(target, request=Request(time_budget=5.0, retries=1)).set_by_step == {}
    assert builtin_book().resolve(target).set_by_step == {}


def test_a_timedelta_is_seconds_where_a_step_gives_one() -> None:
    given: dict[str, Any] = {"base_delay": timedelta(seconds=3), "deadline": timedelta(minutes=2)}
    policy = RetryPolicy(**given)

    assert (policy.base_delay, policy.time_budget) == (3.0, 120.0)


def test_the_answer_of_a_step_about_a_failure_is_over_its_code_and_under_what_a_file_says_of_it() -> None:
    target, book = "block:report.render", builtin_book()
    bug, yes = classify("", code=ErrorCode.execution_failed), FieldValue(True, Layer.STEP, "steps.py:7")
    no = FieldValue(False, Layer.STEP, "steps.py:7")

    assert [book.resolve(target, bug, retryable=one).retryable for one in (None, yes, no)] == [False, True, False]
    assert book.resolve(target, bug, retryable=yes).set_by_step == {"retryable": "steps.py:7"}
    never = TargetEntry(overrides={bug.code: patch(Layer.OVERRIDE, "reefknot.yaml:3", {"retryable": False})})
    written = structs.replace(book, targets={target: (never,)}, _cache={})
    assert not written.resolve(target, bug, retryable=yes).retryable


@for_each_row(
    ("step", "written", "request", "expected"),
    [
        ({"base_delay": 60.0}, {}, NO_REQUEST, (60.0, 60.0)),  # above the built-in cap, which yields
        ({"max_delay": 0.05}, {}, NO_REQUEST, (0.05, 0.05)),  # below the built-in delay, which yields
        ({"base_delay": 1.0, "max_delay": 2.0}, {}, NO_REQUEST, (1.0, 2.0)),
        ({"max_delay": 0.5}, {}, Request(base_delay=9.0), (0.5, 0.5)),  # a request obeys every cap
        ({"base_delay": 20.0}, {"max_delay": 10.0}, NO_REQUEST, (10.0, 10.0)),  # what a file says of a step wins
        ({"max_delay": 5.0}, {"base_delay": 10.0}, NO_REQUEST, (10.0, 10.0)),
    ],
)
def test_of_a_steps_own_delay_and_the_other_layers_cap_the_lower_layer_yields(
    step: dict[str, float], written: dict[str, float], request: Request, expected: tuple[float, float]
) -> None:
    target, book = "block:report.render", builtin_book()
    if written:
        entry = TargetEntry(patch(Layer.TARGET, "reefknot.yaml:3", written))
        book = structs.replace(book, targets={target: (entry,)}, _cache={})

    policy = book.with_blocks(own(target, **step)).resolve(target, request=request)

    assert (policy.base_delay, policy.max_delay) == expected
