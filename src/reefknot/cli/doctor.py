"""`reefknot doctor`: checks the store of the configuration or of `--engine`, and says what to do about each finding."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec

from reefknot.cli.app import Exit, noun
from reefknot.cli.options import STORE, StoreFlags, arg
from reefknot.cli.output import put, say, show
from reefknot.cli.store import address_of

if TYPE_CHECKING:
    from reefknot.app.doctor import Finding

app = noun(
    "doctor",
    "doctor",
    "doctor --engine nats://127.0.0.1:4222 --monitor http://127.0.0.1:8222",
    help="Check the store: can it be used, is it as it should be, what does it promise. Nothing is changed.",
)

CODES = {
    "unreachable": Exit.UNREACHABLE,
    "locked": Exit.TEMPORARY,
    "forbidden": Exit.FORBIDDEN,
    "misconfigured": Exit.MISCONFIGURED,
    "damaged": Exit.MISMATCH,
}
"""The exit code of a problem, by its cause."""


@app.default
def doctor(
    *,
    monitor: Annotated[str | None, arg("Monitoring port of a NATS server, http://HOST:PORT.")] = None,
    options: StoreFlags = STORE,
) -> int:
    """Check the store and print every finding: ok, warning or problem. The exit code is that of the first problem."""
    from reefknot.app.doctor import examine
    from reefknot.app.stores import options_of

    address = address_of(options)
    nats = None if address.settings is None else options_of(address.settings)["nats"]
    findings = asyncio.run(examine(address.url, nats=nats, monitor=monitor))
    problems = [one for one in findings if one.level == "problem"]
    data = {"ok": not problems, "store": address.shown, "findings": msgspec.to_builtins(findings)}
    show(data, lambda: _put(findings), json=options.json)
    levels = Counter(one.level for one in findings)
    counted = [f"{levels[one]} {one}{'s' * (levels[one] > 1)}" for one in ("problem", "warning") if levels[one]]
    say(f"{address.shown}: {', '.join(counted) or 'nothing to do'}")
    return CODES[problems[0].cause] if problems else Exit.FINE


def _put(findings: list[Finding]) -> None:
    for one in findings:
        put(f"{one.level:<8} {one.check:<11} {one.text}" + (f"; {one.way_out}" if one.way_out else ""))
