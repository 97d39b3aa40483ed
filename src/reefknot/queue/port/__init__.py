"""Contracts of a work queue, its transport and its control channel."""
