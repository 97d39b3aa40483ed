"""Three dialects, one book: what each word means, where it was written, and what means nothing."""

from importlib import metadata
from typing import Any, cast

import pytest

from reefknot.core.failure import ErrorCode
from reefknot.errors import ConfigurationError
from reefknot.policy.book import PolicyBook
from reefknot.policy.model.book import Layer
from reefknot.policy.reading.session import Problem
from tests.rows import for_each_row

V2 = "worker.retries.v2"


def v2(text: str) -> PolicyBook:
    """A book of what stands under `worker.retries.v2`, in one line."""
    return PolicyBook.loads(f"worker: {{retries: {{v2: {{{text}}}}}}}")


def problems(text: str) -> list[str]:
    """Path and message of every mistake."""
    with pytest.raises(ConfigurationError) as caught:
        PolicyBook.loads(text)
    return [f"{problem.path}: {problem.message}" for problem in cast(list[Problem], caught.value.problems)]


def v2_problems(text: str) -> list[str]:
    return [one.removeprefix(f"{V2}.") for one in problems(f"worker: {{retries: {{v2: {{{text}}}}}}}")]


# ---- the worker's dialect --------------------------------------------------------------------------------------------


WORKER_WORDS: list[tuple[str, object, str, object]] = [
    ("max_attempts", 0, "max_attempts", 1),
    ("max_attempts", 7, "max_attempts", 8),
    ("base_delay_ms", 250, "base_delay", 0.25),
    ("max_delay_ms", 1500, "max_delay", 1.5),
    ("jitter_type", "decorrelated", "jitter", "decorrelated"),
    ("jitter_factor", 0.4, "jitter_factor", 0.4),
    ("exponential_base", 3, "multiplier", 3.0),
    ("strategy", "fixed_delay", "strategy", "fixed_delay"),
    ("max_retry_after_ms", 5000, "max_retry_after", 5.0),
    ("timeout_ms", 45000, "time_budget", 45.0),
    ("attempt_timeout_ms", 1500, "attempt_timeout", 1.5),
]


@for_each_row(("word", "written", "field", "meant"), WORKER_WORDS)
def test_a_word_of_the_worker_means_the_same_at_every_level(
    word: str, written: object, field: str, meant: object
) -> None:
    said = f"{{{word}: {written}}}"
    books = {
        Layer.GLOBAL: v2(f"default_policy: {said}"),
        Layer.CATEGORY: v2(f"error_classification: {{network_errors: {said}}}"),
        Layer.TARGET: v2(f"block_policies: {{http: {said}}}"),
        Layer.OVERRIDE: v2(f"block_policies: {{http: {{error_overrides: {{'503': {said}}}}}}}"),
    }

    for layer, book in books.items():
        policy = book.resolve("block:http", http_status=503)
        assert getattr(policy, field) == meant
        assert (policy.provenance[field].layer, policy.provenance[field].value) == (layer, meant)


def test_every_word_of_the_worker_is_known_here() -> None:
    from reefknot.policy.dialects import BACKOFF_WORDS
    from reefknot.policy.schema import Backoff
    from reefknot.policy.sections import keys_of

    assert set(BACKOFF_WORDS) == set(keys_of(Backoff)) == {word for word, *_ in WORKER_WORDS}


def test_a_value_keeps_the_place_it_was_written_at_also_where_it_is_for_particular_failures() -> None:
    text = """\
worker:
  retries:
    v2:
      default_policy:
        max_attempts: 5
      block_policies:
        http:
          error_overrides:
            "404":
              retryable: true
retry_policies:
  imap_mailbox:
    transient_max_attempts: 2
    rate_limit_delay_seconds: 50
    permanent_failures_no_retry: false
"""
    book = PolicyBook.loads(text, name="r.yaml")

    def source(target: str, field: str, **failure: Any) -> str:
        return book.resolve(target, **failure).provenance[field].source

    mail = "connector:imap_mailbox"
    assert source("block:http", "max_attempts") == "r.yaml:5:9"
    assert source("block:http", "retryable", http_status=404) == "r.yaml:10:15"
    assert source(mail, "max_attempts", failure_type="transient") == "r.yaml:13:5"
    assert source(mail, "base_delay", failure_type="rate_limited") == "r.yaml:14:5"
    assert source(mail, "retryable", failure_type="permanent") == "r.yaml:15:5"


CONNECTOR_NULLS = "strategy max_attempts base_delay_seconds max_delay_seconds permanent_failures_no_retry jitter_factor"
OPERATION_NULLS = "max_attempts base_delay jitter_enabled retryable_exceptions"
NULLS = [
    *(
        (f"{V2}.{place}", word, "inherit it")
        for place in ("default_policy", "error_classification.system_errors", "block_policies.http")
        for word, *_ in WORKER_WORDS[1:]
        if word != "attempt_timeout_ms"  # null: no limit
    ),
    *(("retry_policies.imap_mailbox", word, "keep the connector's default") for word in CONNECTOR_NULLS.split()),
    *(("operations.KV_GET", word, "keep the operation's default") for word in OPERATION_NULLS.split()),
]


@for_each_row(("place", "word", "instead"), NULLS)
def test_null_is_no_value_for_most_words(place: str, word: str, instead: str) -> None:
    text = "null"
    for part in reversed(f"{place}.{word}".split(".")):
        text = f"{{{part}: {text}}}"

    assert problems(text) == [f"{place}.{word}: null is not a value here; leave the key out to {instead}"]


@for_each_row("key", ["429", "http_error", "HTTP_ERROR", "rate_limited", "Rate_Limited"])
def test_an_override_is_for_a_status_a_code_or_a_failure_type(key: str) -> None:
    book = v2(f"block_policies: {{http: {{error_overrides: {{'{key}': {{max_attempts: 9}}}}}}}}")

    assert book.resolve("block:http", code="http_error", http_status=429).retries == 9
    assert book.resolve("block:http", code="network_error").retries == 3


@for_each_row(
    ("key", "hint"),
    [
        *((key, "") for key in ("600", "99", "0429", "4291", "²²²", "٤٢٩", "none")),
        ("conection_timeout", "; did you mean 'connection_timeout'?"),
        ("rate-limited", "; did you mean 'rate_limited'?"),
    ],
)
def test_an_override_for_what_is_no_failure_is_a_mistake(key: str, hint: str) -> None:
    (problem,) = v2_problems(f"block_policies: {{http: {{error_overrides: {{'{key}': {{}}}}}}}}")

    assert f"{key!r} is not a failure; accepted: an HTTP status, or one of invalid_input, " in problem
    assert problem.endswith(f"unknown{hint}")


def test_the_same_failure_or_operation_given_twice_is_a_mistake() -> None:
    assert v2_problems("block_policies: {http: {error_overrides: {http_error: {}, HTTP_Error: {}}}}") == [
        "block_policies.http.error_overrides.HTTP_Error: the same failure is given twice; keep one of them"
    ]

    assert problems("operations: {NATS_PUBLISH: {}, nats.publish: {}}") == [
        "operations.\"nats.publish\": the same operation as 'NATS_PUBLISH'; keep one of them"
    ]


def test_an_override_may_set_retryable_for_its_own_code_or_status_only() -> None:
    book = v2(
        "block_policies: {http: {error_overrides:"
        " {'404': {retryable: true}, permission_denied: {retryable: true}, '503': {retryable: false}}}}"
    )

    found = book.resolve("block:http", http_status=404)
    assert (found.retryable, found.provenance["retryable"].layer) == (True, Layer.OVERRIDE)
    assert book.resolve("block:http", code="permission_denied").retryable
    for target, status in (("block:http", 503), ("block:http", 403), ("block:fs", 404)):
        assert not book.resolve(target, http_status=status).retryable


RETRYABLE = "block_policies: {{http: {{error_overrides: {{{}: {{retryable: {}}}}}}}}}"
CANCELLED = "error_classification: {{cancellation_errors: {{retryable: {}}}}}"
NEVER = ".retryable: cancellation is never retried; accepted: false"
TRANSIENT = "error_overrides.transient.retryable: only a code or a status may set it"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        *((RETRYABLE.format("transient", flag), TRANSIENT) for flag in ("true", "false")),
        (RETRYABLE.format("'404'", "null"), "404.retryable: null is not a value here; leave the key out to inherit it"),
        (RETRYABLE.format("cancelled_by_timeout", "true"), f"error_overrides.cancelled_by_timeout{NEVER}"),
        *((CANCELLED.format(flag), NEVER) for flag in ("true", "{cancelled_by_user: true}")),
    ],
)
def test_retryable_is_set_for_a_code_or_a_status_that_is_no_cancellation(text: str, mistake: str) -> None:
    (problem,) = v2_problems(text)

    assert problem.endswith(mistake)


def test_cancellation_may_be_spoken_of_and_a_yes_for_network_errors_still_asks_the_status() -> None:
    book = v2("error_classification: {cancellation_errors: {retryable: {cancelled_by_user: false}, max_attempts: 0}}")
    policy = book.resolve("block:http", code="cancelled_by_user")
    assert (policy.retryable, policy.max_attempts) == (False, 1)
    assert policy.provenance["retryable"].layer is Layer.CATEGORY

    yes = v2("error_classification: {network_errors: {retryable: true}}")
    no = v2("error_classification: {network_errors: {retryable: false}}")
    assert [yes.resolve("block:http", http_status=status).retryable for status in (404, 503)] == [False, True]
    assert [no.resolve("block:http", http_status=status).retryable for status in (404, 503)] == [False, False]


CODES = [code for code in ErrorCode if code.value // 1000 in (1, 2, 3, 4)]
FLAG = "retryable: accepted: true, false, or a mapping of error codes"
BOOLEAN = "retryable.network_error: accepted: true or false"
OF_NETWORK = "network_error, connection_timeout, http_error; did you mean 'network_error'?"
OF_SYSTEM = "unknown code 'network_error'; accepted: internal_error, system_overload; did you mean 'internal_error'?"


@for_each_row("code", CODES)
@for_each_row("flag", [True, False])
def test_one_flag_for_a_category_is_for_all_of_its_codes(code: ErrorCode, flag: bool) -> None:
    book = v2(f"error_classification: {{{code.category.value}_errors: {{retryable: {str(flag).lower()}}}}}")

    assert book.resolve("block:http", code=code).retryable is flag
    other = ErrorCode.system_overload if code.category.value != "system" else ErrorCode.network_error
    assert book.resolve("block:http", code=other).provenance["retryable"].layer is Layer.BUILTIN


@for_each_row("code", CODES)
def test_a_flag_for_one_code_is_for_that_code(code: ErrorCode) -> None:
    verdicts = {one: PolicyBook().resolve("block:x", code=one).retryable for one in CODES}
    flag = f"{{{code.name}: {str(not verdicts[code]).lower()}}}"
    book = v2(f"error_classification: {{{code.category.value}_errors: {{retryable: {flag}}}}}")

    assert {one for one in CODES if book.resolve("block:x", code=one).retryable is not verdicts[one]} == {code}


@for_each_row(
    ("category", "written", "message"),
    [
        *(("network", flag, FLAG) for flag in ("maybe", "null", "[http_error]")),
        ("network", "{http_error: maybe}", 'retryable.http_error: accepted: true or false, or "conditional"'),
        *(("network", f"{{network_error: {flag}}}", BOOLEAN) for flag in ("conditional", "1")),
        (
            "network",
            "{netwrk_error: true}",
            f"retryable.netwrk_error: unknown code 'netwrk_error'; accepted: {OF_NETWORK}",
        ),
        ("system", "{network_error: true}", f"retryable.network_error: {OF_SYSTEM}"),
    ],
)
def test_a_flag_that_means_nothing_is_a_mistake(category: str, written: str, message: str) -> None:
    (problem,) = v2_problems(f"error_classification: {{{category}_errors: {{retryable: {written}}}}}")

    assert problem == f"error_classification.{category}_errors.{message}"


def test_statuses_are_mapped_by_hundred_and_by_exception() -> None:
    book = v2(
        "error_classification: {network_errors: {http_status_mapping:"
        " {4xx: {exceptions: {'425': true, 408: false}}, 5xx: {retryable: true, exceptions: {501: false}}}}}"
    )

    verdicts = {
        status: book.resolve("block:http", http_status=status).retryable for status in (400, 408, 425, 429, 501, 503)
    }
    assert verdicts == {400: False, 408: False, 425: True, 429: True, 501: False, 503: True}
    settled = book.resolve("block:http", http_status=425).provenance["retryable"]
    assert (settled.layer, [one.layer for one in settled.overrode]) == (Layer.CATEGORY, [Layer.BUILTIN, Layer.BUILTIN])


@for_each_row("status", ["503", "4", "4xx", "²²²", "0404", "1e2"])
def test_an_exception_is_a_status_of_its_own_hundred(status: str) -> None:
    mapping = f"{{4xx: {{exceptions: {{'{status}': true}}}}}}"
    (problem,) = v2_problems(f"error_classification: {{network_errors: {{http_status_mapping: {mapping}}}}}")

    assert problem.endswith(": accepted: a status of 4xx, such as 408")


# ---- the connectors' dialect -----------------------------------------------------------------------------------------


@for_each_row(
    ("word", "written", "field", "meant"),
    [
        *(("strategy", "linear_backoff", "strategy", "linear_backoff"), ("max_attempts", 4, "max_attempts", 5)),
        *(("base_delay_seconds", 7, "base_delay", 7.0), ("max_delay_seconds", 2000, "max_delay", 2000.0)),
        *(("jitter_factor", 0, "jitter_factor", 0.0), ("backoff_multiplier", 3, "multiplier", 3.0)),
    ],
)
def test_a_word_of_a_connector_is_for_its_target_and_leaves_the_rest(
    word: str, written: object, field: str, meant: object
) -> None:
    book = PolicyBook.loads(f"retry_policies: {{imap_mailbox: {{{word}: {written}}}}}")
    policy, untouched = book.resolve("connector:imap_mailbox"), PolicyBook().resolve("connector:imap_mailbox")

    assert getattr(policy, field) == meant
    assert policy.provenance[field].layer is Layer.TARGET
    assert policy.replace(**{field: getattr(untouched, field)}) == untouched
    assert book.resolve("connector:github_repository") == PolicyBook().resolve("connector:github_repository")


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    for text in ("retry_policies: {imap_mailbx: {}}", "sources: {a: {connector: imap_mailbx}}"):
        (problem,) = problems(text)
        assert problem.endswith(
            ": unknown connector 'imap_mailbx'; accepted: local_files, obsidian_vault, imap_mailbox, github_repository,"
            " or a name of your own: 3 or more lower-case letters, digits and _; did you mean 'imap_mailbox'?"
        )


def test_a_connector_that_another_package_brings_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("rss_feed", "rss:Feed", "reefknot.connectors")

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        assert group == "reefknot.connectors"
        return [point]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    book = PolicyBook.loads(
        "retry_policies: {rss_feed: {max_attempts: 2}}\n"
        "sources: {news: {connector: rss_feed, retry: {jitter_factor: 1}}}"
    )

    nulls = PolicyBook.loads("retry_policies: {rss_feed: {transient_max_attempts: null, max_delay_seconds: 99}}")
    assert nulls.resolve("connector:rss_feed", failure_type="transient").retries == 3
    policy = book.resolve("connector:rss_feed", source="news")
    assert (policy.retries, policy.base_delay, policy.max_delay, policy.jitter_factor) == (2, 60.0, 1800.0, 1.0)
    assert not book.resolve("connector:rss_feed", failure_type="permanent").retryable


def test_a_source_speaks_its_connectors_dialect_on_a_layer_of_its_own() -> None:
    book = PolicyBook.loads(
        "sources:\n  inbox:\n    connector: imap_mailbox\n    host: mail.example\n"
        "    retry:\n      max_attempts: 2\n      transient_max_attempts: 4\n",
        name="r.yaml",
    )

    transient = book.resolve("connector:imap_mailbox", source="inbox", failure_type="transient").provenance
    other = book.resolve("connector:imap_mailbox", source="inbox").provenance
    assert (transient["max_attempts"].value, transient["max_attempts"].source) == (5, "r.yaml:7:7")
    assert (other["max_attempts"].value, other["max_attempts"].source) == (3, "r.yaml:6:7")
    assert transient["max_attempts"].layer is other["max_attempts"].layer is Layer.SOURCE
    assert dict(book.sources) == {"inbox": "imap_mailbox"}


# ---- the operations' dialect -----------------------------------------------------------------------------------------


@for_each_row(
    ("word", "written", "field", "meant"),
    [
        ("max_attempts", 7, "max_attempts", 7),
        ("base_delay", 2, "base_delay", 2.0),
        ("max_delay", 99, "max_delay", 99.0),
        ("backoff_multiplier", 3, "multiplier", 3.0),
        ("jitter_enabled", "false", "jitter", "none"),
        ("jitter_enabled", "true", "jitter", "proportional"),
        ("jitter_factor", 0.5, "jitter_factor", 0.5),
        ("retryable_exceptions", "[TimeoutError]", "retryable_exceptions", ("TimeoutError",)),
        ("non_retryable_exceptions", "[a.b.C]", "non_retryable_exceptions", ("a.b.C",)),
        ("timeout", 2, "attempt_timeout", 2.0),
        ("timeout", "null", "attempt_timeout", float("inf")),
    ],
)
def test_a_word_of_an_operation_is_for_its_target(word: str, written: object, field: str, meant: object) -> None:
    book = PolicyBook.loads(f"operations: {{NATS_PUBLISH: {{{word}: {written}}}}}")

    policy = book.resolve("operation:nats.publish")
    assert getattr(policy, field) == meant
    assert policy.provenance[field].layer is Layer.TARGET
    assert book.resolve("operation:nats.subscribe") == PolicyBook().resolve("operation:nats.subscribe")


@pytest.mark.parametrize("name", ["billing.charge", "kv.purge", "api.v2.orders_list"])
def test_a_dotted_name_is_an_operation_of_ones_own(name: str) -> None:
    policy = PolicyBook.loads(f"operations: {{{name}: {{max_attempts: 9}}}}").resolve(f"operation:{name}")

    assert (policy.max_attempts, policy.base_delay, policy.attempt_timeout) == (9, 1.0, 30.0)


TOO_LONG = f"{'x' * 40}.{'y' * 40}"


@for_each_row(
    ("name", "hint"),
    [
        *((name, "") for name in ("billing", "billing.", ".charge", "a..b", "bill ing.charge", TOO_LONG)),
        ("NATS_PUBLSH", "; did you mean 'NATS_PUBLISH'?"),
        ("nats.publsh", "; did you mean 'nats.publish'?"),
        ("kv.gett", "; did you mean 'kv.get'?"),
    ],
)
def test_what_is_no_operation_or_a_slip_of_one_is_refused(name: str, hint: str) -> None:
    (problem,) = problems(f"operations: {{'{name}': {{}}}}")

    assert "unknown operation " in problem
    assert problem.endswith(f"or a dotted name of your own such as billing.charge{hint}")

    (long,) = problems(f"operations: {{'{'x' * 5000}': {{}}}}")
    assert len(long) < 1000, "a very long name is not repeated in full"
