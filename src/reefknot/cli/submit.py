"""`reefknot submit`: hand work in through the store, for the system that runs on it or will."""

from __future__ import annotations

import asyncio
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from reefknot.cli.app import CommandError, Exit
from reefknot.cli.options import Config, Engine, Json, load
from reefknot.cli.output import printable, put, put_table, say
from reefknot.cli.stores import Place, place

if TYPE_CHECKING:
    from reefknot.core.messages import ExecAssignment, ExecResult
    from reefknot.router.client import Client, Handle

AT_ONCE = 100
LONGEST_WAIT_S = 5.0
GIVE_UP_S = 60.0

app = App(
    name="submit",
    help="Hand in work: a file of assignments, or one step. Accepted means kept, whether a system runs yet or not.",
    help_epilogue="Examples:\n\n    reefknot submit assignments.jsonl\n"
    '    reefknot submit --type fs.blob_get --inputs \'{"path": "a.txt"}\' --wait',
)


@app.default
def submit(
    file: Annotated[
        str | None, Parameter(help="One assignment a line, as JSON; - is stdin.", allow_leading_hyphen=True)
    ] = None,
    /,
    *,
    type_: Annotated[str | None, Parameter(name="--type", help="One step of this type, instead of a file.")] = None,
    inputs: Annotated[str | None, Parameter(help="Its inputs, as a JSON object.")] = None,
    id_: Annotated[str | None, Parameter(name="--id", help="Its assignment id; the same id is the same work.")] = None,
    deadline: Annotated[float | None, Parameter(help="Seconds from now on, waiting included.")] = None,
    wait: Annotated[bool, Parameter(help="Wait for the results. The exit code is 1 unless all succeeded.")] = False,
    timeout: Annotated[float, Parameter(help="How many seconds --wait waits, 60 unless said.")] = 60.0,
    engine: Engine = None,
    config: Config = None,
    json: Json = False,
) -> int:
    """Hand in a file of assignments, or one step, and perhaps wait for what comes of it."""
    if (file is None) == (type_ is None):
        raise CommandError("give a FILE of assignments, or one step with --type, not both and not neither")
    if not 0 < timeout < 1e9:
        raise CommandError(f"--timeout: {timeout:g} is not accepted: seconds, more than 0")
    where = place(engine, config)
    said = load(config).configuration
    size = said.router.max_queue_size or said.worker.queue.v2.max_queue_size
    handed = Handed(where, size, timeout if wait else None)
    if file is not None:
        from reefknot.cli.assignments import existing_file

        existing_file(file)
        asyncio.run(handed.file(file))
    else:
        asyncio.run(handed.one(_step(type_ or "", inputs, id_, deadline)))
    return handed.tell(json=json)


def _step(type_: str, inputs: str | None, id_: str | None, deadline: float | None) -> ExecAssignment:
    """The assignment that the flags describe."""
    import msgspec

    from reefknot.cli.assignments import read_object

    try:
        payload: Any = msgspec.json.decode(inputs or "{}")
    except msgspec.DecodeError as error:
        raise CommandError(f"--inputs: not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise CommandError('--inputs: accepted: a JSON object, such as {"path": "a.txt"}')
    if deadline is not None and not 0 < deadline < 1e9:
        raise CommandError(f"--deadline: {deadline:g} is not accepted: seconds, more than 0")
    words: dict[str, Any] = {"job": {"type": type_, "payload": payload}}
    if id_ is not None:
        words["assignment_id"] = id_
    if deadline is not None:
        words["options"] = {"deadline_ms": max(1, round(deadline * 1000))}
    found = read_object(words)
    if isinstance(found, str):
        flags = {"job.type": "--type", "assignment_id": "--id"}
        field = found.partition(":")[0]
        raise CommandError(found.replace(field, flags.get(field, field), 1))
    return found


class Handed:
    """What was handed in, and what came of it. `wait` is how long to wait for that, None not at all."""

    def __init__(self, where: Place, size: int, wait: float | None) -> None:
        self.ids: list[str] = []
        self.mistakes = 0
        self._where = where
        self._size = size
        self._wait = wait
        self._results: dict[str, ExecResult | None] = {}

    async def file(self, name: str) -> None:
        from reefknot.app.system import connect
        from reefknot.cli.assignments import Mistake, assignments
        from reefknot.errors import KeyConflictError

        async with connect(self._where.url, size=self._size) as client:
            handles = []
            async for line in assignments(name):
                if isinstance(line, Mistake):
                    say(f"{'<stdin>' if name == '-' else name}:{line.line}: {printable(line.message)}")
                    self.mistakes += 1
                    continue
                try:
                    handles.append(await self._hand_in(client, line.assignment))
                except KeyConflictError as error:
                    say(f"{'<stdin>' if name == '-' else name}:{line.line}: assignment_id: {printable(str(error))}")
                    self.mistakes += 1
            await self._results_of(handles)

    async def one(self, assignment: ExecAssignment) -> None:
        from reefknot.app.system import connect

        async with connect(self._where.url, size=self._size) as client:
            await self._results_of([await self._hand_in(client, assignment)])

    async def _hand_in(self, client: Client, assignment: ExecAssignment) -> Handle:
        """A full queue says when to come back; one that stays full is told."""
        from reefknot.errors import QueueFullError

        waited = 0.0
        while True:
            try:
                handle = await client.hand_in(assignment)
            except QueueFullError as error:
                if waited >= GIVE_UP_S:
                    text = f"{error}; {len(self.ids)} came before it. Is a system running? reefknot router status"
                    raise CommandError(text, Exit.TEMPORARY) from None
                pause = min(max(error.retry_after, 0.05), LONGEST_WAIT_S)
                waited += pause
                await asyncio.sleep(pause)
            else:
                self.ids.append(handle.assignment_id)
                return handle

    async def _results_of(self, handles: list[Handle]) -> None:
        if self._wait is None:
            return
        room = asyncio.Semaphore(AT_ONCE)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait

        async def result(handle: Handle) -> None:
            from reefknot.errors import ResultPendingError

            async with room:
                try:
                    found = await handle.result(max(0.0, until - loop.time()))
                except ResultPendingError:
                    found = None
            self._results[handle.assignment_id] = found

        await asyncio.gather(*map(result, handles))

    def tell(self, *, json: bool) -> int:
        pending = [name for name in self.ids if self._wait is not None and self._results.get(name) is None]
        if json:
            self._put_json()
        elif self._wait is None:
            for name in self.ids:
                put(name)
            say(f"{len(self.ids)} handed in; see them with: reefknot job list")
        else:
            self._put_table()
        if pending:
            say(f"{len(pending)} have no result yet; they are kept. Is a system running? reefknot router status")
        if self.mistakes or any(one is not None and one.status.value != "success" for one in self._results.values()):
            return Exit.FAILED
        return Exit.TEMPORARY if pending else Exit.FINE

    def _put_json(self) -> None:
        import msgspec

        results = None
        if self._wait is not None:
            found = [one for one in map(self._results.get, self.ids) if one is not None]
            results = [self._where.redactor.tree(msgspec.to_builtins(one)) for one in found]
        print(dumps({"handed_in": self.ids, "mistakes": self.mistakes, "results": results}, ensure_ascii=True))

    def _put_table(self) -> None:
        rows = []
        for name in self.ids:
            result = self._results.get(name)
            if result is None:
                rows.append((name, "pending", ""))
                continue
            said = dumps(self._where.redactor.tree(result.output or {}), ensure_ascii=False)
            if result.error_code:
                said = self._where.redactor(f"{result.error_code}: {result.error_message or ''}")
            rows.append((name, result.status.value, said[:400]))
        put_table(("assignment", "status", "result"), rows, styles=("cyan", "bold"), whole=("assignment", "status"))
