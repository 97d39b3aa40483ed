"""Commands run in process, in a folder of their own, without variables that change answers; or as processes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reefknot.console.cli import main
from tests.warm_commands import run_warm

HIDDEN = ("WORKER_RETRIES_V2_ENABLED", "WORKER_QUEUE_V2_ENABLED", "REEFKNOT_CONFIG", "REEFKNOT_TRACEBACK")
"""Variables that change answers, and are removed."""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "120"}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`reefknot` as a process of its own."""
    return run_warm(*words, cwd=folder, env=environment(folder))


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Commands:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.environment = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder)
        for name in [one for one in os.environ if one in HIDDEN or one.startswith("REEFKNOT__")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "no-such-folder"))
        monkeypatch.setenv("COLUMNS", "160")

    def __call__(self, *words: str) -> Ended:
        self.taken()
        return Ended(main(words), *self.taken())

    def taken(self) -> tuple[str, str]:
        return self._capsys.readouterr()

    def write(self, text: str, name: str = "reefknot.yaml") -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path
