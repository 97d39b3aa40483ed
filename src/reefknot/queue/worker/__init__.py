"""The worker: admits assignments, keeps them in bounded queues, and runs them as steps."""
