"""
Verify an exported audit log with the standard library alone: `python verify_chain.py log.jsonl log.jsonl.head.json`.

The format is described in docs/reference/audit-chain.md. Prints each problem; the exit code is 1 when there is one.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NUMBER = rb"(0|[1-9][0-9]{0,17})"
LINK = rb'"hash":"([0-9a-f]{64})","sequence":%b' % NUMBER
SHORT = rb'"hash":"([\w-]{43})","seq":%b' % NUMBER
FLAT = rb'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}'
HEADER = re.compile(rb'\{"chain":"([0-9a-f]{16}(?:-[0-9a-f]{1,16})?)","format":([12]),%b\}\n' % LINK)
LINES = {
    form: re.compile(rb'\{"event":(\{.*\}),%b(?:,"at":\d+)?(?:,"filed":%b)?(?:,"more":\d+)?\}\n' % (link, FLAT))
    for form, link in ((b"1", LINK), (b"2", SHORT))
}


def problems(log: str, head_file: str | None = None) -> Iterator[str]:
    """Each place where the log is not the chains that it says it is, or lacks a head. `ValueError` for another form."""
    missing = heads_in(head_file) if head_file else set()
    starts, anchors = set(), set()
    chain, number, previous, form = "", 0, "", b""
    with open(log, "rb") as file:
        for place, text in enumerate(file, 1):
            header = HEADER.fullmatch(text)
            if header is not None and header[1].decode() != chain:  # a log on NATS has one chain after the other
                chain, form, previous, number = header[1].decode(), header[2], header[3].decode(), int(header[4])
                starts.add((chain, number, previous))
                missing.discard((chain, number, previous))
                continue
            line = LINES[form].fullmatch(text) if form else None
            if line is None:
                raise ValueError(f"line {place}: it is not exactly a header or the line of an event")
            event = json.loads(line[1])  # one JSON value, so that no other member of the line is taken for a part of it
            number += 1
            hashed = hashlib.sha256(f"{chain}\n{number}\n{previous}\n".encode() + line[1]).digest()
            if (int(line[3]), line[2]) != (number, written(hashed, form)):
                yield f"event {int(line[3])}: it is not number {number}, or its hash does not fit its place"
            claimed = line[2].decode()  # from here on, so that one change is not found in every event after it
            number, previous = int(line[3]), claimed if form == b"1" else base64.urlsafe_b64decode(f"{claimed}=").hex()
            missing.discard((chain, number, previous))
            if event.get("event_type") == "anchor":
                anchors.add((event.get("chain"), event.get("sequence"), event.get("hash")))
    if not starts:
        raise ValueError("line 1: it is not exactly the header of a log of format 1 or 2")
    for start in sorted(starts - anchors):
        if start[1:] != (0, "0" * 64):
            yield f"chain {start[0]} begins after event {start[1]}, and no anchor event says why"
    yield from (f"the log lacks the head of chain {one[0]}: event {one[1]} was changed or cut off" for one in missing)


def written(hashed: bytes, form: bytes) -> bytes:
    """A hash as a line has it: hexadecimal digits in format 1, base64url without padding in format 2."""
    return hashed.hex().encode() if form == b"1" else base64.urlsafe_b64encode(hashed).rstrip(b"=")


def heads_in(head_file: str) -> set[tuple[str, int, str]]:
    """The heads that the log must have: all; in a file of `audit.heads`, with times, those of the last line's chain."""
    heads = [json.loads(line) for line in Path(head_file).read_bytes().splitlines()]
    if not heads:
        raise ValueError(f"{head_file}: there is no head")
    if any("at" in one for one in heads):
        heads = [one for one in heads if one["chain"] == heads[-1]["chain"]]
    return {(one["chain"], one["sequence"], one["hash"]) for one in heads}


if __name__ == "__main__":
    found: list[str] = []
    try:
        found.extend(problems(*sys.argv[1:3]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        found.append(f"cannot be verified: {error}")
    print("\n".join(found) or f"{sys.argv[1]}: the chain fits" + (" its head" if len(sys.argv) > 2 else ""))
    sys.exit(bool(found))
