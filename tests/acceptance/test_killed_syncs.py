"""A `source run` that was killed, and the next one: it goes on at once, behind the last page that was kept."""

from __future__ import annotations

import time

from tests.acceptance.folder import Folder, until

SLOW = """\
import os
import time
import reefknot as rk

@rk.connector("slow_pages")
async def fetch(context, request):
    number = int(request.cursor or 0)
    if number == 2 and os.path.exists("hangs"):
        open("reached", "w").close()
        time.sleep(60)
    return rk.Page(str(number + 1), (rk.Document(str(number), f"p{number}", "1"),), is_last=number == 4)
"""


def test_the_next_run_goes_on_at_once(folder: Folder) -> None:
    folder.write("slow.py", SLOW)
    (folder.path / "hangs").touch()
    words = ("source", "add", "slow", "--connector", "slow_pages", "--module", "slow")
    assert folder(*words).code == 0
    killed = folder.start("source", "run", "slow", "--module", "slow")
    until(lambda: (folder.path / "reached").exists())
    folder.kill(killed)
    (folder.path / "hangs").unlink()

    began = time.monotonic()
    done = folder("source", "run", "slow", "--module", "slow")
    assert (done.code, "3 new or changed" in done.out) == (0, True), done
    assert time.monotonic() - began < 30, "a lease of a minute is not waited for"
    assert folder.json("source", "list")["sources"][0]["documents"] == 5
