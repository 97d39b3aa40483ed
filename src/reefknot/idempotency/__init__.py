"""One effect per key: claim, renew, record, answer."""
