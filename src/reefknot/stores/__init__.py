"""Stores: one contract, three engines, and the retention of their records."""
