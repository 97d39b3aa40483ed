"""Ingestion PULLS documents from sources: due, claim, fetch a page, keep documents and cursor, settle."""
