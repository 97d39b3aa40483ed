"""
Conformance suites: one for each contract of a store, the same for every engine.

    class TestMyEngineIdempotency(IdempotencyContract):
        @pytest.fixture
        def harness(self, tmp_path: Path) -> Harness:
            return Harness(lambda clock, **options: MyStore(tmp_path, clock, **options))

A suite tests the contract and nothing else: an engine need not offer more. Time is a virtual clock that the tests
advance.
"""

from reefknot.testing.conformance.audit_log import AuditLogContract
from reefknot.testing.conformance.control import ControlContract
from reefknot.testing.conformance.document_changes import DocumentChangesContract
from reefknot.testing.conformance.documents import DocumentHarness, DocumentsContract
from reefknot.testing.conformance.harness import Harness
from reefknot.testing.conformance.idempotency_store import IdempotencyContract
from reefknot.testing.conformance.notes import NoteContract, SharedNoteContract
from reefknot.testing.conformance.quarantine import QuarantineContract
from reefknot.testing.conformance.records import RecordsContract
from reefknot.testing.conformance.transport import TransportContract, TransportHarness
from reefknot.testing.conformance.values import SharedValueContract, ValueContract
from reefknot.testing.conformance.work_queue import WorkQueueContract

__all__ = [
    "AuditLogContract",
    "ControlContract",
    "DocumentChangesContract",
    "DocumentHarness",
    "DocumentsContract",
    "Harness",
    "IdempotencyContract",
    "NoteContract",
    "QuarantineContract",
    "RecordsContract",
    "SharedNoteContract",
    "SharedValueContract",
    "TransportContract",
    "TransportHarness",
    "ValueContract",
    "WorkQueueContract",
]
