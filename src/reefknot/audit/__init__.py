"""Audit: events on their way to a log, and the policy books that decisions refer to."""
