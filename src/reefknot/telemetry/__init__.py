"""Telemetry of running systems: counters of events, and traces."""
