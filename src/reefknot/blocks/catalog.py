"""
The blocks of a worker, by the names that assignments use.

Short names stand for the same blocks: `http` is `http.request`.
"""

from collections.abc import Mapping

from reefknot.blocks.fs import BlobGet, BlobPut, Delete, Folders
from reefknot.blocks.settings import BlockSettings
from reefknot.blocks.sql import SqlQuery
from reefknot.errors import ConfigurationError
from reefknot.ports.block import Block

ALIASES: Mapping[str, str] = {
    "http": "http.request",
    "fs_blob_put": "fs.blob_put",
    "fs_blob_get": "fs.blob_get",
    "sql": "sql.query",
}


def standard_blocks(settings: BlockSettings | None = None) -> dict[str, Block]:
    """The blocks that come with the package. `http.request` only where its library is installed."""
    settings = settings or BlockSettings()
    folders = Folders(settings.fs)
    blocks: list[Block] = [BlobPut(folders), BlobGet(folders), Delete(folders), SqlQuery(settings.sql)]
    try:
        from reefknot.blocks.http import HttpRequest
    except ImportError:  # the extra 'http' is not there; an assignment for it is an unknown type
        pass
    else:
        blocks.insert(0, HttpRequest(settings.http))
    return {block.type: block for block in blocks}


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
