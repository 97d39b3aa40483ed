"""`reefknot doctor`: checks this installation, the configuration and its store, and what to do about each finding."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated, Any

from reefknot.console.cli.app import Exit, noun
from reefknot.console.cli.options import STORE, StoreFlags, arg
from reefknot.console.cli.output import put, say, show
from reefknot.console.cli.store import StoreAddress, address_of

app = noun(
    "doctor",
    "doctor",
    "doctor --engine nats://127.0.0.1:4222 --monitor http://127.0.0.1:8222",
    help="Check Python and the extras, the configuration and its secrets, and the store: can it be used, is it as it "
    "should be, what does it promise. Nothing is changed.",
)

CODES = {
    "unreachable": Exit.UNREACHABLE,
    "locked": Exit.TEMPORARY,
    "forbidden": Exit.FORBIDDEN,
    "misconfigured": Exit.MISCONFIGURED,
    "damaged": Exit.MISMATCH,
    "unserved": Exit.FAILED,
}
"""The exit code of a problem, by its cause."""
WAY_OUT = "correct it: what runs a system refuses this configuration; `reefknot config check` checks it"


@app.default
def doctor(
    *,
    monitor: Annotated[str | None, arg("Monitoring port of a NATS server, http://HOST:PORT.")] = None,
    logins: Annotated[bool, arg("Try the logins of the SQL connections for reading, at their servers.")] = False,
    options: StoreFlags = STORE,
) -> int:
    """Check everything and print every finding: ok, warning or problem. The exit code is that of the first problem."""
    from reefknot.console.operations.health import examine_address

    address = address_of(options, looks=True)
    report = asyncio.run(
        examine_address(
            address.url,
            address.settings,
            shown=address.shown,
            redactor=address.redactor,
            monitor=monitor,
            logins=logins,
            is_named=address.is_named,
        )
    )
    wrong = [
        {"check": "configuration", "level": "problem", "text": one, "way_out": WAY_OUT, "cause": "misconfigured"}
        for one in address.mistakes
    ]
    report["findings"] = [*wrong, *report["findings"]]  # first: it keeps a system from starting, whatever else is wrong
    report["ok"] = report["ok"] and not address.mistakes
    findings = report["findings"]
    show(report, lambda: _put(findings), json=options.json)
    say(f"{address.shown}: {_counted(findings)}")
    return next((CODES.get(one["cause"], Exit.FAILED) for one in findings if one["level"] == "problem"), Exit.FINE)


def _put(findings: list[dict[str, Any]]) -> None:
    for one in findings:
        put(f"{one['level']:<8} {one['check']:<11} {one['text']}" + (f"; {one['way_out']}" if one["way_out"] else ""))


def _counted(findings: list[dict[str, Any]]) -> str:
    """The number of problems and warnings, in words."""
    levels = Counter(one["level"] for one in findings)
    counted = [f"{levels[one]} {one}{'s' * (levels[one] > 1)}" for one in ("problem", "warning") if levels[one]]
    return ", ".join(counted) or "nothing to do"


# ---- for commands that look at jobs ----------------------------------------------------------------------------------


def configuration_problems(options: StoreFlags, address: StoreAddress) -> list[str]:
    """The line that says that no system starts with this configuration; all its mistakes are said as warnings."""
    is_checked = address.settings is not None
    mistakes = (address if is_checked else address_of(options, looks=True)).mistakes
    return [f"problem: the configuration is wrong: {mistakes[0]}; {WAY_OUT}"] if mistakes else []


def disk_problems(address: StoreAddress) -> list[str]:
    """The line about a disk without room for new work."""
    if not address.has_file:
        return []
    found = address.files.disk_finding(str(address.path))
    return [f"problem: the disk of the store: {found.text}; {found.way_out}"] if found.level == "problem" else []
