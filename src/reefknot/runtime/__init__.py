"""Parts that services share: background tasks, batches, log lines, timeouts, seeds."""
