"""Files of assignments: what is accepted, and where a mistake is said to be."""

import asyncio
import codecs
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.cli import assignments as reading
from reefknot.console.cli.app import CommandError
from reefknot.console.cli.assignments import AssignmentLine, InvalidLine, assignments
from reefknot.queue.model.messages import ExecAssignment, InvalidMessage, read_assignment
from tests.rows import for_each_row
from tests.unit.console.cli.running import command, environment

V2 = "worker: {retries: {v2: {enabled: true}}, queue: {v2: {enabled: true}}}\nblocks: {fs: {roots: [files]}}\n"


def read(path: Path, content: bytes | str) -> list[AssignmentLine | InvalidLine]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    async def everything() -> list[AssignmentLine | InvalidLine]:
        return [one async for one in assignments(str(path), "digest")]

    return asyncio.run(everything())


def told(path: Path, content: bytes | str) -> list[str]:
    """Each mistake, with its line; each assignment by its id."""
    return [
        f"{one.line}: {one.message}" if isinstance(one, InvalidLine) else one.assignment.assignment_id
        for one in read(path, content)
    ]


def contents(path: Path, content: str) -> list[tuple[Any, ...]]:
    found = [one.assignment for one in read(path, content) if isinstance(one, AssignmentLine)]
    return [(one.assignment_id, one.job, one.options, one.metadata) for one in found]


def job(name: str, **more: Any) -> dict[str, Any]:
    return {"assignment_id": name, "job": {"type": "fs.blob_get", "payload": {"path": "a.txt"}}, **more}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "work.jsonl"


@for_each_row(
    ("written", "expected"),
    [
        ({"assigment_id": "x"}, "assigment_id: unknown field; accepted: assignment_id, request_id, job, "),
        ({"assigment_id": "x"}, "; did you mean 'assignment_id'?"),
        ({"options": {"deadlin_ms": 5}}, "options.deadlin_ms: unknown field"),
        ({"options": {"deadlin_ms": 5}}, "; did you mean 'deadline_ms'?"),
        ({"options": {"retry": {"max_attempt": 5}}}, "options.retry.max_attempt: unknown field"),
        ({"priority": 5}, "; did you mean 'options.priority'?"),
        ({"job": {"type": "t", "inputs": {}}}, "job.inputs: unknown field; accepted: type, payload"),
        ({"executor": {"provider": "p"}}, "executor.provider: unknown field"),
        ({"correlation": {"trace": "p"}}, "correlation.trace: unknown field"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(file: Path, written: dict[str, Any], expected: str) -> None:
    (mistake,) = told(file, json.dumps({"job": {"type": "t"}} | written))
    assert mistake.startswith("1: ")
    assert expected in mistake


def test_a_file_that_is_read_like_the_wire_would_ignore_that_field(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what became of a misspelt id before."""

    def as_on_the_wire(value: dict[str, Any], assignment_id: str, request_id: str) -> ExecAssignment | InvalidMessage:
        ids = {"assignment_id": assignment_id, "request_id": request_id}
        return read_assignment(json.dumps(ids | value).encode())

    monkeypatch.setattr(reading, "written_assignment", as_on_the_wire)
    assert told(file, json.dumps({"assigment_id": "x", "job": {"type": "t"}})) == ["digest-1"]


def test_the_callers_own_values_may_have_any_field_and_letter(file: Path) -> None:
    own = {"anything": {"assigment_id": 1}, "name": "Åsa 日本"}
    given = {"job": {"type": "t", "payload": own, "resources": own}, "metadata": own, "decision": own}
    (found,) = read(file, json.dumps(given, ensure_ascii=False))
    assert isinstance(found, AssignmentLine)
    assert found.assignment.job.payload == own


TWICE = "the key stands twice in one object; keep one of them"
OPEN = "the array is not closed: the file was cut off here, or a ] is missing"
LATIN = "is not UTF-8; save the file as UTF-8 (it may be in Latin-1 or Windows-1252)"


def text_of(*names: str) -> str:
    return "".join(f"{json.dumps(job(name))}\n" for name in names)


@for_each_row(
    ("content", "expected"),
    [
        ('{"job": {"type": "a"}, "job": {"type": "b"}}', [f"1: job: {TWICE}"]),
        ('{"job": {"type": "a", "payload": {"n": 1, "m": 2, "n": 1}}}', [f"1: job.payload.n: {TWICE}"]),
        ('{"job": {"type": "a", "payload": {"l": [{"n": 1, "\\u006e": 2}]}}}', [f"1: job.payload.l[0].n: {TWICE}"]),
        ('{"assignment_id": "x", "job": {"type": "t", "payload": {"type": 1, "l": [{"n": 1}, {"n": 2}]}}}', ["x"]),
        (codecs.BOM_UTF8 + text_of("one").encode() + codecs.BOM_UTF8 + text_of("two").encode(), ["one", "two"]),
        (
            text_of("one").encode() + '{"job": {"type": "café"}}\n'.encode("latin-1"),
            ["one", f"2: byte 21 of the line, 0xe9, {LATIN}"],
        ),
        ('{\n "job": {\n  "type": "café"\n }\n}'.encode("latin-1"), [f"3: byte 14 of the line, 0xe9, {LATIN}"]),
        (f"[{text_of('one')},\n{text_of('two').strip()}", ["one", "two", f"3: {OPEN}"]),
        (f"[{text_of('one').strip()},\n", ["one", f"1: {OPEN}"]),
        (f"[{text_of('one').strip()}]\n", ["one"]),
        (json.dumps([{"job": {"type": "t"}}] * 3), ["digest-1", "digest-1.1", "digest-1.2"]),
        (json.dumps([job("x"), job("x")]), ["x", "1: assignment_id: 'x' is in line 1 already…"]),
        ('[\n {"job":\n  {"type": "t",\n   "inputs": {}}}\n]', ["4: job.inputs: unknown field…"]),
        ('{\n "job": {"type": "t"},\n "options": {\n  "timeout_ms": "5"\n }\n}', ["4: options.timeout_ms: Expected…"]),
        ('{\n "job": {"type": "t"},\n "job": {"type": "u"}\n}', [f"3: job: {TWICE}"]),
        ('{\n "job": {"type": "t"},\n "options": {oops}\n}', ["3: not JSON: JSON is malformed: …"]),
        ('{\n "job": {"type": "t"},\n "options": {\n', ["1: not JSON: …"]),
    ],
)
def test_each_mistake_is_named_with_line_and_path(content: bytes | str, expected: list[str], tmp_path: Path) -> None:
    """An end of three dots stands for the rest of a sentence."""
    found = told(tmp_path / "work.jsonl", content)
    begun = [want.removesuffix("…") for want in expected]
    assert [one[: len(want)] if want not in expected else one for one, want in zip(found, begun, strict=True)] == begun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reefknot.yaml").write_text(f"{V2}\nsecrets: {{mine: 'file:mine.txt'}}\n")
    (tmp_path / "mine.txt").write_text("xyzzy-4711")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("ahoy")
    return tmp_path


def test_run_and_submit_name_an_unknown_field_whatever_its_name_show_no_secret_and_do_the_rest(folder: Path) -> None:
    """Ignored, a misspelt id would be a random one, and the work would be done again by every run."""
    twice = '{"job": {"type": "t", "payload": {"token": "hunter2", "token": "hunter3"}}}'
    lines = [json.dumps({"password": "hunter2"}), twice, json.dumps({"password=hunter2": 1, "xyzzy-4711": 1})]
    misspelt = {"assigment_id": "two", "job": job("two")["job"]}
    lines += [json.dumps({"xyzzy-4711": 1}), json.dumps(job("one")), json.dumps(misspelt)]
    (folder / "work.jsonl").write_text("\n".join(lines) + "\n")

    for verb in ("run", "submit"):
        done = command(folder, verb, "work.jsonl", "--json")
        answer, said = json.loads(done.stdout), done.stderr
        assert (done.returncode, answer.get("succeeded", len(answer.get("handed_in", ())))) == (1, 1), said
        assert "work.jsonl:1: password: unknown field; accepted: " in said
        assert "work.jsonl:2: job.payload.token: the key stands twice" in said
        assert "work.jsonl:3: password=[redacted]: unknown field; " in said
        assert "work.jsonl:4: [redacted]: unknown field; " in said
        assert "work.jsonl:6: assigment_id: unknown field" in said
        assert "did you mean 'assignment_id'?" in said
        assert "hunter" not in said
        assert "xyzzy" not in said

    listed = json.loads(command(folder, "job", "list", "--json").stdout)["jobs"]
    assert [one["id"] for one in listed] == ["one"]
    one = command(folder, "submit", "--type", "fs.blob_get", "--inputs", '{"path": "a", "path": "b"}')
    assert (one.returncode, "--inputs: path: the key stands twice" in one.stderr) == (2, True)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_one_sentence_for_the_whole_file(file: Path, encoding: str) -> None:
    content = "\ufeff" + f"{json.dumps(job('one'))}\n" * 3
    with pytest.raises(CommandError, match=r"work.jsonl: is in UTF-16; accepted: UTF-8"):
        read(file, content.encode(encoding))


@pytest.mark.parametrize("indent", [0, 1, 4, "\t"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_pretty_printed_objects_and_arrays_are_read(file: Path, indent: int | str, ending: str) -> None:
    odd = {"text": 'a "quoted" } ] , {\\'}
    jobs = [job("one", metadata=odd, options={"timeout_ms": 5}), job("two", metadata={"list": [[], {}, [1, 2]]})]
    written = {
        "one object": json.dumps(jobs[0], indent=indent),
        "two objects": "\n".join(json.dumps(one, indent=indent) for one in jobs),
        "an array": json.dumps(jobs, indent=indent),
        "an array of lines": "[\n" + ",\n".join(json.dumps(one) for one in jobs) + "\n]\n",
        "an array on one line": json.dumps(jobs),
    }
    lines = contents(file, "".join(f"{json.dumps(one)}\n" for one in jobs))
    assert [name for name, *_ in lines] == ["one", "two"]
    for name, text in written.items():
        assert contents(file, text.replace("\n", ending)) == lines[: 1 if name == "one object" else 2], name
    assert len(set(told(file, json.dumps([{"job": {"type": "t"}}] * 3, indent=indent)))) == 3, "ids that are left out"


def test_a_line_that_was_cut_off_costs_no_line_but_itself(file: Path) -> None:
    """A line that ends like the beginning of a pretty-printed object, and one that does not."""
    good = [json.dumps(job(name)) for name in ("one", "two", "three")]
    cut = '{"assignment_id": "cut", "job": {'
    found = told(file, "\n".join([good[0], cut, good[1], cut[:20], good[2], cut]))
    assert [one for one in found if one[0].isalpha()] == ["one", "two", "three"]
    assert [one.partition(":")[0] for one in found if one[0].isdigit()] == ["2", "4", "6"]


def test_an_endless_pretty_printed_object_is_not_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_MESSAGE", 1000)
    text = reading._OpenText(is_array=False)
    list(text.add(1, b'{"a": ['))
    for number in range(2, 5000):
        list(text.add(number, b'"0123456789",'))
    assert len(text.rest()[1]) <= 1020


def test_run_reads_an_array_from_a_pipe(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reefknot", "run", "-", "--json"],
        cwd=folder,
        env=environment(folder),
        input=codecs.BOM_UTF8 + json.dumps([job("one"), job("two")], indent=2).encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["succeeded"]) == (0, 2), done.stderr


def test_a_long_text_without_an_end_is_read_once(file: Path) -> None:
    """Looked for at each quote again, it would take minutes."""
    (broken, _) = told(file, b'["' + b'\\"' * 300_000)
    assert broken.startswith("1: ")
