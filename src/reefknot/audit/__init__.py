"""Audit: events and the log they are written to, and the policy books that decisions refer to."""
