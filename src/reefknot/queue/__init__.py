"""Work from submission to its end: model and ports, execution of attempts, workers, the router, and clients."""
