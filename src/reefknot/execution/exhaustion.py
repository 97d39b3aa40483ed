"""
How many retries gave up in this process.

The number tells a fresh mark on an exception from an old one: an exception object may be raised again and again.
"""

so_far = 0
