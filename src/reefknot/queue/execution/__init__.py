"""Execution RUNS claimed work, for workers and for ingestion: failures, events, reports, isolation of suspects."""
