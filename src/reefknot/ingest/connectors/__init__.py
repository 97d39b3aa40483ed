"""Connectors READ sources: local files, Obsidian vaults, IMAP mailboxes, GitHub repositories, and one's own."""
