"""The servers that the integration tests share: one of each kind for the whole session."""

from tests.integration.postgres import postgres

__all__ = ["postgres"]
