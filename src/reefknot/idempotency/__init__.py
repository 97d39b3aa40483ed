"""Idempotency: one effect per key, and its recorded result for every caller."""
