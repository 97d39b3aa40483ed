"""Commands that are refused: mistyped words, values out of bounds, and stores that are not there."""

from tests.golden.harness import Folder, Step, both


def asked_wrongly() -> list[Step]:
    return [
        lambda folder: folder.write("none.jsonl", ""),
        ("nothing", ""),
        ("version", "--version"),
        ("unknown_command", "polcy"),
        ("unknown_verb", "policy lst"),
        ("unknown_flag", "policy list --jsn"),
        ("unknown_flag_of_a_noun", "store --jsn"),
        ("noun_alone", "policy"),
        ("missing_argument", "job show"),
        ("missing_value", "audit tail --lines"),
        ("too_many_arguments", "config check a b"),
        ("not_a_number", "policy explain block:http --status many"),
        ("not_a_kind", "policy list --kind blocks"),
        ("unknown_connector", "policy show connector:imap"),
        ("unknown_operation", "policy show operation:nats.publsh"),
        ("unknown_target", "policy show http"),
        ("unknown_kind", "policy explain blok:http"),
        ("empty_target", "policy explain block:"),
        ("target_with_an_escape", "policy explain 'operation:a\x1b[31m'"),
        ("no_target", "policy explain"),
        ("unknown_source", "policy explain --source nowhere"),
        ("unknown_code", "policy explain block:http --error http_eror"),
        ("unknown_failure_type", "policy explain block:http --failure-type transiend"),
        ("status_out_of_bounds", "policy explain block:http --status 999"),
        ("negative_retries", "policy explain block:http --retry-count -1"),
        ("negative_wait", "policy explain block:http --retry-after -1"),
        ("no_wait", "policy explain block:http --retry-after nan"),
        ("code_of_no_failure", "policy explain block:http --error none"),
        ("status_of_no_failure", "policy explain block:http --status 200"),
        ("too_many_retries", "policy explain block:http --retry-count 1000000000"),
        ("no_time", "policy explain block:http --timeout-ms 0"),
        ("since_nonsense", "audit tail --since yesterday"),
        ("negative_lines", "audit tail --lines -1"),
        ("negative_time", "audit tail --for -1"),
        ("negative_threshold", "audit analyse --threshold -1"),
        ("gone_config", "policy list --config gone.yaml"),
        ("gone_config_check", "config check gone.yaml"),
        ("gone_config_checks", "policy check gone.yaml gone.json"),
        ("up_negative", "up --for -1"),
        ("up_workers", "up --workers 65"),
        ("up_processes_memory", "up --processes --engine memory:"),
        ("up_module", "up --for 0 --engine memory: --module no_such_module_here"),
        ("run_gone", "run gone.jsonl"),
        ("run_nothing", "run"),
        ("run_nats", "run none.jsonl --engine nats://127.0.0.1:4222"),
        ("submit_neither", "submit"),
        ("submit_gone", "submit gone.jsonl"),
        ("submit_no_json", "submit --type a.b --inputs {"),
        ("submit_no_object", "submit --type a.b --inputs []"),
        ("submit_deadline", "submit --type a.b --deadline 0"),
        ("submit_timeout", "submit --type a.b --wait --timeout 0"),
        ("submit_type", "submit --type ''"),
        ("submit_memory", "submit --type a.b --engine memory:"),
        *_parts(),
        ("worker_module", "worker start --module no_such_module_here --for 0"),
        ("drain_seconds", "worker drain --seconds -1"),
        ("job_limit", "job list --limit 0"),
        ("job_state", "job list --state pendng"),
        ("init_template", "init --template mailbx"),
        ("init_full_template", "init --full --template mailbox"),
        ("init_name", "init somewhere"),
        *_mistyped(),
        *_times(),
        *_both_or_neither(),
        made_no_store,
    ]


def _parts() -> list[Step]:
    """What neither a worker nor a router can start with."""
    words = {
        "memory": "--engine memory:",
        "nats": "--engine nats://127.0.0.1:0",
        "for": "--for -1",
        "id": "--{part}-id a.b",
        "no_id": "--{part}-id ''",
    }
    parts = ("worker", "router")
    return [
        (f"{part}_{name}", f"{part} start {text.format(part=part)}") for part in parts for name, text in words.items()
    ]


def _mistyped() -> list[Step]:
    """Options and words that no command has, with those that may be meant."""
    lines = {
        "typ": "submit --typ x",
        "typ_with_value": "submit --typ=x",
        "wiat": "submit none.jsonl --wiat",
        "result": "run --result out.jsonl none.jsonl",
        "zzz": "run --zzz",
        "x": "run -x",
        "frce": "audit export --frce",
        "stat": "job list --stat failed",
        "stauts": "policy explain block:http --stauts 4",
        "explian": "policy explian",
        "no_json": "policy list --no-json",
        "nope": "--nope",
        "extra_target": "policy explain block:http extra",
        "extra_type": "quarantine list other.type",
        "no_reason": "job cancel x --because",
        "json_as_reason": "job cancel x --because --json",
        "no_status": "policy explain block:http --status",
        "no_suggestion": "policy explain operation:billing.charge",
        "schedule_target": "policy schedule connector:imap_mail_box",
        "baseline_of_a_connector": "policy explain connector:local_files --baseline",
        "module": "policy explain block:own.render --module not_there",
        "module_file": "config check --module no_such_wiki.py",
        "format": "audit export log.csv --format xml",
    }
    return [(f"mistyped_{name}", line) for name, line in lines.items()]


def _times() -> list[Step]:
    """Times, ages and seconds that cannot be read, and due times that cannot be."""
    later = "submit --type x"
    lines = {
        "watch_word": "quarantine list --watch abc",
        "watch_negative": "job list --watch -1",
        "watch_empty": "job list --watch ''",
        "watch_worker": "worker list --watch=abc",
        "every_word": "top --every abc",
        "since_negative": "job list --since -5m",
        "before_negative": "quarantine list --before -1d",
        "until_negative": "audit tail --until -1d",
        "until_before_since": "audit tail --since 1h --until 2h",
        "in_word": f"{later} --in soon",
        "in_far": f"{later} --in 99999d",
        "in_negative": f"{later} --in -5m",
        "at_negative": f"{later} --at -5m",
        "at_word": f"{later} --at tomorrow",
        "at_past": f"{later} --at 2020-01-01T00:00:00Z",
        "at_and_in": f"{later} --at 2100-01-01 --in 1s",
        "at_far": f"{later} --at 2100-01-01",
    }
    return [(f"time_{name}", line) for name, line in lines.items()]


def _both_or_neither() -> list[Step]:
    """What a file of assignments has in its lines, and two answers to one question."""
    for_type = ("tenant t", "deadline 5", "timeout-ms 5", "attempt-timeout-ms 5", "inputs {}", "id a --deadline 5")
    return [
        ("submit_both", "submit none.jsonl --type x"),
        *((f"submit_{flag.split()[0]}_of_a_file", f"submit none.jsonl --{flag}") for flag in for_type),
        ("verify_both", "audit verify x.jsonl --engine sqlite:x.db"),
    ]


def no_store() -> list[Step]:
    commands = (
        *("audit tail", "audit verify", "audit replay", "audit export log.jsonl", "audit analyse"),
        *("idempotency show a", "idempotency stats", "idempotency forget a", "idempotency resolve a --released"),
        *("store check", "store backup copy.db", "store migrate", "store compact"),
        *("job list", "job show a", "job cancel a", "worker list", "worker drain", "router status"),
        *("quarantine list", "quarantine show a", "quarantine requeue a", "quarantine purge --all"),
        *("quarantine discard a --because 'it was withdrawn'", "quarantine stats", "dashboard"),
    )
    lines = {"_".join(line.split()[:2]): line for line in commands}
    lines |= {
        "audit_file": "audit verify gone.jsonl",
        "json": "job list --json",
        "other_path": "store check --engine sqlite:elsewhere/x.db",
        "memory": "audit tail --engine memory:",
        "postgres": "audit tail --engine postgres://u:canary@db/x",
        "nats": "store check --engine nats://127.0.0.1:4222",
        "migrate_nats": "store migrate --engine nats://127.0.0.1:4222",
        "compact_nats": "store compact --engine nats://127.0.0.1:4222",
        "dashboard_memory": "dashboard --engine memory:",
        "telemetry_unknown": "telemetry show --connector nope",
        "tune_unknown": "policy tune --connector nope",
        "reset_unknown": "telemetry reset nope",
        "reset_without_counts": "telemetry reset imap_mailbox",
        "no_path": "store check --engine sqlite:",
        "nothing": "store check --engine ''",
        "up_below_a_file": "up --for 0 --engine sqlite:plain.txt/x.db",
    }
    both_forms = [*both("telemetry", "telemetry show"), *both("tune", "policy tune")]
    return [lambda folder: folder.write("plain.txt", "x"), *lines.items(), *both_forms, made_no_store]


def made_no_store(folder: Folder) -> None:
    assert not (folder.path / ".reefknot").exists()


def runs() -> list[Step]:
    """Runs of assignments that cannot begin."""
    words = {
        "workers": "--workers 0",
        "in_flight": "--in-flight 0",
        "engine": "--engine redis:x",
        "below_a_file": "--engine sqlite:good.jsonl/state.db",
        "module": "--module no_such_module",
        "results_nowhere": "--results no/such/out.jsonl",
        "results_folder": "--results files --force",
        "results_empty": "--results ''",
        "no_config": "--config gone.yaml",
    }
    return [("run_folder", "run files"), *((f"run_{name}", f"run good.jsonl {one}") for name, one in words.items())]


def operators() -> list[Step]:
    """What operators ask of a store in vain."""
    changes = ("requeue", "discard", "purge")
    lines = {
        "job_after": "job list --after purged",
        "job_tenant": "job list --tenant ''",
        "job_error": "job list --error ' '",
        "job_before": "job list --before soon",
        "job_connector": "job list --connector x --type y",
        "job_retry_all": "job retry --all good",
        "job_retry_state": "job retry --state failed good",
        "job_retry_all_state": "job retry --all --state failed good",
        "job_cancel_ended": "job cancel good",
        "quarantine_discard_why": "quarantine discard broken",
        "quarantine_discard_blank": "quarantine discard broken --because ' '",
        "quarantine_requeue_filter": "quarantine requeue unlucky --type own.broken",
        "quarantine_requeue_elsewhere": "quarantine requeue good nobody",
        "quarantine_requeue_type": "quarantine requeue --type no.such",
        "dashboard_port": "dashboard --port 70000",
        "dashboard_port_negative": "dashboard --port -1",
        "dashboard_host": "dashboard --host ''",
        "dashboard_for": "dashboard --for -1",
        "backup_nowhere": "store backup nowhere/x.db",
        "backup_existing": "store backup good.jsonl",
    }
    return [
        *lines.items(),
        *((f"quarantine_{verb}_nothing", f"quarantine {verb}") for verb in changes),
        *((f"quarantine_{verb}_both", f"quarantine {verb} --all broken --because both") for verb in changes),
    ]
