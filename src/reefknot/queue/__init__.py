"""Work from accepted to ended: its model and ports, one attempt, workers, the router, and clients."""
