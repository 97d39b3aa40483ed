"""Events, the hash chain, replay and analysis. Pure."""
