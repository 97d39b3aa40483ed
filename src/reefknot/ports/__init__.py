"""Contracts that the inside asks of the outside: one Protocol per file."""
