"""Open work as a table in memory, shared by the engines that keep it there."""
