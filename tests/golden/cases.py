"""Every scenario: what is there, and which commands are run on it, one after the other."""

from tests.golden import configurations, refusals, stores
from tests.golden.harness import Folder, Scenario, Step, both

ENGINE_JOB = "--module golden_steps --seed 7 --in-flight 1"


def _policies() -> list[Step]:
    explain = "policy explain"
    return [
        *both("list", "policy list"),
        *both("list_connectors", "policy list --kind connector"),
        *both("show_block", "policy show block:http"),
        *both("show_connector", "policy show connector:imap_mailbox"),
        *both("show_operation", "policy show operation:nats.publish"),
        *both("show_spelling", "policy show operation:RETRY_KV_GET"),
        *both("explain_429", f"{explain} --target block:http --status 429 --retry-count 2"),
        *both("explain_404", f"{explain} block:http --status 404"),
        *both("explain_exception", f"{explain} operation:kv.put --exception ConnectionError"),
        *both("explain_code", f"{explain} block:sql --error 3003"),
        *both("explain_hint", f"{explain} block:http --status 503 --retry-after 90000"),
        *both("explain_seed", f"{explain} connector:imap_mailbox --failure-type transient --seed 7"),
        *both("explain_baseline", f"{explain} block:http --status 500 --baseline"),
        ("explain_baseline_404_json", f"{explain} block:http --status 404 --baseline --json"),
        ("explain_baseline_cancelled", f"{explain} block:http --error cancelled_by_user --baseline"),
        (
            "explain_baseline_request_json",
            f"{explain} block:http --status 404 --baseline --retry-count 1 --timeout-ms 500 --json",
        ),
        *both("explain_message", f"{explain} connector:imap_mailbox --message 'timeout, password=hunter2hunter2'"),
        *both("explain_timeout", f"{explain} block:fs --timeout-ms 150"),
        *both("explain_nothing", f"{explain} block:any"),
        *both("schedule", "policy schedule operation:nats.connect"),
        *both("schedule_seed", "policy schedule connector:imap_mailbox --failure-type transient --seed 7"),
        *both("schedule_stop", "policy schedule block:http --status 404"),
        *both("check", "policy check"),
    ]


def _answers() -> list[Step]:
    """The sentence that people read first."""
    lines = {
        "retried": "operation:nats.publish --exception TimeoutError",
        "one_retry": "operation:nats.publish --retry-count 1",
        "no_retries": "block:http --status 500 --retry-count 0",
        "hint_too_long": "block:http --status 500 --retry-after 400",
        "hint_above_the_longest_wait": "connector:imap_mailbox --message busy --retry-after 90000",
        "hint_beyond_the_budget": "block:http --status 500 --retry-after 40",
        "hint_within_the_budget": "block:http --status 500 --retry-after 20",
        "cancelled": "block:http --error cancelled_by_timeout",
        "control_flow": "block:http --exception SystemExit",
        "control_flow_of_a_connector": "connector:imap_mailbox --exception CancelledError",
        "ingestion_permanent": "connector:imap_mailbox --failure-type permanent",
        "ingestion_unknown": "connector:imap_mailbox --failure-type unknown",
        "ingestion_rate_limited": "connector:imap_mailbox --failure-type rate-limited",
        "ingestion_rate_limited_hint": "connector:imap_mailbox --failure-type rate_limited --retry-after 9000",
        "ingestion_transient_hint": "connector:imap_mailbox --failure-type transient --retry-after 9000",
    }
    return [(name, f"policy explain {words}") for name, words in lines.items()]


def _templates() -> list[Step]:
    names = ("rate-limited-api", "flaky-network", "database", "local-disk", "mailbox")
    steps = both("templates", "policy templates")
    steps += [(f"template_{name}", f"policy templates {name}") for name in names]
    return [*steps, ("template_json", "policy templates Flaky_Network --json"), ("unknown", "policy templates mailbx")]


def _configuration_files() -> list[Step]:
    names = [(name, name.replace(".", "_")) for name in configurations.FILES]
    steps: list[Step] = [configurations.configurations]
    steps += [(f"check_{case}", f"config check c/{name}") for name, case in names]
    shown = ("rich.", "mistakes.", "good.", "warning.")
    steps += [(f"check_{case}_json", f"config check c/{name} --json") for name, case in names if name.startswith(shown)]
    steps += [
        ("policy_check_several", "policy check c/mistakes.yaml c/rich.yaml c/mistakes.json c/mistakes.toml"),
        ("policy_check_several_json", "policy check c/mistakes.yaml c/rich.yaml c/mistakes.json --json"),
        ("policy_check_blocks", "policy check c/blocks.yaml"),
        ("show_bad", "config show --config c/mistakes.yaml"),
        ("list_bad", "policy list --config c/duplicate.yaml"),
        ("run_bad_blocks", "run c/empty.yaml --engine memory: --config c/blocks.yaml"),
        ("up_bad_engine", "up --for 0 --config c/nats.yaml"),
        ("up_bad_port", "up --for 0 --config c/port.yaml"),
        ("run_bad_port", "run c/empty.yaml --config c/port.yaml"),
        ("worker_memory", "worker start --config c/memory.yaml"),
        ("router_memory", "router start --config c/memory.yaml"),
        ("job_bad", "job list --config c/syntax.toml"),
        ("folder", "config check c"),
        ("show_json_format", "config show --config c/good.json"),
        ("show_toml_format", "config show --config c/good.toml --json"),
    ]
    return steps


def _configured() -> list[Step]:
    return [
        configurations.rich,
        *both("config_show", "config show"),
        *both("config_check", "config check"),
        *_policies(),
        *both("show_source", "policy show --source inbox"),
        *both("explain_source", "policy explain --source inbox --failure-type rate_limited"),
        ("explain_two", "policy explain --target block:http --source inbox"),
        configurations.overlaid,
        *both("overlaid_show", "config show"),
        configurations.overlaid_badly,
        ("overlaid_badly", "config show"),
    ]


def _init() -> list[Step]:
    def another(folder: Folder) -> None:
        (folder.path / "reefknot.yaml").rename(folder.path / "reefknot.yml")

    return [
        ("dry", "init --dry-run"),
        ("dry_json", "init --dry-run --json"),
        ("written", "init"),
        ("again", "init"),
        ("again_json", "init --json"),
        ("check", "config check"),
        ("list", "policy list"),
        ("forced", "init --force --template mailbox"),
        ("check_template", "config check"),
        ("forced_json", "init --force --template database --json"),
        another,
        ("other_name", "init"),
    ]


def _audit() -> list[Step]:
    return [
        stores.recorded,
        *both("tail", "audit tail"),
        *both("tail_two", "audit tail -n 2"),
        *both("tail_type", "audit tail --type retry_exhausted --since 1h"),
        ("tail_category", "audit tail --category kv.get"),
        ("tail_nothing", "audit tail --correlation nobody"),
        ("tail_for_no_time", "audit tail --for 0"),
        *both("head", "audit head"),
        ("tail_for", "audit tail --for 0.01 -n 1"),
        ("tail_unknown_type", "audit tail --type retry_atempt"),
        ("tail_unknown_category", "audit tail --category kv.gt"),
        *both("verify", "audit verify"),
        *both("replay", "audit replay"),
        *both("analyse", "audit analyse"),
        *both("analyse_alert", "audit analyse --threshold 1"),
        ("analyse_fail", "audit analyse --threshold 1 --fail-on-alert"),
        ("analyse_since", "audit analyse --since 2000-01-01T00:00:00Z"),
        ("export", "audit export log.jsonl"),
        ("export_again", "audit export log.jsonl"),
        ("export_forced", "audit export log.jsonl --force --json"),
        ("export_some", "audit export some.jsonl --type retry_attempt"),
        ("verify_some", "audit verify some.jsonl"),
        ("export_nowhere", "audit export gone/below/log.jsonl"),
        ("export_folder", "audit export .reefknot"),
        ("export_folder_forced", "audit export .reefknot --force"),
        ("export_folder_csv", "audit export .reefknot --force --format csv"),
        ("export_below_a_file", "audit export log.jsonl/log.jsonl"),
        *both("verify_file", "audit verify log.jsonl"),
        ("verify_head", "audit verify --head log.jsonl.head.json"),
        ("verify_no_head", "audit verify --head gone.json"),
        *both("replay_file", "audit replay log.jsonl"),
        ("analyse_file", "audit analyse log.jsonl"),
        stores.tampered,
        *both("verify_edited", "audit verify edited.jsonl"),
        *both("verify_cut", "audit verify cut.jsonl --head log.jsonl.head.json"),
        ("verify_swapped", "audit verify swapped.jsonl"),
        ("verify_prose", "audit verify prose.jsonl"),
        ("replay_prose", "audit replay prose.jsonl"),
        ("analyse_prose", "audit analyse prose.jsonl"),
        *both("check", "store check"),
        ("check_damaged", "store check --engine sqlite:damaged.db"),
        ("check_text", "store check --engine sqlite:text.db"),
        ("check_empty", "store check --engine sqlite:empty.db"),
        *both("backup", "store backup copy.db --as ann"),
        ("backup_other", "store backup copy-2.db --as ann --json"),
        ("check_copy", "store check --engine sqlite:copy.db"),
        *both("migrate_dry", "store migrate --dry-run"),
        *both("migrate", "store migrate --as ann"),
        ("migrate_empty", "store migrate --engine sqlite:empty.db"),
        ("compact_dry", "store compact --dry-run"),
        ("compact", "store compact --as ann"),
        ("compact_json", "store compact --as ann --json"),
        ("tail_deeds", "audit tail --type operator_action"),
    ]


def _keys() -> list[Step]:
    return [
        stores.keys,
        *both("show_done", "idempotency show order-7"),
        *both("show_held", "idempotency show order-8"),
        *both("show_unknown", "idempotency show order-9"),
        ("show_none", "idempotency show order-99"),
        ("show_empty", "idempotency show ''"),
        ("show_long", f"idempotency show {'x' * 513}"),
        *both("stats", "idempotency stats"),
        ("forget_dry", "idempotency forget order-7 --dry-run"),
        ("forget_dry_json", "idempotency forget order-7 --dry-run --json"),
        ("forget_held", "idempotency forget order-8"),
        ("forget_none", "idempotency forget order-99"),
        ("forget", "idempotency forget order-7 --as ann"),
        ("show_forgotten", "idempotency show order-7"),
        ("resolve_nothing", "idempotency resolve order-9"),
        ("resolve_two", "idempotency resolve order-9 --released --failed x"),
        ("resolve_no_json", "idempotency resolve order-9 --done {"),
        ("resolve_held", "idempotency resolve order-8 --released"),
        ("resolve_none", "idempotency resolve order-99 --released"),
        ("resolve_dry", "idempotency resolve order-9 --done '{\"id\": 7}' --dry-run"),
        ("resolve_done", "idempotency resolve order-9 --done '{\"id\": 7}' --as ann"),
        ("resolve_again", "idempotency resolve order-9 --released"),
        ("resolve_again_dry", "idempotency resolve order-9 --released --dry-run"),
        ("resolve_held_dry", "idempotency resolve order-8 --released --dry-run"),
        ("resolve_none_dry", "idempotency resolve order-99 --released --dry-run"),
        ("resolve_failed", "idempotency resolve order-10 --failed 'it bounced' --json"),
        ("resolve_released", "idempotency resolve order-11 --released"),
        ("resolve_null", "idempotency resolve order-12 --done null --json"),
        *both("show_failed", "idempotency show order-10"),
        ("show_resolved_json", "idempotency show order-9 --json"),
        ("show_released_json", "idempotency show order-11 --json"),
        ("show_null_json", "idempotency show order-12 --json"),
        ("forget_json", "idempotency forget order-10 --json"),
        *both("stats_after", "idempotency stats"),
        *both("tail", "audit tail"),
        ("verify", "audit verify"),
    ]


def _work() -> list[Step]:
    return [
        stores.prepared,
        ("run_none", "run none.jsonl --engine memory: --workers 2"),
        ("run_none_json", "run none.jsonl --json"),
        ("run_good", f"run good.jsonl {ENGINE_JOB} --results out.jsonl"),
        ("run_lucky_json", f"run lucky.jsonl {ENGINE_JOB} --json"),
        ("run_unlucky", f"run unlucky.jsonl {ENGINE_JOB}"),
        ("run_broken_json", f"run broken.jsonl {ENGINE_JOB} --json"),
        ("run_gone_file", f"run gone.jsonl {ENGINE_JOB}"),
        ("run_odd_json", f"run odd.jsonl {ENGINE_JOB} --json"),
        ("run_mixed", f"run mixed.jsonl --engine memory: {ENGINE_JOB}"),
        ("submit_results", "submit good.jsonl --wait"),
        ("submit_results_json", "submit good.jsonl --wait --json"),
        ("submit_file", "submit none.jsonl --json"),
        ("submit_one", 'submit --type fs.blob_get --inputs \'{"path": "a.txt"}\' --id waiting-1'),
        ("submit_same", 'submit --type fs.blob_get --inputs \'{"path": "a.txt"}\' --id waiting-1 --json'),
        ("submit_conflict", 'submit --type fs.blob_get --inputs \'{"path": "b.txt"}\' --id waiting-1'),
        ("submit_no_id", "submit --type fs.blob_get --deadline 3600 --json"),
        ("submit_pending", "submit --type fs.blob_get --id waiting-2 --wait --timeout 0.05 --json"),
        ("submit_pending_table", "submit --type fs.blob_get --id waiting-2 --wait --timeout 0.05"),
        ("submit_mixed", "submit mixed.jsonl --engine sqlite:other.db"),
        *both("job_list", "job list --state succeeded"),
        *both("job_list_type", "job list --type own.flaky"),
        *both("job_list_page", "job list --state quarantined --limit 1"),
        *both("job_show", "job show good"),
        *both("job_show_lucky", "job show lucky"),
        *both("job_show_unlucky", "job show unlucky"),
        *both("job_show_waiting", "job show waiting-1"),
        *refusals.runs(),
        *refusals.operators(),
        ("job_show_none", "job show nobody"),
        ("job_cancel_dry", "job cancel waiting-1 --dry-run"),
        ("job_cancel", "job cancel waiting-1 --because withdrawn --as ann"),
        ("job_cancel_json", "job cancel waiting-2 --as ann --json"),
        ("job_cancel_again", "job cancel waiting-1"),
        ("job_cancel_none", "job cancel nobody"),
        *both("job_show_cancelled", "job show waiting-1"),
        *_quarantine(),
        ("analyse", "audit analyse"),
        ("verify", "audit verify"),
        ("replay", "audit replay"),
        ("tail_deeds", "audit tail --type operator_action"),
        ("worker_list_none", "worker list"),
        ("router_status_none_json", "router status --json"),
    ]


def _quarantine() -> list[Step]:
    return [
        *both("quarantine_list", "quarantine list"),
        *both("quarantine_list_type", "quarantine list --type own.broken"),
        ("quarantine_list_before", "quarantine list --before 1h"),
        ("quarantine_list_nonsense", "quarantine list --before soon"),
        *both("quarantine_stats", "quarantine stats"),
        *both("quarantine_show", "quarantine show unlucky"),
        ("quarantine_show_none", "quarantine show nobody"),
        ("quarantine_requeue_none", "quarantine requeue nobody"),
        *both("quarantine_requeue_dry", "quarantine requeue --all --dry-run"),
        ("quarantine_requeue", "quarantine requeue unlucky --as ann"),
        ("quarantine_discard_dry", "quarantine discard broken --dry-run"),
        ("quarantine_discard", "quarantine discard broken --because 'the order was withdrawn' --as ann --json"),
        ("quarantine_purge_none", "quarantine purge --before 30d --dry-run"),
        ("quarantine_purge_dry", "quarantine purge --all --dry-run"),
        ("quarantine_list_source", "quarantine list --source notes"),
        ("quarantine_purge", "quarantine purge --all --as ann"),
        ("quarantine_empty", "quarantine list"),
        ("quarantine_empty_stats_json", "quarantine stats --json"),
    ]


def _moments() -> list[Step]:
    return [
        stores.prepared,
        ("up", "up --for 0.1 --workers 2 --module golden_steps"),
        ("up_json", "up --for 0.1 --json"),
        ("worker", "worker start --for 0.05"),
        ("worker_json", "worker start --worker-id reader --for 0.05 --json"),
        ("router", "router start --for 0.05"),
        ("router_json", "router start --router-id front --for 0.05 --json"),
        lambda folder: (folder.path / "reefknot.yaml").unlink(),
        ("up_baseline", "up --for 0 --engine memory:"),
        ("run_baseline", "run none.jsonl --engine memory: --json"),
    ]


SCENARIOS = [
    Scenario("usage", refusals.asked_wrongly()),
    Scenario("builtin", [*_policies(), *both("config_show", "config show"), *both("config_check", "config check")]),
    Scenario("answers", _answers()),
    Scenario("schema", [("schema", "config schema")]),
    Scenario("templates", _templates()),
    Scenario("configured", _configured()),
    Scenario("files", _configuration_files()),
    Scenario("init", _init()),
    Scenario("nostore", refusals.no_store()),
    Scenario("audit", _audit()),
    Scenario("keys", _keys()),
    Scenario("work", _work()),
    Scenario("moments", _moments()),
]
UP = "up --for 60 --module golden_steps --seed 7"
LIVE = Scenario(
    "live",
    [
        *both("worker_list", "worker list"),
        *both("router_status", "router status"),
        ("worker_start_taken", "worker start --worker-id worker-1 --for 0"),
        ("worker_unknown", "worker drain worker-7"),
        *both("drain_dry", "worker drain --dry-run"),
        ("pause", "worker pause worker-1 --as ann"),
        ("worker_list_paused", "worker list"),
        ("resume_json", "worker resume worker-1 --as ann --json"),
        ("submit", "submit good.jsonl --wait"),
        ("submit_json", "submit lucky.jsonl --wait --json"),
        ("submit_failed", "submit gone.jsonl --wait"),
        ("job_list", "job list"),
        ("drain_json", "worker drain worker-1 --seconds 1 --as ann --json"),
        ("resume", "worker resume --as ann"),
    ],
)
"""Commands that look at a system and steer it, which runs meanwhile in a process of its own."""
