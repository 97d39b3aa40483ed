"""
`Settings`: the checked configuration of a process, its policy book and its gates, frozen before anything starts.

A named file that is missing is an error. The worker's own commands forgive it when the environment alone opened the
gate: then the baseline is in force, and a warning says so.
"""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from reefknot.core.limits import LimitRule
from reefknot.errors import ConfigurationError
from reefknot.policy.check import checked, limit_rules
from reefknot.policy.layers import (
    QUEUE,
    RETRIES,
    Gate,
    Tree,
    environment,
    gate,
    gate_from_environment,
    load_tree,
    merge,
)
from reefknot.policy.model.book import Book
from reefknot.policy.reading.session import Problem
from reefknot.policy.schema import Configuration
from reefknot.policy.sections import keys_of


class Settings(Struct, frozen=True):
    """A checked configuration, its book, its gates, and warnings for people."""

    configuration: Configuration
    book: Book
    retries_gate: Gate
    queue_gate: Gate
    path: Path | None
    warnings: tuple[str, ...] = ()
    tree: Tree = merge()
    """The values as they were written, with their positions."""

    @property
    def folder(self) -> Path:
        """The folder that relative paths are beneath: the file's, without a file the working directory."""
        return Path.cwd() if self.path is None else self.path.parent

    @property
    def limits(self) -> tuple[LimitRule, ...]:
        """The limits of the fleet, each with its place."""
        return tuple([one for one in limit_rules(self.tree, self.configuration.limits) if isinstance(one, LimitRule)])

    @property
    def queue_size(self) -> int:
        """The number of jobs that may wait for a router: that of its own section, else that of a worker's queue."""
        return self.configuration.router.max_queue_size or self.configuration.worker.queue.v2.max_queue_size


def load_settings(
    explicit: str | None = None, *, environ: Mapping[str, str], cwd: Path, forgiving: bool = False
) -> Settings:
    """
    The settings of this process: read, checked, frozen.

    `forgiving` is for `worker start`, `run` and `up`: with the environment's gate open, no file means the baseline.
    """
    named = explicit or environ.get("REEFKNOT_CONFIG")
    opened = gate_from_environment(RETRIES, environ) is True
    if forgiving and opened and named and not Path(cwd, named).exists():
        return _baseline(named, environ)
    tree, path = load_tree(explicit, environ=environ, cwd=cwd)
    return settings_of(tree, path, environ=environ)


def settings_of(tree: Tree, path: Path | None, *, environ: Mapping[str, str]) -> Settings:
    """The settings that these values are, checked; `path` is the file that they come from."""
    configuration, book = checked(tree)
    worker = configuration.worker
    return Settings(
        configuration,
        book,
        gate(RETRIES, environ, worker.retries.v2.enabled, where=str(tree.mark(("worker", "retries", "v2", "enabled")))),
        gate(QUEUE, environ, worker.queue.v2.enabled, where=str(tree.mark(("worker", "queue", "v2", "enabled")))),
        path,
        tuple(_warnings(configuration)),
        tree,
    )


STORE_SECTIONS = frozenset({"engine", "nats", "secrets"})
"""The sections without which a store cannot be opened, or secrets cannot be hidden."""


def settings_to_look(
    tree: Tree, path: Path | None, *, environ: Mapping[str, str]
) -> tuple[Settings, tuple[object, ...]]:
    """
    The settings without the sections that have mistakes, and these mistakes: enough for reading a store.

    Mistakes in `STORE_SECTIONS`, and sections that are not known, are raised: one may be a misspelt `secrets`.
    """
    left, mistakes = tree, tuple[object, ...]()
    while True:
        try:
            return settings_of(left, path, environ=environ), mistakes
        except ConfigurationError as error:
            wrong = {one.path.partition(".")[0] if isinstance(one, Problem) else "" for one in error.problems}
            if not wrong or not wrong <= keys_of(Configuration).keys() - STORE_SECTIONS:
                raise
            mistakes += error.problems
            left = Tree({name: value for name, value in left.value.items() if name not in wrong}, left.marks)
            if any(name in left.value for name in wrong) or not wrong & tree.value.keys():
                raise  # the mistake is in what is not written: nothing is left to leave out


def _baseline(named: str, environ: Mapping[str, str]) -> Settings:
    """The settings without the file; variables still hold."""
    tree = environment(environ)
    configuration, book = checked(tree)
    warning = (
        f"{named} is missing, so the baseline is in force although {RETRIES} is on; create the file, or do not name it"
    )
    queue = gate(QUEUE, environ, configuration.worker.queue.v2.enabled, where="the environment or a flag")
    retries = Gate(False, f"missing file {named}")
    return Settings(configuration, book, retries, queue, None, (warning, *_warnings(configuration)), tree)


def _warnings(configuration: Configuration) -> list[str]:
    warnings = []
    queue = configuration.worker.queue.v2
    levels = queue.policies.degrade.degradation_levels
    skipping = [name for name in keys_of(type(levels)) if getattr(levels, name).skip_circuit_breaker]
    if queue.rejection_policy == "degrade" and skipping:
        warnings.append(
            f"worker.queue.v2.policies.degrade: {' and '.join(skipping)} degradation skips the circuit breaker, so an"
            " overloaded worker keeps calling a destination that is down;"
            " set skip_circuit_breaker: false unless you mean it"
        )
    return warnings
