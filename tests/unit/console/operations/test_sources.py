"""Operations on sources: the list, a sync that is asked for, pauses, and what is left of a source."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reefknot.console.operations import sources, values
from reefknot.errors import OperationError, ParameterError
from reefknot.ingest.port import FetchRequest, Page
from reefknot.queue.model.work import WorkState
from tests.unit.console.operations.operator_scene import SECRET, OperatorScene, names_of
from tests.unit.ingest.world import page


async def row(scene: OperatorScene, name: str) -> dict[str, Any]:
    listed = (await sources.list_sources(scene.operator))["sources"]
    return dict(next(one for one in listed if one["name"] == name))


async def test_the_list_has_cursor_and_cooldown_redacted_and_bounded(scene: OperatorScene) -> None:
    place = await scene.keep("notes", "a.md", cursor=f"after {SECRET} " + "x" * 5000)
    until = scene.world.store.moment().wall + 60_000
    health = {"cools_until": until, "cooling_reason": f"it asked: {SECRET}"}
    await scene.change("notes", documents=place, health=health, synced_at=1)
    found = await row(scene, "notes")
    assert (found["state"], found["documents"]) == ("cooling", 1)
    assert found["cursor"].startswith("after [redacted] x")
    assert len(found["cursor"]) == sources.LONGEST_CURSOR_SHOWN
    assert found["cooldown_until"] == values.time_text(until)
    assert SECRET not in str(found)
    other = await row(scene, "mail")
    assert (other["state"], other["cursor"], other["cooldown_until"]) == ("never synced", None, None)


async def test_a_source_is_shown_with_its_settings_and_a_bounded_number_of_problems(scene: OperatorScene) -> None:
    await scene.keep("notes", problem="cut")
    found = await sources.show_source(scene.operator, "notes", limit=1)
    assert (found["settings"], found["problem_documents"][0]["problem"]) == ({"path": "notes"}, "cut")
    with pytest.raises(ParameterError, match="limit=0 is not accepted: a whole number from 1 to"):
        await sources.show_source(scene.operator, "notes", limit=0)
    with pytest.raises(ParameterError, match=r"'note' is unknown; accepted: notes, mail.*did you mean 'notes'"):
        await sources.show_source(scene.operator, "note")


async def test_a_sync_is_queued_and_audited_and_a_second_request_names_the_same_job(scene: OperatorScene) -> None:
    dry = await sources.run_source(scene.operator, "notes", dry_run=True)
    assert (dry["job"], dry["queued"]) == (None, False)
    assert await scene.world.jobs.list("notes") == []
    assert await scene.actions() == []
    first = await sources.run_source(scene.operator, "notes")
    told = {"source": "notes", "queued": True, "existing": False, "running_system": False}
    assert first.items() >= told.items()
    assert "no system runs over this store" in first["note"]
    assert f"reefknot up --engine {scene.operator.shown}" in first["note"]
    second, full = [await sources.run_source(scene.operator, "notes", full=full) for full in (False, True)]
    assert (second["job"], second["existing"]) == (first["job"], True)
    assert (full["job"], full["full"]) == (first["job"], False), "it is not promised while another is under way"
    assert "ask for a full one when that has ended" in full["note"]
    assert not (await scene.records.read("notes")).begin_anew
    assert [one.assignment_id for one in await scene.world.jobs.list("notes")] == [first["job"]]
    assert names_of(await scene.actions()) == [("source.run", "notes", "ann")]


async def test_a_full_sync_begins_without_a_cursor_once_also_after_a_failed_first_page(scene: OperatorScene) -> None:
    """The second page, and the next sync, go on behind what is kept."""
    cursors = list[str]()

    async def fetch(request: FetchRequest) -> Page:
        cursors.append(request.cursor)
        if len(cursors) == 7:
            raise ConnectionError("not now")
        return page("a.md", cursor=f"c{len(cursors)}", is_last=len(cursors) % 2 == 0)

    await scene.world.start(scene.world.source(fetch, "notes"))
    for full in (False, True, False):
        asked = await sources.run_source(scene.operator, "notes", full=full)
        assert asked["full"] is full
        await asyncio.sleep(10)
        assert await scene.world.state(asked["job"]) is WorkState.SUCCEEDED
    assert cursors == ["", "c1", "", "c3", "c4", "c5"]
    assert [one.details for one in await scene.actions()] == [{"full": False}, {"full": True}, {"full": False}]
    await sources.run_source(scene.operator, "notes", full=True)
    await asyncio.sleep(3600)
    assert cursors[6:] == ["", ""]
    assert not (await scene.records.read("notes")).begin_anew


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (
            {"health": {"paused": True}, "paused_by": "ben", "paused_because": "it moves"},
            "notes is paused by ben because it moves; first: reefknot source resume notes",
        ),
        ({"health": {"cools_until": 4_000_000_000_000, "cooling_reason": "429"}}, "no job begins before 2096-.*429"),
        ({"health": {"rests_until": 4_000_000_000_000, "rests": 1}}, "it does not answer .several jobs failed"),
        ({"connector": "imap_mailbox"}, "its stored documents come from the connector imap_mailbox"),
    ],
)
@pytest.mark.parametrize("full", [False, True])
async def test_a_source_that_is_not_synced_is_refused(scene: OperatorScene, record: Any, text: str, full: bool) -> None:
    await scene.change("notes", **dict(record))
    with pytest.raises(OperationError, match=text) as refused:
        await sources.run_source(scene.operator, "notes", full=full)
    assert refused.value.kind == "conflict"
    assert await scene.world.jobs.list("notes") == []
    assert await scene.actions() == []


async def test_documents_in_another_file_of_this_host_are_a_conflict_and_a_full_sync_moves_them(
    scene: OperatorScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a server the place of the documents is known only there."""
    (tmp_path / "elsewhere.db").touch()
    await scene.change("notes", documents=f"another {tmp_path / 'elsewhere.db'}")
    with pytest.raises(OperationError, match=r"in another place: .*elsewhere\.db"):
        await sources.run_source(scene.operator, "notes")
    assert (await sources.run_source(scene.operator, "notes", full=True))["job"]
    assert (await scene.records.read("notes")).documents == ""
    monkeypatch.setattr(type(scene.world.store), "reached_for", 60.0)
    await scene.change("mail", documents="another /srv/documents.db")
    assert (await sources.run_source(scene.operator, "mail", full=True))["job"]
    assert (await scene.records.read("mail")).documents == "another /srv/documents.db"


@pytest.mark.parametrize("scene", ["worker: {}\n"], indirect=True)
async def test_without_a_configured_source_there_is_nothing_to_run(scene: OperatorScene) -> None:
    with pytest.raises(ParameterError, match="accepted: none is configured"):
        await sources.run_source(scene.operator, "notes")


async def test_what_is_left_of_a_source_is_removed_with_its_jobs(scene: OperatorScene) -> None:
    at = scene.operator
    await scene.keep("gone", "a.md", "b.md")
    await scene.world.job("gone@1", "gone")
    await scene.change("gone", sync_job="gone@1")
    with pytest.raises(OperationError, match="notes is configured; remove it"):
        await sources.forget_source(at, "notes", because="x")
    with pytest.raises(ParameterError, match="because: give the reason"):
        await sources.forget_source(at, "gone", because=" ")
    with pytest.raises(ParameterError, match=r"nothing is left of a source 'gome'.*\(gone\)"):
        await sources.forget_source(at, "gome", because="x")
    would = await sources.forget_source(at, "gone", because="moved", dry_run=True)
    assert (would["documents"], would["jobs"], would["forgotten"], would["dry_run"]) == (2, 1, False, True)
    assert await scene.actions() == []
    assert (await sources.forget_source(at, "gone", because="moved"))["forgotten"] is True
    assert await scene.world.state("gone@1") is WorkState.CANCELLED
    assert "gone" not in str(await sources.list_sources(at))
    assert names_of(await scene.actions()) == [("source.forget", "gone", "ann")]
