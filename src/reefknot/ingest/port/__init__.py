"""Contracts of connectors and of the document store."""
