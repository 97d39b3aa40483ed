"""The decorator: a function that fails twice, a hook that watches, and an override for one request."""

import reefknot as rk

calls = 0


def watch(event: rk.RetryEvent) -> None:
    print(f"  attempt {event.attempt} of {event.max_attempts}: {event.failure}; again in {event.delay:.2f} s")


@rk.retry(on=ConnectionError, attempts=4, base_delay=0.05, deadline=5, on_retry=watch)
def price_of(article: str) -> float:
    global calls
    calls += 1
    if calls % 3:
        raise ConnectionError("the price list is not reachable")
    return 9.95


print(f"it recovers: {price_of('rope')} after {calls} calls")

try:
    price_of.using(attempts=2)("rope")
except ConnectionError as error:
    print(f"with two attempts it does not: {error}")
    for note in error.__notes__:
        print(f"  {note}")
