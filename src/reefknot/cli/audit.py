"""`reefknot audit`: what was decided, proven and decided again. No command here runs an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.asking import Config, Json
from reefknot.cli.engine import Engine, opened, place, run
from reefknot.cli.exits import CommandError, Exit
from reefknot.cli.output import put, put_json, say

app = App(
    name="audit",
    help="Read, prove, replay and analyse what was decided.",
    help_epilogue="Example:\n\n    reefknot audit tail --follow --type retry_exhausted",
)

File = Annotated[
    Path | None, Parameter(help="An exported file, a JSON-lines log, or a store's file, instead of --engine.")
]
Since = Annotated[
    str | None, Parameter(help="Not before: a time such as 2026-01-25T21:15:00Z, or 90s, 15m, 2h, 7d ago.")
]
MOST_SHOWN = 1000
"""Findings that are listed; all of them are counted."""


@app.command(help_epilogue="Example:\n\n    reefknot audit tail --follow --for 60 --category nats.publish")
def tail(
    *,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="How many of the last events to begin with.")] = 20,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], help="Go on with what comes, until interrupted.")
    ] = False,
    for_: Annotated[float | None, Parameter(name="--for", help="Follow for so many seconds, then end.")] = None,
    type_: Annotated[str | None, Parameter(name="--type", help="Only this event type, such as retry_attempt.")] = None,
    category: Annotated[str | None, Parameter(help="Only this retry category, in any of its spellings.")] = None,
    correlation: Annotated[str | None, Parameter(help="Only this correlation id.")] = None,
    trace: Annotated[str | None, Parameter(help="Only this trace id.")] = None,
    since: Since = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """The last events, and with --follow those that come. With --json, one event a line."""
    from reefknot.cli.tailing import Wanted, follow_log, moment_of, put_events

    if lines < 0:
        raise CommandError(f"--lines: {lines} is not accepted: a number, 0 or more")
    if for_ is not None and not 0 <= for_ <= 86400:
        raise CommandError(f"--for: {for_:g} is not accepted: seconds, from 0 to 86400")
    wanted = Wanted.of(type_, category, correlation, trace, moment_of(since))

    async def work() -> None:
        async with opened(place(engine, config)) as store:
            head = await store.audit.head()
            put_events(await wanted.last(store.audit, head, lines), json=json)
            if follow or for_ is not None:
                await follow_log(store.audit, wanted, after=head.sequence, seconds=for_, json=json)

    run(work())
    return Exit.FINE


@app.command(
    help_epilogue="Examples:\n\n    reefknot audit verify\n    reefknot audit verify log.jsonl --head kept.head.json"
)
def verify(
    file: File = None,
    /,
    *,
    head: Annotated[
        Path | None, Parameter(help="A head that was exported earlier: shows whether the end was cut off.")
    ] = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Is the record what it was? Every edit, removal, swap and insertion is listed, and the exit code is 65."""
    from reefknot.cli.evidence import evidence, head_beside, head_in

    beside = None if file is None else head_beside(file)
    chosen = head or (beside if beside is not None and beside.is_file() else None)

    async def work() -> tuple[str, Any, list[Any]]:
        async with evidence(file, engine, config) as found:
            return found.name, *await found.verify(None if chosen is None else head_in(chosen))

    name, end, mismatches = run(work())
    answer: dict[str, Any] = {
        "ok": not mismatches,
        "source": name,
        "chain": end.chain,
        "sequence": end.sequence,
        "hash": end.hash,
        "compared_with": None if chosen is None else str(chosen),
        "mismatches": [{"sequence": one.sequence, "problem": one.problem} for one in mismatches[:MOST_SHOWN]],
        "mismatches_total": len(mismatches),
    }
    if json:
        put_json(answer)
    else:
        for one in mismatches[:MOST_SHOWN]:
            put(f"event {one.sequence}: {one.problem}")
        verdict = (
            "OK" if not mismatches else f"{len(mismatches)} {'mismatch' if len(mismatches) == 1 else 'mismatches'}"
        )
        put(f"{name}: {verdict}; chain {end.chain} stands at event {end.sequence}")
    if chosen is None:
        say("Without --head a cut-off end does not show. `audit export` writes a head; keep it elsewhere.")
    return Exit.MISMATCH if mismatches else Exit.FINE


@app.command(help_epilogue="Examples:\n\n    reefknot audit replay\n    reefknot audit replay log.jsonl --json")
def replay(file: File = None, /, *, engine: Engine = None, config: Config = None, json: Json = False) -> int:
    """Decide every recorded decision again and list each difference (exit code 65). Nothing is executed."""
    from reefknot.cli.evidence import evidence
    from reefknot.cli.progress import progress
    from reefknot.config.strategies import load_all
    from reefknot.core.audit.replay import Replayer

    for problem in load_all():  # a decision that followed one can only be taken again with it
        say(f"warning: {problem}")
    differences: list[dict[str, Any]] = []
    total = 0
    replayer = Replayer()

    async def work() -> str:
        nonlocal total
        async with evidence(file, engine, config) as found:
            with progress("replaying", found.total) as advance:
                async for page in found.pages():
                    for event in page.events:
                        for one in replayer.take(event.body):
                            total += 1
                            if total <= MOST_SHOWN:
                                told = {"event_type": one.event_type, "recorded": one.recorded, "decided": one.decided}
                                differences.append({"sequence": event.sequence, **told})
                    advance(page.size)
            return found.name

    name = run(work())
    again = replayer.result()
    if json:
        counts = {"events": again.events, "decisions": again.decisions, "differences_total": total}
        books = {"books": again.books, "books_missing": list(again.books_missing)}
        put_json({"ok": not total, "source": name, **counts, "differences": differences, **books})
    else:
        for one in differences:
            answers = f"recorded {one['recorded']}, decided again {one['decided']}"
            put(f"event {one['sequence']} ({one['event_type']}): {answers}")
        verdict = f"{total} come{'s' * (total == 1)} out differently" if total else "all come out the same"
        put(f"{name}: {again.decisions} decisions in {again.events} events; {verdict}")
    if again.books_missing:
        some = ", ".join(one[:12] for one in again.books_missing[:3])
        say(
            f"Not on record: {len(again.books_missing)} of the policy books that were in force ({some}); the decisions "
            "carry their own policies, so nothing else is missing."
        )
    return Exit.MISMATCH if total else Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot audit export log.jsonl")
def export(
    file: Annotated[Path, Parameter(help="Where to write. The head goes beside it, to FILE.head.json.")],
    /,
    *,
    force: Annotated[bool, Parameter(help="Replace files that are there.")] = False,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Write all events as JSON lines, and the head that proves later that nothing was cut off."""
    from reefknot.cli.evidence import head_beside
    from reefknot.cli.exporting import export_to

    beside = head_beside(file)
    there = [str(one) for one in (file, beside) if one.exists()]
    if there and not force:
        names = " and ".join(there)
        raise CommandError(f"{names}: exists already; name another file, or replace it with --force", Exit.FAILED)

    async def work() -> tuple[int, Any]:
        async with opened(place(engine, config)) as store:
            return await export_to(file, beside, store.audit)

    count, head = run(work())
    if json:
        put_json(
            {"file": str(file), "head_file": str(beside), "events": count}
            | {"head": {"chain": head.chain, "sequence": head.sequence, "hash": head.hash}}
        )
    else:
        put(f"{file}: {count} events of chain {head.chain}, up to {head.sequence}; its head is in {beside}")
        say("Keep the head where whoever can write the log cannot: it shows a cut-off end.")
    return Exit.FINE


@app.command(help_epilogue="Example:\n\n    reefknot audit analyse --since 1h --threshold 30 --fail-on-alert")
def analyse(
    file: File = None,
    /,
    *,
    threshold: Annotated[float | None, Parameter(help="Retries a minute beyond which there is an alert.")] = None,
    fail_on_alert: Annotated[bool, Parameter(help="Exit with 1 when there was an alert.")] = False,
    since: Since = None,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Retries a minute, success rate and average attempts of every category, and alerts past a threshold."""
    from reefknot.cli.analysing import analysed, put_analysis
    from reefknot.cli.tailing import moment_of

    result, unreadable = run(analysed(file, engine, config, threshold=threshold, since=moment_of(since)))
    put_analysis(result, unreadable, json=json)
    for alert in result.alerts:
        rate = f"{alert.peak_per_minute} retries a minute, more than {alert.threshold:g}"
        until = "still so at the end" if alert.until is None else f"until {alert.until}"
        say(f"alert: {alert.category or 'all categories'}: {rate}, from {alert.since}, {until}")
    if result.alerts_left_out:
        say(f"alert: {result.alerts_left_out} more")
    if unreadable:
        say(f"{unreadable} events could not be read and are in no number; see `audit verify`")
        return Exit.MISMATCH
    return Exit.FAILED if fail_on_alert and result.alerts else Exit.FINE
