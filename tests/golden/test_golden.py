"""
The command line and the public names, compared with golden files.

`REEFKNOT_GOLDEN=write pytest tests/golden` rewrites the files; otherwise every difference fails with a diff. Nothing
here imports more than `reefknot.console.cli.main` and public names, so that the inside may be rearranged. Commands run
in process, 100 columns wide; help, steps of one's own, stdin, and `up` beside other commands are processes of their
own. What is made comparable, and how, is in `harness.py`.

Left out, because it cannot be made the same in every run, or takes too long:

- `audit tail --follow` and whatever else ends only by a signal, `up` apart;
- `worker drain` and `pause` that nobody obeys (75): that needs a system which stands still, and five seconds;
- `submit` to a queue that stays full (75): a minute;
- `audit tail` over what a whole system wrote: router and worker write at the same time; only its operators' deeds;
- `up --json` while work is done, and several workers at work: who gets what is chance;
- jobs that time out, are dropped, or are called off while they run;
- files that may not be read (77, 78): root may read everything; stores of a newer version;
- terminals: colours, progress bars, widths; streams that are closed or full.
"""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.golden import stores
from tests.golden.cases import LIVE, SCENARIOS, UP
from tests.golden.harness import FILES, WRITES, Ended, Folder, Scenario, all_commands, compare, played, started
from tests.golden.surface import surface

SURFACE = "public_surface"
LIVE_CASES = [*LIVE.cases(), "live.up", "live.run_stdin"]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """A folder whose path always has the same length, so that lines break at the same places."""
    path = Path(tempfile.mkdtemp(prefix="golden-", dir="/tmp"))
    try:
        yield Folder(path, monkeypatch)
    finally:
        shutil.rmtree(path)


def help_case(words: str) -> str:
    """The name of the golden file of a command's help."""
    return "help." + (words.replace(" ", "_") or "reefknot")


def test_help_of_every_command(folder: Folder) -> None:
    found = all_commands(folder)

    assert len(found) > 40, "the panels of commands are no longer understood"
    compare({help_case(words): folder.golden(f"{words} --help".strip(), ended) for words, ended in found.items()})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(folder: Folder, scenario: Scenario) -> None:
    compare(played(scenario, folder))


@contextmanager
def system(folder: Folder) -> Iterator[subprocess.Popen[str]]:
    process = started(UP, folder.path)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def lived(folder: Folder) -> dict[str, str]:
    """Run `up` beside the scenario, end it by a signal, and give all texts."""
    stores.prepared(folder)
    with system(folder) as process:
        until = time.monotonic() + 20
        while "worker-1" not in folder.run("router status").out:
            assert process.poll() is None, "the system ended by itself"
            assert time.monotonic() < until, "the system does not say that it runs"
            time.sleep(0.05)
        found = played(LIVE, folder)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    found["live.up"] = folder.golden(f"{UP}  # ended by SIGTERM", Ended(process.returncode, out, err))
    line = "run - --engine memory: --json"
    found["live.run_stdin"] = folder.golden(f"{line}  # one bad line", folder.run_apart(line, "not json\n"))
    return found


def test_a_system_that_runs(folder: Folder) -> None:
    compare(lived(folder))


def test_public_surface() -> None:
    compare({SURFACE: surface()})


def test_every_golden_file_has_its_case(folder: Folder) -> None:
    """A file that nothing compares any more would look like a promise."""
    cases = [SURFACE, *LIVE_CASES, *(case for scenario in SCENARIOS for case in scenario.cases())]
    cases += [help_case(words) for words in all_commands(folder)]
    assert len(cases) == len(set(cases)), "two cases of one name"
    stale = {path.stem for path in FILES.iterdir()} - set(cases)
    if WRITES:
        for name in stale:
            (FILES / f"{name}.txt").unlink()
        return

    assert not stale, "golden files without a case"
