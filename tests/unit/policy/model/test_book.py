"""The policy book: which layer wins, and what it says about it."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from reefknot.core.failure import ErrorCategory, ErrorCode, Failure, FailureType
from reefknot.core.policy import FIELDS, Jitter, RetryPolicy, RetryStrategy
from reefknot.errors import ParameterError
from reefknot.policy.model import book as book_module
from reefknot.policy.model.book import (
    EMPTY_PATCH,
    MOST_BOOKS,
    NO_REQUEST,
    SHOWN_FIELDS,
    Book,
    BookHistory,
    CategoryEntry,
    FieldOrigin,
    FieldValue,
    Layer,
    Patch,
    Request,
    ResolvedPolicy,
    StatusRules,
    TargetEntry,
    families,
    fold_patches,
    kind_of,
    merge,
    patch,
)
from reefknot.policy.model.defaults import BASE, CATEGORIES, OTHERS, STATUSES, builtin_book
from tests.rows import for_each_row

HTTP_429 = Failure(ErrorCode.http_error, FailureType.RATE_LIMITED, "", 429)
HTTP_503 = Failure(ErrorCode.http_error, FailureType.TRANSIENT, "", 503)
TIMEOUT = Failure(ErrorCode.connection_timeout, FailureType.TRANSIENT)
DENIED = Failure(ErrorCode.permission_denied, FailureType.PERMANENT)


def of_http(status: int | None, failure_type: FailureType = FailureType.UNKNOWN) -> Failure:
    return Failure(ErrorCode.http_error, failure_type, "", status)


def of_type(failure_type: FailureType, code: ErrorCode = ErrorCode.none) -> Failure:
    return Failure(code, failure_type)


def said(layer: Layer, source: str = "file", **fields: Any) -> Patch:
    return patch(layer, source, fields)


def over(source: str = "file", **fields: Any) -> Patch:
    return patch(Layer.OVERRIDE, source, fields)


def entry(overrides: Mapping[Any, Patch] = {}, *, source: str = "file", **fields: Any) -> TargetEntry:
    """What a file says of one target: the fields of its policy, and its overrides."""
    return TargetEntry(patch(Layer.TARGET, source, fields), overrides)


NO_RULES = StatusRules()


def book_of(
    *,
    default: Patch = EMPTY_PATCH,
    categories: Mapping[ErrorCategory, CategoryEntry] = {},
    statuses: StatusRules = NO_RULES,
    targets: Mapping[str, TargetEntry] = {},
    sources: Mapping[str, tuple[str, TargetEntry]] = {},
) -> Book:
    """What is built in for the kinds of targets, and what a test says over it."""
    return Book(
        base={**BASE, "block": (*BASE["block"], default)},
        categories={
            category: (known, *([categories[category]] if category in categories else []))
            for category, known in CATEGORIES.items()
        },
        statuses=(STATUSES, statuses),
        targets={target: (one,) for target, one in targets.items()},
        others=OTHERS,
        sources=sources,
        hash="h",
    )


# ---- which layer wins -----------------------------------------------------------------------------------------------


def all_layers() -> Book:
    network = CategoryEntry(said(Layer.CATEGORY, max_attempts=12, base_delay=0.12, max_delay=112.0))
    return book_of(
        default=said(Layer.GLOBAL, max_attempts=11, base_delay=0.11, max_delay=111.0, multiplier=1.1),
        categories={ErrorCategory.NETWORK: network},
        targets={"block:http": entry({429: over(max_attempts=14)}, max_attempts=13, base_delay=0.13)},
    )


BENEATH_THE_OVERRIDE = [(13, Layer.TARGET), (12, Layer.CATEGORY), (11, Layer.GLOBAL), (4, Layer.BUILTIN)]


def test_the_nearer_layer_wins_knows_whom_it_overrode_and_is_heard_nowhere_else() -> None:
    settled = all_layers().resolve("block:http", HTTP_429, request=Request(retries=14)).provenance["max_attempts"]
    assert (settled.value, settled.layer) == (15, Layer.REQUEST)
    assert [(one.value, one.layer) for one in settled.overrode] == [(14, Layer.OVERRIDE), *BENEATH_THE_OVERRIDE]

    assert all_layers().resolve("block:fs", HTTP_429).provenance["max_attempts"].layer is Layer.CATEGORY
    for target in ("connector:imap_mailbox", "operation:kv.get"):
        policy = all_layers().resolve(target, TIMEOUT)
        assert {field.layer for field in policy.provenance.values()} == {Layer.BUILTIN}
        assert policy.retryable


@for_each_row(
    ("failure", "field", "value", "layer"),
    [
        (HTTP_429, "max_attempts", 14, Layer.OVERRIDE),
        (HTTP_503, "max_attempts", 13, Layer.TARGET),
        (HTTP_503, "base_delay", 0.13, Layer.TARGET),
        (HTTP_503, "max_delay", 112.0, Layer.CATEGORY),
        (DENIED, "max_delay", 111.0, Layer.GLOBAL),
        (None, "max_delay", 111.0, Layer.GLOBAL),
        (None, "multiplier", 1.1, Layer.GLOBAL),
        (None, "max_retry_after", 300.0, Layer.BUILTIN),
    ],
)
def test_a_field_comes_from_the_nearest_layer_that_speaks_of_it(
    failure: Failure | None, field: str, value: object, layer: Layer
) -> None:
    policy = all_layers().resolve("block:http", failure)

    assert getattr(policy, field) == value
    assert policy.provenance[field].layer is layer


def test_a_step_hears_its_family_and_then_its_own_name_and_only_blocks_have_families() -> None:
    family = entry(source="family", max_attempts=7, base_delay=0.7)
    book = book_of(targets={"block:http": family, "block:http.request": entry(source="own", max_attempts=8)})
    own = book.resolve("block:http.request").provenance
    assert (own["max_attempts"].source, own["base_delay"].source) == ("own", "family")
    asked = ("block:http", "block:http.head", "block:httpx")
    assert [book.resolve(target).max_attempts for target in asked] == [7, 7, 4]

    limited = entry({429: over(base_delay=1.0)})
    book = book_of(targets={"block:http": limited, "block:http.request": entry(base_delay=0.2)})
    waits = [book.resolve("block:http.request", failure).base_delay for failure in (HTTP_429, HTTP_503)]
    assert waits == [1.0, 0.2], "every override of a family stands above the policy of the step"

    assert list(families("block:http.request.v2")) == ["block:http", "block:http.request.v2"]
    for alone in ("block:http", "operation:kv.get"):
        assert list(families(alone)) == [alone]


def test_the_files_entry_stands_above_the_built_in_one_and_the_default_for_others_beneath_none() -> None:
    built_in = TargetEntry(said(Layer.BUILTIN, max_attempts=4, base_delay=1.0, max_delay=9.0))
    book = structs.replace(book_of(), targets={"connector:x": (built_in, entry(max_attempts=6))}, _cache={})
    policy = book.resolve("connector:x")
    assert (policy.max_attempts, policy.base_delay) == (6, 1.0)

    book = book_of(targets={"connector:x": entry(max_attempts=2, base_delay=5.0, max_delay=5.0)})
    permanent = of_type(FailureType.PERMANENT)
    assert [book.resolve(target, permanent).retryable for target in ("connector:x", "connector:y")] == [True, False]


# ---- overrides ------------------------------------------------------------------------------------------------------


BY_ALL = {
    FailureType.TRANSIENT: over("type", max_attempts=2, base_delay=0.2, multiplier=1.2),
    ErrorCode.http_error: over("code", max_attempts=3, base_delay=0.3),
    503: over("status", max_attempts=4),
}


def test_a_status_override_beats_a_code_override_which_beats_a_failure_type_override() -> None:
    book = book_of(targets={"block:http": entry(BY_ALL)})
    origins = book.resolve("block:http", HTTP_503).provenance

    sources = [origins[field].source for field in ("max_attempts", "base_delay", "multiplier")]
    assert sources == ["status", "code", "type"]
    assert [one.source for one in origins["max_attempts"].overrode[:2]] == ["code", "type"]
    asked = (TIMEOUT, HTTP_429, DENIED, None)
    built_in = "built-in: worker default"
    found = [book.resolve("block:http", one).provenance["max_attempts"].source for one in asked]
    assert found == ["type", "code", built_in, built_in], "an override is for its own failure only"


@for_each_row(
    ("overrides", "failure_type", "attempts", "retryable"),
    [
        ({429: 9}, FailureType.RATE_LIMITED, 9, True),
        ({429: 9}, FailureType.PERMANENT, 4, False),
        ({429: 9, 403: 8}, FailureType.RATE_LIMITED, 8, True),
    ],
)
def test_a_rate_limit_under_another_status_is_spoken_of_as_429_unless_its_own_is(
    overrides: Mapping[int, int], failure_type: FailureType, attempts: int, retryable: bool
) -> None:
    given = {status: over(max_attempts=number) for status, number in overrides.items()}
    policy = book_of(targets={"block:http": entry(given)}).resolve("block:http", of_http(403, failure_type))

    assert (policy.max_attempts, policy.retryable) == (attempts, retryable)


# ---- is it worth another try ----------------------------------------------------------------------------------------


def flags(**codes: object) -> CategoryEntry:
    return CategoryEntry(
        codes={ErrorCode[name]: FieldValue(value, Layer.CATEGORY, "file") for name, value in codes.items()}
    )


def rules(hundreds: Mapping[int, bool] = {}, statuses: Mapping[int, bool] = {}) -> StatusRules:
    return StatusRules(
        {key: FieldValue(value, Layer.CATEGORY, "file") for key, value in hundreds.items()},
        {key: FieldValue(value, Layer.CATEGORY, "file") for key, value in statuses.items()},
    )


def test_a_flag_of_a_category_makes_a_code_worth_another_try_or_vetoes_it_unless_an_override_lifts_it() -> None:
    book = book_of(categories={ErrorCategory.EXECUTION: flags(execution_failed=True)})
    policy = book.resolve("block:http", of_type(FailureType.UNKNOWN, ErrorCode.execution_failed))
    assert policy.retryable
    assert policy.provenance["retryable"].layer is Layer.CATEGORY
    assert not book.resolve("block:http", of_type(FailureType.UNKNOWN, ErrorCode.quota_exceeded)).retryable

    never = {ErrorCategory.NETWORK: flags(connection_timeout=False)}
    book = book_of(categories=never, targets={"block:http": entry(max_attempts=9)})
    policy = book.resolve("block:http", TIMEOUT, request=Request(retries=50))
    assert (policy.max_attempts, policy.retryable) == (51, False)
    book = book_of(targets={"block:http": entry({ErrorCode.permission_denied: over(retryable=True)})})
    assert [book.resolve(target, DENIED).retryable for target in ("block:http", "block:fs")] == [True, False]


@for_each_row(
    ("failure", "retryable", "source"),
    [
        (of_http(None, FailureType.TRANSIENT), True, "built-in: worker default"),  # no status means yes
        (HTTP_503, True, "built-in: HTTP statuses"),
        (of_http(404, FailureType.PERMANENT), False, "built-in: HTTP statuses"),
        (of_http(302), False, "built-in: HTTP statuses"),  # a redirect that is reported as a failure
        (of_http(777), True, "built-in: worker default"),  # no rule speaks of it
        (Failure(ErrorCode.network_error, FailureType.UNKNOWN, "", 404), True, "built-in: error codes"),
    ],
)
def test_a_status_says_whether_an_http_error_is_retried(failure: Failure, retryable: bool, source: str) -> None:
    settled = book_of().resolve("block:http", failure).provenance["retryable"]

    assert (settled.value, settled.source) == (retryable, source)


SOME_OF_EACH = {500: False, 503: True, 425: True, 424: False, 429: False, 408: True}


@for_each_row(
    ("code", "statuses", "expected"),
    [
        (None, rules({4: False}), {404: False, 408: True, 429: True}),  # the built-in exceptions stay
        (None, rules({5: False}, {503: True, 425: True, 429: False}), SOME_OF_EACH),
        (False, rules({5: True}), {503: False}),
        (True, NO_RULES, {404: True}),
    ],
)
def test_an_exception_beats_its_hundred_and_a_plain_flag_beats_both(
    code: bool | None, statuses: StatusRules, expected: Mapping[int, bool]
) -> None:
    categories = {} if code is None else {ErrorCategory.NETWORK: flags(http_error=code)}
    book = book_of(categories=categories, statuses=statuses)

    assert {status: book.resolve("block:http", of_http(status)).retryable for status in expected} == expected


def test_conditional_asks_the_status_once_and_a_strategy_that_never_retries_says_why() -> None:
    book = book_of(categories={ErrorCategory.NETWORK: flags(http_error="conditional")}, statuses=rules({5: False}))
    settled = book.resolve("block:http", HTTP_503).provenance["retryable"]
    assert settled.value is False
    assert [one.source for one in settled.overrode] == ["built-in: HTTP statuses", "built-in: worker default"]

    book = book_of(targets={"block:x": entry(source="there", strategy=RetryStrategy.NO_RETRY)})

    settled = book.resolve("block:x", TIMEOUT).provenance["retryable"]
    assert (settled.value, settled.layer, settled.source) == (False, Layer.TARGET, "there")
    assert settled.overrode == (
        FieldValue(True, Layer.BUILTIN, "built-in: error codes"),
        FieldValue(True, Layer.BUILTIN, "built-in: worker default"),
    )
    anyway = book.resolve("block:x", DENIED).provenance["retryable"]
    assert anyway.source == "built-in: error codes", "what is not retryable anyway keeps its reason"


def test_an_entry_that_is_silent_about_a_code_leaves_it_to_the_next() -> None:
    entries = (CategoryEntry(), flags(internal_error=True), flags(system_overload=False))
    book = structs.replace(builtin_book(), categories={ErrorCategory.SYSTEM: entries}, statuses=(), _cache={})
    codes = (ErrorCode.internal_error, ErrorCode.system_overload, ErrorCode.network_error)
    asked = [book.resolve("block:x", of_type(FailureType.UNKNOWN, code)).provenance["retryable"] for code in codes]
    assert [one.layer for one in asked] == [Layer.CATEGORY, Layer.CATEGORY, Layer.BUILTIN]


# ---- sources --------------------------------------------------------------------------------------------------------


def sourced() -> Book:
    mail = entry({FailureType.TRANSIENT: over(max_attempts=6)}, max_attempts=5, base_delay=10.0, max_delay=60.0)
    limited = said(Layer.SOURCE, max_attempts=8)
    inbox = TargetEntry(said(Layer.SOURCE, max_attempts=7), {FailureType.RATE_LIMITED: limited})
    return book_of(targets={"connector:mail": mail}, sources={"inbox": ("mail", inbox)})


@for_each_row(
    ("source", "failure_type", "request", "attempts"),
    [
        (None, FailureType.UNKNOWN, NO_REQUEST, 5),
        (None, FailureType.TRANSIENT, NO_REQUEST, 6),
        ("inbox", FailureType.UNKNOWN, NO_REQUEST, 7),
        ("inbox", FailureType.TRANSIENT, NO_REQUEST, 7),
        ("inbox", FailureType.RATE_LIMITED, NO_REQUEST, 8),
        ("inbox", FailureType.UNKNOWN, Request(retries=0), 1),
    ],
)
def test_a_source_stands_above_its_connectors_overrides_its_own_above_it_and_a_request_above_all(
    source: str | None, failure_type: FailureType, request: Request, attempts: int
) -> None:
    failure = of_type(failure_type, ErrorCode.execution_failed)

    assert sourced().resolve("connector:mail", failure, source=source, request=request).max_attempts == attempts


TWO_SOURCES = book_of(sources={"b": ("mail", entry()), "a": ("mail", entry())})


@for_each_row(
    ("book", "target", "source", "accepted"),
    [
        (sourced(), "connector:mail", "outbox", "a configured source: inbox"),
        (book_of(), "connector:mail", "inbox", "a configured source: none, because no source is configured"),
        (TWO_SOURCES, "connector:mail", "c", "a configured source: a, b"),
        (sourced(), "connector:web", "inbox", "a source of connector:web; this one belongs to connector:mail"),
    ],
)
def test_a_source_that_is_not_the_targets_is_refused_with_the_known_ones(
    book: Book, target: str, source: str, accepted: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        book.resolve(target, source=source)

    assert str(caught.value) == f"source={source!r} is not accepted: {accepted}"
    assert caught.value.parameter == "source"


# ---- the request ----------------------------------------------------------------------------------------------------


@for_each_row("retries", [0, 1, 3, 4, 99])
def test_a_request_overrides_the_count_up_and_down(retries: int) -> None:
    settled = book_of().resolve("block:http", TIMEOUT, request=Request(retries=retries)).provenance["max_attempts"]
    assert (settled.value, settled.layer, settled.source) == (retries + 1, Layer.REQUEST, "request")


def test_a_request_that_says_nothing_changes_nothing_and_its_base_delay_obeys_the_cap() -> None:
    assert Request().patch() == {}
    assert Request() == NO_REQUEST
    given = said(Layer.REQUEST, "request", max_attempts=1, base_delay=0.0, time_budget=0.5)
    assert Request(0, 0.0, 0.5).patch() == given

    policy = book_of().resolve("block:http", request=Request(base_delay=31.0))

    assert (policy.base_delay, policy.max_delay) == (30.0, 30.0)
    settled = policy.provenance["base_delay"]
    assert (settled.layer, settled.source) == (Layer.BUILTIN, "built-in: worker default")
    assert settled.overrode == (
        FieldValue(31.0, Layer.REQUEST, "request"),
        FieldValue(0.1, Layer.BUILTIN, "built-in: worker default"),
    )
    at_the_cap = book_of().resolve("block:http", request=Request(base_delay=30.0))
    assert (at_the_cap.base_delay, at_the_cap.provenance["base_delay"].layer) == (30.0, Layer.REQUEST)


# ---- base and cap together ------------------------------------------------------------------------------------------


@for_each_row(
    ("cap", "failure_type", "expected", "origin", "overrode"),
    [
        (60.0, FailureType.RATE_LIMITED, (600.0, 600.0), "limit", (FieldValue(60.0, Layer.TARGET, "cap"),)),
        (60.0, FailureType.TRANSIENT, (10.0, 60.0), "cap", ()),
        (600.0, FailureType.RATE_LIMITED, (600.0, 600.0), "cap", ()),
    ],
)
def test_a_rate_limits_own_delay_above_the_cap_is_the_cap_for_that_failure(
    cap: float, failure_type: FailureType, expected: tuple[float, float], origin: str, overrode: tuple[FieldValue, ...]
) -> None:
    limited = {FailureType.RATE_LIMITED: over("limit", base_delay=600.0)}
    mail = entry(limited, source="cap", max_attempts=4, base_delay=10.0, max_delay=cap)
    policy = book_of(targets={"connector:x": mail}).resolve("connector:x", of_type(failure_type))

    assert (policy.base_delay, policy.max_delay) == expected
    layer = Layer.OVERRIDE if origin == "limit" else Layer.TARGET
    assert policy.provenance["max_delay"] == FieldOrigin(expected[1], layer, origin, overrode)


@for_each_row(
    ("target", "failure"), [("block:x", HTTP_429), ("connector:x", TIMEOUT), ("connector:x", None), ("block:x", None)]
)
def test_elsewhere_a_base_above_its_cap_is_refused(target: str, failure: Failure | None) -> None:
    book = book_of(targets={target: entry(max_attempts=3, base_delay=61.0, max_delay=60.0)})

    with pytest.raises(ParameterError, match="at most max_delay, which is 60 s"):
        book.resolve(target, failure)
    assert book.origins(target, failure)["base_delay"].value == 61.0


# ---- targets --------------------------------------------------------------------------------------------------------


@for_each_row("target", ["http", "block", "block:", ":http", "step:http", "", "Block:http"])
def test_the_kind_stands_before_the_colon_and_what_has_none_is_refused(target: str) -> None:
    assert [kind_of(known) for known in ("block:http", "connector:x", "operation:a:b")] == list(BASE)
    with pytest.raises(ParameterError) as caught:
        book_of().resolve(target)
    accepted = "block:<type>, connector:<type> or operation:<name>"
    assert str(caught.value) == f"target={target!r} is not accepted: {accepted}"


# ---- snapshots ------------------------------------------------------------------------------------------------------


def test_the_same_question_gets_the_very_same_policy_and_every_part_of_it_is_heard() -> None:
    book = sourced()
    also = Failure(ErrorCode.connection_timeout, FailureType.TRANSIENT, "other words", retry_after=3.0)
    asked = [
        *(book.resolve("block:http", failure) for failure in (None, TIMEOUT, HTTP_429, HTTP_503)),
        book.resolve("block:http", request=Request(retries=1)),
        *(book.resolve("connector:mail", source=source) for source in (None, "inbox")),
        *(book.resolve("connector:mail", of_type(kind)) for kind in (FailureType.TRANSIENT, FailureType.RATE_LIMITED)),
    ]

    assert len({id(policy) for policy in asked}) == len(asked)
    assert book.resolve("block:http", TIMEOUT) is book.resolve("block:http", also) is asked[1]
    assert book.resolver("connector:mail", source="inbox")(of_type(FailureType.TRANSIENT)).max_attempts == 7
    assert book.resolver("connector:mail")(TIMEOUT).max_attempts == 6


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert book_module._CACHE == 4096
    monkeypatch.setattr(book_module, "_CACHE", 3)
    book = book_of()
    first = book.resolve("block:a")
    for name in "bc":
        book.resolve(f"block:{name}")
    assert book.resolve("block:a") is first

    book.resolve("block:d")

    assert book.resolve("block:a") is not first
    assert book.resolve("block:a") == first
    assert len(book._cache) == 2


def test_provenance_cannot_be_changed_and_survives_copying_and_pickling() -> None:
    policy = book_of().resolve("block:http")
    with pytest.raises(TypeError):
        policy.provenance["max_attempts"] = FieldOrigin(9, Layer.REQUEST, "me")  # type: ignore[index]
    with pytest.raises(AttributeError):
        policy.book_hash = "other"

    policy = all_layers().resolve("block:http", HTTP_429)
    for other in (copy.copy(policy), copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert other == policy
        assert other.provenance == policy.provenance
        assert (other.target, other.book_hash) == ("block:http", "h")


def test_what_a_caller_replaces_was_said_by_the_caller_and_is_checked_like_any() -> None:
    policy = all_layers().resolve("block:http", HTTP_503)
    changed = policy.replace(max_attempts=2, time_budget=None, backoff_multiplier=3.0, jitter_enabled=False)

    assert (changed.max_attempts, changed.time_budget) == (2, float("inf"))
    assert (changed.multiplier, changed.jitter) == (3.0, Jitter.NONE)
    settled = changed.provenance["max_attempts"]
    assert (settled.value, settled.layer, settled.source) == (2, Layer.REQUEST, "caller")
    assert [(one.value, one.layer) for one in settled.overrode] == BENEATH_THE_OVERRIDE
    assert {one.source for one in settled.overrode} == {"file", "built-in: worker default"}
    by_caller = {name for name, one in changed.provenance.items() if one.source == "caller"}
    assert by_caller == {"max_attempts", "time_budget", "multiplier", "jitter"}
    assert (changed.target, changed.book_hash) == ("block:http", "h")
    assert policy.max_attempts == 13

    named = ("builtins.ValueError",)
    changed = book_of().resolve("block:http").replace(non_retryable_exceptions=[ValueError])
    assert changed.non_retryable_exceptions == named
    assert changed.provenance["non_retryable_exceptions"] == FieldOrigin(named, Layer.REQUEST, "caller")
    with pytest.raises(ParameterError, match="at most max_delay"):
        book_of().resolve("block:http").replace(base_delay=31)


def test_tables_show_every_field_but_three_in_their_order_and_layers_have_a_rank() -> None:
    hidden = {"whole_seconds", "retryable_exceptions", "non_retryable_exceptions"}
    assert hidden < set(FIELDS)
    assert list(SHOWN_FIELDS) == [field for field in FIELDS if field not in hidden]

    ranked = " ".join(layer.value for layer in sorted(Layer, key=lambda layer: layer.rank))
    assert ranked == "builtin global category step target override source request"


def test_two_policies_of_the_same_values_are_equal_wherever_they_came_from() -> None:
    assert book_of().resolve("block:a") == book_of().resolve("block:b")
    assert isinstance(book_of().resolve("block:a"), RetryPolicy)
    assert ResolvedPolicy.__mro__[1] is RetryPolicy


# ---- an independent walk through the layers -------------------------------------------------------------------------


COUNTED = ("max_attempts", "multiplier", "max_retry_after")
NUMBERS = st.dictionaries(st.sampled_from(COUNTED), st.integers(1, 50), max_size=3)
CONDITIONS: st.SearchStrategy[Any] = st.sampled_from(
    [FailureType.TRANSIENT, FailureType.RATE_LIMITED, ErrorCode.http_error, ErrorCode.network_error, 429, 503]
)
CODES = st.sampled_from([ErrorCode.http_error, ErrorCode.network_error, ErrorCode.internal_error])
STATUS = st.sampled_from([None, 429, 503, 404])
FAILURES = st.none() | st.builds(Failure, CODES, st.sampled_from(FailureType), st.just(""), STATUS)


@given(NUMBERS, NUMBERS, NUMBERS, st.dictionaries(CONDITIONS, NUMBERS), FAILURES, st.none() | st.integers(0, 9))
def test_the_named_layer_is_the_one_whose_value_won(
    default: dict[str, int],
    category: dict[str, int],
    target: dict[str, int],
    overrides: dict[Any, dict[str, int]],
    failure: Failure | None,
    retries: int | None,
) -> None:
    """Against a walk by hand, from the request down: the first that speaks is the one."""
    conditions = {key: over(f"override {key}", **fields) for key, fields in overrides.items()}
    book = book_of(
        default=patch(Layer.GLOBAL, "global", default),
        categories={ErrorCategory.NETWORK: CategoryEntry(patch(Layer.CATEGORY, "category", category))},
        targets={"block:x": entry(conditions, source="target", **target)},
    )
    walk: list[tuple[str, Mapping[str, int]]] = []
    if retries is not None:
        walk.append(("request", {"max_attempts": retries + 1}))
    if failure is not None:
        status = failure.http_status
        if status is not None and status not in overrides and failure.failure_type is FailureType.RATE_LIMITED:
            status = 429
        keys = (status, failure.code, failure.failure_type)
        walk += [(f"override {key}", overrides.get(key, {})) for key in keys if key is not None]
    walk.append(("target", target))
    if failure is not None and failure.code is not ErrorCode.internal_error:
        walk.append(("category", category))
    built_in = {"max_attempts": 4, "multiplier": 2, "max_retry_after": 300}
    walk += [("global", default), ("built-in: worker default", built_in)]

    policy = book.resolve("block:x", failure, request=Request(retries=retries))

    for field in COUNTED:
        (source, value), *beneath = [(name, fields[field]) for name, fields in walk if field in fields]
        assert getattr(policy, field) == value
        assert (policy.provenance[field].value, policy.provenance[field].source) == (value, source)
        assert [one.source for one in policy.provenance[field].overrode] == [name for name, _ in beneath]


# ---- patches ---------------------------------------------------------------------------------------------------------


SOME_FIELDS = st.sampled_from(["max_attempts", "base_delay", "jitter"])
SPOKEN = st.dictionaries(SOME_FIELDS, st.integers(0, 9))
PLACES = st.sampled_from(["a.yaml:1", "b.yaml:2"])
PATCHES: st.SearchStrategy[Patch] = st.builds(patch, st.sampled_from(Layer), PLACES, SPOKEN)


@given(PATCHES, PATCHES, PATCHES)
def test_merging_is_associative_and_nothing_said_changes_nothing(a: Patch, b: Patch, c: Patch) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, EMPTY_PATCH) == a == merge(EMPTY_PATCH, a)


@given(st.lists(PATCHES, max_size=6))
def test_the_named_layer_is_always_the_one_whose_value_won(patches: list[Patch]) -> None:
    settled = fold_patches(patches)

    assert set(settled) == {field for one in patches for field in one}
    for field, winner in settled.items():
        speakers = [one[field] for one in patches if field in one]
        last = speakers[-1]
        assert winner == FieldOrigin(last.value, last.layer, last.source, tuple(reversed(speakers[:-1])))


def test_said_none_beats_said_something_and_what_was_said_cannot_be_changed_afterwards() -> None:
    fields: dict[str, Any] = {"time_budget": 30}
    lower, higher = patch(Layer.BUILTIN, "x", fields), said(Layer.TARGET, "y", time_budget=None)
    fields["time_budget"] = 9

    settled = fold_patches([lower, higher])["time_budget"]
    assert settled == FieldOrigin(None, Layer.TARGET, "y", (FieldValue(30, Layer.BUILTIN, "x"),))


def test_work_follows_the_book_it_began_under() -> None:
    books = [book_of() for _ in range(MOST_BOOKS + 2)]
    history = BookHistory(books[0])
    assert history.at(0) is books[0]
    for number, book in enumerate(books[1:], 1):
        history.add(book, since=number * 100)
    assert history.at(850) is books[8]
    assert history.at(100_000) is books[-1]
    assert history.at(0) is books[2], "older than all that are kept: the oldest one"
