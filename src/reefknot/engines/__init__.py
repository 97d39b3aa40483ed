"""Engines implement the ports: stores, logs, ledgers, clocks. None knows another."""
