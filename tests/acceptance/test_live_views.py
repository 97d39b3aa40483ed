"""`reefknot top`, `--watch`, `-V` and shell completion, where people meet them: on a terminal, in a pipe, in bash."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import apsw
import pytest

from tests.acceptance.folder import PATIENCE_S, Folder, until
from tests.acceptance.terminal import Terminal
from tests.warm_commands import run_cold

Opens = Callable[..., Terminal]
READ = {"path": "a.txt"}


@pytest.fixture
def opened(folder: Folder) -> Iterator[Opens]:
    """Opens a command on a terminal, in the folder."""
    terminals: list[Terminal] = []

    def open_(*words: str, columns: int = 80, lines: int = 24) -> Terminal:
        terminals.append(Terminal(*words, cwd=folder.path, columns=columns, lines=lines))
        return terminals[-1]

    yield open_
    for terminal in terminals:
        terminal.close()


def worked(folder: Folder) -> None:
    """A running system with an ended job and a running one."""
    folder.up()
    folder.submit("fs.blob_get", "read-a", "--wait", **READ)
    folder.wait("long")
    until(lambda: "long" in folder.begun())


def test_a_terminal_without_a_size_is_taken_for_80_columns(folder: Folder, opened: Opens) -> None:
    folder.submit("fs.blob_get", "read-a")
    for words, shown in ((("top", "--every", "0.2"), "pending"), (("job", "list", "--watch", "0.2"), "read-a")):
        view = opened(*words, columns=0, lines=0)
        view.until(lambda text: text.count("\x1b[H") >= 3)
        assert shown in view.text
        view.type(b"q")
        assert view.ends() == 0
        assert "internal error" not in view.text


def test_top_shows_queues_workers_rates_and_last_ends_in_any_width_and_follows(folder: Folder, opened: Opens) -> None:
    worked(folder)
    for columns in (60, 80, 120):
        top = opened("top", "--every", "0.2", columns=columns)
        top.until(lambda text: "read-a" in text and text.count("reefknot top") >= 3)
        view = "\n".join(top.views()[1])
        for words in ("worker-1", "healthy", "1 running", "1 succeeded", "ended/s", "retries/s", "read-a", "success"):
            assert words in view, (columns, words)
        assert max(len(line) for view in top.views() for line in view) <= columns
        if columns == 120:
            folder.go()
            top.until(lambda text: "2 succeeded" in text)
        top.type(b"q")
        assert top.ends() == 0
        assert top.is_sane


@pytest.mark.parametrize("words", [("top",), ("job", "list", "--watch"), ("quarantine", "list", "--watch", "1")])
def test_whatever_ends_it_the_terminal_is_left_as_it_was(folder: Folder, opened: Opens, words: tuple[str, ...]) -> None:
    """Unless it is killed: that is the control."""
    folder.nap("one", 0)
    ways: dict[int, Callable[[Terminal], None]] = {
        130: lambda top: top.type(b"\x03"),
        143: lambda top: top.process.send_signal(signal.SIGTERM),
        0: lambda top: top.type(b"Q"),
        -9: lambda top: top.process.kill(),
    }
    for code, leave in ways.items():
        view = opened(*words)
        view.until(lambda text: "\x1b[J" in text)
        assert not view.is_sane, "it has a screen of its own"
        leave(view)
        assert (view.ends(), view.is_sane) == (code, code != -9)


def test_a_low_terminal_says_how_much_does_not_fit(folder: Folder, opened: Opens) -> None:
    for number in range(12):
        folder.nap(f"n{number}", 0)
    view = opened("job", "list", "--watch", "0.2", lines=8)
    view.until(lambda text: text.count("\x1b[J") >= 2)
    view.type(b"q")
    assert view.ends() == 0
    assert all(len(lines) <= 7 for lines in view.views())
    assert "more lines; a taller terminal shows them" in view.text


def test_a_system_that_ends_meanwhile_is_said_in_the_view_which_goes_on(folder: Folder, opened: Opens) -> None:
    system = folder.up()
    view = opened("worker", "list", "--watch", "0.2")
    view.until(lambda text: "worker-1" in text)
    folder.stop(system)
    view.until(lambda text: "no worker is running" in text)
    folder.up()
    view.until(lambda text: "worker-1" in text.rpartition("no worker is running")[2])
    view.type(b"q")
    assert view.ends() == 0


@contextmanager
def locked(folder: Folder) -> Iterator[None]:
    """Inside, another program has the store for itself."""
    connection = apsw.Connection(str(folder.path / ".reefknot" / "state.db"))
    connection.set_busy_timeout(int(PATIENCE_S * 1000))
    connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
    connection.execute("BEGIN IMMEDIATE; CREATE TABLE other (one); ROLLBACK").fetchall()
    try:
        yield
    finally:
        connection.close()


def test_a_store_that_is_locked_for_a_while_is_said_in_the_view_which_goes_on(folder: Folder, opened: Opens) -> None:
    folder.nap("one", 0)
    view = opened("job", "list", "--watch", "0.2")
    view.until(lambda text: "own.nap" in text)
    with locked(folder):
        view.until(lambda text: "reefknot: " in text and "locked" in text)
    view.until(lambda text: "own.nap" in text.rpartition("locked")[2])
    view.type(b"q")
    assert view.ends() == 0


def test_through_a_pipe_top_prints_one_view_without_escapes_and_for_programs_one_document(folder: Folder) -> None:
    worked(folder)
    for words in (("top",), ("top", "--once")):
        code, out, err = folder.ends(folder.start(*words))
        assert (code, err) == (0, "")
        assert (out.count("reefknot top"), "\x1b" in out) == (1, False)

    view = folder.json("top")
    assert (view["states"]["succeeded"], view["states"]["running"]) == (1, 1)
    assert [one["worker_id"] for one in view["workers"]] == ["worker-1"]
    assert view["last_ends"][0].items() >= {"id": "read-a", "status": "success", "worker_id": "worker-1"}.items()
    assert (view["window_s"], view["retries_per_s"]) == (10, 0.0)
    assert view["ended_per_s"] in (0.0, 0.1), "one within the last ten seconds"


def test_once_prints_one_view_on_a_terminal_too_and_an_early_error_is_its_own(folder: Folder, opened: Opens) -> None:
    folder.nap("one", 0)
    top = opened("top", "--once")
    assert top.ends() == 0
    assert "no worker is running on this store; start a system with: reefknot up" in top.text
    assert "\x1b[?1049h" not in top.text
    view = opened("worker", "list", "--watch")
    assert view.ends() == 69
    assert "no worker is running" in view.text
    assert view.is_sane


def test_watching_through_a_pipe_prints_one_list_after_the_other_until_nobody_reads(folder: Folder) -> None:
    folder.nap("one", 0)
    process = folder.start("job", "list", "--watch", "0.1", "--json")
    assert process.stdout is not None
    documents, lines = 0, list[str]()
    while documents < 3:
        lines.append(process.stdout.readline())
        if lines[-1] == "}\n":
            assert json.loads("".join(lines))["jobs"][0]["id"] == "one"
            documents, lines = documents + 1, []
    process.stdout.close()

    assert process.wait(PATIENCE_S) == 0


def test_an_end_whose_event_was_damaged_is_shown_as_unreadable(folder: Folder) -> None:
    folder.write_lines("work.jsonl", {"assignment_id": "read-a", "job": {"type": "fs.blob_get", "payload": READ}})
    assert folder("run", "work.jsonl").code == 0
    connection = apsw.Connection(str(folder.store))
    whole = connection.execute("SELECT body FROM audit WHERE event_type = 'completed'").get
    for body in ("nonsense", "[]", str(whole).replace('"timestamp":"2', '"timestamp":"no')):
        connection.execute("UPDATE audit SET body = ? WHERE event_type = 'completed'", (body,))
        assert connection.changes() == 1
        (end,) = folder.json("top")["last_ends"]
        assert (end["id"], end["status"], end["worker_id"]) == ("read-a", "unreadable", None)
        code, out, err = folder.ends(folder.start("top", "--once"))
        assert (code, err, "unreadable" in out) == (0, "", True)
    connection.close()


def completed(script: str, *words: str, folder: Path | None = None) -> set[str]:
    """What bash offers after these words, in this folder; a name of a file with a blank in it is one."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _reefknot; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = run_cold("bash", "-c", ask, cwd=folder, check=True)
    return set(done.stdout.splitlines()) - {""}


@cache
def script_of(shell: str) -> str:
    return run_cold(sys.executable, "-m", "reefknot", "completion", shell, check=True).stdout


def test_bash_completes_nouns_verbs_and_options() -> None:
    script = script_of("bash")
    assert {"quarantine", "top", "completion"} <= completed(script, "reefknot", "")
    assert completed(script, "reefknot", "qua") == {"quarantine"}
    assert {"list", "show", "cancel"} <= completed(script, "reefknot", "job", "")
    assert "--state" in completed(script, "reefknot", "job", "list", "--st")
    assert completed("_reefknot() { COMPREPLY=(); }", "reefknot", "qua") == set(), "the control: without the script"


def test_bash_completes_names_of_files(tmp_path: Path) -> None:
    names = {"work.jsonl", "two words.jsonl", "files"}
    (tmp_path / "files").mkdir()
    for name in names - {"files"}:
        (tmp_path / name).touch()
    script = script_of("bash")
    before = "run|submit|run work.jsonl --results|run --config|job list --config|up --module|config check|policy check"
    for line in f"{before}|audit verify|audit verify --head|store backup".split("|"):
        words = ("reefknot", *line.split())
        assert completed(script, *words, "", folder=tmp_path) == names, line
        assert completed(script, *words, "two", folder=tmp_path) == {"two words.jsonl"}, line
    control = completed(script, "reefknot", "job", "show", "", folder=tmp_path)
    assert control == set(), "the control: an id is no file"


def test_at_a_prompt_of_bash_a_name_with_a_blank_is_completed_as_one_word(folder: Folder) -> None:
    (folder.path / "two words.jsonl").touch()
    folder.write("completion.sh", script_of("bash") + "reefknot() { printf '<%s>' \"$@\"; echo; }\n")
    environment = {**os.environ, "PS1": "ready> "}
    bash = Terminal("--norc", "--noprofile", "-i", cwd=folder.path, env=environment, command=["bash"])
    try:
        bash.until(lambda text: "ready> " in text)
        bash.type(b"source ./completion.sh\n")
        bash.until(lambda text: text.count("ready> ") == 2)
        bash.type(b"reefknot run two\t--results fil\t\n")
        bash.until(lambda text: "<run><two words.jsonl><--results><files/>" in text)
    finally:
        bash.close()


def test_zsh_and_fish_complete_names_of_files() -> None:
    """Neither shell is here: what their scripts say."""
    zsh, fish = script_of("zsh").splitlines(), script_of("fish").splitlines()
    for what in ("1:One assignment per line", "--results[", "--config[", "--module[", "--head["):
        assert any(what in line and ":_files'" in line for line in zsh), what
    for option in ("results", "config", "module", "head"):
        assert any(f" -l {option} -r -F " in line for line in fish), option
    assert not any(" -l state " in line and "-F" in line for line in fish), "the control: a state is no file"


def test_both_names_of_the_program_are_completed_in_every_shell() -> None:
    registered = run_cold("bash", "-c", f"{script_of('bash')}\ncomplete -p reefknot rk", check=True)
    assert registered.stdout.splitlines() == ["complete -F _reefknot reefknot", "complete -F _reefknot rk"]
    assert "#compdef reefknot rk\n" in script_of("zsh")
    assert script_of("fish").endswith("complete -c rk -w reefknot\n")


def test_for_programs_a_script_is_a_field_and_for_an_unknown_shell_there_is_none(folder: Folder) -> None:
    assert folder.json("completion", "bash") == {"shell": "bash", "script": folder("completion", "bash").out}
    ended = folder("completion", "ksh")
    assert (ended.code, all(shell in ended.err for shell in ("bash", "zsh", "fish"))) == (2, True)
    assert folder("-V").out == folder("--version").out != ""
