"""
The command line and the public names, compared with golden files.

`REEFKNOT_GOLDEN=write pytest tests/golden` rewrites the files; otherwise every difference fails with a diff. Nothing
here imports more than `reefknot.console.cli.main` and public names, so that the inside may be rearranged. Commands run
in process, 100 columns wide; help, steps of one's own, stdin, and `up` beside other commands (`live.py`) are processes
of their own. What is made comparable, and how, is in `harness.py`.

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
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden.cases import SCENARIOS
from tests.golden.harness import FILES, WRITES, Folder, Scenario, all_commands, compare, played
from tests.golden.live import CASES as LIVE_CASES
from tests.golden.live import lived
from tests.golden.surface import surface

SURFACE = "public_surface"


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
