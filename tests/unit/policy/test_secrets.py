import copy
import json
import logging
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reefknot.policy.layers import read_text
from reefknot.policy.reading.session import Mark, Problem
from reefknot.policy.secrets import MOST_SECRET_BYTES, SecretText, is_reference, resolve, resolve_section, secret_texts

CANARY = "s3cret-canary-value"
HERE = Mark("f", 1, 2)


def outcome(reference: str, folder: Path, **environ: str) -> SecretText | Problem:
    return resolve(reference, environ=environ, folder=folder, mark=HERE, path="secrets.key")


def revealed(found: SecretText | Problem) -> str:
    assert isinstance(found, SecretText)
    return found.reveal()


def complaint(found: SecretText | Problem) -> str:
    assert isinstance(found, Problem)
    return str(found)


def test_an_environment_reference_leads_to_the_variable_as_it_is(tmp_path: Path) -> None:
    assert revealed(outcome("env:TOKEN", tmp_path, TOKEN=CANARY + "\n")) == CANARY + "\n"
    assert revealed(outcome("env:TOKEN", tmp_path, TOKEN="on")) == "on"


@pytest.mark.parametrize(
    ("data", "meant"),
    [("x", "x"), ("x\n", "x"), ("x\r\n", "x"), ("x\n\n", "x\n"), ("x\r", "x\r"), (" x ", " x "), ("a\nb\n", "a\nb")],
)
def test_a_file_reference_leads_to_the_text_without_one_trailing_line_break(
    data: str, meant: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_bytes(data.encode())
    assert revealed(outcome("file:token", tmp_path)) == meant
    assert revealed(outcome(f"file:{tmp_path / 'token'}", tmp_path / "elsewhere")) == meant


def test_what_a_reference_does_not_lead_to_is_named_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"\n")
    (tmp_path / "binary").write_bytes(CANARY.encode() + b"\xff")
    (tmp_path / "nul").write_bytes(CANARY.encode() + b"\x00")
    (tmp_path / "large").write_bytes(CANARY.encode() * MOST_SECRET_BYTES)
    os.mkfifo(tmp_path / "pipe")
    expected = {"env:NONE": "there is no such environment variable", "file:none": "there is no such file"}
    expected |= {"file:nul": "NUL", "file:large": "limit of 64 kB", "file:pipe": "not a regular file"}
    expected |= dict.fromkeys(("env:EMPTY", "file:empty"), "is empty") | {"file:.": "is a directory"}
    expected |= dict.fromkeys(("env:BAD", "file:binary"), "not UTF-8")
    for reference, reason in expected.items():
        said = complaint(outcome(reference, tmp_path, EMPTY="", BAD=CANARY + "\udcff"))
        assert said.startswith(f"f:1:2: secrets.key: {reference}: ")
        assert reason in said
        assert CANARY not in said


@pytest.mark.parametrize("text", [CANARY, f"vault:{CANARY}", "env:", "file:", "", f"ENV:{CANARY}"])
def test_a_secret_written_in_place_of_a_reference_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    assert not is_reference(text)
    said = complaint(outcome(text, tmp_path))
    assert said == "f:1:2: secrets.key: is not a reference: env:NAME or file:PATH"


def test_a_section_is_resolved_with_every_mistake_at_its_place(tmp_path: Path) -> None:
    tree = read_text(f"secrets:\n  good: env:TOKEN\n  gone: env:NONE\n  raw: {CANARY}\n  number: 5\n", name="f")
    found, problems = resolve_section(tree, environ={"TOKEN": CANARY}, folder=tmp_path)
    assert list(found) == ["good"]
    assert [str(problem).partition(": ")[0] for problem in problems] == ["f:3:3", "f:4:3", "f:5:3"]
    assert CANARY not in "".join(map(str, problems))
    for text, count in (("a: 1", 0), ("secrets: ~", 0), ("secrets: {}", 0), ("secrets: [1]", 1)):
        found, problems = resolve_section(read_text(text), environ={}, folder=tmp_path)
        assert (found, len(problems)) == ({}, count), text


def test_the_texts_of_a_configuration_are_found_beneath_its_folder_and_without_a_file_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(CANARY)
    tree = read_text("secrets:\n  one: env:ONE\n  gone: env:NONE\n  two: file:token\n", name="f")
    expected = ["f:3:3: secrets.gone: env:NONE: there is no such environment variable"]

    found, problems = secret_texts(tree, tmp_path / "f", environ={"ONE": "1st"})
    assert (found, list(map(str, problems))) == (("1st", CANARY), expected)

    monkeypatch.chdir(tmp_path)
    assert secret_texts(tree, None, environ={"ONE": "1st"}) == (found, problems)


def test_a_secret_does_not_show_itself_is_not_encoded_and_can_be_compared_and_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = SecretText(CANARY)
    logging.getLogger("test").warning("%s %r", secret, [secret])
    shown = [str(secret), repr(secret), f"{secret}", f"{secret:>40}", f"{secret!r}", "%s" % secret, str({"a": secret})]  # noqa: UP031
    shown.append(caplog.text)
    try:
        raise ValueError(secret)
    except ValueError:
        shown.append(traceback.format_exc())
    assert CANARY not in "".join(shown)
    assert secret.reveal() == CANARY
    assert CANARY in repr([CANARY]), "the control: a plain text shows itself"
    assert CANARY in json.dumps(CANARY)

    secret = SecretText(CANARY)
    refusing: list[Callable[[Any], object]] = [json.dumps, pickle.dumps, msgspec.json.encode, hash, vars, iter, len]
    for refuse in refusing:
        with pytest.raises(TypeError) as caught:
            refuse(secret)
        assert CANARY not in str(caught.value)

    secret = SecretText(CANARY)
    assert secret == SecretText(CANARY)
    assert secret != SecretText("other")
    assert secret != CANARY
    assert copy.deepcopy({"a": secret})["a"] is copy.copy(secret) is secret
