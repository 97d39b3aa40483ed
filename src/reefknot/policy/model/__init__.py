"""The policy book as values: layers resolved, built-in defaults, explanations, tuning. Pure."""
