"""The sweeps: tests that assert the same over many cases, and the cases of each that `make test` runs.

The rest of their cases get the marker `sweep`, which `make test-all` runs each night, or `exhaustive` where
that would take too long. Kept here, and so run for each change, are one case of each path through the code
(stages that differ in what they shard, eager and compiled, Inductor where its own code is what the test is
about) and of each class of input. A sweep that is not in this table runs whole in `make test`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

KEPT: dict[str, tuple[str, ...]] = {
    "step/test_what_plans_say.py::test_what_a_plan_says_is_what_runs": ("0.85-checkpointed-3",),
    "loop/test_steps.py::test_a_loop_of_ones_own_tells_what_is_known": ("by_torchloom-3",),
    "memory/test_expand.py::test_peaks_of_bodies_are_measured_as_predicted": ("3",),
    "numerics/test_region_lengths.py::test_every_length_has_the_same_calls": ("shown",),
    "simulation/test_simulate.py::test_the_plan_is_that_of_real_ranks_to_the_byte": ("4-2-AdamW",),
    "checkpoints/test_others.py::test_plain_torch_reads_it_by_the_names_of_state_dict": ("3-3", "1-2"),
    "loop/test_optimizer_states.py::test_states_are_whole_and_go_on_with_other_ranks": ("3-2-3-adamw", "2-3-2-sgd"),
    "shard/test_direct_uses.py::test_sums_beside_modules_train_as_in_one_process": (
        "total-1-engine-aot_eager", "stacked-3-own loop-None", "weighed-3-engine-None",
    ),
    "shard/test_direct_uses.py::test_what_sees_one_part_is_refused_and_is_right_on_whole_ones": (
        "norms-aot_eager", "root-None",
    ),
    "shard/test_direct_uses.py::test_terms_inside_of_forward": ("norms-aot_eager-False",),
    "loop/test_clip.py::test_norms_equal_those_of_one_process": ("stages0", "stages1"),
    "engine/test_stage3_files.py::test_two_steps": ("warmup, both offloaded",),
    "shard/test_shard_tensor.py::test_other_ranks_read_what_ranks_wrote": ("2-3", "2-1"),
    "docs/test_blocks.py::test_programs_run": (
        "docs/howto/memory_budget.md-budget", "docs/howto/pretrained.md-load", "docs/howto/report.md-watch",
        "docs/howto/serving.md-serve", "docs/migrating/fsdp2.md-shard", "docs/migrating/vllm.md-decorator",
        "docs/tutorial.md-train",
    ),
    "engine/test_symmetric_weights.py::test_whoever_writes_all_ranks_read_it": ("precision1-surgery", "precision0-swap"),
    "engine/test_symmetric_weights.py::test_the_plan_knows_that_weights_take_no_room": (
        "aot_eager-precision0",
    ),
    "engine/test_symmetric_weights.py::test_weights_that_leave_or_are_patched_are_copies": (
        "aot_eager",
    ),
    "engine/test_ragged_budget.py::test_ranks_with_other_batches_train_under_a_budget": (
        "3-0.1-later",
    ),
    "checkpoints/test_folder.py::test_killed_while_a_tag_is_replaced": ("0-True",),
    "shard/test_saved_tensors.py::test_a_forward_without_backward_keeps_nothing": ("3-aot_eager",),
    "serve/builder/test_split.py::test_exact_sizes_have_programs_of_their_own": ("eager",),
    "serve/builder/test_split.py::test_a_cache_is_written_and_read_through_views": ("False",),
    "faults/test_groups_without_tags.py::test_ranks_that_differ_are_told_before_the_next_step_ends": (
        "another_layer-aot_eager", "another_order-",
    ),
    "faults/test_ranks_that_recompile_alone.py::test_lengths_differ_between_ranks": ("3-True",),
    # stages x backends x ranks: both stages that shard weights otherwise, both backends, two and three ranks
    "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses": ("3-aot_eager-3",),
    "engine/test_copies.py::test_a_copy_has_its_own_weights": (
        "0-None", "1-aot_eager", "3-None", "3-aot_eager",
    ),
    "engine/test_copies.py::test_a_copy_runs_inside_of_the_originals_forward": ("0", "3"),
    "engine/test_lower_precision.py::test_norms_with_running_statistics": ("1-None-bf16", "3-aot_eager-fp16"),
    "engine/test_transforms.py::test_compiled": ("3-Tangent",),
    "engine/test_transforms.py::test_in_python": ("0-Slope", "2-Jacobian", "3-Dual"),
    "engine/test_transforms.py::test_functional_calls_use_the_tensors_that_they_are_given": (
        "0-False", "1-True", "3-True",
    ),
    # every program at the stage that gathers, one at each other stage
    "loop/test_frames.py::test_functions_that_dynamo_gives_up": ("loops-3", "lstm-2"),
    "loop/test_frames.py::test_forward_takes_gradients": ("2-2",),
    "engine/test_engines_that_end.py::test_engines_one_after_another": ("aot_eager-dropped-Broken",),
    "engine/test_engines_inside_engines.py::test_each_parameter_is_treated_as_its_own_engine_says": (
        "1-0-offload0", "3-1-offload3",
    ),
    "engine/test_parts_in_python.py::test_no_whole_weight_waits_for_backward": (
        "aot_eager-Traced-Disabled-Disabled-Disabled", "aot_eager-Checkpointed-Traced-Checkpointed",
    ),
    "engine/test_whole_plan.py::test_gathering_weights_anew_is_part_of_the_peak": (
        "True-aot_eager",
    ),
    "engine/test_unlike_ranks.py::test_unfreezing": ("-0", "aot_eager-3"),
    "engine/test_unlike_ranks.py::test_backward_passes_that_one_rank_alone_takes": (
        "a second backward-1", "the boundary-0",
    ),
    "engine/test_unlike_ranks.py::test_models_on_meta_in_different_parts": ("parts1-True", "parts2-False"),
    "engine/test_unlike_ranks.py::test_an_extra_step_of_an_engines_optimizer": ("None-3", "1-3"),
    "loop/test_offload_states.py::test_bit_identical_with_accumulation_and_clipping": ("1-SGD", "3-AdamW"),
    "engine/test_offload_activation.py::test_bit_identical_also_with_random_delays_and_poison": ("3",),
    "engine/test_offload_activation.py::test_models_of_all_kinds": ("checkpointed", "in_place"),
    "engine/test_free_activation.py::test_models_of_all_kinds": ("in_place",),
    # where in an epoch: at its first batch, inside, at its last, after it; each kind of data, both of `drop`
    "checkpoints/test_loader.py::test_goes_on_in_the_middle_of_an_epoch": (
        "1-False-Numbers", "4-False-Stream", "7-True-Stream", "8-True-Tracking",
    ),
    "checkpoints/test_loader.py::test_iterable_data_on_other_ranks_and_batches": (
        "before1-after1-None-DividedPieces", "before2-after2-8-Positioned", "before3-after3-4-Divided",
    ),
    "checkpoints/test_loader.py::test_passes_without_epochs_go_on_where_they_were": ("at1-Stream", "at2-Numbers"),
    "checkpoints/test_accumulation.py::test_gradients_in_the_middle_of_an_accumulation": ("2",),
    # killed before, inside and after each of two files
    "checkpoints/test_export.py::test_killed_while_an_export_is_replaced": ("600-2000",),
    "shard/test_writes.py::test_a_write_into_a_cast_weight_is_refused": (
        "0-2-False", "3-2-True", "3-1-False",
    ),
    # each stage at two ranks, one rank and four ranks with and without accumulation
    "numerics/test_regions.py::test_equal_layers_train_as_in_the_flat_graph": ("llama-3",),
    "numerics/test_regions.py::test_odd_layers_train_as_in_the_flat_graph": ("3",),
    "numerics/test_region_layouts.py::test_gradients_may_lie_in_any_order": ("over length",),
    "engine/test_planned_regions.py::test_budgets_are_kept_by_few_bodies": ("0",),
    "numerics/test_equality_with_ddp.py::test_eager_fused_with_clipping": ("3-1-0", "1-2-1", "3-2-3"),
    "numerics/test_equality_with_ddp.py::test_compiled_aot_eager": ("1-2-1", "3-2-3"),
    "numerics/test_equality_with_ddp.py::test_compiled_inductor": ("2-1-3",),
    "numerics/test_symmetric_memory.py::test_two_ranks_bitwise": ("1-aot_eager", "2-None", "3-aot_eager"),
    "numerics/test_symmetric_memory.py::test_three_ranks": ("3-aot_eager",),
    "numerics/test_symmetric_memory.py::test_sixteen_bits_and_skipped_steps": (
        "precision0-aot_eager", "precision1-None",
    ),
    # models: each class of operators and of results once
    "memory/test_exact_peak.py::test_the_prediction_is_the_measurement": (
        "conv", "in_place", "lora", "mlp_bf16", "mlp_no_bias_odd", "two_results",
    ),
    "memory/test_alive.py::test_groups_add_up_to_the_peak": ("False-in_place", "True-checkpointed"),
    "plan/test_frontier.py::test_budgets_are_kept_and_peaks_fall_with_them": (
        "mlp", "gpt2_tied", "frozen",
    ),
    "plan/test_frontier.py::test_points_are_measured_as_predicted": ("vit",),
    "plan/test_together.py::test_what_pays_only_together_is_found": ("mlp",),
    # architectures of transformers: a decoder, one with grouped heads, tied weights, an encoder
    "integrations/test_serve_hf.py::test_prefill_of_any_length_for_any_batch": ("qwen3",),
    "integrations/test_zoo.py::test_losses_are_those_of_eager_steps_in_one_graph": ("t5", "vit"),
    "step/test_both_doors.py::test_equal_plans_graphs_and_losses": ("schedule",),
    "engine/test_second_plan.py::test_a_second_plan_that_fails_on_one_rank_leaves_the_first": ("would_change",),
    "step/test_own_loops.py::test_updates_that_leave_no_trace_are_read": ("by hand-2",),
    "step/test_own_loops.py::test_steps_of_whoever_steps_the_parameters_move_the_schedule": ("True",),
    "engine/test_compile_schedule.py::test_residents_are_gathered_once_per_optimizer_step": ("3",),
    "engine/test_offload_parameters.py::test_bit_identical_alone_and_with_everything": ("aot_eager-3",),
    "runtime/test_c10d_buckets.py::test_buckets_of_a_compiled_model_save_collectives": ("3",),
    "faults/test_ranks_that_fail.py::test_the_launcher_exits_non_zero": ("killed-",),
    # The loops of frameworks: a run, its files and resume, and its ranks are tests of their own, which stay.
    "integrations/test_lightning.py::test_each_entry_after_each_other_equals_ddp": ("3",),
    "simulation/test_simulate.py::test_transfers_hide_behind_layers_of_real_size": ("none-compiling0",),
    "integrations/test_serve_hf.py::test_stock_models_are_served_from_one_row_and_one_token_on": ("vit",),
    "shard/test_user_copies.py::test_whole_weights_are_written_and_shards_refuse": ("True-set_rows", "False-assign"),
    "loop/test_offload_states.py::test_checkpoints_do_not_know_where_states_live": ("True-False",),
    "engine/test_engine.py::test_users_optimizer_object_and_factory": ("0", "3"),
    "engine/test_engine.py::test_bf16_stays_close_to_fp32": ("1", "3"),
    "engine/test_engine.py::test_a_broken_pass_falls_back_and_says_so_once": ("aot_eager",),
    "engine/test_step_events.py::test_a_step_tells_its_numbers_and_ranks_tell_the_same": ("1-0", "2-3"),
    "engine/test_step_events.py::test_recompiles_are_counted": ("aot_eager",),
    "engine/test_shared_parameters.py::test_what_is_cut_is_refused": ("True-stages4", "False-stages2", "True-stages0"),
    "engine/test_aborted_forward.py::test_tied_weights_are_gathered_anew": ("KeyboardInterrupt-3", "ValueError-0"),
    "engine/test_aborted_forward.py::test_compiled_weights_are_not_read_before_they_are_written": ("True",),
    "engine/test_unlike_ranks.py::test_a_step_left_out_in_a_loop_of_ones_own": ("True-True", "False-False"),
    "engine/test_unlike_ranks.py::test_one_rank_loads_weights_whose_changes_all_ranks_keep": ("3",),
    "engine/test_unlike_ranks.py::test_weights_that_one_rank_alone_loads": ("True-3", "False-1"),
    "engine/test_unlike_ranks.py::test_a_copy_that_one_rank_keeps_may_load": ("2",),
    "engine/test_non_finite.py::test_a_spoiled_step_is_skipped_on_all_ranks": (
        "3-fp16-None-True-2", "3-fp32-aot_eager-False-1", "1-bf16-None-False-1", "0-fp32-None-True-1",
    ),
    "engine/test_non_finite.py::test_raise": ("fp16-1", "fp32-3", "bf16-3"),
    "engine/test_twins.py::test_one_inside_the_other_has_its_own_weights": ("True-True", "False-False"),
    "engine/test_shared_loss.py::test_what_was_scaled_otherwise_is_refused_beside_an_own_backward": (
        "False-1", "True-3",
    ),
    "engine/test_symmetric_weights.py::test_no_gather_is_left_and_the_bytes_are_counted": ("aot_eager",),
    "engine/test_autocast.py::test_the_section_of_the_config_is_autocast_around_forward": ("None",),
    "engine/test_user_backward.py::test_user_backward_is_the_engines": ("aot_eager",),
    "engine/test_interrupted_step.py::test_a_hook_that_raises": ("3-aot_eager", "0-None"),
    "engine/test_late_gradients.py::test_first_gradients_that_come_late": ("3-offload2", "1-offload3"),
    "engine/test_kept_dtypes.py::test_float64_stays": ("compiled",),
    "engine/test_compile_schedule.py::test_edits_appear_in_forward_and_backward": ("aot_eager",),
    "loop/test_plan_check.py::test_predicted_and_measured_are_compared_once": ("0-1", "3-2"),
    "loop/test_plan_check.py::test_a_loop_without_an_engine_measures_its_peak": ("3-2",),
    "loop/test_slices.py::test_equal_to_whole_states_with_half_of_them": ("aot_eager",),
    "loop/test_slices.py::test_a_closure_runs_on_whole_weights_once": ("False",),
    "loop/test_elementwise.py::test_closures_at_every_stage": ("LBFGS",),
    "loop/test_elementwise.py::test_a_function_is_given_a_list_of_parameters_that_it_may_group": ("0",),
    "faults/test_alone.py::test_a_call_of_rank_0_alone_is_where_it_stops": (
        "evaluate-3-aot_eager-without gradients", "save-2-None-for whole weights",
    ),
    "faults/test_different_programs.py::test_compiled": ("another_layer-gloo",),
    "faults/test_different_programs.py::test_two_models_of_own_loops_and_equal_names_in_another_order": ("3-True",),
    "faults/test_different_programs.py::test_optimizers_that_step_with_other_numbers": ("own_loop-plateau-words0",),
    "checkpoints/test_continue.py::test_continues_bitwise": ("0", "3"),
    "checkpoints/test_continue.py::test_other_world_size_and_stage": (
        "before1-after1", "before3-after3", "before4-after4",
    ),
    "checkpoints/test_accumulation.py::test_accumulated_gradients_on_other_ranks_and_stages": (
        "before1-after1", "before3-after3",
    ),
    "checkpoints/test_loader.py::test_epochs_go_on_where_they_were": ("at1", "at3"),
    "examples/test_examples.py::test_a_program_of_the_readme_prints_what_the_readme_says": ("see.py",),
    "serve/builder/test_slices.py::test_slices_are_written_for_all_sizes": ("prove-3",),
    "serve/builder/test_padding.py::test_what_is_in_the_padding_does_not_reach_results": ("nan",),
    "pipeline/test_races.py::test_a_wrong_graph_never_runs_and_is_never_cached": ("aot_eager",),
    "deepcompile/test_profile.py::test_other_graphs_of_a_step_count": ("1",),
    "deepcompile/test_profile.py::test_a_pass_that_keeps_what_fits_keeps_the_budget": ("0",),
    "shard/test_direct_uses.py::test_a_head_that_the_loss_applies_itself": ("own loop-aot_eager", "engine-None"),
    "shard/test_parameter.py::test_averages_of_weights_made_after_sharding": (
        "3-by_state_dict", "2-averaged_model", "1-by_parameters",
    ),
    "shard/test_writes.py::test_a_write_is_kept_or_refused": ("0-False", "1-True", "2-False", "3-True"),
    "shard/test_writes.py::test_what_is_made_of_a_weight_may_be_written": ("True",),
    "faults/test_different_programs.py::test_eager": (
        "another_layer", "leaves_a_step_out", "gathers_alone", "evaluates_at_another_step",
    ),
    "faults/test_different_programs.py::test_shared_memory": ("leaves_a_step_out",),
    "faults/test_meeting.py::test_ranks_that_meet_again_while_the_store_of_before_is_still_served": ("0.7",),
    "runtime/test_hush.py::test_a_lost_store_prints_no_stack_within_the_block_alone": ("True",),
    "numerics/test_equality_with_ddp.py::test_eager_two_ranks_bitwise": ("1", "3"),
    "engine/test_non_finite.py::test_skips_in_a_row_have_a_limit": ("fp16",),
    "engine/test_user_backward.py::test_in_16_bits_losses_are_scaled_once": ("fp16",),
    "engine/test_writes_through_data.py::test_new_data_of_parameters_counts": ("1-True",),
    "engine/test_profiler_phases.py::test_a_trace_holds_the_phases_of_each_micro_step": ("aot_eager",),
    "engine/test_deepspeed_calls.py::test_states_go_away_and_come_back": ("aot_eager",),
    "engine/test_shared_loss.py::test_a_loss_of_two_engines_steps_both": ("3",),
    "engine/test_shared_loss.py::test_both_train_to_the_weights_of_one_process": ("1", "3"),
    "engine/test_shared_loss.py::test_gradients_of_others_that_were_dropped_do_not_count": ("module",),
    "serve/builder/test_options.py::test_passes_of_ones_own_run_by_function_or_name": ("look",),
    "serve/builder/test_generated_text.py::test_a_loaded_piece_does_what_the_model_does": ("kinds0-plain",),
    "checkpoints/test_hostile.py::test_hostile_pickles_in_every_file": ("True",),
    "report/test_page_browser.py::test_no_view_scrolls_sideways": ("390",),
    "shard/test_leaf_modules.py::test_weights_are_those_of_ddp": ("3", "1"),
    "shard/test_leaf_modules.py::test_engines_accumulate": ("3",),
    "engine/test_chunked_losses.py::test_weights_are_those_of_all_logits": ("0", "3"),
    "shard/test_leaf_modules.py::test_compiled_models_run_leaf_modules_in_python": ("3",),
}  # fmt: skip


ELSEWHERE: dict[str, str] = {
    "numerics/test_regions.py::test_inductor_trains_to_nearly_the_same":
        "engine/test_regions.py::test_a_body_is_traced_once_split_once_and_lowered_twice",
    "engine/test_ragged_regions.py::test_all_ranks_compile_the_form_of_graph_that_the_leader_compiles":
        "engine/test_ragged_budget.py::test_ranks_with_other_batches_train_under_a_budget",
    "engine/test_planned_regions.py::test_any_layers_train_under_a_budget_as_without":
        "engine/test_planned_regions.py::test_budgets_are_kept_by_few_bodies",
    "engine/test_planned_regions.py::test_code_keeps_a_budget_in_two_rounds_at_most":
        "memory/test_inductor_peak.py::test_the_peak_is_that_of_the_code",
    "engine/test_regions.py::test_weights_under_autocast_are_gathered_in_the_lower_dtype":
        "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses",
    "serve/builder/test_slices.py::test_a_cache_is_written_at_a_position_and_attended_to":
        "serve/builder/test_slices.py::test_slices_are_written_for_all_sizes",
    "docs/test_site.py::test_no_page_is_wider_than_a_phone":
        "docs/test_site.py::test_the_reference_holds_every_public_name",
    "docs/test_site.py::test_the_site_builds_without_a_warning":
        "docs/test_links.py::test_links_lead_somewhere",
    "test_pool.py::test_each_function_meets_the_state_of_a_new_process":
        "test_pool.py::test_what_cannot_be_sent_is_told",
    "pipeline/test_caches.py::test_each_code_of_one_graph_is_remembered_for_itself":
        "pipeline/test_caches.py::test_second_start_runs_no_pass",
    "faults/test_ranks_that_recompile_alone.py::test_inductor":
        "faults/test_ranks_that_recompile_alone.py::test_lengths_differ_between_ranks",
    "engine/test_whole_plan.py::test_weights_that_stay_gathered_are_counted_once_in_inductors_code":
        "memory/test_inductor_peak.py::test_the_peak_is_that_of_the_code",
    "engine/test_offload_activation.py::test_the_peak_of_inductors_code_counts_no_host_memory":
        "engine/test_offload_activation.py::test_bit_identical_also_with_random_delays_and_poison",
    "engine/test_offload_parameters.py::test_inductor_with_everything":
        "engine/test_offload_parameters.py::test_bit_identical_alone_and_with_everything",
    "examples/test_examples.py::test_text_is_generated_cold_and_warm_without_a_compile":
        "serve/store/test_store.py::test_a_new_process_traces_nothing_and_builds_nothing_and_returns_the_same_bits",
    "examples/test_examples.py::test_the_programs_of_the_page_of_ragged_batches_run":
        "engine/test_ragged_budget.py::test_ranks_with_other_batches_train_under_a_budget",
    "examples/test_examples.py::test_selective_gather_saves_gathers_within_its_budget":
        "engine/test_whole_plan.py::test_graphs_share_the_room_for_weights",
    "examples/test_examples.py::test_adaptive_prefetch_merges_gathers_where_memory_allows":
        "engine/test_whole_plan.py::test_graphs_share_the_room_for_weights",
    "examples/test_examples.py::test_fused_casts_halve_what_is_gathered":
        "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses",
    "examples/test_examples.py::test_native_example_keeps_half_of_a_model_that_was_never_whole":
        "engine/test_unlike_ranks.py::test_models_on_meta_in_different_parts",
    "engine/test_ragged_budget.py::test_graphs_whose_sizes_are_symbols_follow_as_well":
        "engine/test_ragged_budget.py::test_ranks_with_other_batches_train_under_a_budget",
    "faults/test_train_tree.py::test_workers_end_when_torchrun_is_killed":
        "faults/test_train_tree.py::test_workers_end_when_the_launcher_is_killed",
    "pipeline/test_caches.py::test_a_pass_without_identity_is_never_cached":
        "pipeline/test_caches.py::test_identity_of_own_passes",
    "memory/test_inductor_peak.py::test_what_fits_as_it_is_fits_where_activations_may_move":
        "memory/test_inductor_peak.py::test_the_peak_is_that_of_the_code",
    "plan/test_frontier.py::test_the_smallest_plan_needs_half_of_what_torch_does_with_its_best_setting":
        "plan/test_frontier.py::test_budgets_are_kept_and_peaks_fall_with_them",
    "engine/test_offload_activation.py::test_inductor_moves_what_it_would_lay_out_otherwise":
        "engine/test_offload_activation.py::test_bit_identical_also_with_random_delays_and_poison",
    "engine/test_offload_activation.py::test_random_budgets_are_kept_and_less_room_is_never_faster":
        "engine/test_offload_activation.py::test_a_budget_counts_what_stays_on_the_device",
    "engine/test_whole_plan.py::test_activations_move_only_where_that_is_needed":
        "engine/test_offload_activation.py::test_a_budget_counts_what_stays_on_the_device",
    "engine/test_whole_plan.py::test_buckets_shrink_where_memory_is_scarce":
        "engine/test_whole_plan.py::test_graphs_share_the_room_for_weights",
    "engine/test_ragged_budget.py::test_a_batch_that_outgrows_the_shared_plan_on_one_rank_says_so":
        "engine/test_ragged_budget.py::test_ranks_with_other_batches_train_under_a_budget",
    "examples/test_examples.py::test_a_server_batches_requests_of_many_clients_and_never_compiles":
        "cli/test_serve_command.py::test_from_check_to_a_miss",
    "examples/test_examples.py::test_engine_example_trains_and_resumes_on_more_ranks":
        "checkpoints/test_continue.py::test_other_world_size_and_stage",
    "examples/test_examples.py::test_a_branch_on_the_batch_is_refused_split_or_hidden":
        "serve/contract/test_dims.py::test_a_scan_over_many_sizes_is_refused_with_its_line",
    "cli/test_serve_command.py::test_cold_and_warm_starts_are_timed":
        "cli/test_serve_command.py::test_from_check_to_a_miss",
    "cli/test_doctor.py::test_the_probe_compiles":
        "cli/test_doctor.py::test_a_machine_that_works",
    "pipeline/test_bisect.py::test_the_preset_of_a_sharded_model":
        "pipeline/test_bisect.py::test_a_wrong_pass_of_ones_own",
    "faults/test_train_tree.py::test_hangup_saves_and_goes_on_and_old_checkpoints_go":
        "faults/test_train_tree.py::test_a_closed_terminal_saves_and_ends_the_run",
    "faults/test_train_tree.py::test_full_memory_is_told_with_rank_and_phase":
        "cli/test_train_faults.py::test_full_memory_is_known_by_any_of_its_names",
    "cli/test_train_end_to_end.py::test_an_interrupted_run_saves_and_resumes_exactly":
        "checkpoints/test_continue.py::test_continues_bitwise",
    "faults/test_train_tree.py::test_stopped_before_anything_is_saved":
        "faults/test_train_tree.py::test_a_closed_terminal_saves_and_ends_the_run",
    "loop/test_offload_states.py::test_room_is_made_for_states_where_links_are_slow":
        "loop/test_offload_states.py::test_the_budget_chooses_the_resident_part",
    "plan/test_frontier.py::test_the_smallest_plan_needs_no_more_than_a_checkpoint_per_block":
        "plan/test_frontier.py::test_budgets_are_kept_and_peaks_fall_with_them",
    "security/test_listening.py::test_a_run_of_the_command_train":
        "security/test_listening.py::test_a_world_of_one",
    "engine/test_offload_parameters.py::test_selective_gather_reads_pieces_on_the_host":
        "engine/test_offload_parameters.py::test_bit_identical_alone_and_with_everything",
    "engine/test_second_plan.py::test_a_graph_that_torch_captures_again_is_compared_all_the_same":
        "engine/test_second_plan.py::test_recorders_hear_that_the_plan_was_reviewed",
    "examples/test_examples.py::test_the_walk_through_shows_entries_break_and_recompile":
        "inspect/test_watch.py::test_the_entries_of_the_walk_through",
    "engine/test_whole_plan.py::test_room_that_is_left_keeps_weights_gathered":
        "engine/test_whole_plan.py::test_graphs_share_the_room_for_weights",
    "engine/test_offload_parameters.py::test_begins_and_ends_by_name":
        "engine/test_offload_parameters.py::test_the_budget_chooses_the_pieces_that_wait",
    "engine/test_offload_activation.py::test_inductor_moves_the_same_and_races_no_more":
        "engine/test_offload_activation.py::test_bit_identical_also_with_random_delays_and_poison",
    "engine/test_memory_budget.py::test_a_plan_from_a_file_is_followed":
        "step/test_both_doors.py::test_equal_plans_graphs_and_losses",
    "memory/test_inductor_peak.py::test_plans_follow_what_the_code_needs":
        "memory/test_inductor_peak.py::test_the_peak_is_that_of_the_code",
    "integrations/test_serve_hf.py::test_a_static_cache_decodes_any_batch":
        "integrations/test_serve_hf.py::test_prefill_of_any_length_for_any_batch",
    "faults/test_matrix.py::test_cases_end_to_end":
        "faults/test_matrix.py::test_a_case_that_ends_as_it_must",
    "faults/test_train_tree.py::test_a_killed_worker_is_named":
        "faults/test_ranks_that_fail.py::test_the_launcher_exits_non_zero",
    "pipeline/test_caches.py::test_an_upgrade_of_what_shapes_graphs_has_another_key":
        "pipeline/test_caches.py::test_second_start_runs_no_pass",
    "test_last_words.py::test_a_collective_of_the_program_that_loses_its_peer_is_explained":
        "faults/test_ranks_that_fail.py::test_the_launcher_exits_non_zero",
    "cli/test_calibrate.py::test_ranks_write_one_table":
        "cli/test_calibrate.py::test_collectives_are_timed_on_all_ranks",
    "serve/store/test_store.py::test_processes_that_start_together_build_once_even_if_one_is_killed":
        "serve/store/test_store.py::test_a_new_process_traces_nothing_and_builds_nothing_and_returns_the_same_bits",
    "integrations/test_trainer.py::test_ranks_generate_other_lengths_and_train_on":
        "integrations/test_accelerate.py::test_a_models_own_generate_gets_the_callers_arguments_alone",
    "examples/test_recipes.py::test_a_budget_is_kept":
        "engine/test_whole_plan.py::test_graphs_share_the_room_for_weights",
    "examples/test_recipes.py::test_adapters_are_trained_and_saved_alone":
        "integrations/test_trainer.py::test_adapters_train_and_are_all_that_is_saved",
    "examples/test_recipes.py::test_programs_of_a_decoder_generate_what_generate_does":
        "integrations/test_serve_hf.py::test_prefill_of_any_length_for_any_batch",
    "examples/test_recipes.py::test_trl_fine_tunes":
        "integrations/test_trainer.py::test_a_run_equals_ddp_and_goes_on_from_its_files",
    "examples/test_recipes.py::test_the_job_of_slurm_is_that_of_the_page_and_starts_its_tasks":
        "faults/test_slurm.py::test_tasks_are_ranks",
    "security/test_listening.py::test_ranks_that_meet_at_a_loopback_address":
        "security/test_listening.py::test_a_world_of_one",
    "examples/test_restart.py::test_killed_ranks_cost_only_steps_since_the_last_checkpoint":
        "checkpoints/test_continue.py::test_continues_bitwise",
    "examples/test_ray.py::test_a_killed_worker_costs_only_steps_since_the_last_checkpoint":
        "checkpoints/test_continue.py::test_continues_bitwise",
    "faults/test_slurm.py::test_preemption_saves_and_the_requeued_job_goes_on":
        "faults/test_slurm.py::test_tasks_are_ranks",
    "simulation/test_simulate.py::test_accumulation_repeats_micro_steps":
        "simulation/test_simulate.py::test_what_is_said_of_a_step",
    "simulation/test_simulate.py::test_checkpointed_layers_hold_less_and_compute_more":
        "simulation/test_simulate.py::test_what_is_said_of_a_step",
    "simulation/test_simulate.py::test_operators_one_by_one_take_longer":
        "simulation/test_simulate.py::test_what_is_said_of_a_step",
    "simulation/test_simulate.py::test_other_stages_keep_more_and_reduce_behind_backward":
        "simulation/test_simulate.py::test_what_is_said_of_a_step",
    "integrations/test_accelerate.py::test_two_models_and_an_evaluation_model":
        "integrations/test_entries.py::test_each_entry_after_each_other_equals_ddp",
    "integrations/test_accelerate.py::test_bf16_is_that_of_the_configuration":
        "engine/test_lower_precision.py::test_norms_with_running_statistics",
    "integrations/test_trainer.py::test_seq2seq_predicts_with_generate":
        "integrations/test_entries.py::test_each_entry_after_each_other_equals_ddp",
    "integrations/test_trainer.py::test_only_rank_0_loads_and_others_hold_nothing_before":
        "integrations/test_accelerate.py::test_a_model_of_transformers_on_meta_is_filled_as_transformers_does",
    "integrations/test_trl.py::test_a_run_equals_ddp":
        "integrations/test_trainer.py::test_a_run_equals_ddp_and_goes_on_from_its_files",
    "integrations/test_zoo_layers.py::test_every_length_has_the_same_calls":
        "numerics/test_region_lengths.py::test_every_length_has_the_same_calls",
    "examples/test_recipes.py::test_a_decoder_is_pretrained_and_goes_on_where_it_was_stopped":
        "cli/test_train_report.py::test_the_timeline_has_each_phase_of_each_step",
    "examples/test_examples.py::test_the_programs_of_the_page_of_metrics_run":
        "engine/test_step_events.py::test_a_function_gets_floats_on_rank_0_alone",
    "examples/test_examples.py::test_a_fake_is_fitted_and_checked":
        "custom_ops/test_check_op.py::test_a_right_operator_passes",
    "memory/test_inductor_peak.py::test_cached_code_without_a_known_plan_is_not_trusted":
        "memory/test_inductor_peak.py::test_the_peak_is_that_of_the_code",
    "memory/test_expand.py::test_what_policies_of_checkpoints_keep_is_known":
        "memory/test_expand.py::test_peaks_of_bodies_are_measured_as_predicted",
    "loop/test_plan_check.py::test_a_process_may_end_within_a_measured_step":
        "loop/test_plan_check.py::test_predicted_and_measured_are_compared_once",
    "loop/test_offload_states.py::test_compiled_and_switched_by_name":
        "loop/test_offload_states.py::test_the_budget_chooses_the_resident_part",
    "loop/test_slices.py::test_a_compiled_step_and_averaged_weights":
        "loop/test_slices.py::test_equal_to_whole_states_with_half_of_them",
    "engine/test_symmetric_weights.py::test_too_little_memory_for_the_weights_is_said_and_they_are_copied":
        "runtime/test_shm_faults.py::test_falls_back_to_gloo_on_all_ranks_and_says_why_once",
    "faults/test_slurm.py::test_the_loop_of_the_page_stops_all_ranks_in_one_step":
        "faults/test_slurm.py::test_tasks_are_ranks",
    "test_pool.py::test_a_failure_is_told_with_its_lines_and_values_and_the_ranks_are_replaced":
        "test_pool.py::test_what_cannot_be_sent_is_told",
    "numerics/test_regions.py::test_settings_mean_the_same":
        "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses",
    "engine/test_second_plan.py::test_a_second_plan_that_compiles_is_kept":
        "engine/test_second_plan.py::test_recorders_hear_that_the_plan_was_reviewed",
    "loop/test_frames.py::test_inductor":
        "loop/test_frames.py::test_functions_that_dynamo_gives_up",
    "runtime/test_shm_faults.py::test_a_rank_that_does_not_come_is_named":
        "faults/test_meeting.py::test_a_rank_that_never_comes_is_named",
    "faults/test_ranks_that_recompile_alone.py::test_a_rank_that_has_met_too_many_sizes_says_so":
        "faults/test_ranks_that_recompile_alone.py::test_one_rank_alone_recompiles",
    "integrations/test_accelerate.py::test_other_loops_equal_ddp":
        "integrations/test_accelerate.py::test_a_loop_equals_ddp_and_goes_on_from_its_files",
    "integrations/test_trainer.py::test_other_runs_equal_ddp":
        "integrations/test_trainer.py::test_a_run_equals_ddp_and_goes_on_from_its_files",
    "integrations/test_lightning.py::test_other_runs_equal_ddp":
        "integrations/test_lightning.py::test_a_run_equals_ddp_and_goes_on_from_its_file",
    "integrations/test_zoo_layers.py::test_architectures_train_to_the_weights_of_the_flat_graph":
        "numerics/test_regions.py::test_equal_layers_train_as_in_the_flat_graph",
    "numerics/test_regions.py::test_sharded_layers_of_other_kinds_train_as_in_the_flat_graph":
        "numerics/test_regions.py::test_equal_layers_train_as_in_the_flat_graph",
    "engine/test_second_plan.py::test_a_second_plan_that_does_not_compile_leaves_the_first":
        "engine/test_second_plan.py::test_a_second_plan_that_fails_on_one_rank_leaves_the_first",
    "engine/test_compile_schedule.py::test_a_run_resumed_later_gets_the_entry_that_is_due":
        "engine/test_compile_schedule.py::test_switching_loses_nothing_and_other_functions_keep_their_entries",
    "engine/test_autocast.py::test_compiled_trains_as_eager_code_does":
        "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses",
    "examples/test_recipes.py::test_the_notebook_runs":
        "docs/test_blocks.py::test_programs_run",
    "examples/test_recipes.py::test_an_operator_keeps_its_promises_and_changes_no_loss":
        "custom_ops/test_check_op.py::test_a_right_operator_passes",
    "faults/test_ranks_that_recompile_alone.py::test_one_rank_alone_has_more_sizes_and_modes_than_torchs_limit":
        "faults/test_ranks_that_recompile_alone.py::test_lengths_differ_between_ranks",
    "faults/test_different_programs.py::test_stages":
        "faults/test_different_programs.py::test_compiled",
    "simulation/test_simulate.py::test_copies_hold_more_gather_within_and_reduce_between":
        "simulation/test_simulate.py::test_what_is_said_of_a_step",
    "memory/test_exact_peak.py::test_measuring_says_nothing_on_the_terminal":
        "memory/test_exact_peak.py::test_the_prediction_is_the_measurement",
    "numerics/test_symmetric_memory.py::test_hybrid_sharding":
        "numerics/test_symmetric_memory.py::test_two_ranks_bitwise",
    "checkpoints/test_state.py::test_schedules_go_on":
        "checkpoints/test_continue.py::test_continues_bitwise",
    "loop/test_clip.py::test_clipping_inside_of_compiled_code":
        "loop/test_clip.py::test_norms_equal_those_of_one_process",
    "loop/test_counts.py::test_activations_are_those_of_the_engine_that_moved_them":
        "loop/test_counts.py::test_engines_count_what_they_move_themselves",
    "loop/test_plan_check.py::test_another_size_has_a_prediction_without_a_time":
        "loop/test_plan_check.py::test_predicted_and_measured_are_compared_once",
    "engine/test_free_activation.py::test_the_peak_falls_to_that_of_a_backend_that_frees":
        "engine/test_free_activation.py::test_models_of_all_kinds",
    "integrations/test_trainer.py::test_bf16_computes_in_bf16_and_keeps_fp32":
        "engine/test_lower_precision.py::test_norms_with_running_statistics",
    "integrations/test_trainer.py::test_two_ranks_then_one_then_two":
        "checkpoints/test_continue.py::test_other_world_size_and_stage",
}  # fmt: skip
"""Tests that only `make test-all` runs, with the one that shows most of the same in `make test`."""


RARE = frozenset([
    "engine/test_autocast.py::test_half_the_bytes_and_the_same_losses",
    "engine/test_engines_that_end.py::test_engines_one_after_another",
    "engine/test_offload_activation.py::test_inductor_moves_what_it_would_lay_out_otherwise",
    "engine/test_planned_regions.py::test_any_layers_train_under_a_budget_as_without",
    "engine/test_ragged_budget.py::test_a_batch_that_outgrows_the_shared_plan_on_one_rank_says_so",
    "engine/test_ragged_budget.py::test_graphs_whose_sizes_are_symbols_follow_as_well",
    "engine/test_second_plan.py::test_a_second_plan_that_does_not_compile_leaves_the_first",
    "integrations/test_serve_hf.py::test_a_static_cache_decodes_any_batch",
    "integrations/test_trainer.py::test_other_runs_equal_ddp",
    "integrations/test_trl.py::test_a_run_equals_ddp",
    "integrations/test_zoo.py::test_losses_are_those_of_eager_steps_in_one_graph",
    "memory/test_exact_peak.py::test_the_prediction_is_the_measurement",
    "memory/test_inductor_peak.py::test_plans_follow_what_the_code_needs",
    "memory/test_inductor_peak.py::test_what_fits_as_it_is_fits_where_activations_may_move",
    "numerics/test_equality_with_ddp.py::test_compiled_inductor",
    "numerics/test_regions.py::test_equal_layers_train_as_in_the_flat_graph",
    "numerics/test_regions.py::test_sharded_layers_of_other_kinds_train_as_in_the_flat_graph",
    "pipeline/test_caches.py::test_an_upgrade_of_what_shapes_graphs_has_another_key",
    "pipeline/test_caches.py::test_each_code_of_one_graph_is_remembered_for_itself",
    "step/test_both_doors.py::test_equal_plans_graphs_and_losses",
    "step/test_own_loops.py::test_updates_that_leave_no_trace_are_read",
])  # fmt: skip
"""Sweeps that take longest: beyond what `make test` runs, their cases run in `make test-exhaustive`."""


def mark_sweeps(items: Iterable[pytest.Item], folder: str = "tests/") -> list[str]:
    """Mark the cases that `make test` leaves out; return what the table names and no test has.

    Args:
        items: all that was collected, in whole files.
        folder: what node ids begin with.
    """
    unseen: dict[str, set[str]] = {}
    for item in items:
        name, _, case = item.nodeid.removeprefix(folder).partition("[")
        case = case.removesuffix("]")
        marker = pytest.mark.exhaustive if name in RARE else pytest.mark.sweep
        if name in ELSEWHERE:
            item.add_marker(marker)
        if name not in KEPT:
            continue
        unseen.setdefault(name, set(KEPT[name])).discard(case)
        if case not in KEPT[name]:
            item.add_marker(marker)
    files = {item.nodeid.removeprefix(folder).partition("::")[0] for item in items}
    names = {item.nodeid.removeprefix(folder).partition("[")[0] for item in items}
    listed = {*KEPT, *ELSEWHERE, *ELSEWHERE.values(), *RARE}
    gone = [name for name in listed - names if name.partition("::")[0] in files]
    return gone + [f"{name}[{case}]" for name, cases in unseen.items() for case in sorted(cases)]
