"""
The blocks of a worker, by the names that assignments use.

Short names stand for the same blocks: `http` is `http.request`.
"""

from collections.abc import Mapping
from typing import Any

from reefknot.blocks.fs import BlobGet, BlobPut, Delete, Folders
from reefknot.blocks.settings import BlockSettings
from reefknot.blocks.sql import SqlQuery
from reefknot.core.failure import ErrorCode
from reefknot.core.messages import StepResult, StepStatus
from reefknot.errors import ConfigurationError
from reefknot.ports.block import Block, BlockContext

ALIASES: Mapping[str, str] = {
    "http": "http.request",
    "fs_blob_put": "fs.blob_put",
    "fs_blob_get": "fs.blob_get",
    "sql": "sql.query",
}


def standard_blocks(settings: BlockSettings | None = None) -> dict[str, Block]:
    """The blocks that come with the package. `http.request` says so where its library is not installed."""
    settings = settings or BlockSettings()
    folders = Folders(settings.fs)
    blocks: list[Block] = [BlobPut(folders), BlobGet(folders), Delete(folders), SqlQuery(settings.sql)]
    blocks.insert(0, _http(settings))
    return {block.type: block for block in blocks}


def _http(settings: BlockSettings) -> Block:
    try:
        from reefknot.blocks.http import HttpRequest
    except ImportError:
        return MissingExtra("http.request", "http")
    return HttpRequest(settings.http)


class MissingExtra:
    """Stands for a block whose library is not installed: every step of it fails, and says what to install."""

    def __init__(self, type_name: str, extra: str) -> None:
        self.type = type_name
        self._extra = extra

    def destination(self, inputs: Mapping[str, Any]) -> str:
        return self.type

    async def run(self, inputs: Mapping[str, Any], context: BlockContext) -> StepResult:
        text = f"{self.type} needs the extra {self._extra!r}: pip install reefknot[{self._extra}]"
        return StepResult(StepStatus.ERROR, ErrorCode.execution_failed, error_message=text)

    async def close(self) -> None:
        """There is nothing to let go of."""


def by_name(*groups: Mapping[str, Block]) -> dict[str, Block]:
    """All blocks under all their names. Two blocks of one type are a mistake in the configuration."""
    blocks: dict[str, Block] = {}
    for group in groups:
        for name, block in group.items():
            if name in blocks or name in ALIASES:
                raise ConfigurationError([f"block {name}: there is another block of this type; give it another name"])
            blocks[name] = block
    for alias, name in ALIASES.items():
        if name in blocks:
            blocks[alias] = blocks[name]
    return blocks
