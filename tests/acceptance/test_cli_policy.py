"""
The documents' own configurations, through the command line.

Every file in `samples/` loads unchanged, and resolves to what its document says, as corrected by the decisions.
"""

from pathlib import Path
from typing import Any

import pytest

from reefknot.policy.model.defaults import RetryCategory
from tests.unit.console.cli.running import Commands

SAMPLES = Path(__file__).with_name("samples")
NAMES = sorted(path.name for path in SAMPLES.iterdir())


def sample(name: str) -> str:
    return str(SAMPLES / name)


def policy(rk: Commands, name: str, target: str, *failure: str) -> dict[str, Any]:
    words = ("policy", "explain", "--target", target, *failure, "--config", sample(name), "--json")
    return {field: one["value"] for field, one in rk(*words).json["policy"].items()}


def line_of(name: str, *keys: str) -> int:
    """The line of a key, found by the keys that lead to it."""
    lines = (SAMPLES / name).read_text().splitlines()
    at = 0
    for key in keys:
        at = next(n for n in range(at, len(lines)) if f'"{key}"' in lines[n] or f"{key}:" in lines[n])
    return at + 1


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_the_documents_loads_unchanged(rk: Commands, name: str) -> None:
    ended = rk("config", "check", sample(name))
    assert ended.code == 0, ended.err
    assert rk("policy", "list", "--config", sample(name)).code == 0


def test_there_is_a_sample_of_every_document() -> None:
    assert {name[:5] for name in NAMES} == {"spec1", "spec2", "spec3", "spec4", "spec5"}


def test_the_429_example_has_its_values_each_with_its_layer_and_what_it_overrode_and_its_waits(rk: Commands) -> None:
    """HTTP block, `http_error`, 429, `retry_count` 2: the document's own resolution."""
    structure = "spec1-2.2-structure.json"
    answer = rk(
        *("policy", "explain", "--target", "block:http", "--error", "http_error", "--status", "429"),
        *("--retry-count", "2", "--config", sample(structure), "--json"),
    ).json
    fields = answer["policy"]
    said: dict[str, tuple[object, str]] = {
        "retries": (2, "request"),
        "max_attempts": (3, "request"),
        "retryable": (True, "category"),
        "base_delay": (1.0, "override"),
        "max_delay": (60.0, "override"),
        "jitter": ("equal", "target"),
        "multiplier": (2.0, "global"),
    }
    assert {field: (fields[field]["value"], fields[field]["layer"]) for field in said} == said
    assert (answer["decision"], answer["gate"]) == ("retry", "off")
    overrode = [(one["value"], one["layer"]) for one in fields["retries"]["overrode"]]
    assert overrode == [(3, "override"), (5, "target"), (5, "category"), (3, "global"), (3, "builtin")]
    waits = [(one["retry"], one["min"], one["max"], one["delay"]) for one in answer["schedule"]]
    assert waits == [(0, 0.5, 1.0, None), (1, 1.0, 2.0, None)]
    for field, keys in {
        "base_delay": ("block_policies", "http", "error_overrides", "429", "base_delay_ms"),
        "max_delay": ("block_policies", "http", "error_overrides", "429", "max_delay_ms"),
        "jitter": ("block_policies", "http", "jitter_type"),
        "retryable": ("http_status_mapping", "exceptions", "429"),
    }.items():
        file, line, _ = fields[field]["source"].rsplit(":", 2)
        assert (Path(file).name, int(line)) == (structure, line_of(structure, *keys)), field


@pytest.mark.parametrize(
    ("name", "target", "failure", "expected"),
    [
        ("spec1-7.1-minimal.json", "block:http", ("--status", "500"), (3, 0.1, 30.0, "full")),
        ("spec1-7.2-http.json", "block:http", ("--status", "500"), (5, 0.2, 10.0, "equal")),
        ("spec1-7.2-http.json", "block:http", ("--status", "429"), (3, 1.0, 60.0, "equal")),
        ("spec1-7.2-http.json", "block:http", ("--status", "503"), (10, 0.5, 30.0, "equal")),
        ("spec1-7.2-http.json", "block:fs", ("--status", "503"), (3, 0.1, 30.0, "full")),
        ("spec1-7.3-category.json", "block:sql", ("--error", "execution_failed"), (2, 0.1, 30.0, "full")),
        ("spec1-2.2-structure.json", "block:fs", ("--error", "resource_unavailable"), (3, 0.1, 5.0, "full")),
        ("spec1-2.2-structure.json", "block:sql", ("--error", "network_error"), (3, 0.15, 10.0, "full")),
        ("spec1-2.2-structure.json", "block:other", ("--error", "network_error"), (5, 0.1, 30.0, "full")),
        ("spec2-minimal.json", "block:http", ("--error", "network_error"), (3, 0.1, 30.0, "full")),
    ],
)
def test_a_worker_sample_resolves_to_what_its_document_says(
    rk: Commands, name: str, target: str, failure: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    found = policy(rk, name, target, *failure)
    assert (found["retries"], found["base_delay"], found["max_delay"], found["jitter"]) == expected


@pytest.mark.parametrize("category", RetryCategory)
def test_the_matrix_written_down_is_the_matrix_built_in(rk: Commands, category: RetryCategory) -> None:
    written = policy(rk, "spec4-matrix.yaml", category.target)
    built_in = policy(rk, "spec1-7.1-minimal.json", category.target)
    assert written == built_in
