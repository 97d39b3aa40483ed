"""Checking files: every file is read, every mistake is told, and one mistake anywhere makes the answer 78."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from reefknot.cli.asking import load
from reefknot.cli.exits import Exit
from reefknot.cli.output import put, put_json, say, where
from reefknot.errors import ConfigurationError

if TYPE_CHECKING:
    from reefknot.config.settings import Settings


def check_files(files: Iterable[str | None], *, json: bool, policies_only: bool = False) -> int:
    """Check each file on its own; None is the one that would be found."""
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(files):
        try:
            found = load(name)
            if not policies_only:
                _check_blocks(found)
        except ConfigurationError as error:
            problems = str(error).splitlines()
            results.append({"file": name, "ok": False, "problems": problems, "warnings": []})
            for line in problems:
                say(where(line))
            continue
        warnings = [] if policies_only else list(found.warnings)
        for warning in warnings:
            say(f"warning: {warning}")
        shown = str(found.path) if name is None and found.path else name
        results.append({"file": shown, "ok": True, "problems": [], "warnings": warnings})
        if not json:
            name = "no configuration file, only what is built in" if shown is None else where(shown)
            put(f"{name}: OK: {_contents(found)}")
    if json:
        put_json({"ok": all(one["ok"] for one in results), "files": results})
    return Exit.FINE if all(one["ok"] for one in results) else Exit.MISCONFIGURED


def _check_blocks(found: Settings) -> None:
    """What steps may reach is read by the steps' own part; its mistakes are mistakes of the file all the same."""
    if found.configuration.blocks:
        from reefknot.blocks.settings import read_settings

        folder = None if found.path is None else found.path.parent
        read_settings(found.configuration.blocks, folder=folder, place=found.place)


def _contents(found: Settings) -> str:
    configuration = found.configuration
    counts = (
        (len(configuration.worker.retries.v2.block_policies), "block"),
        (len(configuration.retry_policies), "connector"),
        (len(configuration.operations), "operation"),
        (len(configuration.sources), "source"),
    )
    parts = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    retries, queue = ("on" if gate else "off" for gate in (found.retries_gate, found.queue_gate))
    return f"{parts}; worker.retries.v2 {retries}, worker.queue.v2 {queue}"
