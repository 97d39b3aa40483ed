"""What was decided, on record: events, their chain, and deciding them again."""
