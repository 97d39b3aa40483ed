"""
Verify an exported audit log with the standard library alone: `python verify_chain.py log.jsonl log.jsonl.head.json`.

The format is described in docs/reference/audit-chain.md. Prints each problem; the exit code is 1 when there is one.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = rb'"hash":"([0-9a-f]{64})","sequence":(0|[1-9][0-9]{0,17})'
FLAT = rb'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}'
HEADER = re.compile(rb'\{"chain":"([0-9a-f]{16})","format":1,%b\}\n' % LINK)
LINE = re.compile(rb'\{"event":(\{.*\}),%b(?:,"at":\d+)?(?:,"filed":%b)?(?:,"more":\d+)?\}\n' % (LINK, FLAT))


def problems(log: str, head_file: str | None = None) -> Iterator[str]:
    """Each place where the log is not the chain that it says it is, or lacks a head. `ValueError` for another form."""
    heads = [json.loads(line) for line in Path(head_file).read_bytes().splitlines()] if head_file else []
    # A file of heads may go on after a log was begun anew: the chain of its last line counts.
    missing = {(one["chain"], one["sequence"], one["hash"]) for one in heads if one["chain"] == heads[-1]["chain"]}
    if head_file and not missing:
        raise ValueError(f"{head_file}: there is no head")
    with open(log, "rb") as file:
        header = HEADER.fullmatch(file.readline())
        if header is None:
            raise ValueError("line 1: it is not exactly the header of a log of format 1")
        chain, first, start = header[1].decode(), header[2].decode(), int(header[3])
        number, previous, is_anchored = start, first, start == 0 and first == "0" * 64
        missing.discard((chain, number, previous))
        for place, text in enumerate(file, 2):
            line = LINE.fullmatch(text)
            if line is None:
                raise ValueError(f"line {place}: it is not exactly the line of an event")
            event = json.loads(line[1])  # one JSON value, so that no other member of the line is taken for a part of it
            number += 1
            hashed = hashlib.sha256(f"{chain}\n{number}\n{previous}\n".encode() + line[1]).hexdigest()
            if (int(line[3]), line[2].decode()) != (number, hashed):
                yield f"event {int(line[3])}: it is not number {number}, or its hash does not fit its place"
            number, previous = int(line[3]), line[2].decode()
            missing.discard((chain, number, previous))
            if event.get("event_type") == "anchor":
                is_anchored |= (event.get("sequence"), event.get("hash")) == (start, first)
    if not is_anchored:
        yield f"the log begins after event {start}, and no anchor event says why"
    yield from (f"the log lacks the head of chain {one[0]}: event {one[1]} was changed or cut off" for one in missing)


if __name__ == "__main__":
    found: list[str] = []
    try:
        found.extend(problems(*sys.argv[1:3]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        found.append(f"cannot be verified: {error}")
    print("\n".join(found) or f"{sys.argv[1]}: the chain fits" + (" its head" if len(sys.argv) > 2 else ""))
    sys.exit(bool(found))
