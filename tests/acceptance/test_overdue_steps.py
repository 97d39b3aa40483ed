"""A process whose step ignores its cancellation answers in time, and ends when it is asked to."""

from __future__ import annotations

import re

from tests.acceptance.folder import Folder, until

STEPS = """\
import asyncio
import reefknot as rk

@rk.block("own.deaf", timeout=1)
async def deaf(inputs, context):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
"""


def test_a_process_with_such_a_step_answers_in_time_and_ends_when_asked(folder: Folder) -> None:
    folder.write("stubborn.py", STEPS)
    folder.configure("dashboard: {enabled: false}\n")
    process = folder.start("up", "--module", "stubborn", "--drain", "1")

    submitted = folder("submit", "--type", "own.deaf", "--id", "a", "--wait")
    assert submitted.code != 0
    assert "the time for all attempts was over after" in submitted.out
    until(lambda: folder.state("a") in ("failed", "quarantined"))
    process.terminate()
    _, log = process.communicate(timeout=60)

    assert process.returncode in (0, 143)
    assert re.search(rf"its step goes on after its [\d.]+ s, at {folder.path / 'stubborn.py'}:8", log)
    assert "a step ignores that it is cancelled" in log
