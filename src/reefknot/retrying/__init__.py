"""The retry library: decorator, retrier, attempt loop, circuit breaker."""
