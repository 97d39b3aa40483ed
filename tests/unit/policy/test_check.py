"""All mistakes at once, each with its place, what is accepted, and what was perhaps meant."""

import json
import re
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.errors import ConfigurationError, ParameterError
from reefknot.policy import check
from reefknot.policy.check import checked, retry_part
from reefknot.policy.layers import Tree, read_text
from reefknot.policy.model.book import content_hash
from reefknot.policy.model.defaults import OTHERS, TARGETS, builtin_book
from reefknot.policy.reading.session import Mark, Problem
from tests.rows import for_each_row

V2 = "worker.retries.v2"
QUEUE = "worker.queue.v2"
ATTEMPTS = f"{V2}.default_policy.max_attempts"


def mistakes(text: str, name: str = "reefknot.yaml") -> tuple[Problem, ...]:
    with pytest.raises(ConfigurationError) as caught:
        checked(read_text(text, name=name))
    return cast(tuple[Problem, ...], caught.value.problems)


def nested(path: str, value: str) -> str:
    for part in reversed(path.split(".")):
        value = f"{{{part}: {value}}}"
    return value


def mistake(path: str, value: str) -> str:
    """The one message that this value earns at this path."""
    (problem,) = mistakes(nested(path, value))
    assert problem.path == path
    return problem.message


def test_an_empty_configuration_is_the_built_in_book() -> None:
    configuration, book = checked(read_text(""))

    assert configuration.worker.retries.v2.enabled is None
    assert book.resolve("block:http") == builtin_book().resolve("block:http")


# ---- the wording -----------------------------------------------------------------------------------------------------


@for_each_row(
    ("path", "value", "message"),
    [
        (ATTEMPTS, "101", "101 is out of bounds; accepted: from 0 to 100"),
        (ATTEMPTS, "-1", "-1 is out of bounds; accepted: from 0 to 100"),
        *(
            (ATTEMPTS, given, f"{given} is not accepted; accepted: a whole number")
            for given in ("2.5", "3.0", "'3'", "true")
        ),
        (ATTEMPTS, "[3]", "a list is not accepted; accepted: a whole number"),
        (ATTEMPTS, "{a: 3}", "a mapping is not accepted; accepted: a whole number"),
        (f"{V2}.default_policy.base_delay_ms", "fast", "'fast' is not accepted; accepted: a number"),
        (f"{V2}.default_policy.base_delay_ms", "-1", "-1 is out of bounds; accepted: from 0 to 86400000"),
        (f"{V2}.default_policy.jitter_factor", "2", "2 is out of bounds; accepted: from 0 to 1"),
        (f"{V2}.enabled", "maybe", "'maybe' is not accepted; accepted: true or false"),
        (f"{V2}.enabled", "1", "1 is not accepted; accepted: true or false"),
        (f"{V2}.throttle.tokens", "0", "0 is out of bounds; accepted: from 1 to 1000000"),
        ("operations.KV_GET.timeout", "0", "0 is out of bounds; accepted: above 0 to 86400"),
        ("operations.KV_GET.retryable_exceptions", "TimeoutError", "'TimeoutError' is not accepted; accepted: a list"),
        ("retry_policies.imap_mailbox.max_attempts", "11", "11 is out of bounds; accepted: from 1 to 10"),
        ("retry_policies.imap_mailbox.rate_limit_delay_seconds", "0", "0 is out of bounds; accepted: from 1 to 7200"),
        ("engine", "3", "3 is not accepted; accepted: text"),
        ("engine", "[a]", "a list is not accepted; accepted: text"),
        (f"{QUEUE}.max_queue_size", "0", "0 is out of bounds; accepted: from 1 to 10000000"),
        (f"{QUEUE}.policies.defer.max_defer_time_ms", "-1", "-1 is out of bounds; accepted: from 0"),
        (f"{QUEUE}.overload_thresholds.degraded", "0", "0 is out of bounds; accepted: above 0 to 10"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_accepted(path: str, value: str, message: str) -> None:
    assert mistake(path, value) == message


JITTERS = "accepted: 'none', 'full', 'equal', 'proportional' or 'decorrelated'"
REJECTIONS = "accepted: 'reject_new', 'drop_oldest', 'defer' or 'degrade'"
THROTTLE = "unknown key; accepted: enabled, per_second, per_success, tokens"
MAPPING = f"{V2}.error_classification.network_errors.http_status_mapping"


@for_each_row(
    ("path", "value", "message"),
    [
        (f"{V2}.default_policy.jitter_type", "Full", f"'Full' is not accepted; {JITTERS}; did you mean 'full'?"),
        (f"{V2}.default_policy.jitter_type", "7", f"7 is not accepted; {JITTERS}"),
        (f"{QUEUE}.rejection_policy", "drop_o", f"'drop_o' is not accepted; {REJECTIONS}; did you mean 'drop_oldest'?"),
        (f"{MAPPING}.3xx", "{retryable: true}", "unknown key; accepted: '4xx' or '5xx'; did you mean '5xx'?"),
        (f"{V2}.throttle.token", "1", f"{THROTTLE}; did you mean 'tokens'?"),
        (f"{V2}.throttle.zzz", "1", THROTTLE),
        ("worker.retries.v3", "{}", "unknown key; accepted: v2"),
        ("sources.inbox.connector", "3", "3 is not accepted; accepted: text"),
    ],
)
def test_a_wrong_word_is_shown_with_those_that_are_accepted(path: str, value: str, message: str) -> None:
    assert mistake(path, value) == message


SOURCE = "connector, cron, every, max_concurrency, missed, on_change, page_size, retry, time_zone, timeout_seconds"


@for_each_row("value", ["null", "3", "[1, 2]", "text", "true"])
@for_each_row(
    ("path", "keys"),
    [
        ("worker", " of default_timeout_ms, quarantine_failed, queue, retention_seconds, retries"),
        ("worker.retries", " of v2"),
        (f"{V2}.throttle", " of enabled, per_second, per_success, tokens"),
        (f"{QUEUE}.resource_pools.cpu", " of max_concurrency, max_queue_size"),
        ("sources.inbox", f" of {SOURCE}"),
        ("sources", ""),
        ("retry_policies", ""),
        (f"{V2}.block_policies", ""),
        ("audit", " of heads, jsonl, log, max_buffered, on_failure, retention_seconds"),
        ("secrets", ""),
    ],
)
def test_where_a_mapping_belongs_nothing_else_is_accepted(path: str, keys: str, value: str) -> None:
    shown = {"[1, 2]": "a list", "text": "'text'"}.get(value, value)

    assert mistake(path, value) == f"{shown} is not accepted; accepted: a mapping{keys}, or no such key at all"


def test_what_must_be_given_is_asked_for_and_a_mistake_inside_a_list_has_its_own_place() -> None:
    (problem,) = mistakes("sources:\n  inbox:\n    retry: {max_attempts: 2}\n")
    assert str(problem) == "reefknot.yaml:2:3: sources.inbox.connector: missing; it must be given"

    text = "operations:\n  KV_GET:\n    retryable_exceptions:\n      - TimeoutError\n      - 7\n      - ''\n"
    listed = "operations.KV_GET.retryable_exceptions"
    assert [str(problem) for problem in mistakes(text)] == [
        f"reefknot.yaml:5:9: {listed}[1]: 7 is not accepted; accepted: text",
        f"reefknot.yaml:6:9: {listed}[2]: '' is not accepted; accepted: text that is not empty",
    ]


@for_each_row("value", ["hunter2", "'env:'", "'environment:X'", "12345678", "[hunter2]", "{a: hunter2}", "true"])
def test_what_stands_where_a_secret_belongs_is_never_shown(value: str) -> None:
    message = mistake("secrets.token", value)

    assert message == "what is written here is not accepted; accepted: a reference, env:NAME or file:PATH"
    configuration, _ = checked(read_text("secrets: {mail: 'env:MAIL', key: 'file:key.txt'}"))
    assert configuration.secrets == {"mail": "env:MAIL", "key": "file:key.txt"}


NO_FILE = "the path of a file is missing|two slashes begin with a host|a store in memory is memory:$"


@for_each_row(
    ("url", "says"),
    [
        *((url, "' is not accepted; accepted: sqlite") for url in ("redis://ann:hunter2@cache", "nats", "state.db")),
        *((url, "' is not accepted; accepted: sqlite") for url in ("redis://cache", "", "memory:x")),
        *((url, NO_FILE) for url in ("sqlite:", "sqlite://", "sqlite:///", "sqlite://a.db")),
        *((url, f"(?:{NO_FILE[:-1]}).*accepted") for url in ("sqlite::memory:", "sqlite:///:memory:")),
        *((url, " is not accepted; a store on NATS is nats://HOST:PORT") for url in ("nats://", "nats:host")),
        *((url, " is not accepted; a store on NATS") for url in ("tls://ann:hunter2@cluster:0", "nats://host/a.b")),
    ],
)
def test_an_engine_that_names_no_store_is_a_mistake_that_says_why_without_its_password(url: str, says: str) -> None:
    message = mistake("engine", f"'{url}'")

    assert message.endswith("; accepted: sqlite:PATH, nats://HOST:PORT or memory:")
    assert re.search(says, message)
    assert "hunter2" not in message
    for path in ("state.db", "/var/state.db", "///state.db", "////var/state.db", "~/state.db"):
        checked(read_text(f"engine: sqlite:{path}"))
    checked(read_text("engine: 'memory:'"))


def test_a_long_value_is_cut_and_a_policy_that_makes_no_sense_otherwise_is_told_in_its_own_words() -> None:
    (long,) = mistakes(f"engine: ['{'x' * 50}']\nworker: {{retries: {{v2: {{enabled: '{'y' * 500}'}}}}}}\n")[1:]
    assert len(long.message) < 120
    (steering,) = mistakes('worker: {retries: {v2: {enabled: "\\e[31mred"}}}')
    assert "\x1b" not in str(steering)

    tree = Tree({}, {(): Mark("nowhere")})
    book = builtin_book()
    problem = check._located(tree, book, "block:x", None, None, ParameterError("max_attempts", 0, "1 or more"))
    assert str(problem) == "nowhere: block:x: max_attempts=0 is not accepted: 1 or more"


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_mistakes_of_every_kind_come_together_in_the_order_of_the_file() -> None:
    text = """\
worker:
  retries:
    v2:
      default_policy: {max_attempts: many}
      block_policies:
        http: {error_overrides: {"999": {}}}
retry_policies: [local_files]
operations: {KV_GTE: {}}
"""

    assert [(problem.mark.line, problem.path) for problem in mistakes(text)] == [
        (4, f"{V2}.default_policy.max_attempts"),
        (6, f"{V2}.block_policies.http.error_overrides.999"),
        (7, "retry_policies"),
        (8, "operations.KV_GTE"),
    ]

    text = "operations: {KV_GTE: {}}\nworker: {retries: {v2: {zzz: 1}}}\nengine: 3\naudit: 4\n"
    assert [problem.mark.line for problem in mistakes(text)] == [1, 2, 3, 4]


@for_each_row(
    "text",
    [
        'worker: {retries: {v2: {block_policies: {"[key]": {max_attempts: x}}}}}',
        'worker: {retries: {v2: {block_policies: {"[key]": 3}}}}',
        'worker: {retries: {v2: {error_classification: {network_errors: {http_status_mapping: {"[key]": 3}}}}}}',
        'worker: {retries: {v2: {error_classification: {network_errors: {http_status_mapping: {"[key]": {}}}}}}}',
        'retry_policies: {"0": 3}',
    ],
)
def test_a_key_that_looks_like_a_checkers_own_word_is_a_key(text: str) -> None:
    """Cut out by the wrong path, a mistake would stay and be found for ever."""
    for problem in mistakes(text):
        assert "[key]" in problem.path or "0" in problem.path


TEN = {
    17: ("        base_dealy_ms: 200", "did you mean 'base_delay_ms'?"),
    38: ("        max_attempts: lots", "accepted: a whole number"),
    61: ("        jitter_type: fulll", "did you mean 'full'?"),
    92: ("        max_attempts: 1000", "accepted: from 0 to 100"),
    117: ("        max_delay_ms: null", "null is not a value here"),
    143: ("        base_delay_ms: 31000", "the base delay of 31 s is above the cap of 30 s"),
    170: ('        error_overrides: {"799": {}}', "is not a failure"),
    204: ("        error_overrides: {transient: {retryable: true}}", "only a code or a status may set it"),
    251: ("        error_overrides: [429]", "a list is not accepted; accepted: a mapping"),
    298: ("        strategy: 7", "'no_retry'"),
}


def long_file(wrong: dict[int, tuple[str, str]]) -> str:
    """300 lines: in the place of two of them, a block with a line that a test says."""
    lines = ["worker:", "  retries:", "    v2:", "      block_policies:", *["      # nothing"] * 296]
    for number, (written, _) in wrong.items():
        lines[number - 2 : number] = [f"       b{number - 1}:", written]
    return "\n".join(lines) + "\n"


def test_ten_mistakes_of_ten_kinds_in_300_lines_are_told_together_each_with_its_line() -> None:
    text = long_file(TEN)
    assert text.count("\n") == 300

    found = mistakes(text)

    assert [problem.mark.line for problem in found] == list(TEN)
    for problem, (written, expected) in zip(found, TEN.values(), strict=True):
        assert expected in problem.message
        assert problem.mark.source == "reefknot.yaml"
        assert problem.mark.column is not None
        assert problem.mark.column > len(written) - len(written.lstrip())


@pytest.mark.parametrize("line", [6, 150, 299])
def test_a_typo_in_300_lines_is_found_with_its_line_and_a_suggestion(line: int) -> None:
    (problem,) = mistakes(long_file({line: ("        max_atempts: 3", "")}))

    assert problem.mark == Mark("reefknot.yaml", line, 9)
    assert problem.path == f"{V2}.block_policies.b{line - 1}.max_atempts"
    assert problem.message.endswith("; did you mean 'max_attempts'?")
    checked(read_text(long_file({line: ("        max_attempts: 3", "")})))  # the control


# ---- what only shows when things are put together --------------------------------------------------------------------


@for_each_row(
    ("steps", "shown"),
    [
        *(("{degraded: 0.9}", "0.9, 0.8, 1"), ("{overloaded: 0.5}", "0.5, 0.5, 1")),
        *(("{critical: 0.8}", "0.5, 0.8, 0.8"), ("{degraded: 3, overloaded: 2, critical: 1}", "3, 2, 1")),
    ],
)
def test_thresholds_have_to_ascend(steps: str, shown: str) -> None:
    path = f"{QUEUE}.overload_thresholds"
    assert mistake(path, steps) == f"{shown} do not ascend; accepted: degraded < overloaded < critical"
    checked(read_text(nested(path, "{degraded: 0.1, overloaded: 0.2, critical: 0.3}")))


def test_the_named_rejection_policy_cannot_be_disabled_and_the_others_can() -> None:
    (problem,) = mistakes(nested(QUEUE, "{rejection_policy: defer, policies: {defer: {enabled: false}}}"))
    assert problem.path == f"{QUEUE}.policies.defer.enabled"
    assert problem.message == "rejection_policy names 'defer', so it cannot be disabled; accepted: true"
    for policies in ("defer: {enabled: true}", "degrade: {enabled: false}", "defer: {max_defer_time_ms: 5}"):
        checked(read_text(nested(QUEUE, f"{{rejection_policy: defer, policies: {{{policies}}}}}")))
    checked(read_text(nested(QUEUE, "{policies: {reject_new: {enabled: false}}}")))


TWO_OVERRIDES = "{transient: {\n base_delay_ms: 20000},\n connection_timeout: {\n max_delay_ms: 5000}}"
OF_THE_FAMILY = "{http: {max_delay_ms: 5000}, http.request: {\n base_delay_ms: 6000}}"
CONTRADICTIONS: list[tuple[str, str]] = [
    *(
        (f"worker: {{retries: {{v2: {{{text}}}}}}}", target)
        for text, target in [
            ("default_policy: {\n base_delay_ms: 31000}", "any block"),
            ("default_policy: {\n max_delay_ms: 50}", "any block"),
            ("error_classification: {system_errors: {\n base_delay_ms: 31000}}", "any block"),
            ("block_policies: {http: {\n base_delay_ms: 31000}}", "block:http"),
            ("block_policies: {http: {error_overrides: {'503': {\n max_delay_ms: 5}}}}", "block:http"),
            (f"block_policies: {{http: {{error_overrides: {TWO_OVERRIDES}}}}}", "block:http"),
            (f"block_policies: {OF_THE_FAMILY}", "block:http.request"),
        ]
    ),
    ("retry_policies: {local_files: {\n base_delay_seconds: 301}}", "connector:local_files"),
    ("sources: {a: {connector: local_files, retry: {\n max_delay_seconds: 29}}}", "connector:local_files"),
    ("operations: {KV_GET: {\n max_delay: 0.4}}", "operation:kv.get"),
    ("operations: {billing.charge: {\n base_delay: 31}}", "operation:billing.charge"),
]


@for_each_row(("text", "target"), CONTRADICTIONS)
def test_a_base_delay_above_its_cap_is_found_on_the_resolved_policy(text: str, target: str) -> None:
    (problem,) = mistakes(text)

    assert problem.mark.line == 2
    assert problem.path.endswith(("base_delay_ms", "max_delay_ms", "_seconds", "base_delay", "max_delay"))
    assert problem.message.startswith(f"for {target}, the base delay of ")
    assert problem.message.endswith("; accepted: base at most the cap")


def test_a_contradiction_between_two_written_lines_blames_the_nearer_layer() -> None:
    default, block = "default_policy: {base_delay_ms: 5000}", "block_policies: {http: {\n max_delay_ms: 1000}}"
    (problem,) = mistakes(f"worker: {{retries: {{v2: {{{default}, {block}}}}}}}")

    assert (problem.mark.line, problem.path) == (2, f"{V2}.block_policies.http.max_delay_ms")
    assert "the base delay of 5 s is above the cap of 1 s" in problem.message


@for_each_row(
    "text",
    [
        "retry_policies: {imap_mailbox: {max_delay_seconds: 300, rate_limit_delay_seconds: 900}}",
        "worker: {retries: {v2: {default_policy: {base_delay_ms: 31000, max_delay_ms: 31000}}}}",
        "worker: {retries: {v2: {block_policies: {http: {base_delay_ms: 31000, max_delay_ms: 40000}}}}}",
    ],
)
def test_a_base_delay_up_to_its_cap_is_accepted(text: str) -> None:
    checked(read_text(text))


@for_each_row("target", ["block:x", *TARGETS, *(f"{kind}:x" for kind in OTHERS)])
def test_everything_built_in_makes_sense_for_every_failure(target: str) -> None:
    """Checking leaves out what nobody spoke of; this holds that it may."""
    book = builtin_book()
    for code in ErrorCode:
        for failure_type in FailureType:
            for status in (None, 403, 429, 503):
                book.resolve(target, Failure(code, failure_type, "", status))


# ---- the hash --------------------------------------------------------------------------------------------------------


def hash_of(text: str) -> str:
    return checked(read_text(text))[1].hash


def test_the_hash_stands_for_the_policies_and_for_nothing_else() -> None:
    written = "operations: {KV_GET: {max_attempts: 2, base_delay: 1}}"
    plain = hash_of(written)
    assert plain == hash_of("# a comment\noperations:\n  KV_GET:\n    base_delay: 1\n    max_attempts: 2\n")
    assert plain == hash_of(f"{written}\nengine: 'memory:'\naudit: {{log: true}}")
    assert plain == hash_of(f"{written}\nworker: {{retries: {{v2: {{enabled: true}}}}}}")
    assert plain != hash_of(written.replace("2", "3"))
    assert plain != hash_of(written.replace("KV_GET", "KV_PUT"))
    source = "sources: {a: {connector: local_files, folder: x}}"
    assert hash_of(source) == hash_of(source.replace("folder: x", "folder: y")), "a source's own settings are not in it"


@for_each_row(
    "text",
    [
        *(
            f"worker: {{retries: {{v2: {{{said}}}}}}}"
            for said in ("default_policy: {max_attempts: 1}", "throttle: {tokens: 5}")
        ),
        "retry_policies: {local_files: {max_attempts: 1}}",
        *(f"sources: {{a: {{connector: local_files{more}}}}}" for more in ("", ", retry: {max_attempts: 1}")),
    ],
)
def test_every_part_that_says_something_of_retries_is_in_the_hash(text: str) -> None:
    assert hash_of(text) != content_hash(retry_part({}))


# ---- never a traceback -----------------------------------------------------------------------------------------------


KEYS = st.sampled_from(
    [
        *("worker", "retries", "queue", "v2", "default_policy", "block_policies", "http", "error_overrides", "429"),
        *("error_classification", "network_errors", "retryable", "http_status_mapping", "4xx", "exceptions", "[key]"),
        *("retry_policies", "imap_mailbox", "operations", "KV_GET", "sources", "connector", "retry", "max_attempts"),
        *("base_delay_ms", "max_delay_ms", "overload_thresholds", "policies", "secrets", "engine", "²", ""),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-5, 200) | st.floats(-1, 1e6) | st.sampled_from(["full", "x", "²"])
ODD: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)
TOPS = st.dictionaries(KEYS, ODD, max_size=4)
PATHS = st.sampled_from(
    [
        *("", V2, f"{V2}.block_policies.http", f"{V2}.error_classification.network_errors", QUEUE),
        *("retry_policies.imap_mailbox", "sources.inbox", "operations.KV_GET"),
    ]
)


@settings(max_examples=150, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(PATHS, TOPS)
def test_whatever_is_written_is_accepted_or_refused_with_places(path: str, odd: dict[str, Any]) -> None:
    value: Any = odd
    for part in reversed(path.split(".") if path else []):
        value = {part: value}
    problems: list[Problem] | None = None
    try:
        _, book = checked(read_text(json.dumps(value), name="odd.json", format="json"))
        book.resolve("block:http", Failure(ErrorCode.http_error, FailureType.RATE_LIMITED, "", 429))
    except ConfigurationError as error:
        problems = cast(list[Problem], error.problems)

    assert problems is None or problems
    assert all(problem.mark.source == "odd.json" and problem.message for problem in problems or ())


def test_a_retention_shorter_than_the_retry_horizon_is_refused() -> None:
    """Four attempts of 600 s, and waits of 1, 2 and 4 s with a tenth more each."""
    text = "operations:\n  billing.charge: {max_attempts: 4, timeout: 600}\nidempotency:\n  retention_seconds: %d\n"
    (problem,) = mistakes(text % 900)
    expected = "reefknot.yaml:4:3: idempotency.retention_seconds: 900 s is shorter than operation:billing"
    assert str(problem).startswith(expected)
    assert "accepted: at least 2408" in str(problem)

    configuration, _ = checked(read_text(text % 2408))
    assert configuration.idempotency.retention_seconds == 2408


# ---- schedules -------------------------------------------------------------------------------------------------------

STEP = "{job: {type: demo.step}}"
NAMED_TWICE = f"{{sources: {{x: {{connector: local_files}}}}, schedules: {{x: {{every: 1h, assignment: {STEP}}}}}}}"
BOTH = "'* * * * *' is not accepted; accepted: either every or cron, not both"
ALONE = "not accepted without cron, whose time zone it is: remove it, or give cron"


@for_each_row(
    ("keys", "path", "message"),
    [
        ("every: 5", "every", "5 is not accepted; accepted: a duration from 1s to 366d, such as 90s, 15m, 2h, 7d"),
        ("every: 15 min", "every", "'15 min' is not accepted; accepted: a duration from 1s to 366d, such as 90s"),
        ("every: 0s", "every", "'0s' is not accepted; accepted: a duration from 1s to 366d, such as 90s, 15m, 2h, 7d"),
        ("every: 1h, cron: '* * * * *'", "cron", BOTH),
        ("cron: '* * * *'", "cron", "'* * * *' is not accepted; accepted: five fields, minute hour day-of-month month"),
        ("cron: 0 0 30 2 *", "cron", "that are due at least once in fifty years (bad day-of-month)"),
        ("every: 1h, time_zone: Europe/Berln", "time_zone", "; did you mean 'Europe/Berlin'?"),
        ("every: 1h, time_zone: Europe/Berlin", "time_zone", ALONE),
        ("time_zone: UTC", "time_zone", "not accepted without cron"),
        ("every: 1h, missed: twice", "missed", "'twice' is not accepted; accepted: 'once' or 'skip'"),
    ],
)
def test_a_timetable_that_cannot_be_is_told_at_its_key(keys: str, path: str, message: str) -> None:
    for section, rest in (("schedules", f"assignment: {STEP}"), ("sources", "connector: local_files")):
        (problem,) = mistakes(f"{{{section}: {{x: {{{keys}, {rest}}}}}}}")
        assert problem.path == f"{section}.x.{path}"
        assert message in problem.message


@for_each_row(
    ("assignment", "path", "message"),
    [
        ("{}", "assignment.job", "missing"),
        ("{job: {tipe: demo.step}}", "assignment.job.tipe", "unknown field; accepted: type, payload"),
        ("{job: {type: demo.step}, priority: 1}", "assignment.priority", "did you mean 'options.priority'?"),
        ("{job: {type: demo.step}, options: {retry_count: -1}}", "assignment.options.retry_count", "accepted"),
        ("{job: {type: demo.step, payload: {x: .nan}}}", "assignment.job.payload.x", "a number is finite"),
        ("{job: {type: demo.step}, assignment_id: mine}", "assignment.assignment_id", "an id of name and due time"),
        ("{job: {type: demo.step}, request_id: mine}", "assignment.request_id", "an id of name and due time"),
    ],
)
def test_an_assignment_that_no_router_would_take_is_told_at_its_field(assignment: str, path: str, message: str) -> None:
    (problem,) = mistakes(f"{{schedules: {{x: {{every: 1h, assignment: {assignment}}}}}}}")
    assert problem.path == f"schedules.x.{path}"
    assert message in problem.message


@for_each_row("name", ["n" * 201, '"a\\nb"', '""'])
def test_a_name_of_a_schedule_can_be_printed_and_is_not_too_long(name: str) -> None:
    (problem,) = mistakes(f"{{schedules: {{{name}: {{every: 1h, assignment: {STEP}}}}}}}")
    assert "accepted: a name of 1 to 200 bytes that can be printed" in problem.message
    longest = "n" * 200
    configuration, _ = checked(read_text(f"{{schedules: {{{longest}: {{cron: 0 7 * * 1-5, assignment: {STEP}}}}}}}"))
    assert configuration.schedules[longest].missed == "once"


def test_a_schedule_and_a_source_have_different_names() -> None:
    (problem,) = mistakes(NAMED_TWICE)
    assert problem.path == "schedules.x"
    assert problem.message == "a source has this name; accepted: a name that no source has"
