"""Tables in tests: one test that runs every row, and names each row that fails."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

Test = Callable[..., None]


def for_each_row(names: str | Iterable[str], table: Iterable[Any]) -> Callable[[Test], Test]:
    """
    Run the test once for every row of the table, with the row's values as its arguments `names`.

    Unlike `pytest.mark.parametrize` it is one test, so a table of hundreds of rows costs no more than its body. All
    rows are run; the failures are raised together, each with a note that names its row. All rows share the fixtures.
    """
    fields = [names] if isinstance(names, str) else list(names)
    rows = [(row,) if isinstance(names, str) else tuple(row) for row in table]
    assert rows, "a table without rows tests nothing"

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**given: Any) -> None:
            failed: list[Exception] = []
            for row in rows:
                values = dict(zip(fields, row, strict=True))
                try:
                    test(**given, **values)
                except Exception as error:
                    error.add_note(f"row: {', '.join(f'{name}={value!r}'[:200] for name, value in values.items())}")
                    failed.append(error)
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(rows)} rows failed", failed)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in fields]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        del run.__wrapped__  # pytest would look there for fixtures
        return run

    return decorate
