"""Functions that fail a set number of times, and count their calls; and the ways to retry them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import reefknot as rk


class Flaky:
    """Raises the errors in their order, one a call; then returns `value`."""

    def __init__(self, *errors: BaseException | type[BaseException], value: object = "ok") -> None:
        self.errors: Sequence[BaseException | type[BaseException]] = errors
        self.value = value
        self.calls = 0
        self.given: list[object] = []

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        self.given.append((args, kwargs))
        if self.calls <= len(self.errors):
            raise self.errors[self.calls - 1]
        return self.value


class AsyncFlaky(Flaky):
    """`Flaky`, awaited."""

    async def __call__(self, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Always(Flaky):
    """Raises on every call."""

    def __init__(self, error: type[Exception] = ConnectionError) -> None:
        super().__init__()
        self.error = error

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        raise self.error(f"call {self.calls}")


class AsyncAlways(Always):
    """`Always`, awaited."""

    async def __call__(self, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class AsyncHanging(AsyncFlaky):
    """Never ends."""

    async def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return await asyncio.Event().wait()


class Answers:
    """Returns the values in their order, one a call; the last one again and again."""

    def __init__(self, *values: object) -> None:
        self.values = values
        self.calls = 0

    def __call__(self) -> object:
        self.calls += 1
        return self.values[min(self.calls, len(self.values)) - 1]


class AsyncAnswers(Answers):
    """`Answers`, awaited."""

    async def __call__(self) -> object:
        return super().__call__()


def ways(**options: Any) -> Iterator[Callable[[Any], Any]]:
    """Every way to call a plain function under these options."""
    yield lambda fn: rk.retry(**options)(fn)()
    yield lambda fn: rk.Retrier(**options).call(fn)
    yield lambda fn: rk.Retrier(**options).run(fn).unwrap()
    yield lambda fn: rk.retry(in_thread=True, **options)(fn)()
    yield lambda fn: rk.retry(throttle=True, **options)(fn)()
    yield lambda fn: rk.retry(deadline=600, **options)(fn)()
    yield lambda fn: rk.retry(fn).using(**options)()
    yield lambda fn: rk.using(rk.retry(fn), **options)()
    yield lambda fn: rk.retry(policy=rk.Retrier(**options))(fn)()


def async_ways(**options: Any) -> Iterator[Callable[[Any], Any]]:
    yield lambda fn: rk.retry(**options)(fn)()
    yield lambda fn: rk.Retrier(**options).acall(fn)
    yield lambda fn: rk.retry(deadline=600, **options)(fn)()
    yield lambda fn: rk.retry(breaker=rk.CircuitBreaker("x"), **options)(fn)()
