"""`server`: a NATS server for one test to harm."""

from collections.abc import Iterator

import pytest

from reefknot.console.nats_servers import NatsServer
from tests.faults.nats_system import servers_in_memory


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with servers_in_memory() as (found,):
        yield found
