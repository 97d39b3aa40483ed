"""Stores: one contract, three engines, and the retention of what is in them."""
