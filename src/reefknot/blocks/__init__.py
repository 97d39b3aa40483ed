"""
The steps a worker can run: http, files, databases, and one's own Python.

A block runs one attempt and says what came of it; it never tries again by itself. What it may reach is configured:
public addresses, folders, databases. Anything else is `permission_denied`, which nobody retries.
"""
