"""All policies at a glance: every target and source, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from reefknot.cli import wording
from reefknot.cli.asking import all_targets
from reefknot.cli.explaining import FIELDS
from reefknot.cli.output import jsonable, put_table, where
from reefknot.core.failure import ErrorCode, FailureType
from reefknot.core.retry.book import Book, Condition, ResolvedPolicy
from reefknot.core.retry.layers import Layer, Patch, merge

ANY_BLOCK = "block:*"
"""Stands for every block that has no policy of its own."""

_KINDS = ("block", "connector", "operation")


class Row(Struct, frozen=True):
    """One target, or one source of it."""

    target: str
    source: str | None
    policy: ResolvedPolicy
    overrides: Mapping[Condition, Patch]

    def as_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "source": self.source,
            "policy": {name: jsonable(getattr(self.policy, name)) for name in FIELDS},
            "from": origins(self.policy),
            "overrides": sorted(condition_name(condition) for condition in self.overrides),
        }


def listed(book: Book, kind: str | None = None) -> list[Row]:
    """Every target, by kind and name, and after a connector its sources."""
    targets = sorted(
        {ANY_BLOCK, *all_targets(book)}, key=lambda target: (_KINDS.index(target.partition(":")[0]), target)
    )
    rows = []
    for target in targets:
        if kind is not None and not target.startswith(f"{kind}:"):
            continue
        rows.append(Row(target, None, book.resolve(target), overrides_of(book, target, None)))
        rows += [
            Row(target, source, book.resolve(target, source=source), overrides_of(book, target, source))
            for source, (connector, _) in sorted(book.sources.items())
            if target == f"connector:{connector}"
        ]
    return rows


def overrides_of(book: Book, target: str, source: str | None) -> dict[Condition, Patch]:
    """What is said for particular failures, the strongest saying of each."""
    entries = [*book.targets.get(target, ())]
    kind = target.partition(":")[0]
    if not entries and kind in book.others:
        entries = [book.others[kind]]
    if source is not None:
        entries.append(book.sources[source][1])
    found: dict[Condition, Patch] = {}
    for entry in entries:
        for condition, fields in entry.overrides.items():
            found[condition] = merge(found.get(condition, {}), fields)
    return found


def origins(policy: ResolvedPolicy) -> list[str]:
    """Where a policy comes from: the places that said something over the built-in, else the built-in itself."""
    said = [field for field in policy.provenance.values() if field.layer is not Layer.BUILTIN]
    if said:
        return sorted({field.source for field in said}, key=_by_place)
    return [policy.provenance["max_attempts"].source]


def _by_place(source: str) -> tuple[str, ...]:
    return tuple(part.rjust(8, "0") if part.isdigit() else part for part in source.split(":"))


def condition_name(condition: Condition) -> str:
    match condition:
        case ErrorCode():
            return condition.name
        case FailureType():
            return condition.value
        case _:
            return str(condition)


def put_list(rows: list[Row]) -> None:
    table = [
        (
            row.target if row.source is None else f"  source {row.source}",
            wording.count(row.policy.max_attempts),
            wording.growth(row.policy),
            wording.limits(row.policy),
            ", ".join(sorted(condition_name(condition) for condition in row.overrides)),
            _origin(row.policy),
        )
        for row in rows
    ]
    columns = ("target", "attempts", "waits", "time", "differs for", "from")
    put_table(columns, table, styles=("cyan", "bold"), whole=("target", "attempts"))


def _origin(policy: ResolvedPolicy) -> str:
    found = origins(policy)
    if found[0].startswith("built-in:"):
        return "built-in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{where(found[0])}{more}"
