"""The copies of a store follow its cluster: three where there are three servers, and no part takes one away."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.console.nats_servers import NatsServer, url_of
from reefknot.stores.jetstream import assignments
from reefknot.stores.jetstream.connection import options_from_url
from reefknot.stores.jetstream.examination import server_findings
from reefknot.stores.jetstream.store import JetStreamStore
from reefknot.stores.jetstream.streams import patient_info
from reefknot.stores.opening import open_store
from reefknot.stores.port.engines import ExamineOptions

pytestmark = pytest.mark.real_time


async def copies(store: JetStreamStore) -> dict[str, int]:
    """The number of copies of each stream of a store; one whose copies are being changed may have no leader."""
    streams = {branch: f"{store.options.name}_{branch}" for branch in ("state", "assign")}
    found = {branch: await patient_info(store.connection, name) for branch, name in streams.items()}
    return {branch: info.config["num_replicas"] for branch, info in found.items()}


async def used(url: str, **nats: Any) -> dict[str, int]:
    """Open a store, take shared assignments as a worker does, and count the copies."""
    async with open_store(url, nats=nats) as store:
        assert isinstance(store, JetStreamStore)
        await store.transport(keeps_shared=True).ensure_stream()
        return await copies(store)


async def doctor(url: str, **nats: Any) -> list[str]:
    options = options_from_url(url, **nats)
    found = [one async for one in server_findings(options, ExamineOptions(takes_shared=True))]
    return [f"{one.level} {one.text}" for one in found if one.check == "replicas"]


async def test_a_store_has_three_copies_in_a_cluster_and_no_part_takes_one_away(nats_cluster: list[NatsServer]) -> None:
    url = f"{url_of(nats_cluster)}/three"
    assert await used(url) == {"state": 3, "assign": 3}
    assert await used(url, replicas=1) == {"state": 3, "assign": 3}, "of a part that is configured for one"
    assert all("has 3 copies" in one for one in await doctor(url))

    one = f"{url_of(nats_cluster)}/one"
    assert await used(one, replicas=1) == {"state": 1, "assign": 1}, "where it is configured when it is made"
    assert await used(one) == {"state": 1, "assign": 1}
    warned = [f"warning one_{stream} has 1 copy, in a cluster" for stream in ("state", "assign")]
    assert await doctor(one) == warned
    assert await used(one, replicas=3) == {"state": 1, "assign": 3}, "a part that is configured for more gives more"


async def test_a_part_that_takes_copies_away_is_noticed(
    nats_cluster: list[NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: a part that gives a stream what is configured for it."""
    url = f"{url_of(nats_cluster)}/three"
    assert await used(url) == {"state": 3, "assign": 3}
    monkeypatch.setattr(assignments, "max", min, raising=False)
    assert await used(url, replicas=1) == {"state": 3, "assign": 1}


async def test_a_lone_server_gives_one_copy(nats_server: NatsServer) -> None:
    assert await used(f"{nats_server.url}/lonely") == {"state": 1, "assign": 1}
    assert await doctor(f"{nats_server.url}/lonely") == ["ok lonely_state has 1 copy"]
