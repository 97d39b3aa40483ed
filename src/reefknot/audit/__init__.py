"""Audit events on their way to a log."""
