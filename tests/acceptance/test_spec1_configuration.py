"""
Worker retry policy, §2 (layers), §9.1 and §9.2 (what is accepted), by their numbers.

What a running worker does of §3.3 and §9 is in `test_spec1_worker.py`; the examples of §2 and §7 are in
`test_cli_policy.py`.

The document counts retries, a resolved policy counts executions: "max_attempts 2" there is `retries == 2` here (A1).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import reefknot as rk
from reefknot.core.failure import ErrorCode

SAMPLES = Path(__file__).with_name("samples")
SECTION_2_2 = (SAMPLES / "spec1-2.2-structure.json").read_text()


def book(text: str) -> rk.PolicyBook:
    return rk.PolicyBook.loads(text, format="json", name="worker.json")


def v2(section: dict[str, Any]) -> rk.PolicyBook:
    return book(json.dumps({"worker": {"retries": {"v2": section}}}))


def test_2_4_each_step_up_the_layers_is_heard() -> None:
    found = book(SECTION_2_2)

    assert found.resolve("block:http", http_status=429).retries == 3
    assert found.resolve("block:http", http_status=503).retries == 5
    assert found.resolve("block:other", http_status=503).retries == 5
    assert found.resolve("block:other", code="system_overload").retries == 3
    assert found.resolve("block:other", code="invalid_input").retries == 0
    assert found.resolve("block:other").retries == 3


def test_9_1_the_documents_configuration_says_what_the_defaults_say() -> None:
    """Default retryability rules match the design: writing them down changes nothing."""
    written, default = book(SECTION_2_2), rk.PolicyBook()

    for code in ErrorCode:
        assert written.resolve("block:x", code=code).retryable is default.resolve("block:x", code=code).retryable
    for status in range(400, 600):
        one, other = (found.resolve("block:x", http_status=status) for found in (written, default))
        assert one.retryable is other.retryable


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
