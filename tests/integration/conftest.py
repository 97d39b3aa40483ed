"""The servers that the integration tests share, one of each kind for the whole session, and peers on NATS."""

from tests.integration.peers import folder, peer
from tests.integration.postgres import postgres

__all__ = ["folder", "peer", "postgres"]
