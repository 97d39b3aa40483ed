"""The score counts a mutant that nobody reaches as missed, and fails below its target."""

import json
from pathlib import Path

import pytest

from tools import mutant_score

NONE = dict.fromkeys(("killed", "survived", "no_tests", "timeout", "suspicious", "segfault", "total", "skipped"), 0)


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"killed": 9, "survived": 1}, (9, 10)),
        ({"killed": 8, "timeout": 1, "no_tests": 1}, (9, 10)),
        ({"segfault": 1, "suspicious": 1}, (1, 2)),
    ],
)
def test_the_share_is_of_all_mutants_that_ran_or_should_have(stats: dict[str, int], expected: tuple[int, int]) -> None:
    assert mutant_score.score(NONE | stats) == expected


@pytest.mark.parametrize(
    ("stats", "code"),
    [
        ({"killed": 90, "survived": 10}, 0),
        ({"killed": 89, "survived": 11}, 1),
        ({}, 1),
        ({"killed": 3, "total": 10}, 0),
    ],
)
def test_below_nine_in_ten_the_exit_code_is_1_and_a_run_of_only_some_mutants_is_called_a_part(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stats: dict[str, int],
    code: int,
) -> None:
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(NONE | {"total": sum(stats.values())} | stats))
    monkeypatch.setattr(mutant_score, "STATS", file)
    assert mutant_score.main() == code
    assert ("7 more were made and not run" in capsys.readouterr().out) is ("total" in stats)
