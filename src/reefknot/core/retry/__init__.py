"""Again, or stop: the model of retrying, and the one decision."""
