"""
Notes of one attempt: what its step says of itself, and its way to the store.

Checkpoints, progress and lines of log go together, under the fence of the claim, at most once a second. What is said in
between waits in this process, and the latest of it counts. An attempt that ends takes it along with its report, and one
that is stopped stores it before its work goes back: only a kill loses what was said within the last second. A step that
says nothing has no write and no read.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from json import loads
from math import inf
from threading import Lock, get_ident
from typing import Any

import msgspec

from reefknot.errors import LeaseLostError, ParameterTypeError, StoreError
from reefknot.queue.model.notes import (
    CHECKPOINT,
    LINES,
    LONGEST_LINE,
    LONGEST_TEXT,
    MOST_LINES,
    Notes,
    StepLine,
    StepLog,
    StepProgress,
)
from reefknot.queue.model.work import WorkItem
from reefknot.queue.port.work_queue import Held
from reefknot.queue.worker.context import WorkerContext
from reefknot.runtime.log import LogBudget, error_text, logger, printable
from reefknot.runtime.tasks import run_in_background
from reefknot.runtime.timeouts import AWAY_S, STORE_S
from reefknot.steps.port import AtOnce, StepNotes

EVERY_S = 1.0
"""Seconds between two writes of the notes of one attempt, at least."""
LONGEST_GIVEN = 1 << 16
"""Characters of a line, or of the text of a progress, that are looked at."""


class AttemptNotes(StepNotes):
    """
    The notes of one attempt. A step says them from the worker's loop, or from the thread of a plain function.

    After the attempt, or once its lease is lost, a checkpoint is refused; progress and lines are dropped.
    """

    def __init__(self, context: WorkerContext, item: WorkItem, before: dict[str, bytes]) -> None:
        """`before` has the parts that earlier attempts left."""
        noted = item.extra.notes
        self.checkpoints = 0 if noted is None else noted.checkpoints
        self._last = before.get(CHECKPOINT)
        self.last_checkpoint: Any = None
        try:
            self.last_checkpoint = None if self._last is None else loads(self._last)
        except ValueError:
            self._last = None
        if self.checkpoints and self._last is None:
            text = "%s: the checkpoint of %s is missing or damaged; it begins from its start"
            logger().error(text, context.name, item.id)
        self._context = context
        self._item = item
        self._held = Held.of(item)
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._lock = Lock()
        self._checkpoint: bytes | None = None
        self._progress: StepProgress | None = None
        self._lines = StepLog.read(before.get(LINES))
        self._new_lines: list[StepLine] = []
        self._has_new_lines = False
        self._on_its_way: Notes | None = None
        self._saving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._may_save_at = -inf
        self._is_over = False
        self._errors = LogBudget()

    @classmethod
    async def of(cls, context: WorkerContext, item: WorkItem) -> "AttemptNotes":
        """The notes of an attempt that begins now, with what earlier ones left."""
        if item.extra.notes is None:
            return cls(context, item, {})
        async with asyncio.timeout(STORE_S):
            return cls(context, item, await context.work.notes(item.id))

    # ---- the step's side --------------------------------------------------------------------------------------------

    def checkpoint(self, text: bytes) -> Awaitable[None]:
        self._require_lease()
        with self._lock:
            self.checkpoints += text != self._last  # the same one again is no progress
            self._checkpoint = self._last = text
        if get_ident() == self._thread:
            self._arm()
            return self._saved()
        with suppress(TimeoutError):  # the loop is blocked: the checkpoint waits for it
            asyncio.run_coroutine_threadsafe(self._saved(), self._loop).result(STORE_S + EVERY_S)
        return AtOnce()

    def progress(self, progress: StepProgress) -> None:
        with self._lock:
            self._progress = progress
        self._arm_from_anywhere()

    def log(self, text: str) -> None:
        if not isinstance(text, str):
            raise ParameterTypeError("text", text, "a text")
        shown = self._shown(text, LONGEST_LINE)
        line = StepLine(int(self._context.clock.wall() * 1000), self._item.attempts + 1, shown)
        with self._lock:
            self._new_lines.append(line)
            self._has_new_lines = True
            if len(self._new_lines) > MOST_LINES:
                self._fold()
        self._arm_from_anywhere()

    def _shown(self, text: str, most: int) -> str:
        """A text as it may be kept; of a very long one the rest does not count."""
        return printable(self._context.redactor(text[:LONGEST_GIVEN]), most=most)

    def _require_lease(self) -> None:
        if self._is_over:
            raise LeaseLostError(self._item.assignment_id, owner=self._item.owner, fence=self._item.fence)

    # ---- the store's side -------------------------------------------------------------------------------------------

    async def _saved(self) -> None:
        """Wait for the write of what was said until now, if one is due; raise if the lease was lost."""
        self._arm()
        if self._saving is None and self._loop.time() >= self._may_save_at:
            self._save()
        if self._saving is not None:
            await asyncio.wait({self._saving})  # a step that is stopped does not stop the write
        else:
            await asyncio.sleep(0)  # a loop of checkpoints lets others run, and hears that it is cancelled
        self._require_lease()

    def _arm_from_anywhere(self) -> None:
        if get_ident() == self._thread:
            self._arm()
        elif self._timer is None:
            with suppress(RuntimeError):  # the loop is closed: the process ends
                self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Have what was said written once a second has passed since the last write."""
        if self._timer is None and self._saving is None and not self._is_over:
            self._timer = self._loop.call_at(max(self._loop.time(), self._may_save_at), self._save)

    def _save(self) -> None:
        """Begin to write what is not written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._saving is not None or self._is_over or (notes := self._take()) is None:
            return
        self._may_save_at = self._loop.time() + EVERY_S
        self._on_its_way = notes
        self._saving = run_in_background(self._write(notes), f"notes of {self._item.id}")

    async def _write(self, notes: Notes) -> None:
        try:
            async with asyncio.timeout(STORE_S):
                is_kept = await self._context.work.note(self._held, notes)
            self._is_over = self._is_over or not is_kept
        except (StoreError, TimeoutError) as error:
            self._put_back(notes)
            if self._errors.take(self._loop.time()) is not None:
                text = "%s: notes of %s are not stored yet; they are tried again (%s)"
                logger().warning(text, self._context.name, self._item.id, error_text(error))
        finally:
            self._on_its_way = self._saving = None
            if self._has_news():
                self._arm()

    def _has_news(self) -> bool:
        return self._checkpoint is not None or self._progress is not None or self._has_new_lines

    def _take(self) -> Notes | None:
        """Take all that is not written; None if there is nothing."""
        with self._lock:
            if not self._has_news():
                return None
            parts = {} if self._checkpoint is None else {CHECKPOINT: self._checkpoint}
            if self._has_new_lines:
                self._fold()
                parts[LINES] = msgspec.json.encode(self._lines)
            progress = self._progress
            if progress is not None:
                progress = msgspec.structs.replace(progress, text=self._shown(progress.text, LONGEST_TEXT))
            self._checkpoint, self._progress, self._has_new_lines = None, None, False
            return Notes(self.checkpoints, progress, parts)

    def _fold(self) -> None:
        self._lines, self._new_lines = self._lines.with_lines(self._new_lines), []

    def _put_back(self, notes: Notes) -> None:
        """Take what was not stored for unsaid, where nothing newer was said."""
        with self._lock:
            self._checkpoint = self._checkpoint or notes.parts.get(CHECKPOINT)
            self._progress = self._progress or notes.progress
            self._has_new_lines = self._has_new_lines or LINES in notes.parts

    # ---- the end of the attempt -------------------------------------------------------------------------------------

    def end(self) -> Notes | None:
        """End the notes. Returns what is not stored, which goes with the report of the attempt."""
        if self._timer is not None:
            self._timer.cancel()
        if self._on_its_way is not None:  # perhaps it does not arrive
            self._put_back(self._on_its_way)
        notes = None if self._is_over else self._take()
        self._is_over = True
        return notes

    async def stop(self) -> None:
        """Store what is left of an attempt that was stopped, before its work goes back."""
        notes = self.end()
        if notes is not None:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(AWAY_S):
                    await self._context.work.note(self._held, notes)
