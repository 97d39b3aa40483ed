"""Everything a process is told before it starts."""

from pathlib import Path
from typing import cast

import pytest

from reefknot.core.failure import ErrorCode, Failure, FailureType
from reefknot.errors import ConfigurationError, ConfigurationMissingError
from reefknot.policy.layers import QUEUE, RETRIES
from reefknot.policy.reading.session import Problem
from reefknot.policy.settings import Settings, load_settings

OPEN = {RETRIES: "true"}


def write(folder: Path, text: str, name: str = "reefknot.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def load(folder: Path, explicit: str | None = None, **environ: str) -> Settings:
    return load_settings(explicit, environ=environ, cwd=folder)


GATED = "worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}\n"


FILED = "operations: {KV_GET: {max_attempts: 9}}\n"
GENERAL = "REEFKNOT__WORKER__RETRIES__V2__ENABLED"
SHUT = (False, "default")


@pytest.mark.parametrize(
    ("text", "environ", "retries", "queue"),
    [
        (None, {}, SHUT, SHUT),
        (FILED, {}, SHUT, SHUT),
        (GATED, {}, (True, "FILE:1:25"), (True, "FILE:1:55")),
        (GATED, {RETRIES: "off"}, (False, f"environment {RETRIES}"), (True, "FILE:1:55")),
        (GATED, {RETRIES: "0"}, (False, f"environment {RETRIES}"), (True, "FILE:1:55")),
        (GATED.replace("true", "false"), {QUEUE: "yes"}, (False, "FILE:1:25"), (True, f"environment {QUEUE}")),
        # the general variable stands above the file and below the gate's own
        (GATED, {GENERAL: "false"}, (False, f"environment {GENERAL}"), (True, "FILE:1:55")),
        (GATED, {GENERAL: "false", RETRIES: "on"}, (True, f"environment {RETRIES}"), (True, "FILE:1:55")),
    ],
)
def test_a_gate_is_as_the_environment_says_else_the_file_else_shut(
    tmp_path: Path, text: str | None, environ: dict[str, str], retries: tuple[bool, str], queue: tuple[bool, str]
) -> None:
    named = None if text is None else write(tmp_path, text)
    found = load(tmp_path, **environ)

    said = [(gate.on, gate.origin.replace(str(named), "FILE")) for gate in (found.retries_gate, found.queue_gate)]
    assert said == [retries, queue]
    assert (found.path, found.warnings) == (named and Path(named), ())
    assert found.book.resolve("block:http").max_attempts == 4
    assert found.book.resolve("operation:kv.get").max_attempts == (9 if text == FILED else 3)


@pytest.mark.parametrize("variable", [RETRIES, QUEUE])
@pytest.mark.parametrize("forgiving", [False, True])
def test_a_gate_that_says_maybe_is_a_mistake(tmp_path: Path, variable: str, forgiving: bool) -> None:
    with pytest.raises(ConfigurationError, match="'maybe' is not accepted"):
        load_settings(environ={variable: "maybe"}, cwd=tmp_path, forgiving=forgiving)


# ---- a file that is not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "forgiving"),
    [({}, False), (OPEN, False), *((one, True) for one in ({}, {RETRIES: "off"}, {RETRIES: ""}, {QUEUE: "on"}))],
)
def test_a_named_file_that_is_missing_is_forgiven_only_when_the_environment_opened_the_gate(
    tmp_path: Path, environ: dict[str, str], forgiving: bool
) -> None:
    with pytest.raises(ConfigurationMissingError, match="there is no such file"):
        load_settings("gone.yaml", environ=environ, cwd=tmp_path, forgiving=forgiving)
    with pytest.raises(ConfigurationMissingError, match="REEFKNOT_CONFIG"):
        load_settings(environ={**environ, "REEFKNOT_CONFIG": "gone.yaml"}, cwd=tmp_path, forgiving=forgiving)


@pytest.mark.parametrize("named_by_variable", [False, True])
def test_a_forgiven_file_means_the_baseline_and_a_warning(tmp_path: Path, named_by_variable: bool) -> None:
    environ = {**OPEN, "REEFKNOT_CONFIG": "gone.yaml"} if named_by_variable else OPEN
    found = load_settings(None if named_by_variable else "gone.yaml", environ=environ, cwd=tmp_path, forgiving=True)

    assert (found.retries_gate.on, found.retries_gate.origin) == (False, "missing file gone.yaml")
    assert found.path is None
    missing = f"gone.yaml is missing, so the baseline is in force although {RETRIES} is on"
    assert found.warnings == (f"{missing}; create the file, or do not name it",)


@pytest.mark.parametrize("text", [None, "engine: 'memory:'\n"])
@pytest.mark.parametrize("forgiving", [False, True])
def test_no_file_or_one_without_the_section_means_v2_with_built_in_defaults(
    tmp_path: Path, text: str | None, forgiving: bool
) -> None:
    named = None if text is None else write(tmp_path, text)
    found = load_settings(named, environ=OPEN, cwd=tmp_path, forgiving=forgiving)

    assert found.retries_gate.on
    assert (found.book.resolve("block:http").max_attempts, found.book.resolve("block:http").base_delay) == (4, 0.1)


# ---- the environment, warnings ---------------------------------------------------------------------------------------


def test_a_mistake_in_a_variable_names_the_variable_and_in_a_whole_mapping_the_word(tmp_path: Path) -> None:
    variable = "REEFKNOT__WORKER__RETRIES__V2__DEFAULT_POLICY__BASE_DELAY_MS"
    with pytest.raises(ConfigurationError) as caught:
        load_settings(environ={variable: "40000"}, cwd=tmp_path)
    (problem,) = cast(list[Problem], caught.value.problems)
    assert problem.mark.source == f"environment {variable}"
    assert problem.path == "worker.retries.v2.default_policy.base_delay_ms"
    assert problem.message.startswith("for any block, the base delay of 40 s is above the cap of 30 s")

    variable = "REEFKNOT__WORKER__RETRIES__V2__BLOCK_POLICIES"
    base = "{http: {base_delay_ms: 40000, jitter_type: none, error_overrides: {'500': {max_attempts: 3}}}}"
    cap = "{http: {base_delay_ms: 20, error_overrides: {'500': {max_delay_ms: 10, max_attempts: 3}}}}"
    for value, path in ((base, "http.base_delay_ms"), (cap, "http.error_overrides.500.max_delay_ms")):
        with pytest.raises(ConfigurationError) as caught:
            load_settings(environ={variable: value}, cwd=tmp_path)
        (problem,) = cast(list[Problem], caught.value.problems)
        assert problem.path == f"worker.retries.v2.block_policies.{path}"


DEGRADE = """
worker:
  queue:
    v2:
      rejection_policy: degrade
      policies:
        degrade:
          degradation_levels: {medium: {skip_circuit_breaker: MEDIUM}, heavy: {skip_circuit_breaker: HEAVY}}
"""


@pytest.mark.parametrize(
    ("medium", "heavy", "policy", "named"),
    [
        ("false", "true", "degrade", ["heavy"]),
        ("true", "false", "degrade", ["medium"]),
        ("true", "true", "degrade", ["medium and heavy"]),
        ("false", "false", "degrade", []),
        ("true", "true", "defer", []),
    ],
)
def test_a_degradation_that_skips_the_circuit_breaker_is_warned_about(
    tmp_path: Path, medium: str, heavy: str, policy: str, named: list[str]
) -> None:
    text = DEGRADE.replace("MEDIUM", medium).replace("HEAVY", heavy)
    write(tmp_path, text.replace(": degrade", f": {policy}"))

    found = [warning.partition(" degradation skips the circuit breaker")[0] for warning in load(tmp_path).warnings]
    assert [warning.rpartition(": ")[2] for warning in found] == named


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 1000),
        ("worker: {queue: {v2: {max_queue_size: 50}}}\n", 50),
        ("worker: {queue: {v2: {max_queue_size: 50}}}\nrouter: {max_queue_size: 7}\n", 7),
    ],
)
def test_the_bound_of_submissions_is_the_routers_else_that_of_a_workers_queue(
    tmp_path: Path, text: str, size: int
) -> None:
    write(tmp_path, text)

    assert load(tmp_path).queue_size == size


def test_settings_cannot_be_changed_and_a_wrong_file_is_never_forgiven(tmp_path: Path) -> None:
    found = load(tmp_path)
    with pytest.raises(AttributeError):
        found.path = tmp_path  # type: ignore[misc]
    assert not found.book.resolve("block:x", Failure(ErrorCode.none, FailureType.UNKNOWN)).retryable

    environ = {**OPEN, "REEFKNOT__WORKER__QUEUE__V2__MAX_QUEUE_SIZE": "5", "REEFKNOT__WORKER__QUEUE__V2__ENABLED": "on"}
    found = load_settings("gone.yaml", environ=environ, cwd=tmp_path, forgiving=True)
    assert found.configuration.worker.queue.v2.max_queue_size == 5
    assert found.queue_gate.on
    assert not found.retries_gate
    named = write(tmp_path, "worker: {retries: {v2: {enabld: true}}}\n")
    with pytest.raises(ConfigurationError, match="did you mean 'enabled'"):
        load_settings(named, environ=OPEN, cwd=tmp_path, forgiving=True)
