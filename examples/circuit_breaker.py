"""A circuit breaker shared by two functions that call the same place."""

import time

import reefknot as rk

billing = rk.CircuitBreaker("billing", failures=3, cooldown=0.2)
calls = 0
up = False


@rk.retry(attempts=10, base_delay=0.02, breaker=billing)
def charge(amount: int) -> str:
    global calls
    calls += 1
    if not up:
        raise ConnectionError("billing does not answer")
    return f"charged {amount}"


@billing
def balance() -> int:
    return 100


try:
    charge(5)
except ConnectionError as error:
    print(f"{calls} calls, then: {error}")
print(billing)

try:
    balance()
except rk.BreakerOpenError as refused:
    print(f"the other function is refused at once: {refused}")

up = True
time.sleep(0.2)
print(f"a moment later: {billing}")
print(charge(5), "and", billing)
assert calls == 4
