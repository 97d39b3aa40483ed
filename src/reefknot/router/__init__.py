"""Where assignments are sent to workers, and their answers come back to callers."""
