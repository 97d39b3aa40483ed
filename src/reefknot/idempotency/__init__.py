"""One effect per key: claim the key, renew its lease, record the result, answer later callers."""
