"""Telemetry of running systems: counters of events, traces by OpenTelemetry, and the form of log lines."""
