"""Telemetry: retry outcomes by connector, counted by all processes over a store, and their reset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from reefknot.console.operations.values import ParameterUseError, unknown_word
from reefknot.errors import OperationError, StoreCorruptError

if TYPE_CHECKING:
    from reefknot.console.operations.operator import Operator
    from reefknot.ingest.telemetry import ConnectorMetrics

_RESET_TRIES = 50


async def show_telemetry(operator: Operator, *, connector: str | None = None, details: bool = False) -> dict[str, Any]:
    """The counts in the schema of `retry_metrics`; with `details`, all that is counted under a key of its own."""
    found = await connector_metrics(operator, connector)
    fields: dict[str, Any] = {"retry_metrics": {name: one.as_written() for name, one in found.items()}}
    if details:
        fields["details"] = {name: _details(one) for name, one in found.items()}
    return fields


async def connector_metrics(operator: Operator, connector: str | None = None) -> dict[str, ConnectorMetrics]:
    """The counts of every connector that has any, or of one, which may have none. A name that is no connector's is
    refused."""
    from reefknot.ingest.telemetry import ConnectorMetrics, DamagedMetricsError, stored_metrics

    try:
        found = dict(sorted((await stored_metrics(operator.store.values)).items()))
    except DamagedMetricsError as error:
        way_out = f"`telemetry reset {error.connector}` resets its counts"
        raise StoreCorruptError(operator.store.identity, str(error), way_out) from None
    if connector is None:
        return found
    _check_connector(operator, connector, found)
    return {connector: found.get(connector, ConnectorMetrics())}


def _details(metrics: ConnectorMetrics) -> dict[str, Any]:
    """All counts, as they are kept."""
    return {name: getattr(metrics, name) for name in metrics.__struct_fields__}


def _check_connector(operator: Operator, name: str, counted: Iterable[str]) -> None:
    """Refuse what is no connector: one is built in, in the configuration, or has counts."""
    from reefknot.ingest.connectors.registry import BUILTIN

    known = {*BUILTIN, *counted}
    if operator.settings is not None:
        written = operator.settings.configuration
        known |= {*written.retry_policies, *written.ingestion.connectors}
        known |= {source.connector for source in written.sources.values()}
    if name not in known:
        raise ParameterUseError("connector", unknown_word(name, sorted(known)))


async def reset_telemetry(operator: Operator, connector: str, *, dry_run: bool = False) -> dict[str, Any]:
    """Reset the counts of a connector, so that they describe its current policy alone."""
    from reefknot.ingest.telemetry import PREFIX, DamagedMetricsError, decoded_metrics

    values = operator.store.values
    found = {one.name.removeprefix(PREFIX): one for one in await values.list(PREFIX)}
    _check_connector(operator, connector, found)
    is_news = connector in found
    if is_news and not dry_run:
        try:
            counts = msgspec.to_builtins(decoded_metrics(connector, found[connector].body).as_written())
        except DamagedMetricsError:  # a reset is for those as well
            counts = None
        event = operator.event("telemetry.reset", connector, counts=counts)
        for _ in range(_RESET_TRIES):  # a system that runs adds to the counts every second
            value = await values.get(PREFIX + connector)
            if value is None or await values.delete(PREFIX + connector, version=value.version, events=[event]):
                break
        else:
            raise OperationError(f"the counts of {connector} are changed all the time; try again", "temporary")
    return {"connector": connector, "changed": is_news, "actor": operator.actor, "dry_run": dry_run}
