"""
Takes what was collected out of the garbage collector's sight.

Eight thousand tests and what they import are half a million objects that live until the end. Looking through them takes
a third of a second for every `gc.collect()` of a test, and for every full collection in between.
"""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
