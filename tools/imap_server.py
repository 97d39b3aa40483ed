"""
A real IMAP server for tests and benchmarks: a Dovecot with its own configuration and users, on a free local port.

Mailboxes are filled by writing the files of a maildir, which is faster than any protocol. As root the server's parts
run as the users that its package made, and mail is read as `nobody`; otherwise everything runs as whoever runs this.
A server that does not start is an error.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from signal import SIGKILL

CERTIFICATE = Path(__file__).resolve().parents[1] / "tests" / "integration" / "localhost.pem"
"""Key and certificate of `localhost`, which is its own authority."""
PASSWORD = "correct horse"  # noqa: S105 - of mailboxes that live as long as a test
START_S = 30.0

_numbers = count(1)

CONFIGURATION = """
protocols = imap
base_dir = {folder}/run
state_dir = {folder}/run
log_path = {folder}/server.log
auth_mechanisms = plain
auth_failure_delay = 0
shutdown_clients = yes
disable_plaintext_auth = no
ssl = yes
ssl_cert = <{folder}/localhost.pem
ssl_key = <{folder}/localhost.pem
listen = 127.0.0.1
default_internal_user = {internal}
default_internal_group = {internal_group}
default_login_user = {login}
default_process_limit = 40
default_vsz_limit = 0
first_valid_uid = 1
mail_max_userip_connections = {connections}
mail_location = maildir:{folder}/mail/%n
mail_fsync = never
mailbox_list_index = no
maildir_very_dirty_syncs = no
passdb {{
  driver = passwd-file
  args = scheme=PLAIN {folder}/users/%n
}}
userdb {{
  driver = static
  args = uid={uid} gid={gid} home={folder}/mail/%n
}}
namespace inbox {{
  inbox = yes
  separator = /
  mailbox Trash {{
    special_use = \\Trash
  }}
  mailbox Junk {{
    special_use = \\Junk
  }}
}}
service imap-login {{
  chroot =
  process_min_avail = 0
  inet_listener imap {{
    port = {port}
  }}
  inet_listener imaps {{
    port = {tls_port}
    ssl = yes
  }}
}}
service anvil {{
  chroot =
  unix_listener anvil-auth-penalty {{
    mode = 0
  }}
}}
service stats {{
  chroot =
}}
"""


class ImapServer:
    """A running Dovecot."""

    def __init__(self, folder: Path, *, connections: int = 50) -> None:
        self.folder = folder
        self.port, self.tls_port = _free_ports(2)
        self._is_root = os.geteuid() == 0
        self._mail = pwd.getpwnam("nobody") if self._is_root else pwd.getpwuid(os.getuid())
        self._connections = connections
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        mine = self._mail.pw_name
        (folder / "mail").mkdir(exist_ok=True)
        self.own(folder / "mail")
        (folder / "users").mkdir(exist_ok=True)
        shutil.copy(CERTIFICATE, folder / "localhost.pem")
        settings = {
            "folder": folder,
            "port": self.port,
            "tls_port": self.tls_port,
            "internal": "dovecot" if self._is_root else mine,
            "internal_group": "dovecot" if self._is_root else _group_of(self._mail),
            "login": "dovenull" if self._is_root else mine,
            "connections": self._connections,
            "uid": self._mail.pw_uid,
            "gid": self._mail.pw_gid,
        }
        (folder / "dovecot.conf").write_text(CONFIGURATION.format(**settings))
        program = shutil.which("dovecot", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program is not None, "there is no dovecot: install the package dovecot-imapd"
        with (folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "-F", "-c", str(folder / "dovecot.conf")], stdout=log, stderr=log, start_new_session=True
            )
        ends = time.monotonic() + START_S
        while not all(map(_listens, (self.port, self.tls_port))):
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < ends, self.log()
            time.sleep(0.02)

    def stop(self) -> None:
        """Kill the server and all its processes: asked to end, it would wait six seconds for them."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, SIGKILL)
            self._process.wait(20.0)
            self._process = None

    def log(self) -> str:
        texts = [path.read_text() for path in (self.folder / "start.log", self.folder / "server.log") if path.exists()]
        return "\n".join(texts)

    def mailbox(self, password: str = PASSWORD) -> Mailbox:
        """A new user with an empty mailbox."""
        user = f"user{next(_numbers)}"
        home = self.folder / "mail" / user
        (self.folder / "users" / user).write_text(f"{user}:{{PLAIN}}{password}::::::\n")
        mailbox = Mailbox(self, user, home)
        mailbox.make("INBOX")
        return mailbox

    def own(self, path: Path) -> None:
        if self._is_root:
            os.chown(path, self._mail.pw_uid, self._mail.pw_gid)


class Mailbox:
    """The mailbox of a user, as files."""

    def __init__(self, server: ImapServer, user: str, home: Path) -> None:
        self.server = server
        self.user = user
        self.home = home

    def path(self, folder: str) -> Path:
        return self.home if folder == "INBOX" else self.home / ("." + encoded_name(folder.replace("/", ".")))

    def make(self, folder: str) -> Path:
        path = self.path(folder)
        for part in (path, *(path / name for name in ("cur", "new", "tmp"))):
            part.mkdir(exist_ok=True)
            self.server.own(part)
        return path

    def deliver(self, *messages: bytes, folder: str = "INBOX") -> list[Path]:
        """New messages, in this order."""
        place = self.make(folder) / "cur"
        files = []
        for message in messages:
            number = next(_numbers)
            file = place / f"{1_700_000_000 + number}.M{number}.test:2,"
            file.write_bytes(message)
            self.server.own(file)
            files.append(file)
        return files

    def move(self, file: Path, folder: str) -> Path:
        """A message of one folder becomes one of another."""
        number = next(_numbers)
        return file.rename(self.make(folder) / "cur" / f"{1_700_000_000 + number}.M{number}.test:2,")

    def files(self, folder: str = "INBOX") -> list[Path]:
        path = self.path(folder)
        return sorted([*(path / "cur").iterdir(), *(path / "new").iterdir()])

    def renumber(self, folder: str = "INBOX") -> None:
        """Change UIDVALIDITY: all messages get other UIDs."""
        path = self.path(folder)
        old = (path / "dovecot-uidlist").read_text().split()[1]
        (path / "dovecot-uidlist").write_text(f"3 V{int(old[1:]) + 1} N1 G{os.urandom(16).hex()}\n")
        self.server.own(path / "dovecot-uidlist")
        for index in path.glob("dovecot.index*"):
            index.unlink()

    def drop(self, folder: str) -> None:
        shutil.rmtree(self.path(folder))


def encoded_name(name: str) -> str:
    """The name of a folder in modified UTF-7."""
    found, other = "", ""
    for letter in [*name, ""]:
        if letter and not " " <= letter <= "~":
            other += letter
            continue
        if other:
            found += "&" + b64encode(other.encode("utf-16-be")).decode().rstrip("=").replace("/", ",") + "-"
            other = ""
        found += "&-" if letter == "&" else letter
    return found


def message(number: int, *, text: str = "", subject: str = "") -> bytes:
    """A small message that differs from all of other numbers."""
    return (
        f"From: Ann <ann@example.org>\r\nTo: Bob <bob@example.org>\r\nSubject: {subject or f'Message {number}'}\r\n"
        f"Date: Tue, 14 Nov 2023 22:13:20 +0000\r\nMessage-ID: <{number}@example.org>\r\n\r\n"
        f"{text or f'The text of message {number}.'}\r\n"
    ).encode()


@contextlib.contextmanager
def running_imap(*, connections: int = 50) -> Iterator[ImapServer]:
    """A server that is stopped at the end, with nothing left behind."""
    folder = Path(tempfile.mkdtemp(prefix="rk-imap-"))  # short: a socket's path has at most 107 bytes
    server = ImapServer(folder, connections=connections)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _group_of(account: pwd.struct_passwd) -> str:
    import grp

    return grp.getgrgid(account.pw_gid).gr_name


def _free_ports(number: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False
