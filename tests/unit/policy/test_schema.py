"""What a configuration file may say: names, kinds and bounds."""

from typing import Any

import pytest

from reefknot.console.cli.config import configuration_schema
from reefknot.idempotency.model import KEY_RETENTION_S
from reefknot.policy.layers import Tree
from reefknot.policy.reading.session import Mark
from reefknot.policy.schema import (
    Backoff,
    Configuration,
    ConnectorEntry,
    OperationEntry,
    OverloadThresholds,
    QueueV2,
    Source,
    Throttle,
)
from reefknot.policy.sections import REFUSED, Section, SectionReader, keys_of
from tests.rows import for_each_row

BOUNDS: list[tuple[type[Section], str, list[Any], list[Any]]] = [
    (Backoff, "max_attempts", [0, 1, 100, None], [-1, 101, 1.5, "3", True]),
    (Backoff, "base_delay_ms", [0, 0.5, 86_400_000], [-0.1, 86_400_001, "100", True]),
    (Backoff, "max_delay_ms", [0, 86_400_000], [-1, 86_400_001]),
    (Backoff, "max_retry_after_ms", [0, 86_400_000], [-1, 86_400_001]),
    (Backoff, "jitter_type", ["none", "full", "equal", "proportional", "decorrelated"], ["FULL", "", 1, True]),
    (Backoff, "jitter_factor", [0, 0.5, 1], [-0.1, 1.1]),
    (Backoff, "exponential_base", [1, 2.0, 1000], [0.9, 1001]),
    (Backoff, "strategy", ["exponential_backoff", "no_retry", "a_packages_own"], [3]),
    (ConnectorEntry, "max_attempts", [1, 10], [0, 11, 3.0, "3"]),
    (ConnectorEntry, "base_delay_seconds", [1, 3600], [0, 3601, 1.5]),
    (ConnectorEntry, "max_delay_seconds", [1, 86400], [0, 86401]),
    (ConnectorEntry, "jitter_factor", [0, 0.0, 1.0], [-0.01, 1.01]),
    (ConnectorEntry, "backoff_multiplier", [1, 10.0], [0.99, 10.01]),
    (ConnectorEntry, "transient_max_attempts", [1, 20, None], [0, 21]),
    (ConnectorEntry, "rate_limit_delay_seconds", [1, 7200, None], [0, 7201]),
    (ConnectorEntry, "permanent_failures_no_retry", [True, False], [1, "yes"]),
    (OperationEntry, "max_attempts", [1, 100], [0, 101]),
    (OperationEntry, "base_delay", [0, 86_400], [-1, 86_401]),
    (OperationEntry, "backoff_multiplier", [1, 1000], [0, 1001]),
    (OperationEntry, "jitter_enabled", [True, False], [0, "no"]),
    (OperationEntry, "timeout", [0.001, 86_400, None], [0, -1, 86_401]),
    (OperationEntry, "retryable_exceptions", [[], ["ValueError"]], ["ValueError", [1], [""], {}]),
    (QueueV2, "max_queue_size", [1, 10_000_000], [0, 10_000_001]),
    (QueueV2, "rejection_policy", ["reject_new", "drop_oldest", "defer", "degrade"], ["drop", None]),
    (QueueV2, "reject_at", ["overloaded", "critical"], ["degraded"]),
    (QueueV2, "max_wait_fraction", [None, 0.1, 1], [0, 1.1]),
    (OverloadThresholds, "degraded", [0.1, 10], [0, 10.1]),
    (Throttle, "tokens", [1, 1_000_000], [0.9, 1_000_001]),
    (Throttle, "per_success", [0, 1000], [-1, 1001]),
]


def read(section: type[Section], value: dict[str, Any]) -> tuple[Any, list[str]]:
    """A section with these keys, and the mistakes in them."""
    reader = SectionReader(Tree(value, {(): Mark("<text>")}))
    found = reader.section(section, value, ())
    return found, [problem.message for problem in reader.problems]


@for_each_row(("section", "name", "accepted", "refused"), BOUNDS)
def test_a_value_is_accepted_within_its_bounds_and_refused_beyond_them_or_of_another_kind(
    section: type[Section], name: str, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        found, problems = read(section, {name: value})
        assert (getattr(found, name), problems) == (value, [])
    for value in refused:
        found, problems = read(section, {name: value})
        assert (len(problems), name in found.written) == (1, False), value


@for_each_row("section", [Backoff, ConnectorEntry, OperationEntry, QueueV2, Throttle, Configuration])
def test_an_unknown_key_is_refused(section: type[Section]) -> None:
    _, [problem] = read(section, {"retrys": 1})

    assert problem.startswith("unknown key; accepted: ")


def test_what_is_read_tells_said_none_from_not_said_and_cannot_be_changed() -> None:
    assert read(ConnectorEntry, {})[0].written == set()
    assert read(ConnectorEntry, {"transient_max_attempts": None})[0].written == {"transient_max_attempts"}

    with pytest.raises(AttributeError, match="immutable"):
        Configuration().worker = Configuration().worker  # type: ignore[misc]

    assert set(keys_of(Configuration)) == {
        *("worker", "retry_policies", "operations", "engine", "idempotency", "audit", "router"),
        *("sources", "schedules", "ingestion", "blocks", "dashboard", "alerts", "secrets", "nats", "limits"),
    }


def test_a_source_keeps_its_connectors_own_settings_and_no_key_sets_what_a_section_notes() -> None:
    source, _ = read(Source, {"connector": "local_files", "folder": "/data"})
    assert source.own == {"folder": "/data"}
    assert read(Source, {"folder": "/data"}) == (REFUSED, ["missing; it must be given"])

    source, _ = read(Source, {"connector": "local_files", "own": 1, "written": 2})
    assert (source.own, source.written) == ({"own": 1, "written": 2}, {"connector"})
    assert len(read(Throttle, {"written": ["enabled"]})[1]) == 1


def test_the_queue_has_the_documented_defaults_and_keys_are_kept_as_in_a_store_without_configuration() -> None:
    queue = QueueV2()

    assert (queue.max_queue_size, queue.rejection_policy, queue.reject_at) == (1000, "reject_new", "critical")
    steps = queue.overload_thresholds
    assert (steps.degraded, steps.overloaded, steps.critical) == (0.5, 0.8, 1.0)
    assert queue.max_wait_fraction == 0.5
    assert (queue.policies.defer.max_defer_time_ms, queue.policies.drop_oldest.max_drop_age_ms) == (30_000, 60_000)
    levels = queue.policies.degrade.degradation_levels
    assert [level.timeout_reduction_factor for level in (levels.light, levels.medium, levels.heavy)] == [1.0, 0.8, 0.5]
    assert Configuration().idempotency.retention_seconds == KEY_RETENTION_S


def test_the_schema_describes_every_section_and_what_blocks_may_reach() -> None:
    """Editors complete and check by it: a category's `retryable` is a flag or a mapping there too."""
    schema = configuration_schema()
    models = schema["$defs"]

    assert schema["additionalProperties"] is False
    bare = [name for name, one in schema["properties"].items() if one.get("additionalProperties") is True]
    assert bare == [], "every section has a model or is a plain value"
    retryable = models["Category"]["properties"]["retryable"]
    assert [one["type"] for one in retryable["anyOf"]] == ["boolean", "object"]

    assert schema["properties"]["blocks"]["$ref"] == "#/$defs/BlocksSection"
    assert set(models["BlocksSection"]["properties"]) == {"http", "fs", "sql"}
    assert models["BlocksSection"]["additionalProperties"] is False
    assert set(models["HttpBlockSection"]["properties"]) == {"allow", "max_response_bytes", "ca_file"}
    assert set(models["FsBlockSection"]["properties"]) == {"roots", "max_bytes"}
    assert set(models["SqlBlockSection"]["properties"]) == {"connections", "allow", "max_rows", "max_bytes"}
    assert models["SqlConnectionEntry"]["required"] == ["url"]
    assert models["SqlConnectionEntry"]["properties"]["access"]["enum"] == ["read", "write"]
    assert models["HttpBlockSection"]["properties"]["max_response_bytes"]["maximum"] == 67_108_864

    text, entry = models["SqlBlockSection"]["properties"]["connections"]["additionalProperties"]["oneOf"]
    assert (text["type"], entry["$ref"]) == ("string", "#/$defs/SqlConnectionEntry")
