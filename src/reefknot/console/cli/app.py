"""
The application: every noun, the exit codes, and the one place where a command ends.

A noun is imported when it is named. Any exception of a command becomes lines on stderr and an exit code here; no
command prints an error itself. A mistake of the user is never a traceback; a bug is reported as one, and
`REEFKNOT_TRACEBACK=1` shows where it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextvars import ContextVar
from enum import IntEnum
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from reefknot.console.cli.output import OutputError, drop_output, flush_stdout, plain_messages, put_json, relative, say
from reefknot.errors import (
    ConfigurationError,
    IdempotencyError,
    KeyInProgressError,
    NameTakenError,
    OperationError,
    ParameterError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreMovedError,
    StorePermissionError,
    StoreVersionError,
)
from reefknot.runtime.log import printable

NOUNS = {
    "run": ("reefknot.console.cli.run:app", "Run a file of assignments to completion and print a summary."),
    "up": ("reefknot.console.cli.serve:app", "Start a router and workers until interrupted."),
    "submit": (
        "reefknot.console.cli.submit:app",
        "Submit assignments to the store, for a system that runs now or later.",
    ),
    "worker": (
        "reefknot.console.cli.worker_and_router:worker_app",
        "Start a worker; list, drain, pause, resume and reload workers.",
    ),
    "router": ("reefknot.console.cli.worker_and_router:router_app", "Start a router; show and reload running routers."),
    "top": ("reefknot.console.cli.top:app", "Show queues, workers, retries per second and finished jobs, live."),
    "dashboard": ("reefknot.console.cli.dashboard:app", "Serve the pages and the HTTP API of a store."),
    "job": ("reefknot.console.cli.job:app", "List, show, cancel and retry jobs."),
    "queue": ("reefknot.console.cli.queue:app", "Pause and resume job types and tenants; list what is paused."),
    "quarantine": ("reefknot.console.cli.quarantine:app", "List, requeue, discard and purge quarantined jobs."),
    "alert": ("reefknot.console.cli.alert:app", "List the alerts that running systems have raised."),
    "schedule": ("reefknot.console.cli.ingestion.schedule:app", "List, run, pause and resume schedules."),
    "source": (
        "reefknot.console.cli.ingestion.source:app",
        "Add, list, test, sync, pause and search sources of documents.",
    ),
    "telemetry": ("reefknot.console.cli.ingestion.telemetry:app", "Show retry outcomes by connector."),
    "policy": (
        "reefknot.console.cli.policy:app",
        "Show retry policies, and explain why and when a failure is retried.",
    ),
    "config": ("reefknot.console.cli.config:app", "Show and check the configuration."),
    "audit": ("reefknot.console.cli.audit:app", "Tail, verify, replay, export and analyse the audit log."),
    "idempotency": ("reefknot.console.cli.idempotency:app", "Show, resolve and delete idempotency keys."),
    "store": ("reefknot.console.cli.store:app", "Check, back up, move, migrate and compact a store."),
    "doctor": ("reefknot.console.cli.doctor:app", "Check the store, and say what to do about each finding."),
    "dev": ("reefknot.console.cli.dev:app", "Start NATS servers on this machine to develop against."),
    "init": ("reefknot.console.cli.config:init_app", "Write a commented reefknot.yaml to start from."),
    "completion": ("reefknot.console.cli.app:completion_app", "Print the completion script of bash, zsh or fish."),
}
"""By name: the import path, and the summary in the list of commands."""


class Exit(IntEnum):
    """The exit codes, the same for every command."""

    FINE = 0
    FAILED = 1
    USAGE = 2
    MISMATCH = 65
    NO_INPUT = 66
    UNREACHABLE = 69
    OUTPUT = 74
    TEMPORARY = 75
    FORBIDDEN = 77
    MISCONFIGURED = 78
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """A command cannot do what was asked. The message says what to do instead."""

    def __init__(self, message: str, exit: Exit = Exit.USAGE) -> None:  # noqa: A002 - it is the exit code
        super().__init__(message)
        self.exit = exit


class UnknownOptionError(CommandError):
    """A word that begins with a hyphen stands where a file may stand: an option that the command does not have."""

    def __init__(self, given: str) -> None:
        super().__init__(f"{given}: unknown option, or no name of a file; a file of that name is ./{given}")


def examples(*commands: str) -> str:
    """The last lines of a help text: commands to copy. One that names the program itself stays as it is."""
    lines = [one if "reefknot " in one else f"reefknot {one}" for one in commands]
    return "\n    ".join(["Example:\n" if len(lines) == 1 else "Examples:\n", *lines])


def noun(name: str, *commands: str, help: str | None = None) -> App:  # noqa: A002 - the name is cyclopts'
    """The application of one noun: its summary, or a longer help, and examples."""
    return App(name=name, help=help or NOUNS[name][1], help_epilogue=examples(*commands))


def application() -> App:
    """The command line, with no noun imported yet."""
    app = App(
        name="reefknot",
        help="Reliability runtime: retries, idempotency, audit, bounded queues. Data on stdout, messages on stderr; "
        "--json on every command.",
        help_epilogue=examples(
            "init", "policy list", "policy explain --target block:http --status 429", "reefknot --version"
        ),
        help_format="plaintext",
        version_flags=[],
        default_parameter=Parameter(negative=(), show_default=False),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, (import_path, summary) in NOUNS.items():
        app.command(import_path, name=name, help=summary)
    return app


completion_app = noun(
    "completion",
    "source <(reefknot completion bash)",
    "source <(reefknot completion zsh)",
    "reefknot completion fish > ~/.config/fish/completions/reefknot.fish",
    help="Print the script that completes commands and options of reefknot and rk in a shell.",
)


_BASH_FILES = 'COMPREPLY=( $(compgen -f -- "${cur}") )'
_BASH_FILES_WHOLE = f"local IFS=$'\\n'; compopt -o filenames 2>/dev/null; {_BASH_FILES}"
"""File names in bash: with blanks in them whole, and a slash after a folder."""


@completion_app.default
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="bash, zsh or fish.")],
    /,
    *,
    json: Annotated[bool, Parameter(help="Print JSON on stdout, for programs.")] = False,
) -> None:
    """Print the completion script of a shell, for both names of the program."""
    script = application().generate_completion(shell=shell)
    match shell:
        case "bash":
            script = script.replace(_BASH_FILES, _BASH_FILES_WHOLE) + "complete -F _reefknot rk\n"
        case "fish":
            script += "complete -c rk -w reefknot\n"
        case "zsh":  # sourced, or as a file named _cyclopts_reefknot in $fpath
            script = script.replace("#compdef reefknot\n", "#compdef reefknot rk\n", 1) + (
                'if [ "$funcstack[1]" = "_cyclopts_reefknot" ]; then\n  _cyclopts_reefknot "$@"\n'
                "else\n  compdef _cyclopts_reefknot reefknot rk\nfi\n"
            )
    if json:
        put_json({"shell": shell, "script": script})
    else:
        print(script, end="")


def run(words: Sequence[str]) -> int:
    """Run one command and return its exit code; a command that returns nothing has succeeded."""
    code = _run(words)
    try:
        flush_stdout()
    except OutputError as error:
        unwritten, lines = exit_for(error)
        for line in lines:
            say(line, level="error")
        code = code or unwritten  # the code of a failure tells more
    finally:
        plain_messages()
    return code


_words: ContextVar[tuple[str, ...]] = ContextVar("reefknot_command_words", default=())


def command_words() -> list[str]:
    """The words of the command that runs, as they were given."""
    return list(_words.get())


def _run(words: Sequence[str]) -> int:
    """Run one command and report its error, if it has one."""
    _words.set(tuple(words))
    try:
        code = application()(with_default_watch(words))
    except BrokenPipeError:  # of a stream that `guard_streams` left alone
        drop_output()
        return Exit.FINE
    except KeyboardInterrupt:
        say("interrupted")
        return Exit.INTERRUPTED
    except (CycloptsError, UnknownOptionError) as error:
        say(f"reefknot: {usage_mistake(error, words)}", level="error")
        say("Use --help after the command to see its arguments and options.")
        return Exit.USAGE
    except Exception as error:
        if os.environ.get("REEFKNOT_TRACEBACK"):
            raise
        code, lines = exit_for(error)
        for line in lines:
            say(line, level="error")
        if isinstance(error, OutputError):
            drop_output()
        return code
    return code if isinstance(code, int) else Exit.FINE


def usage_mistake(error: CycloptsError | UnknownOptionError, words: Sequence[str]) -> str:
    """The message about words that a command does not take: which one, and what is accepted in its place."""
    match error:
        case UnknownOptionError():
            return mistyped_option(words) or str(error)
        case UnusedCliTokensError():
            return mistyped_option(words) or _unused_word(words, (error.unused_tokens or [""])[0])
        case MissingArgumentError() if error.argument is not None:
            flag = error.keyword or error.argument.name
            return _missing_value(words, flag, error.argument.parameter.help or "") or str(error)
        case _:
            return str(error)


def _unused_word(words: Sequence[str], given: str) -> str:
    """The message about a word where the command takes none, or no further one, and the options that it has."""
    chain, apps, _ = application().parse_commands(list(words))
    arguments = [one for one in apps[-1].assemble_argument_collection() if one.show]
    takes = "no further word" if any(one.index is not None for one in arguments) else "options only"
    listed = ", ".join(one.name for one in arguments if one.name.startswith("--"))
    return f"{printable(given, most=60)!r} is not accepted: `{' '.join(chain)}` takes {takes}; accepted: {listed}"


def _missing_value(words: Sequence[str], flag: str, help_: str) -> str:
    """The message about an option without its value, with an example of its command; "" for a missing argument."""
    if not flag.startswith("--"):
        return ""
    chain, apps, _ = application().parse_commands(list(words))
    lines = str(apps[-1].help_epilogue or "").splitlines()
    example = next((line.strip() for line in lines if f" {flag} " in line), "")
    text = f"`{' '.join(chain)}`: {flag} requires an argument{f': {help_}' if help_ else '.'}"
    return f"{text} For example: {example}" if example else text


def mistyped_option(words: Sequence[str]) -> str:
    """
    The message about the first option that the command does not have; "" when it has all of them.

    The parser does not see such a mistake where a FILE may be `-`: it takes the option for the file.
    """
    from difflib import get_close_matches

    _, apps, rest = application().parse_commands(list(words))
    known = [name for argument in apps[-1].assemble_argument_collection() for name in argument.names]
    for word in rest[: rest.index("--")] if "--" in rest else rest:
        given = word.partition("=")[0]
        if given.startswith("--") and given not in known:
            close = get_close_matches(given, [name for name in known if name.startswith("--")], n=1)
            return f"Unknown option: {printable(given, most=60)}." + "".join(f" Did you mean {one}?" for one in close)
    return ""


def with_default_watch(words: Sequence[str]) -> list[str]:
    """
    The words, with the default seconds for a `--watch` without a value, because the parser has no optional values.

    A word after it that is not an option is its value, number or not, so that a mistake is reported as one.
    """
    following = [*words[1:], "--"]
    return [
        f"--watch={WATCH_S}" if word == "--watch" and re.match(r"-(?![\d.])", after) else word
        for word, after in zip(words, following, strict=False)
    ]


WATCH_S = 2
"""Seconds between two views of `--watch`."""

FLAGS = {
    "code": "--error",
    "http_status": "--status",
    "failure_type": "--failure-type",
    "retry_after": "--retry-after",
    "retry_count": "--retry-count",
    "timeout_ms": "--timeout-ms",
    "max_attempts": "--retry-count",
    "source": "--source",
    "target": "--target",
    "url": "--engine",
    "threshold": "--threshold",
    "key": "KEY",
    "words": "WORDS",
    "limit": "--limit",
    "name": "NAME",
    "state": "--state",
    "type": "--type",
    "tenant": "--tenant",
    "resource_class": "--class",
    "correlation": "--correlation",
    "trace": "--trace",
    "connector": "--connector",
    "error": "--error",
    "reason": "--reason",
    "fingerprint": "--fingerprint",
    "since": "--since",
    "before": "--before",
    "sort": "--sort",
    "after": "--after",
    "all": "--all",
    "because": "--because",
    "payload": "--payload",
    "status": "--status",
    "baseline": "--baseline",
    "until": "--until",
    "worker": "WORKER",
    "router": "ROUTER",
    "seconds": "--seconds",
}
"""The flag that sets a parameter of the library."""


EXIT_OF_KIND = {
    "invalid": Exit.USAGE,
    "not_found": Exit.FAILED,
    "conflict": Exit.FAILED,
    "forbidden": Exit.FORBIDDEN,
    "unreachable": Exit.UNREACHABLE,
    "temporary": Exit.TEMPORARY,
    "misconfigured": Exit.MISCONFIGURED,
}
"""The exit code of an operation that is refused, by the kind of its error."""


def exit_for(error: Exception) -> tuple[Exit, list[str]]:
    """The exit code of an error, and its lines for stderr."""
    match error:
        case CommandError():
            return error.exit, [f"reefknot: {error}"]
        case OperationError():
            advice = f"; {error.advice} {FLAGS[error.parameter]}" if error.advice else ""
            return EXIT_OF_KIND[error.kind], [f"reefknot: {error}{advice}"]
        case ConfigurationError():
            return Exit.MISCONFIGURED, [relative(line) for line in str(error).splitlines()]
        case ParameterError():
            return Exit.USAGE, [f"reefknot: {FLAGS.get(error.parameter, error.parameter)}: {error.problem}"]
        case StoreCorruptError():
            return Exit.MISMATCH, [f"reefknot: {error}"]
        case StoreVersionError() | StoreMovedError():
            return Exit.MISCONFIGURED, [f"reefknot: {error}"]
        case StoreLockedError():
            return Exit.TEMPORARY, [f"reefknot: {error}"]
        case StorePermissionError():
            return Exit.FORBIDDEN, [f"reefknot: {error}"]
        case StoreError():
            return Exit.UNREACHABLE, [f"reefknot: {error}"]
        case KeyInProgressError() | NameTakenError():
            return Exit.TEMPORARY, [f"reefknot: {error}"]
        case IdempotencyError():
            return Exit.USAGE if isinstance(error, ValueError) else Exit.FAILED, [f"reefknot: {error}"]
        case UnicodeEncodeError():  # only an argument can hold half surrogate pairs: its bytes were not UTF-8
            text = f"{printable(str(error.object), most=60)!r} is not accepted: text in UTF-8"
            return Exit.USAGE, [f"reefknot: {text}"]
        case OutputError():
            return Exit.OUTPUT, [f"reefknot: {_system_error(error)}"]
        case PermissionError():
            return Exit.FORBIDDEN, [f"reefknot: {_system_error(error)}"]
        case TimeoutError() if not str(error):
            text = "reefknot: the store did not answer in time; check its disk or its server, and try again"
            return Exit.UNREACHABLE, [text]
        case ConnectionError() | TimeoutError():
            return Exit.UNREACHABLE, [f"reefknot: {_system_error(error)}"]
        case OSError():
            return Exit.FAILED, [f"reefknot: {_system_error(error)}"]
        case _:
            text = f"reefknot: internal error: {type(error).__name__}: {error}"
            return Exit.FAILED, [text, "Set REEFKNOT_TRACEBACK=1 to see the traceback, and please report it."]


def _system_error(error: OSError) -> str:
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{error.filename}: {reason}" if error.filename else reason
