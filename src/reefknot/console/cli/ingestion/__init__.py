"""Commands about sources of documents: `source`, `schedule` and `telemetry`."""
