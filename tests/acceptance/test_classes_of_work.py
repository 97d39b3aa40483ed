"""A class of work that a step brings: made by its worker, found by a submitter that does not know the step."""

from __future__ import annotations

import json

from tests.acceptance.folder import Folder

STEPS = """\
import reefknot as rk

@rk.block("mail.send", resource_class="emails")
async def send(inputs, context):
    return {"sent": True}
"""


def test_a_submission_runs_in_the_class_of_its_step_and_a_misspelt_class_is_warned_of(folder: Folder) -> None:
    folder.write("mail_steps.py", STEPS)
    folder.part("router")
    folder.part("worker", "--worker-id", "mail-1", "--module", "mail_steps")

    assert folder("submit", "--type", "mail.send", "--id", "m-1", "--wait").code == 0
    jobs = folder.json("job", "list", "--class", "emails")["jobs"]
    assert [one["id"] for one in jobs] == ["m-1"]
    (worker,) = folder.json("worker", "list")["workers"]
    assert worker["classes"]["emails"]["capacity"] == 4

    work = {"assignment_id": "m-2", "resource_class": "email", "job": {"type": "mail.send"}}
    folder.write("work.json", json.dumps([work]))
    misspelt = folder.start("submit", "work.json")
    _, said = misspelt.communicate(timeout=60)
    assert misspelt.returncode == 0
    assert "no running worker has the class 'email'; did you mean 'emails'?" in said
