"""
`make release-check`: whether this commit can be tagged as a release.

    python -m tools.release_check [VERSION]

The version stands in one file, the changelog has a dated section for it, the tree is clean, the branch is main, and the
tag is free. With a VERSION, it has to be that one. Nothing is changed, and no tag is made.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "src/reefknot/__init__.py"
ASSIGNED = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)
HEADING = re.compile(r"^## \[?([^\]\s]+)\]?(?: - (.*))?$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
MOST_CHANGELOG_BYTES = 6_000


class Facts(NamedTuple):
    """All that the check looks at."""

    source: str
    pyproject: str
    changelog: str
    changes: str
    """What `git status --porcelain` prints."""
    branch: str
    tags: frozenset[str]


def gathered(root: Path) -> Facts:
    """The facts of a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.rstrip()

    return Facts(
        source=(root / VERSION_FILE).read_text(encoding="utf-8"),
        pyproject=(root / "pyproject.toml").read_text(encoding="utf-8"),
        changelog=(root / "CHANGELOG.md").read_text(encoding="utf-8"),
        changes=git("status", "--porcelain"),
        branch=git("rev-parse", "--abbrev-ref", "HEAD"),
        tags=frozenset(git("tag", "--list").split()),
    )


def version_problems(facts: Facts, version: str, wanted: str | None) -> list[str]:
    """What is wrong with the version itself, and with the places where it stands."""
    found = []
    project = tomllib.loads(facts.pyproject)["project"]
    if "version" in project or "version" not in project.get("dynamic", ()):
        found.append(f"pyproject.toml has a version of its own; the one source is {VERSION_FILE}")
    if wanted is not None and wanted != version:
        found.append(f"the version is {version}, not {wanted}")
    try:
        parsed = Version(version)
    except InvalidVersion:
        return [*found, f"{version!r} is not a version"]
    if str(parsed) != version:
        found.append(f"{version} is written {parsed} in packages")
    older = [one for one in facts.tags if re.fullmatch(r"v\d+(\.\d+)*", one) and Version(one) > parsed]
    if older:
        found.append(f"{version} is older than the tag {max(older, key=Version)}")
    return found


def changelog_problems(text: str, version: str) -> list[str]:
    """What the changelog lacks for this version."""
    found = []
    headings = HEADING.findall(text)
    if not headings or headings[0][0] != version:
        newest = headings[0][0] if headings else "missing"
        found.append(f"the first section of CHANGELOG.md is {newest}, not {version}")
    elif not DATE.fullmatch(headings[0][1]):
        found.append(f"the section {version} of CHANGELOG.md has no date: ## [{version}] - YYYY-MM-DD")
    section = HEADING.split(text)[3] if headings else ""
    if headings and len(section.encode()) > MOST_CHANGELOG_BYTES:
        found.append(f"the section {headings[0][0]} of CHANGELOG.md is longer than {MOST_CHANGELOG_BYTES} bytes")
    return found


def problems(facts: Facts, wanted: str | None = None) -> list[str]:
    """Everything that keeps this commit from being tagged."""
    versions = ASSIGNED.findall(facts.source)
    if len(versions) != 1:
        return [f"{VERSION_FILE} assigns __version__ {len(versions)} times, not once"]
    version = versions[0]
    found = [*version_problems(facts, version, wanted), *changelog_problems(facts.changelog, version)]
    if facts.changes:
        found.append(f"the tree has changes that are not committed:\n{facts.changes}")
    if facts.branch != "main":
        found.append(f"the branch is {facts.branch}, not main")
    if f"v{version}" in facts.tags:
        found.append(f"the tag v{version} exists")
    return found


def main(words: list[str]) -> int:
    facts = gathered(ROOT)
    found = problems(facts, words[0] if words else None)
    for one in found:
        print(one)
    if not found:
        version = ASSIGNED.findall(facts.source)[0]
        print(f"ready: make dist, then git tag -a v{version} -m 'reefknot {version}'")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
