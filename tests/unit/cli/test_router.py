"""The router's own words about several systems on one store."""

from __future__ import annotations

from tests.unit.cli import work_items
from tests.unit.cli.running import Commands


def test_every_system_on_the_store_is_told(rk: Commands) -> None:
    path = rk.folder / ".reefknot" / "state.db"
    work_items.seen_running(path, "worker-1")
    work_items.seen_running(path, "worker-2")
    found = rk("router", "status", "--json").json["routers"]

    assert len({one["system_id"] for one in found}) == 2
    assert rk("router", "status").out.count("router of pid") == 2
