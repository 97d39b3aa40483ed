"""Telemetry: traces by OpenTelemetry, and the form of log lines."""
