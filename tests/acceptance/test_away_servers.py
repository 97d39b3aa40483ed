"""A NATS server that is away when a system is asked to end: the system ends in time, and its work is not lost."""

from __future__ import annotations

import time

from reefknot.console.nats_servers import NatsServer
from tests.acceptance.folder import HOLD, Folder, until
from tests.nats_servers import kill, restart

ENDS_WITHIN_S = 20.0
"""15 s, and what a loaded machine takes more."""
TERMINATED = 143


def test_a_system_ends_soon_although_its_server_is_away_and_its_work_is_done_by_the_next(
    folder: Folder, own_nats_server: NatsServer
) -> None:
    folder.set_variable("REEFKNOT__ENGINE", own_nats_server.url)
    folder.write("calls.py", HOLD)
    system = folder.up("--module", "calls", "--drain", "1")
    for name in ("order-1", "order-2"):
        assert folder("submit", "--type", "own.hold", "--id", name, "--inputs", "{}").code == 0
    until(lambda: set(folder.begun()) == {"order-1", "order-2"})
    kill(own_nats_server)
    began = time.monotonic()
    code, _, err = folder.stop(system)
    took = time.monotonic() - began
    assert (code, took < ENDS_WITHIN_S) == (TERMINATED, True), (took, err)
    restart(own_nats_server)
    folder.go()
    folder.start("up", "--module", "calls")
    until(lambda: [one["state"] for one in folder.json("job", "list")["jobs"]] == ["succeeded"] * 2)
