"""Exceptions that are hard to read: attributes that raise, odd values, groups that are very deep."""

from collections.abc import Callable
from typing import Any

TOLD = "the cause"
READ = (
    *("retry_after", "response", "status_code", "status", "code", "headers", "error_code", "failure_type", "reason"),
    *("grpc_status_code", "details"),
)
READ_BY_PYTHON = ("__dict__", "__cause__", "__notes__", "__traceback__", "__class__", "args")


def raising(name: str, error: BaseException, base: type[Exception] = ConnectionError) -> Exception:
    """An exception whose attribute of this name raises when it is read."""

    def read(_: object) -> Any:
        raise error

    return type(f"Odd_{name.strip('_')}", (base,), {name: property(read)})(TOLD)  # type: ignore[no-any-return]


def having(name: str, value: object, base: type[Exception] = ConnectionError) -> Exception:
    """An exception with this attribute."""
    error = base(TOLD)
    setattr(error, name, value)
    return error


class Deaf(ConnectionError):
    """No attribute can be read or set."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(name)


class Mute(ConnectionError):
    """The text cannot be had."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Endless(ConnectionError):
    """The text is no text."""

    def __str__(self) -> str:
        return self  # type: ignore[return-value]


class OddText(str):
    """A text that cannot be compared."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = str.__hash__


class Texting(ConnectionError):
    def __str__(self) -> str:
        return OddText(TOLD)


class NoNotes(ConnectionError):
    def add_note(self, note: str) -> None:
        raise RuntimeError(note)


class OddHeaders(dict[str, str]):
    def items(self) -> Any:
        raise RuntimeError


class OddDuration:
    def total_seconds(self) -> float:
        raise RuntimeError


class OwnGroup(ExceptionGroup[Exception]):
    """A group that contains itself."""

    @property
    def exceptions(self) -> tuple[Exception, ...]:
        return (self,)


def deep_group(depth: int, leaf: Exception | None = None) -> Exception:
    error: Exception = leaf or ConnectionError(TOLD)
    for _ in range(depth):
        error = ExceptionGroup("deep", [error])
    return error


def own_cause() -> Exception:
    error = ConnectionError(TOLD)
    error.__cause__ = error
    return error


VALUES: tuple[object, ...] = (
    *(
        float("nan"),
        float("inf"),
        -1,
        10**400,
        -(10**400),
        True,
        "²",
        "1e400",
        "9" * 5000,
        "Mon, 99 Foo 99999 00:00:00",
    ),
    *(b"\xff", "\ud800", (), [], {}, object(), OddHeaders(a="b"), OddDuration(), int, lambda: None),
)
RAISED: tuple[BaseException, ...] = (RuntimeError("odd"), SystemExit(1), GeneratorExit(), RecursionError(), KeyError())


def all_odd() -> dict[str, Callable[[], Exception]]:
    """Makers of odd exceptions, by a name for the report."""
    odd: dict[str, Callable[[], Exception]] = {
        "deep": lambda: deep_group(3_000),
        "deep and odd": lambda: deep_group(3_000, raising("retry_after", RuntimeError())),
        "own group": lambda: OwnGroup("own", [ConnectionError(TOLD)]),
        "own cause": own_cause,
        "surrogate": lambda: ConnectionError("\ud800"),
        "large": lambda: ConnectionError("x" * 5_000_000),
    }
    for kind in (Deaf, Mute, Endless, Texting, NoNotes):
        odd[kind.__name__] = lambda kind=kind: kind(TOLD)  # type: ignore[misc]
    for name in (*READ, *READ_BY_PYTHON):
        for error in RAISED:
            odd[f"{name} raises {type(error).__name__}"] = lambda n=name, e=error: raising(n, e)  # type: ignore[misc]
    for name in (*READ, "__notes__"):
        for number, value in enumerate(VALUES):
            odd[f"{name} = value {number}"] = lambda n=name, v=value: having(n, v)  # type: ignore[misc]
    for name in ("retry-after", "x-ratelimit-remaining", "x-ratelimit-reset"):
        for number, value in enumerate(VALUES):
            odd[f"{name}: value {number}"] = lambda n=name, v=value: having(  # type: ignore[misc]
                "headers", {"x-ratelimit-remaining": "0", n: v}
            )
    return odd
