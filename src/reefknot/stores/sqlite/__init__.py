"""A durable store in one SQLite file: WAL, `synchronous=FULL`, one writer thread with group commit."""

from reefknot.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
