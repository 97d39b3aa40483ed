"""A file of credentials, as `nsc` writes it: the command line signs in with it, and a file of somebody else is 77."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nkeys

from tests.acceptance.test_nats_commands import FORBIDDEN, UNREACHABLE, Person, free_port, other_server, person

__all__ = ["person"]  # the fixture

UNBOUNDED = ["subs", "data", "payload", "imports", "exports", "conn", "leaf"]
STORAGE = ["mem_storage", "disk_storage", "streams", "consumer"]


class Key:
    """A pair of keys, and what it signs."""

    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
        self._pair = nkeys.from_seed(self.seed)
        self.name: str = self._pair.public_key.decode()

    def signs(self, subject: Key, claims: dict[str, Any]) -> str:
        parts = [
            {"typ": "JWT", "alg": "ed25519-nkey"},
            {"jti": "x", "iat": 1, "iss": self.name, "name": "x", "sub": subject.name, "nats": {"version": 2} | claims},
        ]
        text = b".".join(_encoded(json.dumps(part).encode()) for part in parts)
        return b".".join((text, _encoded(self._pair.sign(text)))).decode()


def _encoded(text: bytes) -> bytes:
    return base64.urlsafe_b64encode(text).rstrip(b"=")


def account(*limits: str) -> dict[str, Any]:
    return {"type": "account", "limits": dict.fromkeys(limits, -1) | {"wildcards": True}}


@contextmanager
def signing_server(folder: Path) -> Iterator[tuple[str, Key]]:
    """The URL of a server with an operator, and the key of its account."""
    operator, system, ours = (
        Key(nkeys.PREFIX_BYTE_OPERATOR),
        Key(nkeys.PREFIX_BYTE_ACCOUNT),
        Key(nkeys.PREFIX_BYTE_ACCOUNT),
    )
    settings = f"""
        operator: {operator.signs(operator, {"type": "operator", "system_account": system.name})}
        system_account: {system.name}
        resolver: MEMORY
        resolver_preload: {{
            {system.name}: {operator.signs(system, account(*UNBOUNDED))}
            {ours.name}: {operator.signs(ours, account(*UNBOUNDED, *STORAGE))}
        }}
        jetstream {{ store_dir: "{folder / "data"}" }}
    """
    with other_server(folder, settings) as url:
        yield url, ours


def write_credentials(file: Path, issuer: Key) -> str:
    """A file that lets its user in; answers its secret."""
    user = Key(nkeys.PREFIX_BYTE_USER)
    token = issuer.signs(user, {"type": "user", "subs": -1, "data": -1, "payload": -1})
    secret = user.seed.decode()
    texts = {"NATS USER JWT": token, "USER NKEY SEED": secret}
    file.write_text(
        "".join(f"-----BEGIN {name}-----\n{text}\n------END {name}------\n" for name, text in texts.items())
    )
    return secret


def test_a_file_of_credentials_opens_the_store_and_is_never_shown(person: Person, tmp_path: Path) -> None:
    with signing_server(tmp_path / "server") as (url, ours):
        secret = write_credentials(person.folder / "ours.creds", ours)
        person.configure(f'engine: "{url}"\nnats: {{credentials: ours.creds}}\n')
        shown = [
            person.done("submit", "--type", "own.hello", "--in", "24h"),
            person.done("doctor"),
            person.done("job", "list"),
            person.done("config", "show"),
        ]
        assert "own.hello" in shown[2]
        assert not any(secret in one for one in shown)


def test_a_file_of_somebody_else_is_refused(person: Person, tmp_path: Path) -> None:
    with signing_server(tmp_path / "server") as (url, _):
        write_credentials(person.folder / "theirs.creds", Key(nkeys.PREFIX_BYTE_ACCOUNT))
        person.configure(f'engine: "{url}"\nnats: {{credentials: theirs.creds}}\n')
        assert "authorization" in person.refused(FORBIDDEN, "submit", "--type", "own.hello").lower()


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(person: Person) -> None:
    """`doctor` too: it would wait for ever for somebody to write."""
    os.mkfifo(person.folder / "pipe")
    (person.folder / "cert.pem").write_text("")
    for section in (
        "credentials: pipe",
        "tls_ca: pipe",
        "tls_certificate: pipe, tls_key: cert.pem",
        "tls_certificate: cert.pem, tls_key: pipe",
    ):
        key = next(one.partition(":")[0] for one in section.split(", ") if one.endswith("pipe"))
        text = f'engine: "nats://127.0.0.1:{free_port()}"\nnats: {{{section}}}\n'
        person.configure(text)
        ended = person("doctor")
        assert ended.returncode == UNREACHABLE
        assert f"the file of nats.{key} is not a regular file; check nats.{key}" in ended.stdout
