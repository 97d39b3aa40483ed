"""The runbook has every cause for which a job waits, and what it shows of a full disk is printed."""

import os
import sys
from pathlib import Path

from reefknot.queue.model.wait_reasons import WaitCode
from tests.docs.run_page import fences, missing, shown
from tests.warm_commands import run_cold

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "runbook.md"


def in_a_shell(command: str, folder: Path, program: str = "-m reefknot") -> str:
    """What a command prints, whatever its exit code: the page shows that where it matters."""
    line = f'reefknot() {{ {sys.executable} {program} "$@"; }}; {command}'
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = run_cold("bash", "-c", line, cwd=folder, env=os.environ | {"COLUMNS": "200", "PYTHONPATH": path})
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_the_page_has_every_cause_for_which_a_job_waits() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [one.value for one in WaitCode if f"`{one.value}`" not in page] == []


def test_what_the_page_shows_of_a_full_disk_is_printed(tmp_path: Path) -> None:
    in_a_shell("reefknot init && reefknot submit --type fs.delete --inputs '{}' --id first", tmp_path)
    (tmp_path / "full").touch()
    (fence,) = fences(PAGE.read_text(encoding="utf-8"), opted_out=True)
    for _, command, lines in shown(fence):
        printed = in_a_shell(command, tmp_path, "-m tests.faults.full_disk full")
        assert missing(lines, printed) == [], f"{command}\n{printed}"

    (tmp_path / "full").unlink()
    again = in_a_shell("reefknot submit --type fs.delete --inputs '{}' --id order-7; echo \"exit code $?\"", tmp_path)
    assert again.startswith("order-7\nexit code 0"), "with room it goes on"
