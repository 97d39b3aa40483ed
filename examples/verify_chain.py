"""
Verify an exported audit log with the standard library alone: `python verify_chain.py log.jsonl log.jsonl.head.json`.

The format is described in docs/reference/audit-chain.md. Prints each problem; the exit code is 1 when there is one.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def problems(log: str, head_file: str | None = None) -> Iterator[str]:
    """Each place where the log is not the chain that it says it is, or not the one of the head."""
    head = json.loads(Path(head_file).read_bytes()) if head_file else None
    with open(log, "rb") as file:
        header = json.loads(file.readline())
        chain, number, previous = header["chain"], header["sequence"], header["hash"]
        is_anchored = number == 0 and previous == "0" * 64
        is_met = head is None or (head["sequence"], head["hash"]) == (number, previous)
        for line in file:
            record = json.loads(line)
            # The event's own bytes stand between `{"event":` and the last `,"hash":"…","sequence":`.
            end = line.rindex(f',"hash":"{record["hash"]}","sequence":'.encode())
            body = line[len(b'{"event":') : end]
            number += 1
            hashed = hashlib.sha256(f"{chain}\n{number}\n{previous}\n".encode() + body).hexdigest()
            if (record["sequence"], record["hash"]) != (number, hashed):
                yield f"event {record['sequence']}: it is not number {number}, or its hash does not fit its place"
            number, previous = record["sequence"], record["hash"]
            event = record["event"]
            if event["event_type"] == "anchor":
                is_anchored = is_anchored or (event["sequence"], event["hash"]) == (header["sequence"], header["hash"])
            if head is not None and number == head["sequence"]:
                is_met = previous == head["hash"] and chain == head["chain"]
    if not is_anchored:
        yield f"the log begins after event {header['sequence']}, and no anchor event says why"
    if not is_met:
        yield f"the log does not contain the head: event {head and head['sequence']} was changed or cut off"


if __name__ == "__main__":
    found = list(problems(*sys.argv[1:3]))
    print("\n".join(found) or f"{sys.argv[1]}: the chain fits" + (" its head" if len(sys.argv) > 2 else ""))
    sys.exit(bool(found))
