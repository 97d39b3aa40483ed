"""What the pages show of a command's output is what the command prints: every line of it, apart from blanks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.run_page import PYTHON, Fence, fences, run_in_shell, run_python
from tests.unit.cli.running import Commands

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("guides/policy-book.md", "guides/tuning-connectors.md", "reference/cli.md", "reference/configuration.md")


@pytest.fixture
def rk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)


def shown(fence: Fence) -> Iterator[tuple[str, list[str]]]:
    """Every command of a fence, with the lines that are shown beneath it."""
    command: str | None = None
    lines: list[str] = []
    for line in fence.content.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, lines
            command, lines = line[2:], []
        else:
            lines.append(line)
    if command is not None:
        yield command, lines


def squeezed(line: str) -> str:
    return " ".join(line.split())


def missing(lines: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed. A rule is as wide as its table, and `…` stands for what was left out."""
    known = {squeezed(line) for line in printed.splitlines()}
    wanted = (squeezed(line) for line in lines)
    return [line for line in wanted if line.strip("─…") and line not in known]


@pytest.mark.parametrize("name", PAGES)
def test_the_output_on_the_page_is_the_output_of_the_command(rk: Commands, name: str) -> None:
    rk.environment.setenv("COLUMNS", "240")
    page = DOCS / name
    namespace: dict[str, object] = {"__name__": "__main__"}
    compared = 0
    for fence in fences(page.read_text(encoding="utf-8")):
        if fence.language in PYTHON:
            run_python(fence, page, namespace)
            continue
        for command, lines in shown(fence):
            if not command.startswith("reefknot "):  # it makes a file of the reader's
                assert run_in_shell(command) == 0, command
                continue
            ended = rk(*shlex.split(command)[1:])
            assert ended.code == 0, ended.err
            assert missing(lines, ended.out + ended.err) == [], command
            compared += 1
    assert compared > 0


def test_a_line_that_is_not_printed_is_caught() -> None:
    assert missing(["a  b", "────", "…", "", "c"], "x\na b\n") == ["c"]
