"""
The engine on NATS JetStream: a store that many machines share.

Every process mirrors the open work and decides by it; every change is an atomic batch that is compared with what it was
decided on. Events are in the batch of their change until they are in the audit stream.
"""

from reefknot.stores.jetstream.connection import NatsOptions, options_from_url
from reefknot.stores.jetstream.store import JetStreamStore

__all__ = ["JetStreamStore", "NatsOptions", "options_from_url"]
