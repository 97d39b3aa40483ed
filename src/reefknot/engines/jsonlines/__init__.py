"""
An audit log in files of JSON lines, one writer, with a chain of its own.

Files are rotated by size. When more than the configured number are there, the oldest goes, and an anchor event says so.
It keeps no work and no keys: it is a log, not a store.
"""

from reefknot.engines.jsonlines.log import JsonLinesLog
from reefknot.engines.jsonlines.writer import Fsync

__all__ = ["Fsync", "JsonLinesLog"]
