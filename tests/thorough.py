"""The tests that `make test` leaves to `make test-all`, and why.

An entry is a file, or a test of it without its parameters. Where it says ``but_first``, the first of its tests stays in
`make test`; where it says ``but``, those whose parameters match that pattern, in which * is any text.
"""

import hashlib
from fnmatch import fnmatchcase
from typing import NamedTuple


class Thorough(NamedTuple):
    """Tests that take long."""

    name: str
    why: str
    but_first: bool = False
    but: str = ""


PROGRAMS = "runs whole programs; `make test` runs one example"
PARITY = "the same parity over many meshes and models; `make test` keeps the first of each kind"
STATISTICS = "10^5 updates, to hold means against closed forms"
KILLS = "kills, hangs and failures at many moments; `make test` keeps the first of each kind"
BENCHMARK = "a benchmark in small, in processes of its own"
PUBLISHED = "predicts published rows at 83 rates"
PLANNER = "profiles programs on idle cores, or tries planning problems in full"
CASES = "the same claim over many cases; `make test` keeps the first"
LARGE = "large inputs, or several runs, which take seconds"
COMMANDS = "whole commands in processes of their own; `make test` keeps the first"

RULES = (
    "attention",
    "batch_norm",
    "batched",
    "convolution",
    "dropout",
    "einsum",
    "elementwise",
    "embedding",
    "linear",
    "losses",
    "matmul",
    "normalisation",
    "pooling",
    "reduce_cat_slice",
    "reductions",
    "views",
)
"""Of operators that are divided."""

COMPRESSED = (
    "every_rank_has_the_same_bits",
    "a_pickled_state_goes_on_as_if_nothing_had_been",
    "nothing_comes_of_nothing",
    "what_is_not_finite_is_so_on_every_rank_and_leaves_nothing_behind",
    "sums_that_need_no_rounding_are_exact",
    "powersgd_leaves_what_it_does_not_compress_exact",
    "sums_are_off_by_the_roundings_on_the_way",
    "fp16_has_no_range_of_its_own",
    "powersgd_is_exact_where_the_sum_has_no_higher_rank",
    "powersgd_of_too_low_a_rank_is_not",
    "what_was_applied_and_what_is_left_make_up_all_gradients",
    "something_is_left",
    "descent_reaches_the_optimum_with_feedback_and_not_without",
    "payload_is_the_rings",
    "payload_of_powersgd_is_that_of_its_factors",
    "payload_of_top_k_is_indices_and_values_to_all_others",
    "payload_of_blocks_is_the_ring_of_those_that_are_sent",
)
"""Of compressed sums, on one rank, two and three."""

TABLE: tuple[Thorough, ...] = (
    Thorough("tests/replica/test_step_graph.py::test_a_graphs_run_has_the_bits_of_a_plain_one", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_short_steps.py::test_graphs_have_the_same_bits", PARITY, but_first=True),
    Thorough("tests/replica/test_step_graph.py::test_each_size_is_traced_once_as_it_comes", PARITY, but_first=True),
    Thorough("tests/engine/test_graph_engines.py", PARITY, but_first=True),
    Thorough("tests/engine/test_torch_settings.py::test_processes_of_the_local_engine", COMMANDS),
    Thorough("tests/engine/ray/test_ray_torch_settings.py", COMMANDS),
    Thorough("tests/engine/ray/test_push_stream.py::test_streams_that_break_and_then_none_at_all", KILLS),
    Thorough("tests/engine/ray/test_push_stream.py::test_replicas_on_other_hosts_send_bytes", PARITY),
    Thorough("tests/engine/local/test_local_loops.py::test_the_line_of_a_loop_that_fails_is_named", COMMANDS),
    Thorough("tests/engine/serving/test_serving_page.py::test_the_program_of_the_page_serves_and_joins", PROGRAMS),
    Thorough(
        "tests/engine/serving/test_serving.py::test_under_every_policy_all_may_leave_and_others_come",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/engine/serving/test_serving_failures.py::test_what_a_loop_raises_is_its_own_and_the_server_notes_it",
        KILLS,
    ),
    Thorough(
        "tests/engine/serving/test_serving_failures.py::test_a_server_that_is_killed_ends_those_that_have_joined", KILLS
    ),
    Thorough(
        "tests/engine/serving/test_serving_failures.py::test_who_dies_before_training_begins_is_replaced_by_who_joins",
        KILLS,
    ),
    Thorough(
        "tests/engine/serving/test_serving_failures.py::test_who_is_silent_for_too_long_is_told_that_the_others_have_gone_on",
        KILLS,
    ),
    Thorough("tests/engine/local/test_replica_group_failures.py::test_a_worker_that_hangs_is_missed", KILLS),
    Thorough(
        "tests/engine/local/test_replica_group_failures.py::test_a_replica_leaves_with_the_first_of_its_workers_that_is_killed",
        KILLS,
        but_first=True,
    ),
    Thorough("tests/engine/test_rendezvous.py::test_a_port_in_use_is_named", COMMANDS, but_first=True),
    Thorough(
        "tests/parameter_scheduling/test_local_workers.py::test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_said",
        KILLS,
    ),
    Thorough("tests/checkpoint/test_writer.py::test_a_folder_is_written_by_one_run_at_a_time", KILLS),
    Thorough("tests/replica/test_capture.py::test_a_graph_holds_the_models_own_tensors_by_their_names", PARITY, True),
    Thorough("tests/test_docs.py::test_the_results_page_has_the_keys_of_summaries", PROGRAMS),
    Thorough("tests/engine/local/test_start.py::test_progress_says_what_is_being_done", COMMANDS, but_first=True),
    Thorough("tests/benchmarks/test_limits.py::test_a_row_is_measured_once_and_told_on_the_page", BENCHMARK),
    Thorough("tests/benchmarks/test_limits.py::test_a_command_that_fails_ends_it", BENCHMARK),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_what_is_saved_within_a_batch_goes_on_with_all_of_it", PARITY
    ),
    Thorough("tests/engine/local/test_local_hangs.py::test_others_train_on_until_the_time_is_up", KILLS),
    Thorough("tests/engine/local/test_local_hangs.py::test_a_main_process_that_was_suspended_blames_nobody", KILLS),
    Thorough("tests/engine/local/test_local_hangs.py::test_others_make_all_their_steps_first", KILLS),
    Thorough("tests/engine/local/test_local_hangs.py::test_a_scorer_that_says_nothing_is_replaced", KILLS),
    Thorough("tests/engine/local/test_local_hangs.py::test_one_that_hangs_in_its_own_code_too", KILLS),
    Thorough("tests/engine/test_distributed_served.py::test_or_its_replica_leaves_and_the_others_go_on", KILLS),
    Thorough("tests/engine/test_distributed_served.py::test_over_replicas_of_several_workers", PARITY),
    Thorough("tests/cli/test_watch.py::test_the_page_grows_with_the_run", COMMANDS),
    Thorough("tests/cli/test_watch.py::test_the_command_serves_until_ctrl_c", COMMANDS),
    Thorough(
        "tests/replica/test_optimizer_factory.py::test_an_optimizer_is_built_without_the_compiler_which_torch_imports_as_ever_afterwards",
        COMMANDS,
    ),
    Thorough("tests/test_package.py::test_training_needs_no_extra", COMMANDS),
    Thorough("tests/test_short_forms.py::test_no_window_is_opened_and_a_notebook_shows_the_figure", COMMANDS),
    Thorough("tests/engine/test_torch_settings.py::test_processes_of_a_predictor", COMMANDS),
    Thorough("tests/planner/test_explain.py::test_policies_compete_where_replicas_are_slow_at_times", PLANNER),
    Thorough("tests/planner/test_servers.py::test_the_printed_strategy_is_the_plan", PLANNER),
    Thorough("tests/planner/test_servers.py::test_the_command_prints_a_table_of_hosts", PLANNER),
    Thorough("tests/planner/test_servers.py::test_paces_of_late_replicas_on_one_host", STATISTICS, but_first=True),
    Thorough("tests/planner/test_policies.py::test_a_deadline", STATISTICS, but_first=True),
    Thorough("tests/planner/test_policies.py::test_own_steps_of_replicas_that_are_late", STATISTICS, but_first=True),
    Thorough("tests/engine/test_tensor_refusals.py::test_a_run_says_so_too", COMMANDS),
    Thorough("tests/replica/pipeline/test_batchnorm.py::test_statistics_are_those_of_the_mini_batch", PARITY, True),
    Thorough("tests/comm/shm/test_failures.py::test_ranks_that_differ_are_all_told_the_same", KILLS, but_first=True),
    Thorough("tests/optim/test_lbfgs.py::test_owners_of_slices_exchange_numbers_alone", PARITY, but_first=True),
    Thorough("tests/test_share_workers.py::test_each_job_ends_with_the_bits_of_the_job_alone", PARITY, but_first=True),
    Thorough("tests/engine/test_model_loss.py::test_sentences_of_any_length", PARITY, but_first=True),
    Thorough("tests/callbacks/test_engines.py::test_checkpoints_are_named_once_they_are_whole", PARITY, but_first=True),
    Thorough(
        "tests/engine/test_own_loops_under_torchrun.py::test_ranks_train_what_the_plain_loop_trains", PARITY, True
    ),
    Thorough("tests/test_examples.py", PROGRAMS),
    Thorough("tests/test_ported.py::test_trains_what_the_plain_script_trains", PROGRAMS),
    Thorough("tests/test_ported.py::test_resumes_as_the_plain_script_does", PROGRAMS),
    Thorough("tests/engine/ray/test_ray_own_loops.py", PARITY, but_first=True),
    Thorough(
        "tests/engine/serving/test_serving_failures.py::test_a_process_that_is_killed_leaves_the_others_going",
        KILLS,
        but_first=True,
    ),
    Thorough("tests/engine/serving/test_serving_failures.py::test_ctrl_c_at_a_process_ends_it_alone", KILLS),
    Thorough("tests/engine/serving/test_serving_failures.py::test_ctrl_c_before_anybody_has_joined", KILLS),
    Thorough("tests/engine/serving/test_serving_failures.py::test_a_server_that_is_stopped_is_given_up", KILLS),
    Thorough("tests/engine/serving/test_serving_page.py::test_the_command_ends_by_ctrl_c", COMMANDS),
    Thorough("tests/test_docs.py::test_notebooks_run", PROGRAMS),
    Thorough(
        "tests/test_docs.py::test_the_site_builds_without_a_warning", "builds all pages and executes the notebooks"
    ),
    Thorough("tests/accelerator/test_process_group.py", PARITY),
    Thorough("tests/benchmarks/test_gradient_blocks.py", BENCHMARK),
    Thorough("tests/benchmarks/test_reducers.py", BENCHMARK),
    Thorough("tests/benchmarks/test_sandblaster.py", BENCHMARK),
    Thorough("tests/accelerator/test_cpp_device.py", "builds an extension in C++, which takes half a minute"),
    Thorough(
        "tests/integrations/test_integrations.py::test_accumulates_and_resumes_as_the_plain_script_does", COMMANDS
    ),
    Thorough("tests/integrations/test_integrations.py::test_a_budget_ends_training_and_nothing_else", COMMANDS),
    Thorough(
        "tests/integrations/test_integrations.py::test_where_a_is_at_a_server_the_optimizers_state_is_not_saved_and_it_says_so_once",
        COMMANDS,
    ),
    Thorough("tests/test_combinations.py", "every policy over every form of replica on four engines"),
    Thorough("tests/test_readme.py::test_programs_in_the_text_run_as_they_stand", PROGRAMS),
    Thorough("tests/test_readme.py::test_examples_run_from_anywhere", PROGRAMS, but_first=True),
    Thorough("tests/test_planning_page.py", PROGRAMS),
    Thorough("tests/test_hugging_face.py::test_in_parts", PARITY, but_first=True),
    Thorough("tests/test_predict.py::test_the_output_is_that_of_one_process", PARITY, but_first=True),
    Thorough("tests/test_predict.py::test_a_run_a_folder_and_a_state_say_what_is_asked", COMMANDS),
    Thorough("tests/test_predict.py::test_ranks_that_torchrun_started_all_have_the_output", COMMANDS),
    Thorough("tests/test_predict.py::test_the_command_refuses_what_is_no_input", COMMANDS),
    Thorough("tests/cli/test_end_to_end.py", COMMANDS, but_first=True),
    Thorough(
        "tests/callbacks/test_engines.py::test_what_a_callback_raises_ends_the_run_and_names_it", KILLS, but_first=True
    ),
    Thorough("tests/report/test_page.py::test_whatever_is_missing_is_left_out", PARITY),
    Thorough("tests/benchmarks/test_gpu.py::test_a_row_in_small", BENCHMARK),
    Thorough("tests/benchmarks/test_gpu.py::test_torchs_sides_have_one_rank_where_two_would_share_a_device", BENCHMARK),
    Thorough("tests/benchmarks/test_gpu.py::test_a_side_that_does_less_is_refused", BENCHMARK),
    Thorough("tests/benchmarks/test_hybrid.py", BENCHMARK),
    Thorough("tests/benchmarks/test_reliability.py::test_a_row_in_small", BENCHMARK),
    Thorough("tests/benchmarks/test_hostile_files.py::test_none_is_read_and_none_runs_code", BENCHMARK),
    Thorough("tests/benchmarks/test_wrong_launches.py", BENCHMARK),
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
    Thorough("tests/planner/test_calibrated_plans.py", PLANNER),
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
    Thorough("tests/engine/test_shared_parameters.py::test_it_is_the_whole_optimizer", PARITY),
    Thorough("tests/engine/test_shared_parameters.py::test_it_sends_no_a", PARITY),
    Thorough("tests/engine/test_shared_parameters.py::test_a_replica_reads_what_it_can_not_write", PARITY),
    Thorough("tests/engine/test_shared_parameters.py::test_where_the_memory_can_not_be_had_a_is_gathered", PARITY),
    Thorough("tests/engine/test_shared_parameters.py::test_a_model_of_the_users_is_theirs_again", PARITY),
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
    Thorough("tests/engine/local/test_elastic.py::test_an_epoch_is_exact_though_replicas_die", KILLS),
    Thorough("tests/engine/local/test_elastic.py::test_an_epoch_is_exact_over_a_break", KILLS),
    Thorough("tests/engine/ray/test_ray_elastic.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_portions.py", PARITY),
    Thorough("tests/engine/ray/test_ray_pull_ahead.py", PARITY),
    Thorough("tests/engine/local/test_local_portions.py::test_it_goes_on_in_the_middle_of_a_search", PARITY),
    Thorough("tests/engine/local/test_local_portions.py::test_lbfgs_makes_torchs_steps", PARITY),
    Thorough("tests/engine/local/test_local_portions.py::test_it_does_over_synchronous_replicas", PARITY),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_they_are_a_round_of_as_many_replicas", PARITY, but_first=True
    ),
    Thorough(
        "tests/engine/local/test_local_portions.py::test_a_death_in_the_middle_of_a_batch_changes_no_bit",
        KILLS,
        but_first=True,
    ),
    Thorough("tests/engine/local/test_local_checkpoints.py::test_updates_wait_for_a_copy_under_way", PARITY),
    Thorough("tests/comm/test_hierarchical.py::test_two_hosts_of_two_ranks", PARITY),
    Thorough("tests/engine/local/test_on_death.py::test_an_exception_is_a_death_where_asked", KILLS),
    Thorough("tests/engine/test_distributed_served.py::test_so_does_one_that_is_stopped", KILLS),
    Thorough("tests/cli/test_scale.py::test_a_run_is_scaled_up_and_down", COMMANDS),
    Thorough("tests/engine/local/test_own_states.py::test_a_run_that_was_cut_ends_as_one_that_was_not", PARITY),
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
    Thorough("tests/engine/local/test_local_resources.py::test_files_do_not_pile_up", KILLS),
    Thorough("tests/engine/local/test_local_loops.py::test_without_a_guard", COMMANDS),
    Thorough("tests/engine/local/test_local_loops.py::test_a_script_may_train_as_often_as_it_likes", COMMANDS),
    Thorough("tests/engine/local/test_local_models.py", "25 workers, and a million parameters", but_first=True),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_pipelines_do_what_virtual_time_says", PARITY, but_first=True
    ),
    Thorough("tests/engine/local/test_replica_group.py::test_and_so_do_shards", PARITY, but_first=True),
    Thorough("tests/engine/ray/test_ray_clusters.py", "a Ray cluster of two nodes"),
    Thorough("tests/engine/ray/test_ray_failures.py", KILLS, but_first=True),
    Thorough("tests/engine/ray/test_ray_checkpoints.py", KILLS),
    Thorough("tests/engine/ray/test_ray_groups.py", KILLS),
    Thorough("tests/engine/ray/test_ray_servers.py", KILLS),
    Thorough("tests/engine/ray/test_ray_compression.py", PARITY),
    Thorough("tests/engine/ray/test_ray_hosts.py", "Ray clusters of three network namespaces"),
    Thorough("tests/engine/ray/test_ray_own_states.py", KILLS),
    Thorough("tests/engine/ray/test_ray_standbys.py", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_it_may_die_between_any_two_messages", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_again_and_again", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_no_acknowledged_update_is_lost", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_large_deltas_are_read_from_the_object_store", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_two_deaths_in_a_row_end_the_run", KILLS),
    Thorough("tests/engine/ray/test_ray_standby.py::test_while_replicas_are_replaced", KILLS),
    Thorough("tests/engine/ray/test_ray_callbacks.py", KILLS),
    Thorough("tests/engine/ray/test_ray_suspects.py", KILLS),
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
    Thorough("tests/comm/shm/test_collectives.py::test_tensors_around_the_stage_and_above", PARITY),
    Thorough(
        "tests/comm/shm/test_collectives.py::test_combines_every_dtype_by_every_operation", PARITY, but_first=True
    ),
    Thorough("tests/comm/shm/test_collectives.py::test_moves_every_dtype_through_small_stages", PARITY, but_first=True),
    Thorough("tests/engine/test_distributed_parity.py", PARITY, but="2-*"),
    Thorough("tests/engine/local/test_local_kills.py::test_under_every_policy", KILLS, but_first=True),
    Thorough("tests/engine/local/test_local_kills.py::test_the_fork_server", KILLS),
    Thorough("tests/engine/local/test_local_records.py::test_more_points_than_any_queue_holds", "600 evaluations"),
    Thorough("tests/engine/ray/test_ray_runs.py", "starts a Ray; `make test` trains on one once", but_first=True),
    Thorough("tests/engine/ray/test_ray_parity.py", PARITY, but_first=True),
    Thorough("tests/replica/test_capture.py::test_sequences_may_be_of_another_length", PARITY),
    Thorough(
        "tests/replica/test_capture.py::test_a_graph_is_the_model_for_batches_of_any_size", PARITY, but_first=True
    ),
    Thorough("tests/replica/test_capture.py::test_a_graph_captured_under_autocast_is_the_model_under_autocast", PARITY),
    Thorough("tests/replica/test_capture.py::test_evaluation_is_a_graph_of_its_own", PARITY, but_first=True),
    Thorough(
        "tests/replica/pipeline/test_pipelined_models.py::test_five_steps_equal_one_process", PARITY, but_first=True
    ),
    Thorough("tests/engine/test_virtual_checkpoints.py::test_under_any_policy", PARITY, but_first=True),
    Thorough("tests/engine/test_virtual_checkpoints.py::test_over_a_network_whose_hosts_come_and_go", PARITY),
    Thorough("tests/planner/test_policies.py::test_equations_are_what_is_simulated", STATISTICS, but_first=True),
    Thorough("tests/planner/test_policies.py::test_synchronous", STATISTICS),
    Thorough("tests/planner/test_policies.py::test_k_sync", STATISTICS, but="exponential:*"),
    Thorough("tests/planner/test_policies.py::test_k_async", STATISTICS),
    Thorough("tests/planner/test_policies.py::test_k_batch_async", STATISTICS),
    Thorough("tests/planner/test_policies.py::test_asynchronous", STATISTICS, but="exponential:*"),
    Thorough("tests/planner/test_policies.py::test_backups", STATISTICS),
    Thorough("tests/planner/test_policies.py::test_stale_synchronous_is_its_recurrence", STATISTICS),
    Thorough("tests/planner/test_answer.py::test_the_best_is_never_affected_and_all_stand_for_themselves", PLANNER),
    Thorough("tests/replica/pipeline/test_cut.py::test_parts_chained_are_the_model", PARITY, but_first=True),
    Thorough("tests/replica/pipeline/test_pipelined.py::test_five_steps_equal_one_process", PARITY, but_first=True),
    Thorough(
        "tests/replica/pipeline/test_stage_replicas.py::test_five_steps_equal_one_process", PARITY, but_first=True
    ),
    Thorough(
        "tests/replica/pipeline/test_pipelined_models.py::test_what_is_made_again_is_the_same",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/replica/pipeline/test_async_stage.py::test_two_versions_are_what_their_formula_says",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/replica/pipeline/test_async_stage.py::test_pipedream_is_what_its_formula_says", PARITY, but_first=True
    ),
    Thorough("tests/replica/test_handover.py::test_a_model_taken_over_is_the_same", PARITY, but_first=True),
    Thorough("tests/replica/test_compilation.py::test_a_compiled_run_is_the_plain_one", PARITY, but_first=True),
    Thorough(
        "tests/replica/test_compilation.py::test_sizes_that_come_later_are_compared_and_leave_no_trace",
        PARITY,
        but_first=True,
    ),
    Thorough("tests/replica/tensor/test_models.py::test_shards_are_the_model", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_branches.py::test_branches_are_the_model", PARITY, but_first=True),
    Thorough(
        "tests/replica/tensor/test_user_rules.py::test_an_operator_is_divided_as_asked_and_the_model_stays_the_same",
        PARITY,
        but="*-2",
    ),
    Thorough("tests/replica/tensor/test_rules_losses.py::test_losses_of_elements", PARITY, but="*-3"),
    Thorough("tests/replica/tensor/test_rules_losses.py::test_cross_entropy_of_probabilities", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_rules_losses.py::test_nll_of_log_softmax", PARITY, but_first=True),
    Thorough("tests/test_show_shards.py::test_what_it_says_is_what_shards_hold_and_do", PARITY, but_first=True),
    Thorough(
        "tests/engine/local/test_local_parity.py::test_processes_in_lockstep_are_one_process", PARITY, but="[agt]*-4"
    ),
    Thorough(
        "tests/engine/local/test_local_parallel_update.py::test_rounds_made_in_parts_are_those_of_one_process",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/engine/local/test_local_parallel_update.py::test_a_round_is_neither_lost_nor_made_twice",
        KILLS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/local/test_local_kills.py::test_at_any_moment_each_delta_is_applied_once_or_discarded",
        KILLS,
        but="1-*",
    ),
    Thorough(
        "tests/engine/local/test_local_checkpoints.py::test_replicas_of_several_workers_go_on_under_any_policy",
        PARITY,
        but_first=True,
    ),
    Thorough("tests/engine/local/test_start.py::test_workers_import_what_the_fork_server_cannot", KILLS),
    Thorough("tests/engine/test_sandblaster.py::test_lbfgs_makes_torchs_steps", PARITY, but="2-5-*"),
    Thorough("tests/engine/test_virtual_policies.py::test_two_names_of_one_thing", PARITY, but="*-momentum"),
    Thorough("tests/engine/test_virtual_policies.py::test_rounds_of_those_that_are_in_time", PARITY, but="*-momentum"),
    Thorough(
        "tests/engine/test_model_loss.py::test_compiled", "compiles C++, which takes some twenty seconds each time"
    ),
    Thorough("tests/engine/test_wait_thread.py::test_a_process_may_end_before_its_threads", COMMANDS),
    Thorough("tests/optim/test_optim_engines.py::test_processes_are_one_process", PARITY, but="*-3"),
    Thorough(
        "tests/optim/test_optim_engines.py::test_every_policy_in_virtual_time_and_in_processes", PARITY, but_first=True
    ),
    Thorough("tests/parameter_scheduling/test_own_program.py::test_the_example_runs_in_processes", PROGRAMS),
    Thorough(
        "tests/parameter_scheduling/test_local_workers.py::test_faults_of_a_program_are_the_same_in_both",
        KILLS,
        but="virtual-*",
    ),
    Thorough("tests/parameter_scheduling/test_lasso.py::test_processes_compute_the_same_bits", PARITY),
    Thorough("tests/integrations/test_integrations.py::test_trains_what_the_plain_script_trains", COMMANDS),
    Thorough("tests/integrations/test_integrations.py::test_fewer_batches_than_replicas_are_refused", COMMANDS),
    Thorough("tests/integrations/test_integrations.py::test_arguments_that_start_ddp_are_refused", COMMANDS),
    Thorough("tests/test_predict.py::test_the_command_reads_a_file_and_writes_one", COMMANDS),
    Thorough("tests/test_policy_page.py::test_the_program_without_a_model_runs", PROGRAMS),
    Thorough("tests/test_share_workers.py::test_a_killed_share_goes_on_as_if_it_had_not_been", KILLS, but="4"),
    Thorough("tests/test_share_workers.py::test_a_signal_ends_it_also_while_jobs_that_had_slices_are_read", KILLS),
    Thorough(
        "tests/test_predict.py::test_what_fails_in_a_worker_reaches_the_caller_and_leaves_nobody", KILLS, but="dies-*"
    ),
    Thorough(
        "tests/engine/test_pipeline_parity.py::test_the_local_engine_starts_the_stages_itself", PARITY, but="mlp-3"
    ),
    Thorough("tests/engine/local/test_local_resources.py::test_two_engines_at_once", "starts two fork servers"),
    Thorough("tests/accelerator/test_engines.py::test_no_step_of_two_ranks_waits_for_the_device", PARITY),
    Thorough("tests/accelerator/test_engines.py::test_a_killed_worker_process_is_replaced", KILLS),
    Thorough("tests/planner/test_explain.py::test_policies_compete_where_a_divided_optimizer_is_faster_too", PLANNER),
    Thorough("tests/cli/test_plan.py::test_delays_let_policies_compete", PLANNER),
    Thorough(
        "tests/engine/test_distributed_zero1.py::test_each_worker_holds_what_the_formulas_say", PARITY, but_first=True
    ),
    Thorough(
        "tests/engine/test_noise_scale.py::test_the_local_engine_tells_what_virtual_time_tells",
        PARITY,
        but="replicas=3 *",
    ),
    Thorough("tests/engine/test_own_loops.py::test_equals_the_plain_loop", PARITY, but="2-*"),
    Thorough("tests/engine/test_own_loops.py::test_one_local_replica_equals_steps_of_paceline", PARITY, but_first=True),
    Thorough(
        "tests/engine/test_own_loops.py::test_refuses_what_own_gradients_cannot_do",
        "imports the compiler",
        but="*settings[013]*",
    ),
    Thorough("tests/callbacks/test_engines.py::test_local", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_models.py::test_attention_is_divided_by_heads", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_rules_losses.py::test_cross_entropy_of_classes", PARITY, but="*-3"),
    Thorough(
        "tests/replica/tensor/test_rules_losses.py::test_cross_entropy_of_classes_weighed_and_in_more_dims",
        PARITY,
        but_first=True,
    ),
    Thorough(
        "tests/replica/tensor/test_functionalize.py::test_a_residual_network_is_divided_as_if_nothing_were_in_place",
        PARITY,
    ),
    Thorough("tests/engine/local/test_own_states.py::test_however_a_replica_is_cut", KILLS),
    Thorough("tests/planner/test_servers.py::test_servers_compete_with_all_reduce_where_replicas_are_late", PLANNER),
    Thorough(
        "tests/engine/test_noise_scale.py::test_a_known_covariance_is_found_within_five_percent",
        STATISTICS,
        but_first=True,
    ),
    Thorough(
        "tests/engine/test_noise_scale.py::test_gradients_of_different_versions_are_told_to_be_biased", STATISTICS
    ),
    Thorough(
        "tests/benchmarks/test_scheduling.py::test_jobs_that_learn_at_different_speeds_gain_from_unequal_turns",
        BENCHMARK,
    ),
    Thorough("tests/benchmarks/test_hostile_files.py::test_a_sound_checkpoint_is_read_in_all_ways", BENCHMARK),
    Thorough("tests/engine/test_model_loss.py::test_in_parts", PARITY, but="loss-stages=2 shards=2*"),
    Thorough("tests/comm/shm/test_drop_in.py::test_meshes_of_two_by_two", PARITY),
    Thorough("tests/comm/shm/test_drop_in.py::test_fully_sharded", PARITY, but="*half*"),
    Thorough("tests/comm/shm/test_drop_in.py::test_four_ranks_but_for_the_order_of_sums", PARITY, but="*d-args[02]"),
    Thorough("tests/accelerator/test_engines.py::test_no_step_waits_for_the_device", PARITY),
    Thorough("tests/cli/test_watch.py::test_a_run_is_shown_from_its_start_to_its_end", PARITY),
    Thorough("tests/parameter_scheduling/test_matrix_factorization.py::test_processes_compute_the_same_bits", PARITY),
    Thorough("tests/engine/test_tensor_loose.py::test_equals_one_process", PARITY, but_first=True),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_one_replica_on_its_own_is_one_process",
        PARITY,
        but="stages=2 shards=2 *",
    ),
    Thorough("tests/engine/local/test_start.py::test_one_rank_captures_a_model_where_main_does_not", PARITY),
    Thorough(
        "tests/aggregation/test_state_codec.py::test_every_state_of_a_run_is_the_same_afterwards",
        CASES,
        but_first=True,
    ),
    Thorough(
        "tests/replica/test_short_steps.py::test_graphs_have_the_bits_of_steps_as_they_are", PARITY, but_first=True
    ),
    Thorough("tests/replica/test_short_steps.py::test_workers_have_graphs_of_what_is_pure", PARITY, but_first=True),
    Thorough("tests/replica/test_capture.py::test_each_node_belongs_to_a_module_of_the_model", CASES, but_first=True),
    Thorough("tests/replica/test_capture.py::test_capturing_leaves_no_trace", CASES, but_first=True),
    Thorough(
        "tests/engine/ray/test_server_state.py::test_the_same_events_make_the_same_state_also_from_a_copy",
        CASES,
        but_first=True,
    ),
    Thorough("tests/replica/tensor/test_plan_search.py::test_random_graphs", CASES, but_first=True),
    Thorough("tests/replica/pipeline/test_costs.py::test_measuring_leaves_no_trace", CASES, but_first=True),
    Thorough(
        "tests/engine/local/test_own_states.py::test_what_replicas_go_on_with_is_what_they_had", PARITY, but_first=True
    ),
    Thorough(
        "tests/engine/local/test_own_states.py::test_each_replica_has_a_state_of_its_own_in_the_checkpoint", PARITY
    ),
    Thorough(
        "tests/schedule/test_identities.py::test_plans_of_uneven_stages_that_wait_for_each_other_are_exact",
        CASES,
        but_first=True,
    ),
    Thorough("tests/schedule/test_identities.py::test_plans_of_uneven_stages_are_a_little_off", CASES, but_first=True),
    Thorough("tests/schedule/test_dependencies.py::test_nothing_begins_later_than_in_a_chain", CASES, but_first=True),
    Thorough("tests/checkpoint/test_writer.py::test_every_dtype_comes_back", CASES, but_first=True),
    Thorough("tests/accelerator/test_engines.py::test_one_process", PARITY, but_first=True),
    Thorough("tests/engine/test_virtual_loops.py::test_a_loop_trains_as_train_does", PARITY, but_first=True),
    Thorough(
        "tests/replica/tensor/test_rules_normalisation.py::test_a_norm_over_divided_channels_sends_a_few_numbers_a_row",
        CASES,
        but_first=True,
    ),
    Thorough("tests/replica/test_iterables.py::test_a_run_is_that_of_the_function", PARITY, but_first=True),
    Thorough("tests/replica/test_optimizer_state.py::test_its_steps_are_the_same_bits", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_elimination.py::test_none_cost_less", CASES, but_first=True),
    Thorough(
        "tests/comm/shm/test_collectives.py::test_several_groups_interleaved_in_other_orders", PARITY, but_first=True
    ),
    Thorough(
        "tests/replica/pipeline/test_stage_graph.py::test_it_has_the_bits_of_plain_passes", PARITY, but_first=True
    ),
    Thorough("tests/replica/tensor/test_frozen.py::test_a_layer_whose_terms_are_summed", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_float_targets.py::test_shards_are_the_model", PARITY, but_first=True),
    Thorough("tests/replica/pipeline/test_pipelined.py::test_what_is_made_again_is_the_same", PARITY, but_first=True),
    Thorough("tests/test_loaders.py::test_a_run_is_that_of_its_data_set", PARITY, but_first=True),
    Thorough("tests/replica/tensor/test_sharding_plan.py::test_none_is_cheaper", CASES, but_first=True),
    Thorough(
        "tests/replica/tensor/test_redistribute.py::test_value_gradient_and_collectives_are_those_of_the_table",
        CASES,
        but_first=True,
    ),
    Thorough(
        "tests/replica/tensor/test_rules_losses.py::test_a_classifier_never_gathers_its_logits", CASES, but_first=True
    ),
    Thorough("tests/replica/tensor/test_models.py::test_a_batch_may_have_another_size", PARITY),
    Thorough("tests/engine/local/test_local_timers.py::test_a_late_replica_holds_nobody_up", CASES, but_first=True),
    Thorough("tests/engine/test_fragments.py::test_an_overlap_equals_a_plain_loop", PARITY, but_first=True),
    Thorough("tests/comm/shm/test_drop_in.py::test_pipelines", PARITY, but_first=True),
    Thorough(
        "tests/engine/local/test_start.py::test_main_captures_a_model_for_all_its_workers", PARITY, but_first=True
    ),
    Thorough(
        "tests/parameter_scheduling/test_lasso.py::test_the_optimum_is_that_of_scikit_learn", CASES, but_first=True
    ),
    Thorough(
        "tests/parameter_scheduling/test_lasso.py::test_correlated_columns_at_once_diverge_and_the_check_prevents_it",
        CASES,
        but_first=True,
    ),
    Thorough("tests/engine/local/test_start.py::test_progress_says_that_a_new_fork_server_imports", COMMANDS),
    Thorough("tests/engine/local/test_local_resources.py::test_a_comparison_has_one_fork_server", COMMANDS),
    Thorough("tests/comm/test_linux.py::test_what_was_freed_can_be_given_back", LARGE),
    Thorough("tests/checkpoint/test_fingerprint.py::test_another_process_has_the_same", COMMANDS),
    Thorough("tests/engine/local/test_local_resources.py::test_an_engine_by_name_is_closed_after_the_run", COMMANDS),
    Thorough("tests/engine/serving/test_serving_page.py::test_the_command_serves", COMMANDS),
    Thorough("tests/test_loaders.py::test_workers_of_processes_read_from_a_loader", COMMANDS),
    Thorough(
        "tests/engine/test_tensor_parity.py::test_what_is_saved_is_whole_and_goes_on_in_another_number_of_shards",
        PARITY,
    ),
    Thorough("tests/test_show_shards.py::test_a_run_keeps_to_its_rules_and_holds_what_the_table_says", PARITY),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_own_steps_of_shards_clip_by_the_norm_of_the_whole", PARITY
    ),
    Thorough("tests/engine/test_tensor_parity.py::test_what_the_shards_send_is_in_the_trace", PARITY),
    Thorough("tests/test_predict.py::test_another_form_of_input_is_captured_anew", LARGE),
    Thorough("tests/replica/pipeline/test_cut.py::test_wherever_they_are_cut", LARGE),
    Thorough("tests/planner/test_servers.py::test_terms_add_up_and_are_not_negative", PLANNER),
    Thorough("tests/planner/test_lower_bounds.py::test_nothing_is_below_its_bounds", PLANNER),
    Thorough("tests/planner/test_event_simulation.py::test_as_action_by_action", PLANNER),
    Thorough("tests/planner/test_multi_job.py::test_no_other_way_is_done_sooner", PLANNER),
    Thorough("tests/test_share_workers.py::test_the_page_s_program_gives_the_quick_job_more_turns", PROGRAMS),
    Thorough(
        "tests/parameter_scheduling/test_own_program.py::test_the_page_s_program_finds_the_five_coefficients", PROGRAMS
    ),
    Thorough("tests/parameter_scheduling/test_own_program.py::test_the_example_finds_what_liblinear_finds", PROGRAMS),
    Thorough("tests/test_tensor_page.py::test_what_it_writes_by_hand_fits_its_program", PROGRAMS),
    Thorough("tests/engine/serving/test_serving_failures.py::test_ctrl_c_at_the_server_ends_all_with_a_run", KILLS),
    Thorough("tests/parameter_scheduling/test_local_workers.py::test_ctrl_c_ends_them", KILLS),
    Thorough("tests/parameter_scheduling/test_local_workers.py::test_a_worker_that_fails_has_its_traceback", KILLS),
    Thorough("tests/engine/local/test_local_resources.py::test_nor_where_runs_fail", KILLS),
    Thorough("tests/planner/test_policies.py::test_k_batch_sync", STATISTICS),
    Thorough("tests/planner/test_stage_division.py::test_a_micro_batch_takes_the_longest_round_trip", PLANNER),
    Thorough("tests/planner/test_explain.py::test_what_it_takes_when_nothing_fits_is_the_least", PLANNER),
    Thorough("tests/report/test_page.py::test_many_workers_and_long_tails_stay_small", LARGE),
    Thorough("tests/trace/test_picture.py::test_many_spans_stay_small", LARGE),
    Thorough("tests/engine/serving/test_serving.py::test_what_a_loader_draws_is_what_it_drew_before", LARGE),
    Thorough("tests/engine/local/test_own_states.py::test_they_move_between_engines", LARGE),
    Thorough("tests/engine/test_batch_dispatcher.py::test_an_epoch_is_exact_whoever_dies", LARGE),
    Thorough("tests/planner/test_policies.py::test_stale_synchronous_without_slack_is_synchronous", STATISTICS),
    Thorough("tests/planner/test_policies.py::test_own_steps", STATISTICS),
    Thorough("tests/report/test_page.py::test_where_gradients_were_looked_at_the_page_tells_of_batch_sizes", LARGE),
    Thorough("tests/report/test_page.py::test_several_sources_are_several_sections", LARGE),
    Thorough("tests/report/test_page.py::test_a_loss_over_decades_has_a_logarithmic_axis", LARGE),
    Thorough("tests/report/test_page.py::test_pipelines_and_others_share_a_page", LARGE),
    Thorough("tests/report/test_page.py::test_work_that_is_unknown_is_not_drawn_as_none", LARGE),
    Thorough("tests/report/test_page.py::test_dependencies_of_parts_are_explained", LARGE),
    Thorough("tests/report/test_page.py::test_a_pipeline_is_drawn_as_a_step_beside_its_ideal", LARGE),
    Thorough(
        "tests/test_share_workers.py::test_what_is_complete_is_returned_again_and_a_larger_budget_goes_on", COMMANDS
    ),
    Thorough("tests/test_share_workers.py::test_and_in_processes_on_one_engine", PARITY),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_smooth_switch_that_waits_for_all_is_synchronous_training_of_pipelines",
        PARITY,
    ),
    Thorough("tests/engine/local/test_replica_group.py::test_masks_of_pipelines_are_those_of_their_replica", PARITY),
    Thorough("tests/engine/local/test_replica_group.py::test_masks_of_shards", PARITY),
    Thorough(
        "tests/engine/local/test_replica_group.py::test_stages_of_different_numbers_of_shards", PARITY, but_first=True
    ),
    Thorough("tests/engine/local/test_replica_group.py::test_a_replica_that_is_called_off_within_a_gradient", KILLS),
    Thorough(
        "tests/replica/test_capture.py::test_an_output_of_transformers_has_its_attributes_and_says_what_is_not_in_it",
        LARGE,
    ),
    Thorough("tests/engine/test_distributed_served.py::test_one_that_pulls_ahead_computes_with_the_a_before", PARITY),
    Thorough("tests/engine/test_distributed_served.py::test_a_silent_replica_leaves_where_that_is_asked_for", KILLS),
    Thorough("tests/engine/test_distributed_served.py::test_a_run_goes_on_with_its_checkpoint", COMMANDS),
    Thorough("tests/comm/shm/test_drop_in.py::test_checkpoints", PARITY),
    Thorough("tests/comm/shm/test_collectives.py::test_two_threads", LARGE),
    Thorough(
        "tests/replica/pipeline/test_cut.py::test_a_part_that_computes_something_else_is_noticed", CASES, but_first=True
    ),
    Thorough(
        "tests/engine/local/test_on_death.py::test_replicas_of_several_workers_can_be_left_out_of_one_update", KILLS
    ),
    Thorough("tests/replica/tensor/test_models.py::test_some_parameters_may_be_frozen", PARITY, but_first=True),
    Thorough("tests/engine/local/test_elastic.py::test_gangs_come_and_go", KILLS),
    Thorough(
        "tests/engine/local/test_local_failures.py::test_under_hogwild_it_is_named_by_the_replica_that_had_it",
        CASES,
        but_first=True,
    ),
    Thorough(
        "tests/engine/test_own_loops_under_torchrun.py::test_goes_on_from_the_state_of_the_script_s_optimizer", PARITY
    ),
    Thorough(
        "tests/engine/test_own_loops_under_torchrun.py::test_a_script_that_joins_alone_draws_what_it_would_have_drawn",
        PARITY,
    ),
    Thorough("tests/engine/test_own_loops_under_torchrun.py::test_a_second_ctrl_c_is_raised_at_once", KILLS),
    Thorough("tests/planner/test_predict.py::test_outcomes_of_asked_rows_are_not_looked_at", PLANNER),
    Thorough("tests/planner/test_predict.py::test_measured_rows_that_can_not_be_used_are_left_out", PLANNER),
    Thorough("tests/planner/test_predict.py::test_whatever_stands_in_cells_has_an_answer_or_a_reason", PLANNER),
    Thorough("tests/planner/test_predict.py::test_a_device_with_less_memory_than_is_needed_is_predicted", PLANNER),
    Thorough(
        "tests/engine/test_noise_scale.py::test_while_a_moves_it_is_the_mean_noise_by_the_mean_signal", STATISTICS
    ),
    Thorough("tests/engine/test_noise_scale.py::test_stages_that_go_on_by_themselves_are_looked_at_whole", PARITY),
    Thorough("tests/parameter_scheduling/test_local_workers.py::test_a_worker_that_is_killed_is_named", KILLS),
    Thorough("tests/benchmarks/test_smooth_switch.py::test_another_reading_has_a_folder_of_its_own", BENCHMARK),
    Thorough("tests/benchmarks/test_smooth_switch.py::test_an_effect_counts_and_averages", BENCHMARK),
    Thorough("tests/benchmarks/test_smooth_switch.py::test_needed_runs_come_round_after_round", BENCHMARK),
    Thorough("tests/benchmarks/test_smooth_switch.py::test_curves_are_drawn_without_what_diverged", BENCHMARK),
    Thorough("tests/test_strategy.py::test_toml_there_and_back", LARGE),
    Thorough("tests/engine/local/test_suspects.py::test_or_left_out", KILLS),
    Thorough("tests/engine/local/test_suspects.py::test_otherwise_it_is_named_and_waited_for", KILLS),
    Thorough("tests/replica/pipeline/test_async_stage.py::test_a_stream_that_ends_before_it_is_full", LARGE),
    Thorough("tests/engine/test_tensor_loose.py::test_what_is_not_finite_is_discarded", LARGE),
    Thorough(
        "tests/engine/local/test_start.py::test_single_samples_are_refused_where_the_model_does_something_else_with_them",
        COMMANDS,
    ),
    Thorough("tests/comm/shm/test_messages.py::test_tags_out_of_order", LARGE),
    Thorough(
        "tests/engine/test_model_loss.py::test_a_loss_that_is_no_mean_over_samples_can_not_be_cut_into_micro_batches",
        LARGE,
    ),
    Thorough("tests/benchmarks/test_decoupled.py", BENCHMARK),
    Thorough("tests/engine/test_tensor_parity.py::test_no_process_has_the_memory_of_what_is_divided", PARITY),
    Thorough("tests/planner/test_servers.py::test_the_report_says_who_is_where_and_what_to_run", PLANNER),
    Thorough("tests/replica/pipeline/test_branches.py::test_five_steps_equal_one_process", PARITY, but_first=True),
    Thorough("tests/engine/ray/test_push_stream.py::test_of_one_version_a_comes_once", CASES, but_first=True),
    Thorough("tests/engine/test_distributed_zero1.py::test_weights_that_stages_share_stay_one", PARITY),
    Thorough(
        "tests/engine/local/test_local_hangs.py::test_a_stopped_worker_is_named_with_those_who_wait_for_it", KILLS
    ),
    Thorough("tests/optim/test_lbfgs.py::test_it_finds_the_optimum", CASES, but_first=True),
    Thorough("tests/planner/test_gpu_plans.py::test_all_that_is_named_runs", PLANNER, but_first=True),
    Thorough("tests/planner/test_gpu_plans.py::test_unbuilt_plans_have_no_command", PLANNER),
    Thorough("tests/engine/local/test_local_timers.py::test_a_round_is_open_when_the_run_is_cut", LARGE),
    Thorough("tests/benchmarks/test_scheduling.py::test_the_check_prevents_divergence", BENCHMARK),
    Thorough("tests/test_tensor_page.py::test_the_tables_are_what_is_printed", PROGRAMS),
    Thorough("tests/test_docs.py::test_the_json_page_has_every_key", PROGRAMS),
    Thorough(
        "tests/integrations/test_integrations.py::test_without_its_package_a_module_says_what_to_install", COMMANDS
    ),
    Thorough("tests/planner/test_search.py::test_nor_where_the_batch_may_vary", PLANNER),
    Thorough("tests/engine/local/test_local_command.py::test_main_killed_while_it_trains", KILLS),
    Thorough("tests/engine/local/test_replica_group_failures.py::test_ctrl_c_ends_all_workers", KILLS),
    Thorough(
        "tests/engine/local/test_replica_group_failures.py::test_counts_and_staleness_of_teams_that_run_freely", LARGE
    ),
    Thorough("tests/replica/pipeline/test_pipelined_models.py::test_fewer_rows_of_another_length", LARGE),
    Thorough("tests/comm/test_device_memory.py::test_who_allocates_frees_it_with_the_last_tensor", LARGE),
    Thorough("tests/replica/test_short_steps.py::test_a_constant_of_the_first_batch_is_found_on_the_second", LARGE),
    Thorough("tests/replica/test_step_graph.py::test_what_a_graph_would_lose_is_refused", CASES, but_first=True),
    Thorough("tests/planner/test_explain.py::test_all_policies_that_are_offered_can_be_had", PLANNER),
    Thorough("tests/planner/test_explain.py::test_the_smallest_change_that_fits", PLANNER, but_first=True),
    Thorough(
        "tests/replica/tensor/test_collectives.py::test_a_layer_of_a_transformer_takes_two_each_way",
        CASES,
        but_first=True,
    ),
    Thorough("tests/engine/serving/test_serving.py::test_neither_sockets_nor_threads_nor_memory_are_left", COMMANDS),
    Thorough("tests/replica/tensor/test_branches.py::test_another_number_of_samples", PARITY),
    Thorough("tests/engine/test_sandblaster.py::test_the_end_is_the_last_accepted_point_and_its_record", LARGE),
    Thorough("tests/engine/local/test_local_parity.py::test_and_for_what_a_program_may_have", PARITY, but_first=True),
    Thorough(
        "tests/aggregation/test_policy_contract.py::test_only_what_has_no_sample_is_discarded", CASES, but_first=True
    ),
    *(Thorough(f"tests/comm/test_compression.py::test_{name}", PARITY, but="P=2*") for name in COMPRESSED),
    *(Thorough(f"tests/replica/tensor/test_rules_{name}.py::test_every_way", PARITY, but_first=True) for name in RULES),
)


BY_NAME = {entry.name: entry for entry in TABLE}


def is_thorough(name: str, seen: set[str]) -> bool:
    """Return whether a test is left to `make test-all`.

    Args:
        name: its node id.
        seen: entries of which the first test has come along already; grows.
    """
    function, _, parameters = name.partition("[")
    entry = BY_NAME.get(function) or BY_NAME.get(name.partition("::")[0])
    if entry is None or (entry.but and fnmatchcase(parameters.removesuffix("]"), entry.but)):
        return False
    if entry.but_first and entry.name not in seen:
        seen.add(entry.name)
        return False
    return True


def shard_of(name: str, count: int) -> int:
    """Return which of so many shards has a test, from 1 on.

    Tests of a file that have the same parameters are in the same one: they share fixtures, which may start processes.
    """
    function, _, parameters = name.partition("[")
    key = function.partition("::")[0] + parameters if parameters else function
    return 1 + int(hashlib.sha256(key.encode()).hexdigest(), 16) % count
