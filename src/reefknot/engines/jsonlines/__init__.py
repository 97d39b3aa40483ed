"""
An audit log in files of JSON lines, with one writer and a chain of its own.

Files are rotated by size. Beyond the configured number of files the oldest is removed, and an anchor event says so.
The engine keeps no work and no keys: it is a log, not a store.
"""

from reefknot.engines.jsonlines.log import JsonLinesLog
from reefknot.engines.jsonlines.writer import Fsync

__all__ = ["Fsync", "JsonLinesLog"]
