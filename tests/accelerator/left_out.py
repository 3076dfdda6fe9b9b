"""What of the suite does not run on the made-up device, or on one card for all ranks, and why."""

from __future__ import annotations

from fnmatch import fnmatchcase

from lockstep.testing.devices import chosen_accelerator
from tests.tools.extensions import EXTENSIONS, is_there

DEEPSPEED = "DeepSpeed chooses its device itself, and has no such"
LIGHTNING = "compares with Lightning, which takes no such device"
SAYS = "looks for the CPU's words"
CPUS = "measures what is so on the CPU alone"
SPARSE = "the device has no sparse tensors"
DRAWN = "compares with weights that were drawn on the CPU"
LATER = "ranks agree at once by a page that they share, which a device's queue is not read by"
TIED = "its tied layers would be on two devices"
CLOCK = "plays seconds by a clock of the host's, and a device has its own"
SLOWER = "compares measured seconds, which the device's queues take"
SHARED = "is about shared memory, by which ranks average on the CPU alone"
SCRIPTS = "starts scripts that are for the CPU"
ROUNDED = "compares bf16's sums of a GPU with the CPU's"
ONE_DEVICE = "splits a model over the devices of one process, and there is one"
WAITS_FOR_GPU = "is on the CPU, for whose tensors torch's hook waits by torch.cuda.synchronize, which refuses them"
FORKED = "goes on in a copy of this process, which has begun to use the device"
LACKS = "its layer calls an operation that the device lacks"
UNPAIRED = "on a device these ranks wait for each other, and the report of a hang names them before the check can"
FRAMES = "its traceback has the device's own lines of Python, which count as the user's, as no real device's do"
THEIRS = "has tensors or a metric of its own on the CPU, as a script for a device may not"

LEFT_OUT = {
    "tests/extensions/deepspeed/test_deepspeed*": DEEPSPEED,
    "*eepspeed*": DEEPSPEED,
    "*DeepSpeed*": DEEPSPEED,
    "tests/checkpoint/test_frozen.py::test_a_resume_goes_on_to_the_same_bits[full]": DEEPSPEED,
    "tests/loop/test_fit.py::test_batches_reach_training_step_as_the_loader_made_them": "a batch is copied to a device",
    "tests/loop/test_fit_messages.py::test_the_first_line_says_devices_strategy_precision_and_folder": SAYS,
    "tests/extensions/balancing/test_balance.py::test_a_balanced_run_is_stopped_*": CLOCK,
    "tests/extensions/balancing/test_straggler_monitor.py::*": CLOCK,
    "tests/loop/test_memory.py::*": CPUS,
    "tests/loop/test_handover.py::*ddp_fork*": FORKED,
    "tests/loop/test_second_fit.py::*ddp_fork*": FORKED,
    "tests/loop/test_lazy_layers.py::test_they_train_as_layers_that_have_seen_a_batch[flags?]": DRAWN,
    "tests/loop/test_stopping.py::test_one_rank_stops_all_at_the_same_step[flags0-*": LATER,
    "tests/loop/test_stopping.py::test_one_rank_stops_all_at_the_same_step[flags1-*": LATER,
    "tests/loop/test_stopping.py::test_ctrl_c_on_one_rank_ends_all[training_step-2-*": LATER,
    "tests/loop/test_signals.py::test_one_rank_that_hears_of_it_ends_all_at_the_same_step*": LATER,
    "tests/loop/test_decisions_on_ranks.py::test_one_rank_s_clock_saves_on_all_ranks*": LATER,
    "tests/loop/test_empty_shares.py::test_a_sample_was_counted_on_ranks_that_had_borrowed_it*": THEIRS,
    "tests/loop/test_empty_shares.py::test_hooks_that_do_not_run_on_ranks_without_samples*": THEIRS,
    "tests/loop/test_empty_shares.py::test_a_padding_batch_leaves_no_trace_in_the_module": THEIRS,
    "tests/loop/test_metrics.py::test_a_metric_that_the_user_computes_on_a_rank*": THEIRS,
    "tests/loop/test_ready_made.py::test_a_list_of_ready_made_nests_was_taken_for_several*arrays*": THEIRS,
    "tests/extensions/balancing/test_balance.py::test_a_step_that_is_measured_has_one_frame*": CPUS,
    "tests/extensions/balancing/test_balance.py::test_a_resume_goes_on_with_the_shares*": SLOWER,
    "tests/extensions/balancing/test_balance.py::test_a_rank_takes_no_more_than_its_memory*": CPUS,
    "tests/loop/test_mistakes.py::*Sparse*": SPARSE,
    "tests/loop/test_signals.py::test_sigterm_behind_the_last_boundary*": LATER,
    "tests/loop/test_signals.py::test_a_job_saves_requeues_itself_and_goes_on": SCRIPTS,
    "tests/loop/test_interrupted.py::test_a_slurm_job_that_requeues_itself*": SCRIPTS,
    "tests/loop/test_fit_messages.py::test_a_study_printed_two_lines_for_each_fit*": SAYS,
    "tests/checkpoint/test_sharded.py::test_a_damaged_folder_is_named_before*": THEIRS,
    "tests/checkpoint/test_sharded.py::test_a_folder_of_another_model_is_named*": THEIRS,
    "tests/extensions/balancing/test_equivalence.py::test_a_balanced_run_is_one_process*": SLOWER,
    "tests/equivalence/test_planted_faults.py::test_a_dropped_bucket*": SHARED,
    "tests/equivalence/test_engines.py::test_in_shared_memory_no_gradient_goes*": SHARED,
    "tests/extensions/balancing/test_one_process.py::*": TIED,
    "tests/engines/test_calls_in_hooks.py::*swapped*": THEIRS,
    "tests/launch/test_fork.py::*": FORKED,
    "tests/launch/test_saved_after.py::*": FORKED,
    "tests/launch/test_spawn.py::test_the_port_where_ranks_will_meet*": FORKED,
    "tests/engines/sharded/test_fsdp_spawn.py::test_layers_made_on_the_meta_device_come_back*": FORKED,
    "tests/checkpoint/test_from_lightning.py::test_weights_and_hyperparameters_of_every_plain_kind": LIGHTNING,
    "tests/checkpoint/test_from_lightning.py::test_objects_in_them_need_weights_only_false": LIGHTNING,
    "tests/checkpoint/test_from_lightning.py::test_lightning_goes_on_from_our_checkpoint*": LIGHTNING,
    "tests/loop/test_manual.py::test_ranks_that_reduce_different_batches_are_named": UNPAIRED,
    "tests/loop/test_mistakes.py::test_an_error_of_torch_outside_of_hooks_names_the_place": FRAMES,
    "tests/loop/test_metrics.py::test_nan_disappeared_from_extremes[2-*": "tells the sign of the least of 0.0 and -0.0",
    "tests/engines/test_calls_in_hooks.py::*[fsdp-*": THEIRS,
    "tests/extensions/parallel/dp/test_strategy.py::test_own_weights_are_summed_over_the_parts": THEIRS,
    "tests/engines/test_norms.py::test_running_statistics_are_those_of_one_process*": THEIRS,
    "tests/engines/test_norms.py::test_a_fit_converts_the_layers*": THEIRS,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_what_runs_behind_the_chain*": SLOWER,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_replicas_take_one_split*": SLOWER,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_adams_states_move_with_their_blocks*": THEIRS,
    "tests/engines/test_plan.py::test_options_of_buckets_and_group_reach_them*": SHARED,
    "tests/engines/test_options.py::test_sparse_gradients_are_averaged": SPARSE,
    "tests/engines/test_late_parameters.py::*": THEIRS,
    "tests/engines/test_norms.py::test_a_layer_that_the_user_synchronized_meets*": THEIRS,
    "tests/engines/test_options.py::test_on_gloo_they_are_told_to_have_no_effect*": SAYS,
    "tests/engines/test_options.py::test_nccl_on_the_cpu_is_refused*": SAYS,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_a_slow_rank_gets_fewer_blocks*": SLOWER,
    "tests/engines/test_leave_device.py::*": CPUS,
    "tests/loop/test_resume_on_others.py::*Table*": SPARSE,
    "tests/engines/sharded/test_gathered_dtype.py::test_a_rank_alone_has*GRU*": LACKS,
    "tests/checkpoint/test_export.py::test_one_process_saves*mixtral*": LACKS,
}
"""Patterns of the tests' names, and the reason, on the made-up device."""

ON_CARD = {
    "tests/loop/test_fit_messages.py::test_the_first_line_says_devices_strategy_precision_and_folder": SAYS,
    "tests/loop/test_lazy_layers.py::test_they_train_as_layers_that_have_seen_a_batch[flags?]": DRAWN,
    "tests/loop/test_handover.py::*ddp_fork*": FORKED,
    "tests/loop/test_second_fit.py::*ddp_fork*": FORKED,
    "tests/launch/test_spawn.py::test_the_port_where_ranks_will_meet*": FORKED,
    "tests/extensions/balancing/pipeline/test_block_arguments.py::test_in_one_process": ONE_DEVICE,
    "tests/loop/test_fit.py::test_batches_reach_training_step_as_the_loader_made_them": "a batch is copied to a device",
    "tests/loop/test_memory.py::*": CPUS,
    "tests/loop/test_reload.py::test_loaders_are_asked_for_when_lightning_asks*": LIGHTNING,
    "tests/loop/test_empty_shares.py::test_a_sample_was_counted_on_ranks_that_had_borrowed_it*": THEIRS,
    "tests/loop/test_metrics.py::test_a_metric_that_the_user_computes_on_a_rank*": THEIRS,
    "tests/loop/test_metrics.py::test_nan_disappeared_from_extremes[2-*": "tells the sign of the least of 0.0 and -0.0",
    "tests/loop/test_interrupted.py::test_a_slurm_job_that_requeues_itself*": FORKED,
    "tests/launch/test_last_line.py::test_a_failure_is_told_in_40_lines*": FORKED,
    "tests/launch/test_fork.py::*": FORKED,
    "tests/engines/test_late_parameters.py::*": THEIRS,
    "tests/extensions/balancing/test_one_process.py::test_adams_states_move_with_their_blocks*": THEIRS,
    "tests/extensions/balancing/test_one_process.py::test_a_slow_device_gets_fewer_blocks*": SLOWER,
    "tests/extensions/balancing/test_one_process.py::test_where_torchs_backward_in_two_parts_is_wrong*": TIED,
    "tests/engines/test_options.py::test_on_gloo_they_are_told_to_have_no_effect*": SAYS,
    "tests/engines/test_options.py::test_nccl_on_the_cpu_is_refused*": SAYS,
    "tests/extensions/parallel/test_options_page.py::test_power_sgd_really_runs*": WAITS_FOR_GPU,
    "tests/extensions/parallel/test_options_page.py::test_local_steps_on_one_node*": SHARED,
    "tests/engines/test_plan.py::test_options_of_buckets_and_group_reach_them*": SHARED,
    "tests/engines/test_leave_device.py::*": CPUS,
    "tests/engines/test_norms.py::test_a_fit_converts_the_layers*": THEIRS,
    "tests/engines/test_norms.py::test_a_layer_that_the_user_synchronized_meets*": THEIRS,
    "tests/engines/test_norms.py::test_running_statistics_are_those_of_one_process*": THEIRS,
    "tests/engines/test_calls_in_hooks.py::*": THEIRS,
    "tests/engines/sharded/test_fsdp.py::test_a_checkpoint_goes_from_strategy_to_strategy*": THEIRS,
    "tests/engines/sharded/test_fsdp.py::test_a_policys_dtype_is_that_of_the_steps_inputs*": ROUNDED,
    "tests/extensions/balancing/pipeline/test_balanced_contract.py::test_the_same_in_one_process*": ONE_DEVICE,
    "tests/loop/test_resume_on_others.py::test_within_a_window*balanced 2 x 2-one process*": ONE_DEVICE,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_adams_states_move_with_their_blocks*": THEIRS,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_a_slow_rank_gets_fewer_blocks*": SLOWER,
    "tests/extensions/balancing/pipeline/test_resplit.py::test_what_runs_behind_the_chain*": SLOWER,
    "tests/extensions/balancing/test_equivalence.py::test_a_balanced_run_is_one_process*": SLOWER,
    "tests/equivalence/test_engines.py::test_in_shared_memory_no_gradient_goes*": SHARED,
    "tests/equivalence/test_planted_faults.py::test_a_dropped_bucket*": SHARED,
    "tests/checkpoint/test_sharded.py::test_a_checkpoint_moves*": THEIRS,
    "tests/checkpoint/test_sharded.py::test_a_damaged_folder_is_named_before*": THEIRS,
    "tests/checkpoint/test_sharded.py::test_a_folder_of_another_model_is_named*": THEIRS,
    "tests/loop/test_ready_made.py::test_a_list_of_ready_made_nests_was_taken_for_several*arrays*": THEIRS,
}
"""The same on one CUDA device that all ranks of a test share."""


def why_not(name: str, fixtures: list[str], device: str) -> str:
    """Why a test does not run on a device, or nothing.

    Args:
        name: as pytest writes it.
        fixtures: what the test asks for.
        device: the kind on which the suite runs; all tests run on the CPU.
    """
    if device == "cpu":
        return ""
    if "lightning" in fixtures:
        return LIGHTNING
    patterns = ON_CARD if device == "cuda" else LEFT_OUT
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(name, glob(pattern))), "")


def strategies(*names: str) -> list[str]:
    """Of these strategies those that the suite's device takes and whose extension is there, for a test of several."""
    absent = {name for extension, rows in EXTENSIONS.items() if not is_there(extension) for name in rows.strategies}
    on_cpu = chosen_accelerator() == "cpu"
    return [name for name in names if name not in absent and (on_cpu or "deepspeed" not in name)]


def glob(pattern: str) -> str:
    """A pattern in which brackets stand for themselves."""
    return pattern.replace("[", "[[]")
