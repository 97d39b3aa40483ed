"""`make spread`: which interpreters are found, and what a missing one means."""

from pathlib import Path

import pytest

from tools import spread


def made(path: Path, prints: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def environ(folder: Path) -> dict[str, str]:
    return {"PATH": str(folder / "bin"), "HOME": str(folder)}


def test_an_interpreter_on_the_path_is_found(tmp_path: Path) -> None:
    python = made(tmp_path / "bin" / "python3.12", "Python 3.12.4")
    assert spread.find("3.12", environ(tmp_path)) == str(python)
    assert spread.find("3.13", environ(tmp_path)) is None


@pytest.mark.parametrize(("prints", "code"), [("pyenv: command not found", 127), ("Python 3.11.7", 0)])
def test_a_shim_that_does_not_run_or_is_another_version_is_passed_over(tmp_path: Path, prints: str, code: int) -> None:
    made(tmp_path / "bin" / "python3.12", prints, code)
    assert spread.find("3.12", environ(tmp_path)) is None

    made(tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python", "Python 3.12.9")
    newest = made(tmp_path / ".pyenv" / "versions" / "3.12.10" / "bin" / "python", "Python 3.12.10")
    assert spread.find("3.12", environ(tmp_path)) == str(newest)


def test_a_missing_interpreter_is_a_line_and_an_error_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spread, "find", lambda minor, environ: None)
    assert spread.main(["3.13"]) == 0
    assert capsys.readouterr().out == "3.13: not installed\n"
    assert spread.main(["--require", "3.13"]) == 1
    assert spread.main(["2.7"]) == 2


@pytest.mark.parametrize(("is_green", "code"), [(True, 0), (False, 1)])
def test_a_spread_that_fails_fails_the_command(monkeypatch: pytest.MonkeyPatch, is_green: bool, code: int) -> None:
    monkeypatch.setattr(spread, "find", lambda minor, environ: "python")
    monkeypatch.setattr(spread, "tried", lambda minor, python: (is_green, minor))
    assert spread.main([]) == code


def test_the_tests_of_the_spread_are_there() -> None:
    assert [one for one in spread.TESTS if not (spread.ROOT / one).exists()] == []
    assert {"apsw>=3.50", "pytest"} <= set(spread.wanted())
