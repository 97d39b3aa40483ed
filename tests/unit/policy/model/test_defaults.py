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


def numbers(policy: RetryPolicy) -> tuple[object, ...]:
    return tuple(getattr(policy, name) for name in NUMBERS)


def limits(policy: RetryPolicy) -> tuple[object, ...]:
    return tuple(getattr(policy, name) for name in LIMITS)


def of_type(failure_type: FailureType) -> Failure:
    return Failure(ErrorCode.execution_failed, failure_type)


@for_each_row("block", ["block:http", "block:fs.blob_put", "block:sql", "block:billing.render"])
def test_a_block_has_the_global_default_only(block: str) -> None:
    policy = builtin_book().resolve(block)

    assert numbers(policy) == (4, 0.1, 30.0, 2.0, "full", 0.1)
    assert limits(policy) == (30.0, INF, 300.0)
    assert (policy.strategy, policy.retryable, policy.whole_seconds) == ("exponential_backoff", True, False)


def test_a_connector_that_nobody_spoke_of_gets_the_default_and_the_same_care() -> None:
    book = builtin_book()

    assert numbers(book.resolve("connector:rss_feed")) == (4, 60.0, 1800.0, 2.0, "proportional", 0.2)
    assert not book.resolve("connector:rss_feed", of_type(FailureType.PERMANENT)).retryable
    assert book.resolve("connector:rss_feed").provenance["base_delay"].source == "built-in: connector default"


def test_an_operation_that_nobody_spoke_of_gets_the_unlisted_row() -> None:
    policy = builtin_book().resolve("operation:billing.charge")

    assert numbers(policy) == (3, 1.0, 30.0, 2.0, "proportional", 0.1)
    assert policy.attempt_timeout == 30.0
    assert policy.provenance["attempt_timeout"].source == "built-in: operation default"


def test_only_connectors_and_operations_have_an_entry_for_the_rest() -> None:
    assert set(OTHERS) == {"connector", "operation"}
    assert set(BASE) == {"block", "connector", "operation"}


@pytest.mark.parametrize("target", ["connector:imap_mailbox", "connector:local_files", "connector:rss_feed"])
def test_a_permanent_failure_of_a_connector_is_not_retried_and_the_others_are(target: str) -> None:
    verdicts = {one: builtin_book().resolve(target, of_type(one)).retryable for one in FailureType}

    assert verdicts == {one: one is not FailureType.PERMANENT for one in FailureType}


def test_a_mailbox_gets_more_retries_for_passing_failures_and_waits_longer_for_a_limit() -> None:
    book, target = builtin_book(), "connector:imap_mailbox"

    assert [book.resolve(target, of_type(one)).retries for one in FailureType] == [7, 5, 5, 5]
    assert [book.resolve(target, of_type(one)).base_delay for one in FailureType] == [120.0, 600.0, 120.0, 120.0]


def test_a_connector_without_numbers_for_a_failure_type_says_nothing_about_it() -> None:
    entry = connector_entry("local_files")

    assert set(entry.overrides) == {FailureType.PERMANENT}
    assert set(connector_entry("imap_mailbox").overrides) == {
        *(FailureType.PERMANENT, FailureType.TRANSIENT, FailureType.RATE_LIMITED)
    }


def test_an_entry_is_called_what_it_is_for() -> None:
    assert connector_entry("rss_feed").policy["max_delay"].source == "built-in: connector rss_feed"
    assert connector_entry("rss_feed").policy["max_delay"].value == 1800.0
    assert operation_entry("operation:kv.get").policy["max_delay"].source == "built-in: operation kv.get"
    assert operation_entry("operation:kv.get").policy["max_delay"].value == 10.0
    assert operation_entry("operation:my.own").policy["max_attempts"].value == 3
    permanent = connector_entry("rss_feed").overrides[FailureType.PERMANENT]["retryable"]
    assert (permanent.value, permanent.source) == (False, "built-in: connector rss_feed")


def test_a_mailboxs_entry_in_full() -> None:
    def said(value: object) -> FieldValue:
        return FieldValue(value, Layer.BUILTIN, "built-in: connector imap_mailbox")

    entry = connector_entry("imap_mailbox")

    assert dict(entry.policy) == {
        "max_attempts": said(6),
        "base_delay": said(120.0),
        "max_delay": said(1800.0),
        "jitter_factor": said(0.3),
    }
    assert {condition: dict(fields) for condition, fields in entry.overrides.items()} == {
        FailureType.PERMANENT: {"retryable": said(False)},
        FailureType.TRANSIENT: {"max_attempts": said(8)},
        FailureType.RATE_LIMITED: {"base_delay": said(600.0)},
    }


@pytest.mark.parametrize("target", ["operation:nats.connect", "operation:a:b"])
def test_an_operations_entry_in_full(target: str) -> None:
    numbers = [5, 1.0, 30.0, 10.0] if target.endswith("connect") else [3, 1.0, 30.0, 30.0]
    names = ("max_attempts", "base_delay", "max_delay", "attempt_timeout")
    source = f"built-in: operation {target.removeprefix('operation:')}"

    assert dict(operation_entry(target).policy) == {
        name: FieldValue(number, Layer.BUILTIN, source) for name, number in zip(names, numbers, strict=True)
    }


@for_each_row("code", ErrorCode)
def test_the_flag_of_a_code_is_the_tables_but_for_http_errors(code: ErrorCode) -> None:
    assert builtin._flag(code) == ("conditional" if code is ErrorCode.http_error else retryable_code(code))


def test_the_targets_are_the_four_connectors_and_the_seventeen_operations() -> None:
    connectors = [target for target in TARGETS if target.startswith("connector:")]
    operations = [target for target in TARGETS if target.startswith("operation:")]

    assert connectors == [f"connector:{job_type.value}" for job_type in JobType]
    assert operations == [category.target for category in RetryCategory]
    assert len(TARGETS) == 21


@for_each_row("target", ["block:http", *TARGETS])
def test_every_field_of_every_target_is_said_by_the_builtin_layer(target: str) -> None:
    policy = builtin_book("a hash").resolve(target)

    assert set(SHOWN_FIELDS) <= set(policy.provenance)
    assert {field.layer for field in policy.provenance.values()} == {Layer.BUILTIN}
    assert all(field.source.startswith("built-in: ") for field in policy.provenance.values())
    assert (policy.target, policy.book_hash) == (target, "a hash")


def test_what_stands_beneath_an_entry_is_called_by_its_kind() -> None:
    book = builtin_book()

    sources = {kind: book.resolve(f"{kind}:x").provenance["strategy"].source for kind in BASE}
    assert sources == {
        "block": "built-in: worker default",
        "connector": "built-in: connector default",
        "operation": "built-in: operation default",
    }


@for_each_row("code", ErrorCode)
def test_a_code_is_retried_as_the_table_says(code: ErrorCode) -> None:
    policy = builtin_book().resolve("block:http", Failure(code, FailureType.UNKNOWN))

    assert policy.retryable is retryable_code(code)


def test_the_table_of_codes_leaves_http_errors_to_their_status() -> None:
    flags = {code: said for entry in CATEGORIES.values() for code, said in entry.codes.items()}

    assert set(CATEGORIES) == set(ErrorCategory)
    assert set(flags) == set(ErrorCode)
    assert [code for code, said in flags.items() if said.value == "conditional"] == [ErrorCode.http_error]
    assert {(said.layer, said.source) for said in flags.values()} == {(Layer.BUILTIN, "built-in: error codes")}
    assert all(code.category is category for category, entry in CATEGORIES.items() for code in entry.codes)


@for_each_row("status", [400, 401, 404, 407, 408, 409, 428, 429, 430, 499, 500, 501, 503, 505, 599])
def test_a_status_is_retried_as_the_table_says(status: int) -> None:
    failure = Failure(ErrorCode.http_error, FailureType.UNKNOWN, "", status)
    policy = builtin_book().resolve("block:http", failure)

    assert policy.retryable is retryable_status(status)
    assert policy.provenance["retryable"].source == "built-in: HTTP statuses"
    assert policy.provenance["retryable"].layer is Layer.BUILTIN


def test_of_the_statuses_only_5xx_and_two_exceptions_are_retried() -> None:
    hundreds = {hundred: said.value for hundred, said in STATUSES.hundreds.items()}
    assert hundreds == {1: False, 2: False, 3: False, 4: False, 5: True}
    assert {status: said.value for status, said in STATUSES.statuses.items()} == {408: True, 429: True}


def test_the_book_without_a_file_has_no_sources() -> None:
    book = builtin_book()

    assert book.hash == "builtin"
    assert book.sources == {}
    assert isinstance(book.resolve("block:http"), ResolvedPolicy)


# ---- the baseline ---------------------------------------------------------------------------------------------------


def test_the_baseline_waits_100_200_300_ms_and_knows_no_chance() -> None:
    policy = baseline()

    for draw in (0.0, 0.5, 0.99):
        assert [delay_before(k, policy, draw=draw) for k in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_baseline_has_three_retries_and_no_budget_for_all_of_them() -> None:
    policy = baseline()

    assert (policy.max_attempts, policy.time_budget, policy.attempt_timeout) == (4, INF, 30.0)
    assert (policy.strategy, policy.jitter, policy.retryable) == ("linear_backoff", "none", True)


def test_the_baseline_takes_the_count_the_timeout_and_the_veto_of_its_caller() -> None:
    policy = baseline(0, timeout=2.5, retryable=False)

    assert (policy.max_attempts, policy.attempt_timeout, policy.retryable) == (1, 2.5, False)


def test_the_baseline_grows_without_a_cap_of_its_own() -> None:
    assert baseline(1000).max_delay == LONGEST_WAIT
    assert delay_before(999, baseline(1000), draw=0.0) == pytest.approx(100.0)


def test_the_baseline_does_not_hear_a_hint() -> None:
    """Every failure is retried after 100 ms, however long the server asks it to stay away."""
    failure = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "busy", 503, 400.0)

    assert decide(baseline(), History(1), failure, 0.5) == Again(400.5)
    assert decide(baseline(), History(1), without_retry_after(failure), 0.5) == Again(0.1)


def test_the_baseline_sees_everything_else_of_a_failure() -> None:
    failure = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "busy", 503)

    assert without_retry_after(failure) is failure
    assert without_retry_after(Failure(ErrorCode.http_error, FailureType.TRANSIENT, "busy", 503, 9.0)) == failure


# ---- the spellings of operations -------------------------------------------------------------------------------------


def test_every_category_has_a_row() -> None:
    assert list(OPERATIONS) == list(RetryCategory)
    assert len(RetryCategory) == 17


def test_what_is_not_listed_gets_three_executions() -> None:
    assert tuple(UNLISTED) == (3, 1.0, 30.0, 30.0)


@pytest.mark.parametrize(
    ("category", "spelled"),
    [
        (RetryCategory.NATS_STREAM_CREATE, "nats.stream_create"),
        (RetryCategory.KV_GET, "kv.get"),
        (RetryCategory.REPLAY_PROCESSING, "replay.processing"),
    ],
)
def test_a_target_spells_the_group_and_then_the_rest(category: RetryCategory, spelled: str) -> None:
    assert category.spelled == spelled
    assert category.target == f"operation:{spelled}"


@for_each_row("category", RetryCategory)
@for_each_row("change", [str.lower, str.upper, str.title, str])
def test_every_spelling_in_any_case_is_the_category(category: RetryCategory, change: type[str]) -> None:
    for spelling in (category.value, category.name, category.spelled, f"RETRY_{category.name}"):
        assert RetryCategory(change(spelling)) is category
        assert operation_target(change(spelling)) == category.target


@pytest.mark.parametrize("name", ["PROCESSING", "VALIDATION"])
def test_the_value_that_says_replay_twice_is_kept_as_it_was_given(name: str) -> None:
    category = RetryCategory[f"REPLAY_{name}"]

    assert category.value == f"REPLAY_REPLAY_{name}"
    assert RetryCategory(f"RETRY_REPLAY_{name}") is category


@for_each_row("value", ["RETRY_NATS_CONECT", "", 7, None, ["RETRY_KV_GET"]])
def test_what_is_no_spelling_is_no_category(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a valid RetryCategory"):
        RetryCategory(value)


def test_a_name_of_ones_own_is_a_target_in_lower_case() -> None:
    assert operation_target("Billing.Charge") == "operation:billing.charge"


def test_a_book_shows_its_hash_and_not_its_layers() -> None:
    assert repr(builtin_book("0123456789abcdef")) == "<Book 0123456789ab>"


def own(target: str, **fields: Any) -> dict[str, Patch]:
    return {target: patch(Layer.STEP, "steps.py:7", fields)}


def test_a_block_brings_a_policy_of_its_own_beneath_what_a_file_says() -> None:
    book = builtin_book()
    target = "block:report.render"

    policy = book.with_blocks(own(target, time_budget=600.0, attempt_timeout=120.0, max_attempts=7)).resolve(target)

    assert (policy.time_budget, policy.attempt_timeout, policy.max_attempts) == (600.0, 120.0, 7)
    origin = policy.provenance["max_attempts"]
    assert (origin.layer, origin.source) == (Layer.STEP, "steps.py:7")
    assert book.resolve(target).time_budget == 30.0
    assert book.with_blocks({}) is book
    assert book.resolve("block:http.request").attempt_timeout == 10.0


def test_a_timedelta_is_seconds_where_a_step_gives_one() -> None:
    given: dict[str, Any] = {"base_delay": timedelta(seconds=3), "deadline": timedelta(minutes=2)}
    policy = RetryPolicy(**given)

    assert (policy.base_delay, policy.time_budget) == (3.0, 120.0)


def test_a_policy_names_what_its_step_set_also_where_a_request_passes_it_on() -> None:
    target = "block:report.render"
    book = builtin_book().with_blocks(own(target, time_budget=600.0, max_attempts=7))

    assert book.resolve(target, request=Request(time_budget=600.0)).set_by_step == {
        "time_budget": "steps.py:7",
        "max_attempts": "steps.py:7",
    }
    assert book.resolve(target, request=Request(time_budget=5.0, retries=1)).set_by_step == {}
    assert builtin_book().resolve(target).set_by_step == {}


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
    ("step", "request", "expected"),
    [
        ({"base_delay": 60.0}, NO_REQUEST, (60.0, 60.0)),  # above the built-in cap, which yields
        ({"max_delay": 0.05}, NO_REQUEST, (0.05, 0.05)),  # below the built-in delay, which yields
        ({"base_delay": 1.0, "max_delay": 2.0}, NO_REQUEST, (1.0, 2.0)),
        ({"max_delay": 0.5}, Request(base_delay=9.0), (0.5, 0.5)),  # a request obeys every cap
    ],
)
def test_of_a_steps_own_delay_and_the_other_layers_cap_the_lower_one_yields(
    step: dict[str, float], request: Request, expected: tuple[float, float]
) -> None:
    target = "block:report.render"

    policy = builtin_book().with_blocks(own(target, **step)).resolve(target, request=request)

    assert (policy.base_delay, policy.max_delay) == expected


@for_each_row(
    ("step", "written", "expected"),
    [
        ({"base_delay": 20.0}, {"max_delay": 10.0}, (10.0, 10.0)),
        ({"max_delay": 5.0}, {"base_delay": 10.0}, (10.0, 10.0)),
    ],
)
def test_what_a_file_says_of_a_step_beats_the_steps_own_delay_and_cap(
    step: dict[str, float], written: dict[str, float], expected: tuple[float, float]
) -> None:
    target = "block:report.render"
    entry = TargetEntry(patch(Layer.TARGET, "reefknot.yaml:3", written))
    book = structs.replace(builtin_book(), targets={target: (entry,)}, _cache={})

    policy = book.with_blocks(own(target, **step)).resolve(target)

    assert (policy.base_delay, policy.max_delay) == expected
