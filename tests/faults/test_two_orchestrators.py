"""Two orchestrator processes over one store: no job runs twice at the same time, whoever dies."""

from pathlib import Path

import pytest

from reefknot.runtime.seeds import new_id
from tests.faults.carrying_out import Life, carried_out
from tests.faults.points import either

PROGRAM = "tests.faults.two_orchestrators"


def lived(folder: Path, *, jobs: int, kills: int = 0, url: str = "", flaw: str = "") -> Life:
    (life,) = carried_out(folder, [{"jobs": jobs, "kills": kills, "url": url, "flaw": flaw}], program=PROGRAM)
    return life


@pytest.mark.parametrize("engine", ["sqlite", "nats"])
def test_no_job_runs_twice_while_processes_die(tmp_path: Path, engine: str, request: pytest.FixtureRequest) -> None:
    url = f"{request.getfixturevalue('nats_server').url}/{new_id()}" if engine == "nats" else ""
    jobs = either(40, 400)
    life = lived(tmp_path, jobs=jobs, kills=either(3, 30), url=url)
    assert life["said"] == []
    assert life["overlaps"] == []
    assert life["states"] == ["succeeded"] * jobs
    assert life["documents"] == jobs


def test_leases_that_nobody_renews_are_caught(tmp_path: Path) -> None:
    """Within three runs: on a busy machine the second process may come late to one."""
    assert any(lived(tmp_path / str(run), jobs=20, flaw="no renewal")["overlaps"] for run in range(3))
