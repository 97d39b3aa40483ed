"""Configurations: good ones, and bad ones with several mistakes each."""

from tests.golden.harness import Folder

RICH = """\
engine: sqlite:data/state.db
secrets: {mail: 'env:MAIL_PASSWORD'}
worker:
  quarantine_failed: true
  retries:
    v2:
      enabled: true
      default_policy: {max_attempts: 4, base_delay_ms: 50, max_delay_ms: 2000, jitter_type: equal}
      error_classification:
        network_errors:
          retryable: {network_error: true, http_error: conditional}
          max_attempts: 5
          http_status_mapping:
            4xx: {retryable: false, exceptions: {"429": true}}
            5xx: {retryable: true, exceptions: {"501": false}}
      block_policies:
        http:
          max_attempts: 6
          base_delay_ms: 200
          error_overrides:
            "429": {max_attempts: 2, base_delay_ms: 1000, max_delay_ms: 60000}
  queue:
    v2: {enabled: true, max_queue_size: 50, rejection_policy: drop_oldest}
retry_policies:
  imap_mailbox: {max_attempts: 2, base_delay_seconds: 3, transient_max_attempts: 7}
operations:
  KV_GET: {max_attempts: 2, base_delay: 0.5, timeout: 9}
sources:
  inbox: {connector: imap_mailbox, host: mail.example, user: me, password: 'env:INBOX', retry: {max_attempts: 9}}
idempotency: {retention_seconds: 3600, max_keys: 1000}
audit: {on_failure: fail_closed, jsonl: {path: a.jsonl}}
router: {patience_seconds: 5}
blocks:
  http: {allow: [api.example]}
  fs: {roots: [files]}
  sql: {connections: {main: {url: 'sqlite:main.db', access: write}}}
"""

MISTAKES = """\
worker:
  retrys: {}
  retries:
    v2:
      enabled: perhaps
      default_policy: {max_attempts: many, base_delay_ms: -5, jitter_type: fulll}
      block_policies:
        http: {error_overrides: {"nine": {max_attempts: 1}}}
  queue:
    v2: {max_queue_size: 0, overload_thresholds: {degraded: 0.9, overloaded: 0.5}, rejection_policy: reject}
engin: x
retry_policies:
  imap_mailbx: {}
  imap_mailbox: {max_attempts: 99, base_delay_seconds: 1.5}
operations:
  KV_GET: {base_delay: 60, max_delay: 1}
  NO_SUCH: {max_attempts: 2}
sources:
  a: {connector: imap}
  b: {}
audit: {sinks: [], jsonl: {}}
idempotency: {max_keys: 0}
"""

FILES: dict[str, str | bytes] = {
    "rich.yaml": RICH,
    "mistakes.yaml": MISTAKES,
    "duplicate.yaml": "engine: 'memory:'\nworker: {}\nengine: 'memory:'\nworker:\n  retries: {}\n  retries: {}\n",
    "syntax.yaml": "worker:\n  retries: [1, 2\nengine: x\n",
    "indent.yaml": "worker:\n  retries:\n   v2: {}\n  \tqueue: {}\n",
    "tag.yaml": "engine: !!python/object:os.system x\n",
    "list.yaml": "- a\n- b\n",
    "scalar.yaml": "just words\n",
    "empty.yaml": "",
    "utf8.yaml": b"engine: 'sqlite:\xff'\n",
    "types.yaml": "worker: 7\nretry_policies: []\noperations: text\nsources: {a: 1}\nengine: [x]\nblocks: nothing\n",
    "warning.yaml": "worker: {queue: {v2: {rejection_policy: degrade}}}\n",
    "nats.yaml": "worker: {}\nengine: nats://127.0.0.1:4222\n",
    "memory.yaml": "engine: 'memory:'\n",
    "port.yaml": "worker: {}\nengine: nats://127.0.0.1:99999\n",
    "sections.yaml": (
        "audit:\n  jsonl: {path: a, keep: 3, max_files: 1, fsync: maybe}\n  on_failure: closed\n"
        "  retention_seconds: 1\n  max_buffered: 0\nworker: {retention_seconds: soon}\n"
    ),
    "blocks.yaml": (
        "blocks:\n  http: {alow: [], max_response_bytes: 0, allow: [7, 'http://x/y']}\n"
        "  fs:\n    roots: [a, 7]\n    max_bytes: lots\n  ftp: {}\n"
        "  sql: {connections: {a.b: {url: x}, main: {access: all}}, max_rows: -1}\n"
    ),
    "good.json": '{"worker": {"retries": {"v2": {"enabled": true}}}}\n',
    "mistakes.json": '{\n  "worker": {\n    "retrys": {},\n    "quarantine_failed": "no"\n  },\n  "engin": 1\n}\n',
    "duplicate.json": '{\n  "engine": "memory:",\n  "worker": {},\n  "engine": "memory:"\n}\n',
    "syntax.json": '{\n  "worker": {,}\n}\n',
    "constants.json": '{"idempotency": {"retention_seconds": NaN}}\n',
    "good.toml": "[worker.retries.v2]\nenabled = true\n\n[retry_policies.imap_mailbox]\nmax_attempts = 2\n",
    "mistakes.toml": (
        '[worker]\nretrys = 1\nquarantine_failed = "no"\n\n'
        "[retry_policies.imap_mailbox]\nmax_attempts = 99\n\n[engin]\n"
    ),
    "duplicate.toml": 'engine = "memory:"\nengine = "memory:"\n',
    "syntax.toml": '[worker\nengine = "memory:"\n',
    "date.toml": "engine = 2026-01-25T21:15:00Z\n",
    "strange.ini": "[worker]\n",
}


def configurations(folder: Folder) -> None:
    """All of them, under `c/`."""
    for name, text in FILES.items():
        folder.write(f"c/{name}", text)
    folder.environment.setenv("MAIL_PASSWORD", "canary-2")


def rich(folder: Folder) -> None:
    """The rich one, as the configuration of the folder."""
    folder.write("reefknot.yaml", RICH)
    folder.environment.setenv("MAIL_PASSWORD", "canary-2")


def overlaid(folder: Folder) -> None:
    """Variables over the file."""
    folder.environment.setenv("REEFKNOT__WORKER__QUEUE__V2__MAX_QUEUE_SIZE", "7")
    folder.environment.setenv("WORKER_QUEUE_V2_ENABLED", "off")


def overlaid_badly(folder: Folder) -> None:
    """A variable that says nothing useful."""
    folder.environment.setenv("REEFKNOT__WORKER__QUEUE__V2__MAX_QUEUE_SIZE", "many")
    folder.environment.setenv("REEFKNOT__WORKR__X", "1")
    folder.environment.setenv("WORKER_RETRIES_V2_ENABLED", "maybe")
