"""Retries summed up, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from reefknot.cli.evidence import evidence
from reefknot.cli.output import put, put_json, put_table
from reefknot.cli.progress import progress
from reefknot.core.audit.analysis import Analyser, Analysis, Pattern, moment
from reefknot.core.audit.event import decode


async def analysed(
    file: Path | None, engine: str | None, config: str | None, *, threshold: float | None, since: int | None
) -> tuple[Analysis, int]:
    """The whole record, or what happened since; and how many events could not be read."""
    analyser = Analyser(threshold=threshold)
    unreadable = 0
    async with evidence(file, engine, config) as found:
        with progress("analysing", found.total) as advance:
            async for page in found.pages():
                for one in page.events:
                    try:
                        event = decode(one.body)
                    except msgspec.DecodeError:
                        unreadable += 1
                        continue
                    at = None if since is None else moment(event.timestamp)
                    if since is None or (at is not None and at * 1000 >= since):
                        analyser.add(event)
                advance(page.size)
    return analyser.result(), unreadable


def put_analysis(result: Analysis, unreadable: int, *, json: bool) -> None:
    """All numbers as JSON, or a table with a row for each category."""
    if json:
        put_json({**msgspec.to_builtins(result), "unreadable": unreadable})
        return
    span = f", from {result.first} to {result.last}" if result.first else ""
    put(f"{result.events} events{span}")
    put(f"retries a minute: {result.retries_per_minute} in the last one, {result.peak_per_minute} at most")
    if unreadable:
        put(f"{unreadable} events could not be read")
    if result.categories:
        rows = [_row(name, pattern) for name, pattern in result.categories.items()]
        put_table(COLUMNS, [*rows, _row("all", result.overall)], styles=("cyan",), whole=("category",))


COLUMNS = (
    "category",
    "attempts",
    "retries",
    "recovered",
    "given up",
    "refused",
    "success",
    "avg attempts",
    "peak/min",
    "key hits",
)


def _row(name: str, pattern: Pattern) -> tuple[str, ...]:
    numbers: tuple[Any, ...] = (
        pattern.total_attempts,
        pattern.retries,
        pattern.recovered,
        pattern.exhausted,
        pattern.refused,
        "–" if pattern.success_rate is None else f"{pattern.success_rate:.1%}",
        "–" if pattern.avg_attempts is None else f"{pattern.avg_attempts:.2f}",
        pattern.peak_per_minute,
        pattern.idempotency_hits,
    )
    return name, *map(str, numbers)
