"""The model of retrying: policies, classification, backoff, and the one decision."""
