"""The redactor of the process: secrets are hidden from the first worker that has them to the last."""

from collections import Counter

import pytest

from reefknot.core.redaction import Redactor
from reefknot.retrying.failures import failure_from
from reefknot.runtime import redactor
from reefknot.runtime.log import error_text
from reefknot.runtime.redactor import add_secrets, process_redactor, redact, remove_secrets

SECRET = "zander-Trockenfisch_9!"


@pytest.fixture(autouse=True)
def _no_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a source stay for as long as its process lives, and earlier tests may have read some."""
    monkeypatch.setattr(redactor, "_known", Counter())
    monkeypatch.setattr(redactor, "_process", Redactor())


@pytest.mark.parametrize("first", ["a", "b"])
def test_secrets_are_hidden_while_anybody_has_them(first: str) -> None:
    error = ConnectionError(f"no {SECRET} here")
    assert SECRET in failure_from(error).message
    add_secrets([SECRET])
    add_secrets([SECRET, "another-secret"])
    assert SECRET not in failure_from(error).message, "also when the same text was read before"
    remove_secrets([SECRET] if first == "a" else [SECRET, "another-secret"])
    assert SECRET not in redact(f"no {SECRET} here")
    assert SECRET not in error_text(error)
    both = process_redactor(Redactor(["my-own-secret"]))
    assert both(f"{SECRET} and my-own-secret") == "[redacted] and [redacted]"
    remove_secrets([SECRET, "another-secret"] if first == "a" else [SECRET])
    assert SECRET in redact(f"no {SECRET} here")
    own = Redactor(["my-own-secret"])
    assert process_redactor(own) is own
