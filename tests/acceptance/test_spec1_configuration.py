"""
Worker retry policy, §2 (layers), §3.3 (the gate) and §9.1 and §9.2 (what is accepted), by their numbers.

What a running worker does of §9 is in `test_spec1_worker.py`; the examples of §2.4 and §7 are in `test_cli_policy.py`.

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

SAMPLES = Path(__file__).with_name("samples")
SECTION_2_2 = (SAMPLES / "spec1-2.2-structure.json").read_text()
SECTION_7_1 = '{"worker": {"retries": {"v2": {"enabled": true}}}}'


def book(text: str) -> rk.PolicyBook:
    return rk.PolicyBook.loads(text, format="json", name="worker.json")


def v2(section: dict[str, Any]) -> rk.PolicyBook:
    return book(json.dumps({"worker": {"retries": {"v2": section}}}))


# ---- §2 --------------------------------------------------------------------------------------------------------------


def test_2_2_the_documents_own_configuration_loads_unchanged() -> None:
    found = book(SECTION_2_2)

    assert (found.resolve("block:http").retries, found.resolve("block:http").max_delay) == (5, 10.0)
    assert (found.resolve("block:fs").retries, found.resolve("block:fs").max_delay) == (3, 5.0)
    assert (found.resolve("block:sql").base_delay, found.resolve("block:sql").jitter.value) == (0.15, "full")


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


# ---- §9.1 ------------------------------------------------------------------------------------------------------------


RETRIED = {"network_error", "connection_timeout", "http_error", "resource_unavailable", "system_overload"}


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
