"""
Worker retry policy, §2 (layers), §3.3 (the gate), §7 (examples) and §9.1 to §9.3 (what is accepted), by their numbers.

The document counts retries, a resolved policy counts executions: "max_attempts 2" there is `retries == 2` here (A1).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reefknot as rk
from reefknot.core.failure import ErrorCategory, ErrorCode, Failure
from reefknot.errors import ConfigurationMissingError
from reefknot.policy.layers import RETRIES
from reefknot.policy.model.book import Layer
from reefknot.policy.model.defaults import baseline
from reefknot.policy.settings import Settings, load_settings
from reefknot.runtime.clocks import VirtualClock
from tests.acceptance.steps import StepError, Work

SECTION_2_2 = """
{
  "worker": {
    "retries": {
      "v2": {
        "enabled": false,
        "default_policy": {
          "max_attempts": 3,
          "base_delay_ms": 100,
          "max_delay_ms": 30000,
          "jitter_type": "full",
          "exponential_base": 2.0
        },
        "error_classification": {
          "validation_errors": {
            "retryable": false,
            "max_attempts": 0
          },
          "execution_errors": {
            "retryable": {
              "resource_unavailable": true,
              "execution_failed": false,
              "permission_denied": false,
              "quota_exceeded": false
            },
            "max_attempts": 3
          },
          "network_errors": {
            "retryable": {
              "network_error": true,
              "connection_timeout": true,
              "http_error": "conditional"
            },
            "max_attempts": 5,
            "http_status_mapping": {
              "4xx": {
                "retryable": false,
                "exceptions": {
                  "408": true,
                  "429": true
                }
              },
              "5xx": {
                "retryable": true
              }
            }
          },
          "system_errors": {
            "retryable": {
              "internal_error": false,
              "system_overload": true
            },
            "max_attempts": 3
          },
          "cancellation_errors": {
            "retryable": false,
            "max_attempts": 0
          }
        },
        "block_policies": {
          "http": {
            "max_attempts": 5,
            "base_delay_ms": 200,
            "max_delay_ms": 10000,
            "jitter_type": "equal",
            "error_overrides": {
              "429": {
                "max_attempts": 3,
                "base_delay_ms": 1000,
                "max_delay_ms": 60000
              }
            }
          },
          "fs": {
            "max_attempts": 3,
            "base_delay_ms": 100,
            "max_delay_ms": 5000,
            "jitter_type": "full"
          },
          "sql": {
            "max_attempts": 3,
            "base_delay_ms": 150,
            "max_delay_ms": 10000,
            "jitter_type": "full"
          }
        }
      }
    }
  }
}
"""
SECTION_7_1 = '{"worker": {"retries": {"v2": {"enabled": true}}}}'
SECTION_7_2 = """
{
  "worker": {
    "retries": {
      "v2": {
        "enabled": true,
        "block_policies": {
          "http": {
            "max_attempts": 5,
            "base_delay_ms": 200,
            "max_delay_ms": 10000,
            "jitter_type": "equal",
            "error_overrides": {
              "429": {
                "max_attempts": 3,
                "base_delay_ms": 1000,
                "max_delay_ms": 60000
              },
              "503": {
                "max_attempts": 10,
                "base_delay_ms": 500,
                "max_delay_ms": 30000
              }
            }
          }
        }
      }
    }
  }
}
"""
SECTION_7_3 = """
{
  "worker": {
    "retries": {
      "v2": {
        "enabled": true,
        "error_classification": {
          "execution_errors": {
            "retryable": {
              "execution_failed": true,
              "quota_exceeded": true
            },
            "max_attempts": 2
          }
        }
      }
    }
  }
}
"""


def book(text: str) -> rk.PolicyBook:
    return rk.PolicyBook.loads(text, format="json", name="worker.json")


def v2(section: dict[str, Any]) -> rk.PolicyBook:
    return book(json.dumps({"worker": {"retries": {"v2": section}}}))


def line_of(text: str, after: str, word: str) -> int:
    """The line of a word behind another one, so that provenance is compared with the file and not with itself."""
    at = text.index(f'"{word}"', text.index(after))
    return text.count("\n", 0, at) + 1


# ---- §2 --------------------------------------------------------------------------------------------------------------


def test_2_2_the_documents_own_configuration_loads_unchanged() -> None:
    found = book(SECTION_2_2)

    assert (found.resolve("block:http").retries, found.resolve("block:http").max_delay) == (5, 10.0)
    assert (found.resolve("block:fs").retries, found.resolve("block:fs").max_delay) == (3, 5.0)
    assert (found.resolve("block:sql").base_delay, found.resolve("block:sql").jitter.value) == (0.15, "full")


@pytest.mark.parametrize(
    ("field", "value", "layer", "after"),
    [
        ("base_delay", 1.0, Layer.OVERRIDE, '"429": {'),
        ("max_delay", 60.0, Layer.OVERRIDE, '"429": {'),
        ("jitter", "equal", Layer.TARGET, '"http": {'),
        ("multiplier", 2.0, Layer.GLOBAL, '"default_policy"'),
        ("retryable", True, Layer.CATEGORY, '"exceptions"'),
    ],
)
def test_2_4_the_429_example_resolves_as_the_document_says_each_field_with_its_layer(
    field: str, value: object, layer: Layer, after: str
) -> None:
    """HTTP block, http_error, 429, retry_count 2."""
    policy = book(SECTION_2_2).resolve("block:http", code="http_error", http_status=429, retry_count=2)
    words = {"base_delay": "base_delay_ms", "max_delay": "max_delay_ms", "jitter": "jitter_type"}
    words |= {"multiplier": "exponential_base", "retryable": "429"}
    where = after if field != "retryable" else '"4xx"'

    assert getattr(policy, field) == value
    settled = policy.provenance[field]
    assert (settled.value, settled.layer) == (value, layer)
    assert settled.source.startswith(f"worker.json:{line_of(SECTION_2_2, where, words[field])}:")


def test_2_4_the_429_example_takes_its_count_from_the_request_and_knows_whom_it_overrode() -> None:
    policy = book(SECTION_2_2).resolve("block:http", code="http_error", http_status=429, retry_count=2)

    assert (policy.retries, policy.max_attempts) == (2, 3)
    settled = policy.provenance["max_attempts"]
    assert (settled.layer, settled.source) == (Layer.REQUEST, "request")
    assert [(said.layer, said.value - 1) for said in settled.overrode] == [
        (Layer.OVERRIDE, 3),
        (Layer.TARGET, 5),
        (Layer.CATEGORY, 5),
        (Layer.GLOBAL, 3),
        (Layer.BUILTIN, 3),
    ]


def test_2_4_what_the_429_example_leaves_out_is_built_in() -> None:
    policy = book(SECTION_2_2).resolve("block:http", code="http_error", http_status=429, retry_count=2)

    left_out = ("strategy", "jitter_factor", "time_budget", "attempt_timeout", "max_retry_after")
    assert {policy.provenance[field].layer for field in left_out} == {Layer.BUILTIN}


def test_2_4_each_step_up_the_layers_is_heard() -> None:
    found = book(SECTION_2_2)

    assert found.resolve("block:http", http_status=429).retries == 3
    assert found.resolve("block:http", http_status=503).retries == 5
    assert found.resolve("block:other", http_status=503).retries == 5
    assert found.resolve("block:other", code="system_overload").retries == 3
    assert found.resolve("block:other", code="invalid_input").retries == 0
    assert found.resolve("block:other").retries == 3


# ---- §3.3 ------------------------------------------------------------------------------------------------------------


def step(gate_open: bool, found: Settings, failing: Work, *, timeout_ms: int | None = None) -> Any:
    """One step as a worker runs it: the baseline with the gate shut, the book with it open."""

    async def work() -> str:
        return failing()

    if gate_open:
        policy = rk.PolicyBook.of(found.book)
        deadline = {} if timeout_ms is None else {"deadline": timeout_ms / 1000}
        retrier = policy.retrier("block:http", **deadline)  # type: ignore[arg-type]  # a plain dict of options
    else:

        def resolve(failure: Failure) -> rk.RetryPolicy:
            return baseline(retryable=failure.category is not ErrorCategory.CANCELLATION)

        retrier = rk.Retrier.following(resolve, baseline(), "step")
    return asyncio.run(retrier.arun(work))


Loaded = Callable[..., Settings]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    def load(text: str | None = None, *, named: str | None = None, forgiving: bool = False, **environ: str) -> Settings:
        if text is not None:
            (tmp_path / "reefknot.json").write_text(text)
        return load_settings(named, environ=environ, cwd=tmp_path, forgiving=forgiving)

    return load


@pytest.mark.parametrize("code", [ErrorCode.invalid_input, ErrorCode.permission_denied, ErrorCode.network_error])
def test_3_3_1_with_the_flag_disabled_backoff_is_fixed_without_jitter_and_every_error_is_retried(
    virtual_time: VirtualClock, loaded: Loaded, code: ErrorCode
) -> None:
    found = loaded(SECTION_2_2)

    outcome = step(found.retries_gate.on, found, Work(StepError(code)))

    assert not found.retries_gate
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.3])
    assert outcome.attempts == 4


def test_3_3_1_with_the_flag_disabled_there_is_no_budget_for_all_attempts() -> None:
    assert baseline(50).time_budget == float("inf")
    assert baseline(50, timeout=5.0).attempt_timeout == 5.0


def test_3_3_1_cancellation_is_not_retried_even_then(virtual_time: VirtualClock, loaded: Loaded) -> None:
    found = loaded()

    assert step(found.retries_gate.on, found, Work(StepError(ErrorCode.cancelled_by_user))).attempts == 1


def test_3_3_2_with_the_flag_enabled_backoff_is_exponential(virtual_time: VirtualClock, loaded: Loaded) -> None:
    steady = {"enabled": True, "default_policy": {"jitter_type": "none"}}
    found = loaded(json.dumps({"worker": {"retries": {"v2": steady}}}))

    outcome = step(found.retries_gate.on, found, Work(StepError(ErrorCode.network_error)))

    assert found.retries_gate
    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4])
    assert outcome.attempts == 4


def test_3_3_2_with_the_flag_enabled_jitter_is_applied(virtual_time: VirtualClock, loaded: Loaded) -> None:
    found = loaded(SECTION_7_1)
    for _ in range(20):
        step(found.retries_gate.on, found, Work(StepError(ErrorCode.network_error)))

    firsts = virtual_time.waits[::3]
    assert all(0 <= wait <= 0.1 for wait in firsts)
    assert len(set(firsts)) > 10


@pytest.mark.parametrize(
    ("code", "status", "executions"),
    [
        (ErrorCode.network_error, None, 4),
        (ErrorCode.invalid_input, None, 1),
        (ErrorCode.permission_denied, None, 1),
        (ErrorCode.http_error, 503, 4),
        (ErrorCode.http_error, 404, 1),
    ],
)
def test_3_3_2_with_the_flag_enabled_errors_are_classified(
    virtual_time: VirtualClock, loaded: Loaded, code: ErrorCode, status: int | None, executions: int
) -> None:
    found = loaded(SECTION_7_1)

    assert step(found.retries_gate.on, found, Work(StepError(code, http_status=status))).attempts == executions


def test_3_3_2_with_the_flag_enabled_the_budget_is_checked(virtual_time: VirtualClock, loaded: Loaded) -> None:
    steady = {"enabled": True, "default_policy": {"jitter_type": "none", "max_attempts": 50}}
    found = loaded(json.dumps({"worker": {"retries": {"v2": steady}}}))

    outcome = step(found.retries_gate.on, found, Work(StepError(ErrorCode.network_error)), timeout_ms=1000)

    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.4])
    assert outcome.reason is rk.Reason.BUDGET_SPENT


def test_3_3_3_with_the_flag_enabled_and_the_configuration_missing_it_falls_back_and_warns(
    virtual_time: VirtualClock, loaded: Loaded
) -> None:
    found = loaded(named="gone.json", forgiving=True, **{RETRIES: "true"})

    step(found.retries_gate.on, found, Work(StepError(ErrorCode.invalid_input)))

    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.3])
    assert any("gone.json is missing, so the baseline is in force" in warning for warning in found.warnings)


def test_3_3_3_only_the_workers_own_commands_fall_back(loaded: Loaded) -> None:
    with pytest.raises(ConfigurationMissingError):
        loaded(named="gone.json", **{RETRIES: "true"})
    with pytest.raises(ConfigurationMissingError):
        loaded(named="gone.json", forgiving=True)


# ---- §7 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["block:http", "block:fs.blob_put", "block:sql.query", "block:own.step"])
def test_7_1_the_minimal_configuration_uses_the_global_defaults(block: str) -> None:
    policy = book(SECTION_7_1).resolve(block)

    assert (policy.retries, policy.base_delay, policy.max_delay) == (3, 0.1, 30.0)
    assert (policy.jitter.value, policy.multiplier) == ("full", 2.0)


@pytest.mark.parametrize(
    ("status", "retries", "base", "cap"),
    [(429, 3, 1.0, 60.0), (503, 10, 0.5, 30.0), (500, 5, 0.2, 10.0), (408, 5, 0.2, 10.0)],
)
def test_7_2_the_http_configuration_differs_by_status(status: int, retries: int, base: float, cap: float) -> None:
    policy = book(SECTION_7_2).resolve("block:http.request", http_status=status)

    assert (policy.retries, policy.base_delay, policy.max_delay) == (retries, base, cap)
    assert (policy.jitter.value, policy.retryable) == ("equal", True)


def test_7_2_the_http_configuration_leaves_other_blocks_alone() -> None:
    assert book(SECTION_7_2).resolve("block:fs", http_status=503) == rk.PolicyBook().resolve(
        "block:fs", http_status=503
    )


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        ("execution_failed", True),
        ("quota_exceeded", True),
        ("resource_unavailable", True),
        ("permission_denied", False),
    ],
)
def test_7_3_the_category_configuration_changes_what_it_names_and_keeps_the_rest(code: str, retryable: bool) -> None:
    policy = book(SECTION_7_3).resolve("block:http", code=code)

    assert policy.retryable is retryable
    assert policy.retries == 2
    assert policy.provenance["max_attempts"].layer is Layer.CATEGORY
    assert book(SECTION_7_3).resolve("block:http", code="network_error").retries == 3


# ---- §9.1 ------------------------------------------------------------------------------------------------------------


RETRIED = {"network_error", "connection_timeout", "http_error", "resource_unavailable", "system_overload"}


def test_9_1_error_codes_are_mapped_to_retryable() -> None:
    verdicts = {code.name: rk.PolicyBook().resolve("block:http", code=code).retryable for code in ErrorCode}

    assert {name for name, retryable in verdicts.items() if retryable} == RETRIED


def test_9_1_http_statuses_are_mapped_to_retryable() -> None:
    verdicts = {
        status: rk.PolicyBook().resolve("block:http", http_status=status).retryable for status in range(400, 600)
    }

    assert {status for status, retryable in verdicts.items() if retryable} == {408, 429, *range(500, 600)}


@pytest.mark.parametrize("code", [code for code in ErrorCode if code.category.value not in ("none", "cancellation")])
def test_9_1_retryability_is_configurable_per_error_code(code: ErrorCode) -> None:
    turned = code.name not in RETRIED
    section = {"error_classification": {f"{code.category.value}_errors": {"retryable": {code.name: turned}}}}

    policy = v2(section).resolve("block:http", code=code)
    assert policy.retryable is turned
    assert policy.provenance["retryable"].layer is Layer.CATEGORY


def test_9_1_the_documents_configuration_says_what_the_defaults_say() -> None:
    """Default retryability rules match the design: writing them down changes nothing."""
    written, default = book(SECTION_2_2), rk.PolicyBook()

    for code in ErrorCode:
        assert written.resolve("block:x", code=code).retryable is default.resolve("block:x", code=code).retryable
    for status in range(400, 600):
        one, other = (found.resolve("block:x", http_status=status) for found in (written, default))
        assert one.retryable is other.retryable


# ---- §9.2 ------------------------------------------------------------------------------------------------------------


def test_9_2_the_global_default_works() -> None:
    found = v2({"default_policy": {"max_attempts": 7, "base_delay_ms": 50, "exponential_base": 3}})

    for block in ("block:http", "block:fs", "block:anything"):
        policy = found.resolve(block)
        assert (policy.retries, policy.base_delay, policy.multiplier, policy.max_delay) == (7, 0.05, 3.0, 30.0)
        assert policy.provenance["max_attempts"].layer is Layer.GLOBAL


@pytest.mark.parametrize("category", ["validation", "execution", "network", "system", "cancellation"])
def test_9_2_a_category_works(category: str) -> None:
    found = v2({"error_classification": {f"{category}_errors": {"max_attempts": 9}}})

    for code in ErrorCode:
        policy = found.resolve("block:http", code=code)
        assert policy.retries == (9 if code.category.value == category else 3)


def test_9_2_a_block_works() -> None:
    found = v2({"block_policies": {"fs": {"max_attempts": 1, "jitter_type": "equal"}}})

    assert (found.resolve("block:fs.blob_put").retries, found.resolve("block:fs.blob_put").jitter.value) == (1, "equal")
    assert (found.resolve("block:http").retries, found.resolve("block:http").jitter.value) == (3, "full")


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_9_2_a_request_overrides_up_and_down(count: int) -> None:
    found = book(SECTION_2_2)

    assert found.resolve("block:http", http_status=429, retry_count=count).retries == count
    assert found.resolve("block:http", timeout_ms=5000).time_budget == 5.0


def test_9_2_a_request_respects_the_veto_of_category_and_block() -> None:
    """§2.3's note: overrides of a request respect the classification (B13)."""
    assert not book(SECTION_2_2).resolve("block:http", code="invalid_input", retry_count=50).retryable


def test_9_2_the_order_of_the_layers_is_right() -> None:
    """Each layer says another number; taking the top one away lets the next one speak."""
    section: dict[str, Any] = {
        "default_policy": {"max_attempts": 11},
        "error_classification": {"network_errors": {"max_attempts": 12}},
        "block_policies": {
            "http": {
                "max_attempts": 13,
                "error_overrides": {
                    "transient": {"max_attempts": 14},
                    "http_error": {"max_attempts": 15},
                    "503": {"max_attempts": 16},
                },
            }
        },
    }
    overrides = section["block_policies"]["http"]["error_overrides"]

    def retries(**request: Any) -> int:
        return v2(section).resolve("block:http", code="http_error", http_status=503, **request).retries

    assert retries(retry_count=17) == 17
    assert retries() == 16
    del overrides["503"]
    assert retries() == 15
    del overrides["http_error"]
    assert retries() == 14
    del overrides["transient"]
    assert retries() == 13
    del section["block_policies"]
    assert retries() == 12
    del section["error_classification"]
    assert retries() == 11
    del section["default_policy"]
    assert retries() == 3


# ---- §9.3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "environ", "on"),
    [
        (None, {}, False),
        (SECTION_7_1, {}, True),
        (SECTION_2_2, {}, False),
        (None, {RETRIES: "true"}, True),
        (SECTION_2_2, {RETRIES: "1"}, True),
        (SECTION_7_1, {RETRIES: "off"}, False),
        (SECTION_7_1, {RETRIES: ""}, True),
    ],
)
def test_9_3_the_feature_flag_works(loaded: Loaded, text: str | None, environ: dict[str, str], on: bool) -> None:
    assert loaded(text, **environ).retries_gate.on is on


def test_9_3_the_baseline_is_preserved_whatever_the_file_says_of_policies(
    virtual_time: VirtualClock, loaded: Loaded
) -> None:
    found = loaded(SECTION_7_2, **{RETRIES: "false"})

    step(found.retries_gate.on, found, Work(StepError(ErrorCode.http_error, http_status=404)))

    assert virtual_time.waits == pytest.approx([0.1, 0.2, 0.3])


def test_9_3_the_policies_hold_when_the_flag_is_enabled(virtual_time: VirtualClock, loaded: Loaded) -> None:
    found = loaded(SECTION_7_2)

    assert step(found.retries_gate.on, found, Work(StepError(ErrorCode.http_error, http_status=404))).attempts == 1
    assert step(found.retries_gate.on, found, Work(StepError(ErrorCode.http_error, http_status=429))).attempts == 4
    assert all(0.5 <= wait <= 4.0 for wait in virtual_time.waits)


def test_9_3_it_falls_back_to_the_baseline_when_the_configuration_is_missing(loaded: Loaded) -> None:
    assert loaded(named="gone.json", forgiving=True, **{RETRIES: "yes"}).retries_gate.on is False
    assert loaded(forgiving=True, **{RETRIES: "yes"}).retries_gate.on is True
