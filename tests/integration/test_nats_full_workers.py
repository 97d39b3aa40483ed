"""Workers on a real NATS server take from the shared subject what they have places for; the stream keeps the rest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reefknot.console.nats_servers import NatsServer, running_nats
from tests.shared_subject import STORIES, CountingTransport, Story, on_server

pytestmark = pytest.mark.real_time


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with running_nats(tmp_path / "nats") as (one,):
        yield one


@pytest.mark.parametrize(("story", "kind"), STORIES)
async def test_a_full_worker_leaves_the_rest_in_the_stream(
    server: NatsServer, story: Story, kind: type[CountingTransport]
) -> None:
    async with on_server(server.url, kind) as subject:
        await story(subject)
