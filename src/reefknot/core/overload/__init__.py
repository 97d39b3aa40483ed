"""Too much work, or a place that cannot take it: levels, admission, breakers."""
