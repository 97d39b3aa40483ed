"""
`make spread`: a short spread of the tests on every supported interpreter that is installed.

    python tools/spread.py [--require] [3.12 …]

An interpreter is looked for on the PATH and among those of pyenv. One that is missing is a line "not installed", and an
error only with `--require`. Each gets an environment in .venv/spread, with the versions of constraints.txt, which is
kept until the requirements change. The package is run from src.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MINORS = ("3.12", "3.13", "3.14")  # 3.11 has all of `make test`
TESTS = (
    "tests/unit/core",
    "tests/unit/retrying",
    "tests/unit/test_errors.py",
    "tests/unit/test_public_surface.py",
    "tests/unit/test_private_names.py",
)
TOOLS = ("anyio", "google-api-core", "hypothesis", "packaging", "pytest", "pytest-xdist", "tenacity", "trio")
EXTRAS = ("dashboard", "nats")
TIMEOUT_S = 600


def candidates(minor: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Where an interpreter of this version may be: on the PATH, then among those of pyenv, newest first."""
    found = shutil.which(f"python{minor}", path=environ.get("PATH", ""))
    if found is not None:
        yield found
    home = Path(environ.get("PYENV_ROOT") or Path(environ.get("HOME", "/")) / ".pyenv") / "versions"
    versions = [one for one in home.glob(f"{minor}.*") if one.name.rpartition(".")[2].isdigit()]
    for one in sorted(versions, key=lambda one: int(one.name.rpartition(".")[2]), reverse=True):
        yield str(one / "bin" / "python")


def is_version(python: str, minor: str) -> bool:
    """Whether a command runs and is this version. A shim of pyenv may be there and not run."""
    try:
        done = subprocess.run([python, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.startswith(f"Python {minor}.")


def find(minor: str, environ: Mapping[str, str], is_right: Callable[[str, str], bool] = is_version) -> str | None:
    """The interpreter of this version, if there is one."""
    return next((one for one in candidates(minor, environ) if is_right(one, minor)), None)


def wanted() -> list[str]:
    """What the tests of the spread need: the package's own requirements, some extras and the test tools."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for name in EXTRAS for line in project["optional-dependencies"][name]]
    return [*project["dependencies"], *extras, *TOOLS]


def run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether a command succeeded, and all that it printed."""
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"{words[0]}: not finished after {TIMEOUT_S} s"
    return done.returncode == 0, done.stdout + done.stderr


def environment(minor: str, python: str) -> tuple[str, str]:
    """The interpreter of an environment with all that is needed, and an error, or an empty text."""
    folder = ROOT / ".venv" / "spread" / minor
    made, stamp = str(folder / "bin" / "python"), folder / ".made"
    needs = wanted()
    inputs = "\n".join([python, *needs, (ROOT / "constraints.txt").read_text(encoding="utf-8")])
    key = hashlib.sha256(inputs.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return made, ""
    install = [made, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    for words in ([python, "-m", "venv", "--clear", str(folder)], [*install, "-c", "constraints.txt", *needs]):
        is_done, text = run(words, os.environ)
        if not is_done:
            return made, text
    stamp.write_text(key)
    return made, ""


def tried(minor: str, python: str) -> tuple[bool, str]:
    """Whether the spread passes on this interpreter, and the report."""
    began = time.monotonic()
    made, error = environment(minor, python)
    if error:
        return False, f"{error}\n{minor}: no environment"
    pytest = [made, "-m", "pytest", "-q", "-n2", "-p", "no:cacheprovider", "-p", "reefknot.testing.pytest_plugin"]
    quiet = ["--durations=0", "--durations-min=9999", "--tb=short", *TESTS]
    is_green, text = run([*pytest, *quiet], {**os.environ, "PYTHONPATH": str(ROOT / "src")})
    lines = text.strip().splitlines() or ["no output"]
    last = f"{minor}: {lines[-1].strip('= ')}; {time.monotonic() - began:.0f} s in all"
    return is_green, last if is_green else f"{text}\n{last}"


def main(words: Sequence[str]) -> int:
    minors = [one for one in words if one != "--require"] or list(MINORS)
    is_required = "--require" in words
    unknown = set(minors) - set(MINORS)
    if unknown:
        print(f"not an interpreter of the spread: {', '.join(sorted(unknown))}; accepted: {', '.join(MINORS)}")
        return 2
    found = {minor: find(minor, os.environ) for minor in minors}
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(tried, minor, python) for minor, python in found.items() if python is not None]
        results = [job.result() for job in jobs]
    for _, text in results:
        print(text)
    missing = [minor for minor, python in found.items() if python is None]
    for minor in missing:
        print(f"{minor}: not installed")
    return 0 if all(ok for ok, _ in results) and not (is_required and missing) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
