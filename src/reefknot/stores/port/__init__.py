"""Contracts of a store and of its named values."""
