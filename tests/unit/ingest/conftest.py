"""`world`: a store, a sink and orchestrators in virtual time."""

from tests.unit.ingest.world import world

__all__ = ["world"]
