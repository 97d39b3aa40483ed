"""
`python -m bench [TABLE …] [--quick] [--json FILE] [--write]`

All tables when none is named; then, unless `--quick` is said, `docs/performance.md` is written as well. Exits with 1
when a target is missed, with 2 when there is no such table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import report
from bench.machine import this_machine
from bench.measure import FULL, QUICK
from bench.table import Result, Table, chosen, filled, registered

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def main(arguments: Sequence[str] | None = None, *, tables: Sequence[Table] | None = None, page: Path = PAGE) -> int:
    known = registered() if tables is None else tuple(tables)
    given = _parser(known).parse_args(arguments)
    try:
        wanted = chosen(known, given.table)
    except LookupError as error:
        print(f"bench: {error.args[0]}", file=sys.stderr)
        return 2
    date, machine = datetime.now(UTC).date().isoformat(), this_machine()
    print(f"{date}: {machine}", file=sys.stderr)
    results: list[Result] = []
    for table in wanted:
        results.append(filled(table, table.run(QUICK if given.quick else FULL)))
        print(f"\n{report.text(results[-1])}", flush=True)
    if given.json is not None:
        content = report.as_json(results, date=date, machine=machine)
        given.json.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if given.write or not (given.table or given.quick):
        renewed = {result.table.name: report.section(result, date=date, machine=machine) for result in results}
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.page(before, renewed, [table.name for table in known]), encoding="utf-8")
    missed = [line for result in results for line in result.missed]
    print("\n" + ("\n".join(f"MISSED {line}" for line in missed) or "all targets met"))
    return 1 if missed else 0


def _parser(tables: Sequence[Table]) -> argparse.ArgumentParser:
    names = ", ".join(table.name for table in tables)
    parser = argparse.ArgumentParser(prog="python -m bench", description="reefknot side by side with its peers.")
    parser.add_argument("table", nargs="*", help=f"the tables to run, by name or its beginning: {names}")
    parser.add_argument("--quick", action="store_true", help="a rough look in a few seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    parser.add_argument("--write", action="store_true", help="renew these tables on the page docs/performance.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
