"""The size limits notice what is too large, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_sizes


def function_of(lines: int, name: str = "f") -> str:
    """A function of so many lines, its `def` among them."""
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "src" / "pkg" / "m.py"
    path.parent.mkdir(parents=True)
    return path


def test_a_module_at_the_limit_is_fine(module: Path, tmp_path: Path) -> None:
    module.write_text("x = 1\n" * 450)

    assert check_sizes.findings(tmp_path, {}) == []


def test_a_module_beyond_the_limit_is_found(module: Path, tmp_path: Path) -> None:
    module.write_text("x = 1\n" * 451)

    assert check_sizes.findings(tmp_path, {}) == ["src/pkg/m.py:1: module has 451 lines, 450 are allowed"]


def test_blank_lines_and_comments_are_free(module: Path, tmp_path: Path) -> None:
    module.write_text("x = 1\n\n# why\n" * 450)

    assert check_sizes.findings(tmp_path, {}) == []


def test_a_docstring_counts_without_its_blank_lines() -> None:
    source = '"""\nOne.\n\n# not a comment\n"""\n'

    assert check_sizes.code_lines(source) == {1, 2, 4, 5}


def test_a_function_at_the_limit_is_fine(module: Path, tmp_path: Path) -> None:
    module.write_text(function_of(60))

    assert check_sizes.findings(tmp_path, {}) == []


def test_a_function_beyond_the_limit_is_found_where_it_starts(module: Path, tmp_path: Path) -> None:
    module.write_text("\n\n" + function_of(61))

    assert check_sizes.findings(tmp_path, {}) == ["src/pkg/m.py:3: function f has 61 lines, 60 are allowed"]


def test_methods_are_measured_and_named_with_their_class(module: Path, tmp_path: Path) -> None:
    body = function_of(61).replace("\n", "\n    ").rstrip()
    module.write_text(f"class C:\n    async {body}\n")

    assert check_sizes.findings(tmp_path, {}) == ["src/pkg/m.py:2: function C.f has 61 lines, 60 are allowed"]


def test_functions_behind_a_condition_are_measured_too(module: Path, tmp_path: Path) -> None:
    body = function_of(61).replace("\n", "\n    ").rstrip()
    module.write_text(f"if True:\n    {body}\n")

    assert check_sizes.findings(tmp_path, {}) == ["src/pkg/m.py:2: function f has 61 lines, 60 are allowed"]


def test_an_exemption_with_a_reason_holds(module: Path, tmp_path: Path) -> None:
    module.write_text(function_of(61))

    assert check_sizes.findings(tmp_path, {"src/pkg/m.py:f": "a table"}) == []


def test_an_exemption_without_a_reason_is_found(module: Path, tmp_path: Path) -> None:
    module.write_text(function_of(61))

    assert check_sizes.findings(tmp_path, {"src/pkg/m.py:f": " "}) == ["src/pkg/m.py:f: exempt without a reason"]


def test_an_exemption_that_is_not_needed_is_found(module: Path, tmp_path: Path) -> None:
    module.write_text(function_of(3))

    assert check_sizes.findings(tmp_path, {"src/pkg/m.py:f": "once"}) == ["src/pkg/m.py:f: exempt, yet not too large"]


def test_the_exit_code_is_1_when_something_is_too_large(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_sizes, "ROOT", tmp_path)
    monkeypatch.setattr(check_sizes, "EXEMPT", {})
    module.write_text(function_of(61))
    assert check_sizes.main() == 1
    assert "src/pkg/m.py:1: function f" in capsys.readouterr().out

    module.write_text(function_of(60))
    assert check_sizes.main() == 0
