"""Protection against overload: levels, admission, circuit breakers."""
