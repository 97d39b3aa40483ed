"""Retries in process: `@retry`, `Retrier`, attempt loops and circuit breakers."""
