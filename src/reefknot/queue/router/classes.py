"""
Classes of work in the fleet: those that running workers have, and those that step types bring themselves.

`@rk.block(resource_class=…)` is known where the step's module is loaded, not where it is submitted. So every system
reports the classes of its steps with its status, and submitters and routers read them there. An assignment that names a
class keeps it. One of a class that no running worker has is accepted, because its worker may come; the log says so.
"""

from msgspec import DecodeError, Struct, json

from reefknot.core.checks import suggest
from reefknot.core.clock import Clock
from reefknot.errors import StoreError
from reefknot.queue.model.messages import ExecAssignment, named_class, resource_class
from reefknot.queue.port.control import Control
from reefknot.runtime.log import logger, printable
from reefknot.runtime.timeouts import STORE_S, within

READ_EVERY_S = 2.0
"""How old the classes may be that a submission is placed by."""
MOST_WARNED = 100
"""Classes that one submitter warns of, each once."""


class _WorkerStatus(Struct):
    classes: dict[str, object] = {}


class _SystemStatus(Struct):
    """The part of a system's status that is about classes."""

    workers: list[_WorkerStatus] = []
    step_classes: dict[str, str] = {}


_statuses = json.Decoder(_SystemStatus)


class FleetClasses:
    """The classes of running workers and of step types, as the systems over a store report them."""

    def __init__(self, control: Control, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._read_at = -READ_EVERY_S
        self._of_types: dict[str, str] = {}
        self._there: set[str] = set()
        self._warned: set[str] = set()

    async def refresh(self) -> None:
        """Read the reports again, if the last ones are old. What cannot be read is left as it was."""
        now = self._clock.now()
        if now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        try:
            reports = await within(self._control.reports(), STORE_S)
        except (StoreError, TimeoutError):  # whoever needs the store says so
            return
        systems = []
        for report in reports:
            try:
                systems.append(_statuses.decode(report.body))
            except DecodeError:  # of another version
                continue
        self._of_types = {kind: name for one in systems for kind, name in one.step_classes.items()}
        self._there = {name for one in systems for worker in one.workers for name in worker.classes}

    def class_of(self, assignment: ExecAssignment) -> str:
        """The class that an assignment names, else that of its step, else the one of its family."""
        return named_class(assignment) or self._of_types.get(assignment.job.type) or resource_class(assignment)

    def warn_of(self, assignment: ExecAssignment) -> None:
        """Warn, once, of a class that no running worker has. While no worker runs, nothing is known."""
        name = self.class_of(assignment)
        if not self._there or name in self._there or name in self._warned or len(self._warned) >= MOST_WARNED:
            return
        self._warned.add(name)
        logger().warning(
            "%s: no running worker has the class %r%s; there are: %s. The job waits for one for a while, then it is in "
            "quarantine. A class comes from @rk.block(resource_class=…) or worker.queue.v2.resource_pools",
            printable(assignment.assignment_id, most=100),
            printable(name, most=100),
            suggest(name, self._there),
            ", ".join(sorted(self._there)),
        )
