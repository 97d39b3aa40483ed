"""Operations on telemetry: the counts in their schema, and a reset that is audited."""

from __future__ import annotations

import pytest

from reefknot.console.operations import telemetry
from reefknot.errors import ParameterError, StoreCorruptError
from reefknot.ingest.telemetry import PREFIX, TelemetryRecorder
from tests.unit.console.operations.operator_scene import OperatorScene, names_of


async def count(scene: OperatorScene, connector: str) -> None:
    recorder = TelemetryRecorder(scene.world.store.values)
    facts = {"job_type": connector, "attempt": 2, "caused_by": "transient"}
    recorder.record("one", duration=0.5, status="succeeded", metadata=facts)
    await recorder.flush()


async def test_the_counts_are_the_schema_alone_and_details_have_a_key_of_their_own(scene: OperatorScene) -> None:
    assert await telemetry.show_telemetry(scene.operator) == {"retry_metrics": {}}
    await count(scene, "local_files")
    found = await telemetry.show_telemetry(scene.operator)
    assert list(found) == ["retry_metrics"]
    assert found["retry_metrics"]["local_files"]["successful_retries"] == 1
    details = (await telemetry.show_telemetry(scene.operator, details=True))["details"]
    assert details["local_files"]["busy_s"] == 0.5
    of_one = await telemetry.show_telemetry(scene.operator, connector="imap_mailbox")
    assert of_one["retry_metrics"]["imap_mailbox"]["total_retries"] == 0
    with pytest.raises(ParameterError, match="connector: 'imap' is unknown; accepted: "):
        await telemetry.show_telemetry(scene.operator, connector="imap")


async def test_a_reset_begins_anew_and_is_audited_with_the_counts_until_then(scene: OperatorScene) -> None:
    await count(scene, "local_files")
    assert (await telemetry.reset_telemetry(scene.operator, "local_files", dry_run=True))["changed"] is True
    assert await scene.actions() == []
    assert (await telemetry.reset_telemetry(scene.operator, "local_files"))["changed"] is True
    assert (await telemetry.reset_telemetry(scene.operator, "local_files"))["changed"] is False
    (done,) = await scene.actions()
    assert names_of([done]) == [("telemetry.reset", "local_files", "ann")]
    assert done.details is not None
    assert done.details["counts"]["total_retries"] == 1


async def test_a_damaged_record_is_told_with_its_reset_which_removes_it(scene: OperatorScene) -> None:
    await scene.world.store.values.put(f"{PREFIX}local_files", "[]", version=0)
    with pytest.raises(StoreCorruptError, match="`telemetry reset local_files` starts its counts anew"):
        await telemetry.show_telemetry(scene.operator)
    assert (await telemetry.reset_telemetry(scene.operator, "local_files"))["changed"] is True
    assert await telemetry.show_telemetry(scene.operator) == {"retry_metrics": {}}
