"""`make release-check`: each thing that keeps a commit from being tagged is named, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from tools.release_check import ASSIGNED, ROOT, VERSION_FILE, Facts, gathered, problems

READY = Facts(
    source='__version__ = "1.2.0"\n',
    pyproject='[project]\nname = "x"\ndynamic = ["version"]\n',
    changelog="# Changelog\n\n## [1.2.0] - 2030-01-02\n\n### Added\n\n- More.\n\n## [1.1.0] - 2029-01-02\n",
    changes="",
    branch="main",
    tags=frozenset({"v1.1.0", "nightly"}),
)


def test_a_commit_that_is_ready_has_no_problem_but_that_it_is_not_the_version_asked_for() -> None:
    assert problems(READY) == problems(READY, "1.2.0") == []
    assert problems(READY, "1.3.0") == ["the version is 1.2.0, not 1.3.0"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (READY._replace(source='__version__ = "1.3.0"\n'), "the first section of CHANGELOG.md is 1.2.0, not 1.3.0"),
        (READY._replace(source='__version__ = "1.2"\n'), "the first section of CHANGELOG.md is 1.2.0, not 1.2"),
        (READY._replace(source='__version__ = "one"\n'), "'one' is not a version"),
        (READY._replace(source='__version__ = "1.2.0-rc1"\n'), "1.2.0-rc1 is written 1.2.0rc1 in packages"),
        (READY._replace(source=""), "assigns __version__ 0 times"),
        (READY._replace(source=READY.source * 2), "assigns __version__ 2 times"),
        (READY._replace(pyproject='[project]\nversion = "1.2.0"\n'), "pyproject.toml has a version of its own"),
        (READY._replace(changelog="# Changelog\n"), "is missing, not 1.2.0"),
        (READY._replace(changelog="## [1.2.0] - unreleased\n"), "has no date"),
        (READY._replace(changelog=f"## [1.2.0] - 2030-01-02\n{'x' * 6001}"), "is longer than 6000 bytes"),
        (READY._replace(changes=" M README.md"), "changes that are not committed:\n M README.md"),
        (READY._replace(branch="HEAD"), "the branch is HEAD, not main"),
        (READY._replace(tags=frozenset({"v1.2.0"})), "the tag v1.2.0 exists"),
        (READY._replace(tags=frozenset({"v1.10.0", "v1.9.0"})), "1.2.0 is older than the tag v1.10.0"),
    ],
)
def test_control_a_commit_that_is_not_ready_is_refused(changed: Facts, problem: str) -> None:
    assert problem in "\n".join(problems(changed))


def test_only_the_date_and_the_state_of_git_may_keep_this_repository_from_a_release() -> None:
    """A tree that is at work is not clean, and the date is written when a version is released."""
    (version,) = ASSIGNED.findall((ROOT / VERSION_FILE).read_text())
    facts = READY._replace(
        source=(ROOT / VERSION_FILE).read_text(),
        pyproject=(ROOT / "pyproject.toml").read_text(),
        changelog=(ROOT / "CHANGELOG.md").read_text().replace(f"[{version}] - unreleased", f"[{version}] - 2030-01-02"),
        tags=frozenset(),
    )
    assert problems(facts) == []


def test_the_facts_are_those_of_the_repository(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "src" / "reefknot").mkdir(parents=True)
    (tmp_path / VERSION_FILE).write_text(READY.source)
    (tmp_path / "pyproject.toml").write_text(READY.pyproject)
    (tmp_path / "CHANGELOG.md").write_text(READY.changelog)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "Begin")
    git("tag", "v1.1.0")
    assert gathered(tmp_path) == READY._replace(tags=frozenset({"v1.1.0"}))

    (tmp_path / "more").write_text("")
    assert gathered(tmp_path).changes == "?? more"
