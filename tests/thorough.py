"""The tests that `make test` leaves to `make test-all`, and why.

An entry is a file, or a test of it without its parameters. Where it says ``but_first``, the first of its tests stays in
`make test`; where it says ``but``, those whose parameters begin with that text.
"""

from typing import NamedTuple


class Thorough(NamedTuple):
    """Tests that take long."""

    name: str
    why: str
    but_first: bool = False
    but: str = ""


PROGRAMS = "runs whole programs; `make test` runs the README's and one example"
PARITY = "the same parity over many meshes and models; `make test` keeps the first of each kind"
STATISTICS = "10^5 updates, to hold means against closed forms"
KILLS = "kills, hangs and failures at many moments; `make test` keeps the first of each kind"
BENCHMARK = "a benchmark in small, in processes of its own"
PUBLISHED = "predicts published rows at 83 rates"
PLANNER = "profiles programs on idle cores, or tries planning problems in full"
COMMANDS = "whole commands in processes of their own; `make test` keeps the first"

TABLE: tuple[Thorough, ...] = (
    Thorough("tests/test_examples.py", PROGRAMS),
    Thorough("tests/accelerator/test_process_group.py", PARITY),
    Thorough("tests/benchmarks/test_gradient_blocks.py", BENCHMARK),
    Thorough("tests/benchmarks/test_reducers.py", BENCHMARK),
    Thorough("tests/benchmarks/test_sandblaster.py", BENCHMARK),
    Thorough("tests/accelerator/test_cpp_device.py", "builds an extension in C++, which takes half a minute"),
    Thorough("tests/test_combinations.py", "every policy over every form of replica on four engines"),
    Thorough("tests/test_readme.py::test_programs_in_the_text_run_as_they_stand", PROGRAMS, but_first=True),
    Thorough("tests/test_readme.py::test_examples_run_from_anywhere", PROGRAMS, but_first=True),
    Thorough("tests/test_planning_page.py", PROGRAMS),
    Thorough("tests/test_predict.py::test_the_output_is_that_of_one_process", PARITY, but_first=True),
    Thorough("tests/test_predict.py::test_a_run_a_folder_and_a_state_say_what_is_asked", COMMANDS),
    Thorough("tests/test_predict.py::test_ranks_that_torchrun_started_all_have_the_output", COMMANDS),
    Thorough("tests/test_predict.py::test_the_command_refuses_what_is_no_input", COMMANDS),
    Thorough("tests/cli/test_end_to_end.py", COMMANDS, but_first=True),
    Thorough("tests/report/test_page.py::test_whatever_is_missing_is_left_out", PARITY, but_first=True),
    Thorough("tests/benchmarks/test_gpu.py", BENCHMARK, but_first=True),
    Thorough("tests/benchmarks/test_hybrid.py", BENCHMARK),
    Thorough("tests/benchmarks/test_reliability.py::test_a_row_in_small", BENCHMARK),
    Thorough("tests/benchmarks/test_hostile_files.py::test_none_is_read_and_none_runs_code", BENCHMARK, but_first=True),
    Thorough("tests/benchmarks/test_wrong_launches.py", BENCHMARK, but_first=True),
    Thorough("tests/benchmarks/test_listeners.py", BENCHMARK),
    Thorough("tests/benchmarks/test_reliability.py::test_a_row_that_needs_root_in_small", BENCHMARK),
    Thorough("tests/benchmarks/test_data_parallel.py", BENCHMARK),
    Thorough("tests/benchmarks/test_local_steps.py", BENCHMARK, but_first=True),
    Thorough("tests/benchmarks/test_pipeline.py", BENCHMARK),
    Thorough("tests/benchmarks/test_tensor.py", BENCHMARK),
    Thorough("tests/benchmarks/test_collectives.py", BENCHMARK),
    Thorough("tests/benchmarks/test_smooth_switch_engines.py", BENCHMARK),
    Thorough("tests/schedule/test_identities.py::test_the_bubble_of_interleaved_parts", STATISTICS, but_first=True),
    Thorough("tests/accelerator/test_memory.py", "builds that extension, and profiles programs"),
    Thorough("tests/accelerator/test_engines.py::test_worker_processes", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_actors", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_actors_that_share_gpus", "starts a Ray of its own"),
    Thorough("tests/accelerator/test_engines.py::test_predictions", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_several_processes", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_worker_processes_copy_the_batch_alone", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_every_policy_over_every_form", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_every_policy_over_every_form_on_ranks", PARITY),
    Thorough("tests/engine/test_closed_forms.py", STATISTICS),
    Thorough("tests/engine/test_compiled_engines.py", "compiles C++, which takes some twenty seconds each time"),
    Thorough("tests/engine/test_compiled_sizes.py", "compiles C++, which takes some twenty seconds each time"),
    Thorough("tests/planner/test_calibrated_plans.py", PLANNER, but_first=True),
    Thorough("tests/engine/test_virtual_determinism.py::test_two_processes_agree_to_the_byte", COMMANDS),
    Thorough("tests/engine/test_tensor_parity.py::test_equals_one_process", PARITY, but_first=True),
    Thorough("tests/engine/test_pipeline_parity.py::test_equals_one_process", PARITY, but_first=True),
    Thorough("tests/engine/test_hybrid_parity.py", PARITY),
    Thorough("tests/engine/test_replicated_stages.py", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_overlap.py", PARITY),
    Thorough("tests/engine/test_distributed_checkpoints.py", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_restart.py", KILLS),
    Thorough("tests/engine/test_distributed_fsdp.py", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_zero1.py::test_it_equals_one_process", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_noise_scale.py", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_local_steps.py", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_runs.py", "counts the bytes of real TCP connections"),
    Thorough("tests/engine/test_distributed_hosts.py", "two hosts, each in a network namespace"),
    Thorough("tests/engine/test_distributed_failures.py", KILLS),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_survivors_train_as_one_process_without_the_dead",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_one_that_has_missed_a_result_receives_what_it_led_to",
        KILLS,
        but_first=True,
    ),
    Thorough("tests/engine/test_distributed_survivors.py::test_the_first_result_of_all_may_be_missed", KILLS),
    Thorough("tests/engine/test_distributed_survivors.py::test_several_die", KILLS),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_one_that_is_stopped_is_left_out_and_takes_no_part_when_it_goes_on",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_one_of_two_waits_for_the_other_while_that_may_live", KILLS
    ),
    Thorough("tests/engine/test_distributed_survivors.py::test_one_of_two_goes_on_if_the_other_is_dead", KILLS),
    Thorough("tests/engine/test_distributed_survivors.py::test_an_exception_is_a_death", KILLS, but_first=True),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_a_rank_that_is_started_again_joins_where_the_others_are",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/test_distributed_survivors.py::test_one_that_would_do_another_job_does_not_join_and_the_others_go_on",
        KILLS,
    ),
    Thorough("tests/engine/test_distributed_partition.py", "hosts that are cut off, in network namespaces"),
    Thorough("tests/engine/local/test_on_death.py::test_kills_from_outside_at_any_time", KILLS, but_first=True),
    Thorough("tests/engine/local/test_on_death.py::test_a_replaced_replica_changes_no_bit", KILLS, but_first=True),
    Thorough(
        "tests/engine/local/test_on_death.py::test_under_any_policy_each_sample_is_used_as_often_as_without_a_death",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/local/test_elastic.py::test_an_epoch_is_exact_while_replicas_come_and_go", KILLS, but_first=True
    ),
    Thorough("tests/engine/local/test_elastic.py::test_an_epoch_is_exact_though_replicas_die", KILLS, but_first=True),
    Thorough("tests/engine/local/test_elastic.py::test_an_epoch_is_exact_over_a_break", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_elastic.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_portions.py", PARITY, but_first=True),
    Thorough("tests/engine/ray/test_ray_pull_ahead.py", PARITY, but_first=True),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_it_goes_on_in_the_middle_of_a_search", PARITY, but_first=True
    ),
    Thorough("tests/engine/local/test_local_portions.py::test_lbfgs_makes_torchs_steps", PARITY, but_first=True),
    Thorough("tests/engine/local/test_local_portions.py::test_it_does_over_synchronous_replicas", PARITY),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_they_are_a_round_of_as_many_replicas", PARITY, but_first=True
    ),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_a_death_in_the_middle_of_a_batch_changes_no_bit",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/local/test_local_checkpoints.py::test_updates_wait_for_a_copy_under_way", PARITY, but_first=True
    ),
    Thorough("tests/comm/test_hierarchical.py::test_two_hosts_of_two_ranks", PARITY),
    Thorough("tests/engine/local/test_on_death.py::test_an_exception_is_a_death_where_asked", KILLS, but_first=True),
    Thorough("tests/engine/test_distributed_served.py::test_so_does_one_that_is_stopped", KILLS, but_first=True),
    Thorough("tests/cli/test_scale.py::test_a_run_is_scaled_up_and_down", COMMANDS),
    Thorough(
        "tests/engine/local/test_own_states.py::test_a_run_that_was_cut_ends_as_one_that_was_not",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/checkpoint/test_writer.py::test_killed_at_any_time_while_the_same_name_is_written_again",
        KILLS,
        but_first=True,
    ),
    Thorough("tests/benchmarks/test_resharding.py::test_the_matrix_in_small", BENCHMARK),
    Thorough("tests/engine/local/test_suspects.py::test_one_that_is_stopped_is_replaced", KILLS, but_first=True),
    Thorough("tests/engine/test_distributed_sharded_failures.py", KILLS),
    Thorough("tests/engine/test_distributed_async_pipeline.py", PARITY, but_first=True),
    Thorough("tests/engine/test_pipeline_failures.py", KILLS, but_first=True),
    Thorough("tests/engine/test_tensor_faults.py", KILLS, but_first=True),
    Thorough("tests/engine/test_step_profile.py", PLANNER, but_first=True),
    Thorough("tests/engine/test_virtual_memory.py", "measures the memory of processes of their own"),
    Thorough("tests/engine/test_virtual_data.py::test_torchs_loader_with_workers_of_its_own", PARITY, but_first=True),
    Thorough("tests/engine/local/test_local_command.py", KILLS, but_first=True),
    Thorough("tests/engine/local/test_local_resources.py::test_files_do_not_pile_up", KILLS, but_first=True),
    Thorough("tests/engine/local/test_local_loops.py::test_without_a_guard", COMMANDS, but_first=True),
    Thorough("tests/engine/local/test_local_loops.py::test_a_script_may_train_as_often_as_it_likes", COMMANDS),
    Thorough("tests/engine/local/test_local_models.py", "25 workers, and a million parameters", but_first=True),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_pipelines_do_what_virtual_time_says", PARITY, but_first=True
    ),
    Thorough("tests/engine/local/test_replica_group.py::test_and_so_do_shards", PARITY, but_first=True),
    Thorough("tests/engine/ray/test_ray_clusters.py", "a Ray cluster of two nodes"),
    Thorough("tests/engine/ray/test_ray_failures.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_checkpoints.py", KILLS),
    Thorough("tests/engine/ray/test_ray_groups.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_servers.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_compression.py", PARITY, but_first=True),
    Thorough("tests/engine/ray/test_ray_hosts.py", "Ray clusters of three network namespaces"),
    Thorough("tests/engine/ray/test_ray_own_states.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_standbys.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_standby.py::test_it_may_die_between_any_two_messages", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_standby.py::test_again_and_again", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_no_acknowledged_update_is_lost", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_large_deltas_are_read_from_the_object_store", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_two_deaths_in_a_row_end_the_run", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_while_replicas_are_replaced", KILLS),
    Thorough("tests/engine/ray/test_ray_suspects.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_timers.py", KILLS, but_first=True),
    Thorough("tests/planner/test_auto.py", PLANNER),
    Thorough("tests/planner/test_short_runs.py", PLANNER),
    Thorough("tests/planner/test_probe.py", PLANNER),
    Thorough("tests/planner/test_verify.py", PLANNER),
    Thorough("tests/planner/test_calibrate.py", "calibrates 303 published rows, each source and model left out"),
    Thorough("tests/planner/test_device_rates.py::test_rates_of_named_devices_are_those_of_published_rows", PUBLISHED),
    Thorough(
        "tests/planner/test_device_rates.py::test_hopper_is_predicted_within_the_aim_by_rates_of_others", PUBLISHED
    ),
    Thorough("tests/planner/test_search.py", PLANNER, but_first=True),
    Thorough("tests/replica/tensor/test_recurrent.py", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_vision_models.py", PARITY),
    Thorough("tests/test_readme.py::test_a_policy_of_a_programs_own_file_has_its_name_on_the_command_line", COMMANDS),
    Thorough("tests/cli/test_train.py::test_show_mesh_refuses_what_can_not_be_trained", COMMANDS),
    Thorough("tests/comm/shm/test_collectives.py::test_tensors_around_the_stage_and_above", PARITY, but_first=True),
    Thorough(
        "tests/comm/shm/test_collectives.py::test_combines_every_dtype_by_every_operation", PARITY, but_first=True
    ),
    Thorough("tests/comm/shm/test_collectives.py::test_moves_every_dtype_through_small_stages", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_parity.py", PARITY, but="2"),
    Thorough("tests/engine/local/test_local_kills.py::test_under_every_policy", KILLS, but_first=True),
    Thorough("tests/engine/local/test_local_kills.py::test_the_fork_server", KILLS),
    Thorough("tests/engine/local/test_local_records.py::test_more_points_than_any_queue_holds", "600 evaluations"),
    Thorough("tests/engine/ray/test_ray_runs.py", "starts a Ray; `make test` trains on one once", but_first=True),
    Thorough("tests/engine/ray/test_ray_parity.py", PARITY, but_first=True),
    Thorough("tests/replica/test_capture.py::test_sequences_may_be_of_another_length", PARITY, but_first=True),
    Thorough(
        "tests/replica/test_capture.py::test_a_graph_is_the_model_for_batches_of_any_size", PARITY, but_first=True
    ),
    Thorough(
        "tests/replica/test_capture.py::test_a_graph_captured_under_autocast_is_the_model_under_autocast",
        PARITY,
        but_first=True,
    ),
    Thorough("tests/replica/test_capture.py::test_evaluation_is_a_graph_of_its_own", PARITY, but_first=True),
    Thorough(
        "tests/replica/pipeline/test_pipelined_models.py::test_five_steps_equal_one_process", PARITY, but_first=True
    ),
)


def is_thorough(name: str, seen: set[str]) -> bool:
    """Return whether a test is left to `make test-all`.

    Args:
        name: its node id.
        seen: entries of which the first test has come along already; grows.
    """
    path, function, parameters = name.partition("::")[0], name.partition("[")[0], name.partition("[")[2]
    for entry in TABLE:
        if entry.name in (path, function):
            if entry.but and parameters.startswith(entry.but):
                return False
            if entry.but_first and entry.name not in seen:
                seen.add(entry.name)
                return False
            return True
    return False
