"""
Engines: the table of known engines, what each says about itself, and the findings of an examination.

An engine is a package of `stores` with an `ENGINE`. The rest of the program asks it, or the open store, for what they
can do, and never which engine it is. Packages are imported by name, when an address is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from msgspec import Struct

from reefknot.core.redaction import redact
from reefknot.errors import (
    ParameterError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreMovedError,
    StorePermissionError,
    StoreVersionError,
)

if TYPE_CHECKING:
    from reefknot.audit.model.chain import Head, Mismatch
    from reefknot.audit.port import AuditEntry
    from reefknot.core.clock import Clock
    from reefknot.stores.port import Store


class KnownEngine(Struct, frozen=True):
    """An engine in the table: the package that describes it, and its addresses as people write them."""

    package: str
    address: str
    is_shared: bool = True
    """Whether other processes can open its stores."""


_JETSTREAM = KnownEngine("reefknot.stores.jetstream", "nats://HOST:PORT")
ENGINES: dict[str, KnownEngine] = {
    "sqlite": KnownEngine("reefknot.stores.sqlite", "sqlite:PATH"),
    "nats": _JETSTREAM,
    "tls": _JETSTREAM,
    "memory": KnownEngine("reefknot.stores.memory", "memory:", is_shared=False),
}
"""The engines by the scheme of their addresses; what is accepted is named in this order."""
DEFAULT_URL = "sqlite:.reefknot/state.db"

Level = Literal["ok", "warning", "problem"]
Cause = Literal["", "unreachable", "locked", "forbidden", "misconfigured", "damaged", "unserved"]


class Finding(Struct, frozen=True):
    """The outcome of one check; `way_out` says what to do, `cause` what kind of problem it is."""

    check: str
    level: Level
    text: str
    way_out: str = ""
    cause: Cause = ""


class OpenOptions(Struct, frozen=True):
    """The parameters of `open_store`, checked."""

    clock: Clock
    retention: float
    largest_result: int
    most_keys: int | None
    work_retention: float | None
    settings: Mapping[str, Any]
    """The settings of a server, with secrets as values."""
    read_only: bool
    migrate: bool
    inline: bool
    """Whether the loop is a virtual one: everything runs in its time and thread."""

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of keys and results, as keywords of a store."""
        names = ("retention", "largest_result", "most_keys")
        return {name: getattr(self, name) for name in names}


class ExamineOptions(Struct, frozen=True):
    """Parameters of an examination: settings and monitoring port of a server, and what the configuration expects."""

    settings: Mapping[str, Any] = {}
    monitor: str | None = None
    takes_shared: bool = False
    """Whether workers of the configuration take assignments from the subject that peers share."""
    is_named: bool = False
    """Whether the operator named the store. If so, a missing store is a problem; otherwise nothing has run yet."""


class Examination(Struct, frozen=True):
    """The findings about a store, and whether it exists, is undamaged, and opens without being created or migrated."""

    findings: list[Finding]
    is_ready: bool = True


class FileState(Struct, frozen=True):
    """The schema version of a store's file, the one that this program writes, and bytes that `compact` would free."""

    version: int
    current: int
    unused: int


class CheckReport(Struct, frozen=True):
    """Findings of `store check`. The store is fine when both lists are empty."""

    problems: list[str]
    mismatches: list[Mismatch]
    head: Head
    version: int
    sqlite: str

    @property
    def ok(self) -> bool:
        return not self.problems and not self.mismatches


class FileStore(Protocol):
    """An open store in a file."""

    async def check(self) -> CheckReport:
        """Check the file and, when it is whole, the chain of events and how each is filed."""

    async def compact(self) -> int:
        """Return unused space to the disk. Returns the bytes that the file shrank by."""


class UnreadableRecord(Struct, frozen=True):
    """A record of a store on a server that cannot be read."""

    subject: str
    sequence: int
    problem: str


class RecordsReport(Struct, frozen=True):
    """The records of a store on a server, as far as they were read."""

    read: int
    found: list[UnreadableRecord]
    is_whole: bool


class RecordStore(Protocol):
    """An open store whose records are messages on a server."""

    async def check_records(self) -> RecordsReport:
        """Read all records, and find those that cannot be read."""

    async def forget_record(self, subject: str, *, events: Sequence[AuditEntry], dry_run: bool) -> UnreadableRecord:
        """Remove a record that cannot be read; `OperationError` for another one, or none."""


class StoreFiles(Protocol):
    """Work on the file of a store that is not open here; a module of the engine."""

    def state(self, path: str) -> FileState:
        """The state of the file, read without changing anything; a newer version is refused."""

    def copy(self, path: str, target: str, progress: Callable[[int, int], None]) -> FileState:
        """Copy a file of any version as of now, while others write it."""

    def check_unlocked(self, path: str, seconds: float) -> None:
        """`StoreLockedError` when the file stays locked for this long."""

    def disk_finding(self, path: str) -> Finding:
        """The free space on the disk of a file, which need not exist yet."""


class Engine(Protocol):
    """A kind of store: what its addresses mean, how stores are opened and examined, and what they can do."""

    magic: bytes
    """The first bytes of a store's file; empty for an engine whose stores are not files."""
    without_file: str
    """The rest of the sentence that refuses a command on a file, with what to do instead."""
    hears_peers: bool
    """Whether peers that are not reefknot speak on the documented subjects of a store."""
    extra: str
    """The extra of the installation that it needs; empty for none."""

    def path(self, url: str) -> str | None:
        """
        The file in the address of a store, None for an engine without files; `ValueError` says why the address names no
        store.
        """

    def files(self) -> StoreFiles:
        """The operations on files, for an engine whose stores are files."""

    async def open(self, url: str, options: OpenOptions) -> Store:
        """The store, started; the caller closes it."""

    async def create(self, url: str, settings: Mapping[str, Any], *, keeps_shared: bool) -> list[str]:
        """
        Make what a store at this address needs and opening it would not make; returns the names of what is missing.

        `settings` are those of a server. What is there and differs from them is a `StoreVersionError`.
        """

    async def examine(self, url: str, options: ExamineOptions) -> Examination:
        """All findings about the store at this address. Nothing is created, changed or repaired."""

    async def examine_open(self, store: Store, options: ExamineOptions) -> list[Finding]:
        """All findings about a store that is open here, fast enough for a page."""


# ---- addresses -------------------------------------------------------------------------------------------------------


def accepted_urls(*, shared_only: bool = False) -> str:
    """The addresses that are accepted, as a list in words."""
    *rest, last = dict.fromkeys(one.address for one in ENGINES.values() if one.is_shared or not shared_only)
    return " or ".join([", ".join(rest), last]) if rest else last


def _known(url: str) -> KnownEngine | None:
    scheme, separator, _ = url.partition(":")
    found = ENGINES.get(scheme)
    return found if found is not None and (separator or found.address == f"{scheme}:") else None


def engine_of(url: str) -> Engine:
    """The engine of an address, or of the `identity` of an open store; every other address is refused."""
    known = _known(url)
    if known is None:
        raise ParameterError("url", redact(url), accepted_urls())
    return cast("Engine", import_module(known.package).ENGINE)


def address_problem(url: str) -> str | None:
    """The reason why an address names no store: "" when no engine has its scheme. None for an address of a store."""
    if _known(url) is None:
        return ""
    try:
        engine_of(url).path(url)
    except ValueError as error:
        return str(error)
    return None


def is_shared(url: str) -> bool:
    """Whether other processes can open the store at this address, now and after this one has ended."""
    known = _known(url)
    return known is not None and known.is_shared


def has_file(url: str) -> bool:
    """Whether this is the address of a store in a file."""
    return _known(url) is not None and engine_of(url).magic != b""


def file_of(url: str) -> str | None:
    """The file of a store, None for an engine without files; an address of no engine is refused."""
    why = address_problem(url)
    if why is not None:
        raise ParameterError("url", redact(url), accepted_urls() + (f"; {why}" if why else ""))
    return engine_of(url).path(url)


def located(url: str | None, folder: Path) -> str:
    """The address of a store with its path beneath `folder`; None stands for the default one."""
    url = DEFAULT_URL if url is None else url
    path = file_of(url)
    return url if path is None else f"{url.partition(':')[0]}:{folder / path}"


def url_of_file(file: Path) -> str | None:
    """The address of the store in this file; None if it is not a store."""
    with file.open("rb") as stream:
        start = stream.read(100)
    found = (one for one in ENGINES if (magic := engine_of(f"{one}:").magic) and start.startswith(magic))
    return next((f"{scheme}:{file.absolute()}" for scheme in found), None)


# ---- findings --------------------------------------------------------------------------------------------------------


def problem_of(check: str, error: StoreError) -> Finding:
    """The finding that an error of the store is."""
    causes: tuple[tuple[type[StoreError], Cause], ...] = (
        (StoreCorruptError, "damaged"),
        (StoreVersionError, "misconfigured"),
        (StoreMovedError, "misconfigured"),
        (StoreLockedError, "locked"),
        (StorePermissionError, "forbidden"),
    )
    cause: Cause = next((cause for kind, cause in causes if isinstance(error, kind)), "unreachable")
    return Finding(check, "problem", error.problem, error.way_out, cause)


def size_text(number: float) -> str:
    """A number of bytes in the unit that leaves few digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.0f} TiB"
