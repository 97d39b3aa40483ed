"""A GitHub source from the command line, on a server over a real git repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.github_server import GithubServer
from tests.unit.ingest.connectors.test_text_extraction import pdf, word

CANARY = "ghp_canary0123456789"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GithubServer]:
    running = GithubServer(tmp_path)
    yield running
    running.close()


def reefknot(folder: Path, *words: str, token: str = CANARY) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "reefknot", *words],
        cwd=folder,
        env=os.environ | {"DEMO_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert CANARY not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def test_the_texts_of_pdf_word_and_html_files_are_found(server: GithubServer, tmp_path: Path) -> None:
    server.git.files = {
        "guide.pdf": pdf("A bowline for mooring"),
        "guide.docx": word("A sheet bend for hammocks"),
        "guide.html": b"<html><body><h1>Hitches</h1><p>A clove <b>hit</b>ch</p><script>no()</script></body></html>",
        "damaged.pdf": b"%PDF-1.4 no more",
    }
    server.git.commit()
    server.tick(300)
    folder = tmp_path / "user"
    folder.mkdir()
    source = f"sources: {{demo: {{connector: github_repository, repository: octo/demo, base_url: '{server.url}'}}}}"
    (folder / "reefknot.yaml").write_text(source)

    code, told = reefknot(folder, "source", "run", "demo")
    assert code in {0, 1}, told
    for words, name in (("mooring", "guide.pdf"), ("hammocks", "guide.docx"), ("clove hitch", "guide.html")):
        code, found = reefknot(folder, "source", "search", words)
        assert (code, name in found) == (0, True), (told, found)
    code, found = reefknot(folder, "source", "search", "no more")
    assert "damaged.pdf" not in found


def test_a_source_is_tested_synced_searched_and_mended(server: GithubServer, tmp_path: Path) -> None:
    server.token = CANARY
    server.git.files = {f"docs/{n}.md": f"reef number {n}".encode() for n in range(5)}
    server.git.commit()
    server.add_issue(7, body="the knot slips")
    server.tick(300)
    folder = tmp_path / "user"
    folder.mkdir()
    server_keys = f"base_url: '{server.url}', token: 'env:DEMO_TOKEN'"
    source = f"sources: {{demo: {{connector: github_repository, repository: octo/demo, {server_keys}}}}}"
    (folder / "reefknot.yaml").write_text(source)

    code, told = reefknot(folder, "source", "test", "demo")
    assert (code, "branch main at" in told) == (0, True), told
    code, told = reefknot(folder, "source", "run", "demo")
    assert (code, "6 new or changed" in told) == (0, True), told
    code, told = reefknot(folder, "source", "search", "knot slips")
    assert (code, "issues/7" in told) == (0, True), told

    code, told = reefknot(folder, "source", "run", "demo", token="expired")
    assert code == 1
    assert "the token is not valid" in told
    assert "store it where the setting `token` says" in told
    server.git.files["new.md"] = b"new"
    server.git.commit()
    code, told = reefknot(folder, "source", "run", "demo")
    assert (code, "1 new or changed" in told) == (0, True), told
