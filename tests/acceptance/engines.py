"""
The engines that a story of the command line runs on: SQLite for every one, NATS a second time for those of `ON_NATS`.

`make test` repeats the stories of `REPRESENTATIVE` on NATS; `make faults`, or `REEFKNOT_ACCEPTANCE_ON_NATS=all`, all of
them, and `REEFKNOT_FAULT_POINTS=all` those that have a full size. Whatever is not repeated has its reason here. Stories
in virtual time (`test_spec1`, `test_spec5_backpressure`) have no store on a server, because a virtual loop does
not wait for one: there `tests/integration/test_nats_peers.py` says the same of a worker that is a process.
"""

import os

from tests.faults import points

_STORIES = (
    *("alerts", "audit_trail", "blocking_steps", "cancelled_from_outside", "crash_suspects", "dashboard", "job_retry"),
    *(
        "jupyter",
        "latency",
        "limits_of_the_fleet",
        "live_views",
        "liveness",
        "on_call",
        "operators",
        "quarantine_actions",
        "reload",
    ),
    *("run_and_up", "schedules", "separate_processes", "telemetry", "sources", "tenants", "traces", "unknown_types"),
    *("step_checkpoints", "waiting", "web_frameworks", "worker_processes"),
)
ON_NATS = frozenset(f"test_{story}" for story in _STORIES)
_FILE = "it reads, locks or changes the file"
_SAME = "it does not open the store"
SQLITE_ONLY = {
    "test_every_assignment_has_its_submitter_and_its_end_in_less_than_a_kilobyte": _FILE,
    "test_an_assignment_that_ends_without_a_result_has_its_end_on_record": _FILE,
    "test_a_name_given_with_as_stands_beside_the_user_the_host_and_the_process": _FILE,
    "test_a_first_try_success_takes_a_thousand_bytes_with_a_tenant_and_long_ids": _FILE,
    "test_a_second_signal_never_waits_for_a_store_that_is_locked": _FILE,
    "test_a_running_system_keeps_heads_elsewhere_and_a_forged_log_does_not_fit_them": _FILE,
    "test_a_system_that_has_nothing_to_do_writes_at_most_once_a_second": _FILE,
    "test_a_system_that_works_is_seen_to_write_more_often": _FILE,
    "test_a_store_that_is_locked_for_a_while_is_said_in_the_view_which_goes_on": _FILE,
    "test_an_end_whose_event_was_damaged_is_shown_as_unreadable": _FILE,
    "test_what_this_user_may_not_do_is_77": _FILE,
    "test_the_token_of_a_service_is_in_no_log_but_in_a_private_file": "its file is next to that of a store",
    "test_looks_at_the_health_leave_a_system_its_store": _FILE,
    "test_with_uuids_the_record_of_a_success_is_small_as_exported_too": _FILE,
    "test_an_upgrade_is_rolled_back_by_the_copy_that_it_kept": _FILE,
    "test_a_damaged_store_is_restored_from_a_backup": _FILE,
    "test_a_frozen_worker_holds_its_job_until_its_lease_ends": _FILE,
    "test_a_submission_that_is_ended_prints_accepted_ids": "its first look may come before the store is made",
    "test_a_full_disk_is_told": _FILE,
    "test_a_store_that_another_process_keeps_locked_is_75": _FILE,
    "test_for_programs_a_script_is_a_field_and_for_an_unknown_shell_there_is_none": _SAME,
    "test_every_format_can_be_added_to": "it lists sources before there is a store, which on a server is refused",
    "test_a_mistake_says_what_is_accepted_and_leaves_the_file_alone": _SAME,
    "test_a_source_is_added_and_everything_else_of_the_file_stays_byte_for_byte": _SAME,
    "test_a_check_of_the_configuration_finds_settings_that_a_connector_does_not_accept": _SAME,
    "test_a_file_that_cannot_be_extended_is_left_alone_as_it_is_by_a_dry_run": _SAME,
    "test_limits_that_make_no_sense_and_a_webhook_that_is_no_url_are_mistakes_with_their_place": _SAME,
    "test_a_store_that_goes_away_is_told_and_found_again_when_it_is_back": _FILE,
    "test_before_anything_has_run_schedules_are_listed_and_a_list_makes_no_store": _FILE,
}
REPRESENTATIVE = frozenset(
    {
        "test_four_processes_never_call_more_often_than_the_limit_and_use_it",
        "test_a_system_is_worked_with_from_other_processes_and_ends_in_order",
        "test_work_that_was_handed_back_is_counted_and_ended_by_the_next_system",
        "test_a_worker_that_is_killed_loses_nothing_and_everything_has_one_result",
        "test_what_a_killed_router_had_taken_on_is_answered_by_the_other_one",
        "test_of_all_that_ran_when_a_process_died_only_the_culprit_is_quarantined",
        "test_every_job_that_ended_without_success_runs_again_under_its_id",
        "test_a_job_that_its_router_holds_and_one_of_a_killed_worker_are_not_running",
        "test_a_job_says_which_part_of_the_system_it_waits_for",
        "test_no_router_and_no_worker_are_told_everywhere_and_a_dead_part_stays_visible",
        "test_a_key_of_a_killed_process_can_be_forgotten_at_once",
        "test_a_shutdown_ends_with_its_drain_although_a_plain_function_goes_on",
        "test_what_nobody_knows_for_long_is_quarantined_with_its_answer_and_comes_back",
        "test_what_failed_for_one_tenant_is_requeued_for_it_alone",
        "test_failures_of_one_cause_are_one_group_and_an_edited_payload_is_a_new_version",
        "test_the_retries_of_all_processes_are_one_answer_that_survives_them",
        "test_a_sync_keeps_what_is_new_and_tells_what_it_did",
        "test_a_sync_that_is_asked_for_waits_for_a_system_that_runs_it_once",
        "test_two_systems_over_one_store_run_each_due_time_once_and_a_pause_holds_for_both",
        "test_a_job_goes_through_all_processes_and_its_server_in_one_trace",
        "test_through_a_pipe_top_prints_one_view_without_escapes_and_for_programs_one_document",
        "test_a_system_serves_its_own_store_and_work_is_done_through_the_api",
        "test_services_begin_again_and_work_goes_on",
        "test_poison_is_told_with_the_way_out",
        "test_an_application_under_a_test_client_finds_jobs",
        "test_a_worker_that_is_killed_is_replaced_and_its_job_done",
        "test_a_step_whose_process_is_killed_five_times_goes_on_from_its_last_checkpoint",
    }
)
WITH_A_FULL_SIZE = frozenset({"test_web_frameworks"})
"""The servers of these take long on NATS: four processes that submit to one class refuse each other's batches."""
IS_ALL = os.environ.get("REEFKNOT_ACCEPTANCE_ON_NATS") == "all"


def runs_on_nats(module: str, name: str) -> bool:
    """Whether a story, by its module and name, is repeated on NATS."""
    if module not in ON_NATS or name in SQLITE_ONLY:
        return False
    return IS_ALL or name in REPRESENTATIVE or (points.ALL and module in WITH_A_FULL_SIZE)
