"""
Audited actions of an operator on jobs, on the command line.

`reported` runs an action on many jobs: their number is printed before the first is changed, and every changed one after
it. `read_payload` and `put_payload` are the two ends of an edited payload.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from json import dumps, loads
from typing import IO, TYPE_CHECKING, Any

import msgspec

from reefknot.console.cli.app import CommandError, Exit
from reefknot.console.cli.output import progress, put, put_document, put_json, say
from reefknot.console.cli.store import address_of, with_store
from reefknot.console.operations import bulk
from reefknot.console.operations.bulk import BulkListener, BulkVerb
from reefknot.console.operations.quarantine import payload_text
from reefknot.queue.model.messages import LARGEST_MESSAGE
from reefknot.queue.model.work import assignment_and_tenant

if TYPE_CHECKING:
    from reefknot.console.cli.options import OperatorFlags
    from reefknot.console.operations.job_filters import JobChoice
    from reefknot.console.operations.quarantine import QuarantineQuery

_ANSWERED = ("missing", "count", "actor", "dry_run", "unconfigured_sources")
"""The fields of an answer that `--json` prints after the ids."""


class ChangedJobs:
    """The records that an action has changed, as lines of JSON on disk: there may be more than memory holds."""

    def __init__(self, lines: IO[str]) -> None:
        self._lines = lines

    def add(self, records: Sequence[str]) -> None:
        self._lines.writelines(f"{dumps(one)}\n" for one in records)

    def as_json(self, part: int) -> Iterator[str]:
        """The assignment ids (part 0) or the tenants (part 1) as a list of JSON, in pieces."""
        self._lines.seek(0)
        before = "["
        for line in self._lines:
            yield f"{before}\n    {dumps(assignment_and_tenant(loads(line))[part])}"
            before = ","
        yield "[]" if before == "[" else "\n  ]"


def reported(
    verb: BulkVerb,
    operation: Callable[..., Awaitable[dict[str, Any]]],
    query: JobChoice | QuarantineQuery,
    *,
    because: str,
    options: OperatorFlags,
) -> int:
    """Run an action on many jobs, such as `requeue_jobs`, and report it; the result is the exit code."""
    from tempfile import TemporaryFile

    address, would_be = address_of(options), "would be" if options.dry_run else "to be"
    with TemporaryFile("w+", encoding="utf-8") as lines, ExitStack() as bar:
        changed = ChangedJobs(lines)
        bars: list[Callable[[int], None]] = []

        def on_count(counts: dict[str, int]) -> None:
            if total := sum(counts.values()):
                kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items())
                say(f"{total} {would_be} {verb.participle}: {kinds}")
            elif not query.ids:
                say("no job matches")
            bars.append(bar.enter_context(progress(verb.name.rpartition(".")[2], total)))

        def advance(number: int) -> None:
            bars[0](number)

        listener = BulkListener(on_count, advance, changed.add, is_brief=not options.json)
        how = {"because": because, "dry_run": options.dry_run, "listener": listener}
        answer = with_store(address, lambda store: operation(address.operator(store), query, **how))
        bar.close()
        for line in answer["reasons"]:
            say(line)
        if options.json:
            fields = {name: answer[name] for name in _ANSWERED if name in answer}
            put_json(fields, first={verb.participle: changed.as_json(0), "tenant_ids": changed.as_json(1)})
    if not options.json:
        _put_changed(answer, verb, dry_run=options.dry_run)
    for line in answer["hints"]:
        say(line)
    return Exit.FAILED if answer["missing"] else Exit.FINE


def _put_changed(answer: dict[str, Any], verb: BulkVerb, *, dry_run: bool) -> None:
    """The first changed jobs, a line each, and the number of the others."""
    most, would_be = bulk.MOST_SHOWN, "would be " if dry_run else ""
    for name, tenant in zip(answer[verb.participle][:most], answer["tenant_ids"], strict=False):
        put(f"{name}{f' of {tenant}' if tenant else ''} {would_be}{verb.participle}")
    if answer["count"] > most:
        put(f"… and {answer['count'] - most} more")


# ---- an edited payload -----------------------------------------------------------------------------------------------


def put_payload(found: dict[str, Any]) -> None:
    """Print a job's payload, to be edited."""
    put_document(payload_text(found["payload"]))
    for note in found["notes"]:
        say(note)


def read_payload(name: str) -> dict[str, Any]:
    """The payload in a file, or on stdin for `-`."""
    from reefknot.console.cli.assignments import STDIN, display_name, repeated_key, require_file

    require_file(name, flag="--payload", holds="the payload as JSON")
    shown = f"--payload: {display_name(name)}"
    try:
        if name == STDIN:
            text = sys.stdin.buffer.read(LARGEST_MESSAGE + 1)
        else:
            with open(name, "rb") as file:
                text = file.read(LARGEST_MESSAGE + 1)
    except OSError as error:
        raise CommandError(f"{shown}: cannot be read: {error.strerror}", Exit.NO_INPUT) from None
    if len(text) > LARGEST_MESSAGE:
        raise CommandError(f"{shown}: longer than {LARGEST_MESSAGE} bytes; accepted: a payload that fits a message")
    try:
        payload = msgspec.json.decode(text.decode())
        repeated = repeated_key(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CommandError(f"{shown}: not JSON in UTF-8: {error}; {_ACCEPTED}") from None
    if not isinstance(payload, dict):
        raise CommandError(f"{shown}: not an object; {_ACCEPTED}")
    if repeated is not None:
        raise CommandError(f"{shown}: {repeated[0]}: the key stands twice in one object; keep one of them")
    return payload


_ACCEPTED = "accepted: the object that `quarantine show ID --payload-only` prints, edited"


def put_edit(answer: dict[str, Any], *, json: bool) -> None:
    """Print that a job was replaced by one with an edited payload, and of a dry run the difference."""
    if json:
        put_json({name: value for name, value in answer.items() if name != "hints"})
    else:
        if answer["dry_run"]:
            put_document("\n".join(answer["diff"]))
        put(f"{answer['replaces']} {'would be ' if answer['dry_run'] else ''}replaced by {answer['requeued'][0]}")
    for line in answer["hints"]:
        say(line)
