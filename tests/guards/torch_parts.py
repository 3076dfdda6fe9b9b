"""Private parts of torch without which lockstep does less, or does not start: no feature is refused by them.

Those by which a feature is refused are in `lockstep.ground.torch_support` and in the extensions' files `torch_parts`.
"""

from __future__ import annotations

from lockstep.ground.torch_support import Part

CARE = "used with care"
OPTIONAL = "nothing: it may be missing"

PARTS = (
    # the core
    Part(
        "torch.utils._pytree",
        "data/combined.py data/stream.py data/window.py engines/sharded/sharded_init.py",
        "the tensors of a nested batch, and the batch again",
        CARE,
    ),
    Part(
        "torch.nn.modules.batchnorm._BatchNorm",
        "callbacks/finetuning.py engines/ddp/sync_batchnorm.py",
        "which layers have statistics of batches",
        CARE,
    ),
    Part(
        "torch.nn.modules.batchnorm._NormBase",
        "ground/parameters.py engines/sharded/fully_shard.py",
        "as above, instance norms included",
        CARE,
    ),
    Part(
        "torch.nn.Module._load_from_state_dict",
        "ground/parameters.py",
        "whether a layer reads its state in a way of its own",
        CARE,
    ),
    Part("torch.nn.Module._load_state_dict_pre_hooks", "ground/parameters.py", "as above", CARE),
    Part("torch.nn.Module._non_persistent_buffers_set", "loop/window_start.py", "buffers that no state_dict has", CARE),
    Part(
        "torch.UntypedStorage._cdata",
        "checkpoint/io.py ground/transfer.py engines/",
        "which tensors share memory",
        CARE,
    ),
    Part("torch._foreach_mul_", "engines/ddp/bucket.py precision/base.py", "scaling", CARE),
    Part("torch._foreach_copy_", "loop/window_start.py engines/ddp/bucket.py", "copies of many tensors", CARE),
    Part("torch._foreach_zero_", "engines/ddp/bucket.py", "the places of absent gradients", CARE),
    Part("torch._foreach_neg_", "engines/ddp/bucket.py", "the places of absent gradients", CARE),
    Part(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "loop/step_watch.py",
        "whether an optimizer can be watched",
        CARE,
    ),
    Part("torch.optim.Optimizer._optimizer_step_post_hooks", "engines/owners.py", "which of them runs first", CARE),
    Part("torch.utils.data._utils.worker.WorkerInfo", "data/stream.py", "a worker that reads a part of a stream", CARE),
    Part(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers_done_event",
        "data/workers.py",
        "a worker that died, and the samples that it was to fetch",
        CARE,
    ),
    Part(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
        "data/workers.py",
        "as above",
        CARE,
    ),
    Part(
        "torch._C._storage_Use_Count",
        "ground/transfer.py engines/ddp/bucket.py",
        "whether memory is used elsewhere",
        CARE,
    ),
    Part("torch.autograd.profiler._is_profiler_enabled", "loop/update.py", "whether a profile names phases", CARE),
    Part(
        "torch.distributed.distributed_c10d._abort_process_group",
        "engines/ranks.py",
        "to leave a group whose collectives wait for a lost rank",
        OPTIONAL,
    ),
    Part(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "memory/recompute.py",
        "layers that torch's own wrapper recomputes",
        OPTIONAL,
    ),
    Part("torch.utils._triton.has_triton", "precision/formats.py", "whether layers can be compiled", OPTIONAL),
    Part("torch._dynamo", "loop/compiled.py loop/spawn_results.py", "whether anything is compiled", CARE),
    Part("torch._dynamo.eval_frame.OptimizedModule", "loop/compiled.py", "the module that was compiled", CARE),
    Part("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "loop/compiled.py", "as above", CARE),
    Part("torch.nn.Module._compiled_call_impl", "ground/methods.py", "module.compile()", CARE),
    Part("torch.distributed.ProcessGroup._device_types", "supervise/traced_groups.py", "a group's backends", CARE),
    Part(
        "torch.distributed.distributed_c10d._get_object_coll_device",
        "supervise/traced_groups.py",
        "the backend of a collective of objects",
        CARE,
    ),
    Part("torch._C._get_accelerator", "supervise/traced_groups.py", "the backend of a barrier", CARE),
    Part(
        "torch.distributed.ProcessGroup._get_sequence_number_for_group",
        "supervise/traced_groups.py",
        "the number of a collective",
        CARE,
    ),
    Part("torch.cuda._is_in_bad_fork", "ground/device.py", "CUDA used before ranks are forked", CARE),
    # the extension extras
    Part(
        "torch.nn.Module._forward_pre_hooks", "extensions/extras/pruning.py", "the masks of torch.nn.utils.prune", CARE
    ),
    Part(
        "torch.nn.utils.prune.BasePruningMethod._tensor_name",
        "extensions/extras/pruning.py",
        "the parameter that a mask is for",
        CARE,
    ),
    Part("torch._foreach_mul", "extensions/extras/weight_averaging.py", "averages of weights", CARE),
    Part("torch._foreach_add_", "extensions/extras/weight_averaging.py", "averages of weights", CARE),
    # the extension parallel
    Part(
        "torch.autograd.profiler._is_profiler_enabled",
        "extensions/parallel/container.py",
        "whether a profile names phases",
        CARE,
    ),
    Part(
        "torch.distributed.tensor.parallel.ddp._pre_dp_module_transform",
        "extensions/parallel/wrapping.py",
        "a module that is tensor-parallel within replicas",
        CARE,
    ),
    Part("torch.distributed.DeviceMesh._get_root_mesh", "extensions/parallel/wrapping.py", "as above", CARE),
    Part("torch._dynamo", "extensions/parallel/container.py", "whether anything is compiled", CARE),
    Part("torch._dynamo.eval_frame.OptimizedModule._orig_mod", "extensions/parallel/container.py", "as above", CARE),
    Part("torch.nn.Module._compiled_call_impl", "extensions/parallel/container.py", "module.compile()", CARE),
    Part("torch.distributed.rpc._is_current_rpc_agent_set", "extensions/parallel/", "distributed autograd", CARE),
    Part("torch.distributed.autograd._current_context", "extensions/parallel/", "as above", CARE),
    # the extension balancing
    Part(
        "torch.utils._pytree",
        "extensions/balancing/plans/choice.py",
        "the tensors of a nested batch, and the batch again",
        CARE,
    ),
    Part(
        "torch.nn.modules.batchnorm._BatchNorm",
        "extensions/balancing/balance/balance.py extensions/balancing/pipeline/strategy.py",
        "which layers have statistics of batches",
        CARE,
    ),
    Part(
        "torch.nn.Module._non_persistent_buffers_set",
        "extensions/balancing/pipeline/moves.py",
        "buffers that no state_dict has",
        CARE,
    ),
    Part("torch.UntypedStorage._cdata", "extensions/balancing/planner/trace.py", "which tensors share memory", CARE),
    Part(
        "torch.distributed.pipelining.stage.PipelineStage._warmup_forward_vote",
        "extensions/balancing/pipeline/stages.py",
        "a message between stages of several devices, before the first step",
        OPTIONAL,
        since="2.12",
    ),
    Part(
        "torch.distributed.pipelining.stage.PipelineStage._get_init_p2p_neighbors_ops",
        "extensions/balancing/pipeline/stages.py",
        "a message between ranks that one process has nobody for",
        OPTIONAL,
    ),
    Part(
        "torch.distributed.pipelining.stage.PipelineStage._get_grad_send_meta",
        "extensions/balancing/pipeline/stages.py",
        "whether a stage without a gradient sends zeros by itself",
        OPTIONAL,
        since="2.13",
    ),
    Part(
        "torch.distributed.pipelining.schedules._PipelineSchedule._initialize_pipeline_distributed_state",
        "extensions/balancing/pipeline/stages.py",
        "stages of several devices",
        OPTIONAL,
        since="2.15",
    ),
    Part(
        "torch.distributed.pipelining.stage.PipelineStage._user_meta",
        "extensions/balancing/pipeline/stages.py",
        "whether a frozen stage waits for a gradient",
        OPTIONAL,
        since="2.12",
    ),
    Part(
        "torch.autograd._engine_run_backward",
        "extensions/verify/functions.py",
        "the mode that verifies a script, active in what a backward calls in Python",
        CARE,
    ),
)
