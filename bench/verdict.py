"""
Targets, and whether they are met.

A verdict compares figures of one run and nothing else. It gives no discount for noise: a miss by a hair is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AtMostTimes:
    """No more than `limit` times what another contestant of the same run takes."""

    limit: float
    of: str

    def __str__(self) -> str:
        return f"≤ {self.of}" if self.limit == 1.0 else f"≤ {self.limit:g} × {self.of}"


@dataclass(frozen=True, slots=True)
class AtMostSeconds:
    """No more than so long, on any machine this is run on."""

    limit: float

    def __str__(self) -> str:
        return f"≤ {self.limit * 1e3:g} ms" if self.limit >= 1e-3 else f"≤ {self.limit * 1e6:g} µs"


@dataclass(frozen=True, slots=True)
class AtMost:
    """No more than `limit` of what a table counts in place of seconds."""

    limit: float
    what: str

    def __str__(self) -> str:
        return f"≤ {self.limit:g} {self.what}"


@dataclass(frozen=True, slots=True)
class AheadOf:
    """Faster than each of the others."""

    others: tuple[str, ...]

    def __str__(self) -> str:
        return "ahead of every peer"


Target = AtMostTimes | AtMostSeconds | AtMost | AheadOf


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, held against a figure. `missed` says by what; None is met."""

    target: Target
    missed: str | None

    def __str__(self) -> str:
        return "met" if self.missed is None else f"MISSED: {self.missed}"


def ratio(figures: Figures, name: str, reference: str) -> float:
    """How many times the reference's figure."""
    return figures[name] / figures[reference]


def judge(target: Target, name: str, figures: Figures) -> Verdict:
    """Whether `name` meets the target among these figures."""
    match target:
        case AtMostTimes(limit=limit, of=of):
            times = ratio(figures, name, of)
            return Verdict(target, None if times <= limit else f"{times:.2f} × {of}")
        case AtMostSeconds(limit=limit):
            return Verdict(target, None if figures[name] <= limit else f"{figures[name] * 1e6:.3g} µs")
        case AtMost(limit=limit):
            return Verdict(target, None if figures[name] <= limit else f"{figures[name]:.3g}")
        case AheadOf(others=others):
            ahead = [other for other in others if figures[other] <= figures[name]]
            return Verdict(target, f"behind {', '.join(ahead)}" if ahead else None)


def all_met(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.missed is None for verdict in verdicts)
