"""The system put together: steps, router, workers, ingestion, alerts and retry managers, by plain constructor calls."""
