"""All four connectors in one running system: first syncs, changes, bad input, and what `source list` says of it."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.folder import Folder
from tests.github_server import GithubServer
from tests.imap_servers import CERTIFICATE, PASSWORD, Mailbox, message

TOKEN = "ghp_canary0123456789"
PATIENCE_S = 60.0


@pytest.fixture
def github(tmp_path: Path) -> Iterator[GithubServer]:
    (tmp_path / "github").mkdir()
    running = GithubServer(tmp_path / "github")
    running.token = TOKEN
    running.git.files = {"README.md": b"# Demo\n\nbowline in the repository"}
    running.git.commit()
    running.add_issue(7, body="bowline in an issue")
    running.tick(300)
    yield running
    running.close()


def configure(folder: Folder, mailbox: Mailbox, github: GithubServer) -> None:
    (folder.path / "docs").mkdir()
    (folder.path / "docs" / "a.txt").write_text("bowline in a file")
    (folder.path / "vault" / ".obsidian").mkdir(parents=True)
    (folder.path / "vault" / "Knots.md").write_text("---\ntags: [rope]\n---\nbowline in a [[Note]]")
    mailbox.deliver(message(1, text="bowline in a mail"))
    folder.set_variable("MAIL_PASSWORD", PASSWORD)
    folder.set_variable("GITHUB_TOKEN", TOKEN)
    with (folder.path / "reefknot.yaml").open("a") as file:
        at = f"host: localhost, port: {mailbox.server.tls_port}, tls_ca: {CERTIFICATE}, user: {mailbox.user}"
        of_github = f"repository: octo/demo, base_url: '{github.url}', token: 'env:GITHUB_TOKEN'"
        file.write(f"""
sources:
  docs: {{connector: local_files, path: docs, every: 1s}}
  vault: {{connector: obsidian_vault, path: vault, every: 1s}}
  inbox: {{connector: imap_mailbox, {at}, password: "env:MAIL_PASSWORD", every: 1s}}
  demo: {{connector: github_repository, {of_github}, every: 1s}}
""")


def eventually(look: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """The first answer that is wanted, or the last one."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        found = look()
        if wanted(found) or time.monotonic() > ends:
            return found
        time.sleep(0.2)


def locations(folder: Folder, words: str) -> set[str]:
    done = folder("source", "search", words, "--json")
    return {f"{hit['source']}:{hit['location']}" for hit in done.json["hits"]} if done.code == 0 else set()


def states(folder: Folder) -> dict[str, Any]:
    return {one["name"]: one for one in folder.json("source", "list")["sources"]}


def test_everything_flows_in_and_follows_its_source(folder: Folder, mailbox: Mailbox, github: GithubServer) -> None:
    configure(folder, mailbox, github)
    folder.up()
    found = eventually(lambda: locations(folder, "bowline"), lambda found: len(found) >= 5)
    assert {one.partition(":")[0] for one in found} == {"docs", "vault", "inbox", "demo"}, folder("source", "list").out

    (folder.path / "docs" / "a.txt").unlink()
    (folder.path / "vault" / "Knots.md").write_text("a clove hitch instead")
    mailbox.deliver(message(2, text="a clove hitch by mail"))
    github.git.files["hitch.md"] = b"a clove hitch in the repository"
    github.git.commit()
    eventually(lambda: locations(folder, "clove hitch"), lambda found: len(found) >= 3)
    assert {one.partition(":")[0] for one in locations(folder, "clove hitch")} == {"vault", "inbox", "demo"}
    gone = eventually(lambda: locations(folder, "bowline"), lambda found: not any("docs" in one for one in found))
    assert {one.partition(":")[0] for one in gone} == {"inbox", "demo"}


def test_what_goes_wrong_is_classified_shown_with_what_to_do_and_never_the_end_of_the_run(
    folder: Folder, mailbox: Mailbox, github: GithubServer
) -> None:
    configure(folder, mailbox, github)
    folder.set_variable("MAIL_PASSWORD", "wrong-password-canary")
    folder.set_variable("GITHUB_TOKEN", "another-canary-token")
    (folder.path / "vault" / "Broken.md").write_text("---\ntags: [unclosed\n---\nstill a bowline")
    recipients = ", ".join(f"someone{n}@example.org" for n in range(32_000)).encode()
    mailbox.deliver(b"To: " + recipients + b"\nSubject: all of us\n\nbowline for everybody")
    os.rename(folder.path / "docs", folder.path / "vanished")
    up = folder.up()
    wanted = dict.fromkeys(("docs", "inbox", "demo"), "needs attention") | {"vault": "healthy"}
    seen = lambda: {name: one["state"] for name, one in states(folder).items()}  # noqa: E731 - it is asked again
    assert eventually(seen, lambda found: found == wanted) == wanted
    told = folder("source", "list").out
    for words in ("does not exist", "password", "token"):
        assert words in told
    assert eventually(lambda: states(folder)["vault"], lambda one: one["problems"] == 1)["problems"] == 1
    assert locations(folder, "bowline") >= {"vault:Broken.md", "vault:Knots.md"}

    os.rename(folder.path / "vanished", folder.path / "docs")
    assert folder("source", "run", "docs").code == 0
    assert "docs:a.txt" in locations(folder, "bowline")
    assert states(folder)["docs"]["state"] == "healthy"
    up.terminate()
    _, out, err = folder.ends(up)
    assert "canary" not in out + err + told
