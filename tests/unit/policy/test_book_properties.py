"""What holds of every valid configuration: it survives being dumped, and the named layer is the one that won."""

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reefknot.core.classify import retryable_code, retryable_status
from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.policy.book import PolicyBook
from reefknot.policy.model.book import Layer, ResolvedPolicy

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
EXCEPTIONS = st.dictionaries(st.sampled_from(["404", "408", "425", "429"]), st.booleans(), max_size=3)
NETWORK = some_of(
    **BACKOFF,
    retryable=st.booleans() | some_of(network_error=st.booleans(), http_error=st.booleans() | st.just("conditional")),
    http_status_mapping=some_of(**{"4xx": some_of(retryable=st.booleans(), exceptions=EXCEPTIONS), "5xx": HUNDRED}),
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
TARGETS = [
    *("block:http", "block:http.request", "block:fs", "block:other", "operation:kv.get", "operation:nats.publish"),
    *("operation:billing.charge", "connector:local_files", "connector:imap_mailbox", "connector:github_repository"),
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


# ---- an independent reading of the layers ----------------------------------------------------------------------------


BLOCK_WORDS: dict[str, tuple[str, Any]] = {
    "max_attempts": ("max_attempts", lambda value: value + 1),
    "base_delay": ("base_delay_ms", lambda value: value / 1000),
    "max_delay": ("max_delay_ms", lambda value: value / 1000),
    "jitter": ("jitter_type", str),
    "multiplier": ("exponential_base", float),
    "strategy": ("strategy", str),
}
BLOCK_BUILT_IN = dict(zip(BLOCK_WORDS, (4, 0.1, 30.0, "full", 2.0, "exponential_backoff"), strict=True))


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
    files = {"max_attempts": 3, "base_delay_seconds": 30, "max_delay_seconds": 300}
    mail = {"max_attempts": 5, "base_delay_seconds": 120, "max_delay_seconds": 1800}
    hub = {"max_attempts": 5, "base_delay_seconds": 300, "max_delay_seconds": 3600, "rate_limit_delay_seconds": 900}
    defaults: dict[str, dict[str, Any]] = {
        "local_files": files,
        "obsidian_vault": files,
        "imap_mailbox": {**mail, "transient_max_attempts": 7, "rate_limit_delay_seconds": 600},
        "github_repository": hub,
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
