"""Audit events: their records, their hash chain, replay and statistics."""
