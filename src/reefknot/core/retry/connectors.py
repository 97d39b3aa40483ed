"""The connectors that are built in, and what each does when nothing is configured. Numbers are retries and seconds."""

from enum import StrEnum
from typing import NamedTuple


class JobType(StrEnum):
    """What a source is read with."""

    LOCAL_FILES = "local_files"
    OBSIDIAN_VAULT = "obsidian_vault"
    IMAP_MAILBOX = "imap_mailbox"
    GITHUB_REPOSITORY = "github_repository"


class ConnectorDefaults(NamedTuple):
    max_attempts: int = 3
    base_delay_seconds: int = 60
    max_delay_seconds: int = 1800
    jitter_factor: float = 0.2
    transient_max_attempts: int | None = None
    rate_limit_delay_seconds: int | None = None


OTHER_CONNECTORS = ConnectorDefaults()
CONNECTORS: dict[JobType, ConnectorDefaults] = {
    JobType.LOCAL_FILES: ConnectorDefaults(3, 30, 300),
    JobType.OBSIDIAN_VAULT: ConnectorDefaults(3, 30, 300),
    JobType.IMAP_MAILBOX: ConnectorDefaults(5, 120, 1800, 0.3, transient_max_attempts=7, rate_limit_delay_seconds=600),
    JobType.GITHUB_REPOSITORY: ConnectorDefaults(5, 300, 3600, 0.25, rate_limit_delay_seconds=900),
}
