"""The names under which a worker finds its blocks."""

from __future__ import annotations

import asyncio
import sys

import pytest

from reefknot.blocks.python import ALIASES, PythonBlock, by_name, standard_blocks
from reefknot.core.failure import ErrorCode
from reefknot.errors import ConfigurationError
from reefknot.ports.block import BlockContext


def test_the_standard_blocks_are_there_under_all_their_names() -> None:
    blocks = by_name(standard_blocks())

    assert sorted(blocks) == sorted(
        [
            *("http.request", "fs.blob_put", "fs.blob_get", "fs.delete", "sql.query"),
            *("http", "fs_blob_put", "fs_blob_get", "sql"),
        ]
    )
    assert all(blocks[alias] is blocks[name] for alias, name in ALIASES.items())
    assert all(block.type == name for name, block in standard_blocks().items())


@pytest.mark.parametrize("taken", ["http.request", "http"])
def test_a_name_that_is_taken_is_a_configuration_error(taken: str) -> None:
    own = PythonBlock(taken, lambda inputs, context: None)

    with pytest.raises(ConfigurationError, match=f"block {taken}: there is another block"):
        by_name(standard_blocks(), {taken: own})


def test_without_its_library_an_http_step_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reefknot.blocks.http", None)
    block = by_name(standard_blocks())["http"]

    step = asyncio.run(block.run({"url": "https://example.org"}, BlockContext("a", 1, "a/0", 1.0)))

    assert step.error_code is ErrorCode.execution_failed
    assert step.error_message == "http.request needs the extra 'http': pip install reefknot[http]"
