"""What a process holds is free when it is gone, and no shutdown and no caller waits longer than it was told."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from tests.acceptance.folder import PATIENCE_S, Folder, until

STEPS = """\
import asyncio
import os
import time
import reefknot as rk

def begun(name):
    with open("begun.txt", "a") as file:
        file.write(name + "\\n")

@rk.block("own.plain")
def plain(inputs, context):
    begun(inputs["name"])
    ends = time.monotonic() + inputs["seconds"]
    while time.monotonic() < ends:
        time.sleep(0.05)
    return {}
"""


def up(folder: Folder, *words: str) -> subprocess.Popen[str]:
    """A system with the steps of this file, as soon as it says that it is up."""
    (folder.path / "held.py").write_text(STEPS)
    process = folder.start("up", "--module", "held", *words)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("up "), line
    return process


def submit(folder: Folder, kind: str, name: str, *words: str, **inputs: object) -> None:
    given = json.dumps({"name": name, **inputs})
    assert folder("submit", "--type", kind, "--inputs", given, "--id", name, *words).code == 0
    until(lambda: name in folder.begun())


# ---- shutdown --------------------------------------------------------------------------------------------------------


def test_a_shutdown_ends_with_its_drain_although_a_plain_function_goes_on(folder: Folder) -> None:
    process = up(folder, "--drain", "1")
    submit(folder, "own.plain", "endless", seconds=25)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = folder.ends(process)
    took = time.monotonic() - began

    assert code == 143
    assert 1.0 <= took < 8.0, "one second of drain, and then the end"
    assert "1 plain functions run on although their attempts have ended" in err
    shown = folder.json("job", "show", "endless")
    assert (shown["state"], shown["reason"], shown["interruptions"]) == ("pending", "shutdown", 1)
    assert shown["attempts"] == 0, "handed back, and nothing was spent"
