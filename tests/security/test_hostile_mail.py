"""Hostile mail, 60 messages or `REEFKNOT_HOSTILE_MAILS`: each read within a second and 128 MB, in its own process."""

import email
import json
import os
import sys
from pathlib import Path

import pytest

from reefknot.ingest.connectors.mail import read_mail
from tests.pace import slowness
from tests.security.hostile_mail import hostile
from tests.warm_commands import run_cold

ROOT = Path(__file__).resolve().parents[2]
MAILS = int(os.environ.get("REEFKNOT_HOSTILE_MAILS", "60"))
LONGEST_S = 1.0
MOST_MB = 128

READER = """
import json, re, sys, time
from pathlib import Path
from reefknot.ingest.connectors.mail import MOST_TEXT, MOST_TITLE, read_mail
from tests.security.hostile_mail import hostile

worst = (0.0, -1)
for number in range(int(sys.argv[1])):
    raw = hostile(number)
    began = time.process_time()
    mail = read_mail(raw)
    worst = max(worst, (time.process_time() - began, number))
    assert len(mail.text) <= MOST_TEXT + 2000 and len(mail.title) <= MOST_TITLE
    json.dumps(mail.metadata).encode()
    assert len(json.dumps(mail.metadata)) < 1_000_000
    (mail.title + mail.text).encode()
# Not `ru_maxrss`: that is never less than the memory of whoever started this process.
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps([*worst, int(peak[1]) / 1024]))
"""


def test_hostile_messages_cost_little_time_and_memory() -> None:
    done = run_cold(sys.executable, "-c", READER, str(MAILS), cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, number, megabytes = json.loads(done.stdout)
    assert seconds < LONGEST_S * slowness(), f"message {number}"
    assert megabytes < MOST_MB


def test_the_same_message_stops_the_parser_of_the_standard_library() -> None:
    """The control: what is survived here is no harmless message."""
    deep = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(1000))
    with pytest.raises(RecursionError):
        email.message_from_bytes(deep)
    assert read_mail(deep).problems


def test_a_number_is_always_the_same_message() -> None:
    assert hostile(7) == hostile(7) != hostile(8)
