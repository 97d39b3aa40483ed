"""Two orchestrator processes over one store: no job runs twice at the same time, whoever dies."""

from __future__ import annotations

from pathlib import Path

from tests.faults.carrying_out import carried_out
from tests.faults.points import either

PROGRAM = "tests.faults.two_orchestrators"


def test_no_job_runs_twice_at_once_while_processes_die(tmp_path: Path) -> None:
    jobs = either(40, 400)
    (life,) = carried_out(tmp_path, [{"jobs": jobs, "kills": either(3, 30), "flaw": ""}], program=PROGRAM)
    assert life["said"] == []
    assert life["overlaps"] == []
    assert life["states"] == ["succeeded"] * jobs
    assert life["documents"] == jobs


def test_leases_that_nobody_renews_are_caught(tmp_path: Path) -> None:
    (life,) = carried_out(tmp_path, [{"jobs": 20, "kills": 0, "flaw": "no renewal"}], program=PROGRAM)
    assert life["overlaps"] != []
