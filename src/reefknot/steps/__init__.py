"""
Blocks: the steps that a worker can run. HTTP requests, files, databases, and Python functions.

A block runs one attempt and returns its outcome; it never tries again by itself. What it may reach is configured:
public addresses, folders, databases. Anything else is `permission_denied`, which is never retried.
"""
