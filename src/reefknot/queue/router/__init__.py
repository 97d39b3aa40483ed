"""The router: sends assignments to workers, and returns their results to callers."""
