"""Shared by every service: bounded tasks, batches, log lines, time-outs."""
