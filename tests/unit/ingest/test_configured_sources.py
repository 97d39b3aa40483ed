"""The configured sources: where their documents are, what their connectors are given, and which mistakes are found."""

from pathlib import Path

import pytest

from reefknot.core.failure import FailureType
from reefknot.errors import ConfigurationError, SourceError
from reefknot.ingest.configured_sources import (
    check_sources,
    documents_path,
    ingestion_settings,
    open_documents,
    sources_of,
)
from reefknot.ingest.port import Document
from reefknot.policy.layers import read_text
from reefknot.policy.settings import Settings, settings_of
from reefknot.runtime.redactor import redact

SECRET = "hush-4711-hush"
ONE = "sources:\n  code:\n    connector: github_repository\n    repository: a/b\n    token: env:CODE_TOKEN\n"


def written(text: str, folder: Path) -> Settings:
    return settings_of(read_text(text, name="f.yaml"), folder / "f.yaml", environ={})


def test_a_source_has_its_own_settings_and_those_of_all(tmp_path: Path) -> None:
    text = (
        ONE + "    every: 15m\n    on_change: true\n    page_size: 7\n    max_concurrency: 3\n    timeout_seconds: 9\n"
    )
    (source,) = sources_of(written(text, tmp_path))
    assert source.settings == {"repository": "a/b", "token": "env:CODE_TOKEN"}
    assert (source.schedule, source.folder) == ("every 15m and on change", tmp_path)
    made = source.for_orchestrator()
    assert (made.name, made.connector, made.page_size, made.max_concurrency) == ("code", "github_repository", 7, 3)
    assert (made.page_timeout, made.on_change) == (9, True)


@pytest.mark.parametrize(
    ("line", "words"), [("", "by hand"), ("    on_change: true\n", "on change"), ("    every: 90s\n", "every 90s")]
)
def test_a_schedule_is_told_in_words(tmp_path: Path, line: str, words: str) -> None:
    (source,) = sources_of(written(ONE + line, tmp_path))
    assert source.schedule == words


def test_a_secret_is_read_when_it_is_needed_and_hidden_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = sources_of(written(ONE, tmp_path))
    context = source.context()
    with pytest.raises(SourceError, match=r"no such environment variable \(env:CODE_TOKEN\)") as caught:
        context.secret("env:CODE_TOKEN")
    assert caught.value.failure_type is FailureType.PERMANENT
    monkeypatch.setenv("CODE_TOKEN", SECRET)
    assert context.secret("env:CODE_TOKEN") == SECRET
    assert SECRET not in redact(f"it said {SECRET}")
    (tmp_path / "token").write_text(f"{SECRET}-2\n")
    assert context.secret("file:token") == f"{SECRET}-2"


def test_every_mistake_is_named_with_its_place(tmp_path: Path) -> None:
    text = ONE + "  other: {connector: github_repository, repositry: a/b}\n"
    text += "  third:\n    connector: github_repository\n    repository: [a]\n"
    with pytest.raises(ConfigurationError) as caught:
        check_sources(written(text, tmp_path))
    first, second = map(str, caught.value.problems)
    assert first.startswith("f.yaml:6:")
    assert "sources.other.repositry" in first
    assert second.startswith("f.yaml:9:5: sources.third.repository:")
    assert check_sources(written(ONE, tmp_path)) == []


def test_a_connector_that_is_not_known_here_is_a_warning_or_when_asked_for_a_mistake(tmp_path: Path) -> None:
    found = written("sources: {wiki: {connector: some_teams_wiki}}\n", tmp_path)
    (warning,) = check_sources(found)
    assert "--module" in warning
    with pytest.raises(ConfigurationError, match="--module"):
        check_sources(found, strict=True)
    assert check_sources(found, only=(), strict=True) == []


@pytest.mark.parametrize(
    ("configured", "url", "expected"),
    [
        ("", "sqlite:/data/state.db", "/data/documents.db"),
        ("", "nats://host:4222", "{folder}/.reefknot/documents.db"),
        ("", "memory:", "{folder}/.reefknot/documents.db"),
        ("ingestion: {documents: kept/d.db}", "sqlite:/data/state.db", "{folder}/kept/d.db"),
        ("ingestion: {documents: /kept/d.db}", "nats://host:4222", "/kept/d.db"),
    ],
)
def test_documents_are_beside_the_store_or_where_the_configuration_says(
    tmp_path: Path, configured: str, url: str, expected: str
) -> None:
    assert documents_path(written(configured, tmp_path), url) == Path(expected.format(folder=tmp_path))


def test_the_limits_of_ingestion_are_those_of_the_configuration(tmp_path: Path) -> None:
    text = (
        "ingestion: {max_concurrency: 9, connectors: {imap_mailbox: {max_concurrency: 2}}, lease_seconds: 30,\n"
        "  breaker: {failures: 3, cooldown_seconds: 1.5, enabled: false}}\n"
    )
    found = ingestion_settings(written(text, tmp_path))
    assert (found.max_concurrency, dict(found.connectors), found.lease) == (9, {"imap_mailbox": 2}, 30)
    assert (found.health.failures, found.health.rest_ms, found.health.enabled) == (3, 1500, False)


async def test_documents_are_opened_in_virtual_time_too(tmp_path: Path) -> None:
    async with open_documents(tmp_path / "d.db") as documents:
        await documents.put("s", [Document("a", "a", "1")])
        found = (await documents.counts())["s"].documents

    assert found == 1
