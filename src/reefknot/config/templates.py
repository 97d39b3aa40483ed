"""
Configurations to start from: the recommended one, and a template for each common situation.

They are files, so that people may read them; a test loads every one of them. A template is a whole, valid file that
says only what its situation needs.
"""

from pathlib import Path

from reefknot.errors import ParameterError

_FOLDER = Path(__file__).with_name("samples")

TEMPLATES = {
    "rate-limited-api": "an HTTP API that answers 429 and says when to come back",
    "flaky-network": "a network that drops and stalls, but comes back within seconds",
    "database": "SQL that meets locks, fail-overs and a full connection pool",
    "local-disk": "files and vaults on this machine, where waiting long is pointless",
    "mailbox": "IMAP servers that limit logins and go away for minutes",
}
"""By name: when to use it."""


def recommended() -> str:
    """The configuration that `init` writes: both v2 gates on."""
    return (_FOLDER / "reefknot.yaml").read_text(encoding="utf-8")


def template(name: str) -> str:
    """The text of one template."""
    if name not in TEMPLATES:
        raise ParameterError("name", name, f"one of {', '.join(TEMPLATES)}")
    return (_FOLDER / "templates" / f"{name}.yaml").read_text(encoding="utf-8")
