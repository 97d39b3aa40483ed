"""What the figures were taken on. Neither the machine's name nor any path of it is told."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor and interpreter; `load` is how many processes wanted to run, over the minute before."""

    cores: int
    cpu: str
    python: str
    load: float

    def __str__(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"{cores}, {self.cpu}, {self.python}, load {self.load:.1f} before the run"


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Machine(cores, cpu_model(), f"{platform.python_implementation()} {platform.python_version()}", load)


def cpu_model(listing: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as the kernel calls it, else its architecture."""
    try:
        text = listing.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    for line in text.splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions by distribution name."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
