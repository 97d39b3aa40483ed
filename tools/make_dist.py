"""
`make dist`: builds wheel and sdist, and tries them in fresh environments.

    python -m tools.make_dist [EXTRA …]

Both files are built into dist/, and looked into: everything that the package needs has to be there. Then the wheel is
installed without extras, with all of them and with each alone, and the sdist once, each into an environment of its own,
with the versions of constraints.txt; there `tools/smoke_test.py` runs. Environments are made by uv where it is
installed, else by venv and pip, which then looks for all packages once and not for every environment. With names of
extras only these are tried.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tools.smoke_test import FEATURES

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
AT_ONCE = 2
TIMEOUT_S = 600
BACKEND = "hatchling>=1.27"
NONE, ALL, SDIST = "no extra", "all", "sdist"


class DistError(Exception):
    """A file that was built is not as it should be, or does not work."""


def packaged_files() -> set[str]:
    """The paths of all files of the package, as they are in a wheel."""
    source = ROOT / "src"
    files = (one for one in (source / "reefknot").rglob("*") if one.is_file() and "__pycache__" not in one.parts)
    return {one.relative_to(source).as_posix() for one in files if one.suffix not in (".pyc", ".pyo")}


def check_wheel(wheel: Path) -> list[str]:
    """What a wheel lacks, or has too much. Templates, static files, samples and `py.typed` are files of the package."""
    with zipfile.ZipFile(wheel) as file:
        names = {one for one in file.namelist() if not one.endswith("/")}
    wanted = packaged_files()
    own = {one for one in names if not one.split("/")[0].endswith(".dist-info")}
    found = [f"missing: {one}" for one in sorted(wanted - own)] + [f"not ours: {one}" for one in sorted(own - wanted)]
    if not any(one.endswith(".dist-info/entry_points.txt") for one in names):
        found.append("missing: the commands")
    return found


def check_sdist(sdist: Path) -> list[str]:
    """What an sdist lacks to be built, tested and deployed from."""
    with tarfile.open(sdist) as file:
        names = {one.partition("/")[2] for one in file.getnames()}
    wanted = {f"src/{one}" for one in packaged_files()}
    wanted |= {"pyproject.toml", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md", "Makefile", "mkdocs.yml"}
    wanted |= {"deploy/Containerfile", "deploy/reefknot.service", "deploy/reefknot.yaml"}
    return [f"missing: {one}" for one in sorted(wanted - names)]


def build(python: str, target: Path) -> tuple[Path, Path]:
    """Wheel and sdist, built by an interpreter that has hatchling."""
    run([python, "-m", "hatchling", "build", "--directory", str(target)], cwd=ROOT)
    (wheel,), (sdist,) = target.glob("reefknot-*.whl"), target.glob("reefknot-*.tar.gz")
    return wheel, sdist


# ---- environments ----------------------------------------------------------------------------------------------------


def run(words: list[str], *, cwd: Path) -> str:
    """What a command prints. It sees nothing of this environment's packages."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise DistError(f"{' '.join(words)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


UV = shutil.which("uv")
CONSTRAINTS = ["--constraint", str(ROOT / "constraints.txt")]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def make_environment(folder: Path, wanted: str, packages: Path | None = None) -> str:
    """A fresh environment with this requirement, from a folder of `packages` alone; returns its interpreter."""
    python = str(folder / "bin" / "python")
    if UV is not None:
        run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], cwd=ROOT)
        run([UV, "pip", "install", "--quiet", "--python", python, *CONSTRAINTS, wanted], cwd=ROOT)
        return python
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=ROOT)
    where = [] if packages is None else ["--no-index", "--find-links", str(packages)]
    install = [*PIP, "--python", python, "install", "--quiet", "--no-compile"]
    run([*install, *where, *CONSTRAINTS, wanted], cwd=ROOT)
    return python


def collect(wheel: Path, folder: Path) -> Path:
    """All packages that an environment may need, in one folder. uv has a cache of its own."""
    if UV is None:
        wanted = [f"{wheel}[{ALL}]", BACKEND]
        run([*PIP, "wheel", "--quiet", "--wheel-dir", str(folder), *CONSTRAINTS, *wanted], cwd=ROOT)
    return folder


def tried(name: str, file: Path, folder: Path, packages: Path) -> str:
    """Install one file with one set of extras, run the smoke test there, and say how long it took."""
    began = time.monotonic()
    extras = "" if name in (NONE, SDIST) else name
    python = make_environment(folder / "environment", f"{file}[{extras}]" if extras else str(file), packages)
    home = folder / "folder"
    home.mkdir()
    shutil.copy(ROOT / "tools" / "smoke_test.py", folder / "smoke_test.py")
    run([python, "-I", str(folder / "smoke_test.py"), extras], cwd=home)
    return f"{file.name}, {name}: works, {time.monotonic() - began:.0f} s"


@contextmanager
def workshop() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="reefknot-dist-") as folder:
        yield Path(folder)


def main(chosen: list[str]) -> int:
    unknown = set(chosen) - {NONE, ALL, SDIST, *FEATURES}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; accepted: {', '.join([ALL, SDIST, *FEATURES])}", file=sys.stderr)
        return 2
    try:
        with workshop() as folder:
            tools = make_environment(folder / "tools", BACKEND)
            shutil.rmtree(DIST, ignore_errors=True)
            wheel, sdist = build(tools, DIST)
            for file, problems in ((wheel, check_wheel(wheel)), (sdist, check_sdist(sdist))):
                if problems:
                    raise DistError(f"{file.name}: {'; '.join(problems)}")
                print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes, complete", flush=True)
            names = chosen or [NONE, *FEATURES, ALL, SDIST]
            files = {name: sdist if name == SDIST else wheel for name in names}
            packages = collect(wheel, folder / "packages")
            with ThreadPoolExecutor(AT_ONCE) as pool:
                jobs = [pool.submit(tried, name, file, _made(folder / name), packages) for name, file in files.items()]
                try:
                    for job in as_completed(jobs):
                        print(job.result(), flush=True)
                except DistError:
                    pool.shutdown(cancel_futures=True)
                    raise
    except DistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
