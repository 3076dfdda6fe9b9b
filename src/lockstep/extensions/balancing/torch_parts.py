"""List of the private parts of torch that the extension ``balancing`` uses."""

from lockstep.ground.torch_support import Part

PIPELINES = "BalancedStrategy"
ONE_PROCESS = "BalancedStrategy(one_process=True)"
PLAN = "strategy='auto' and lockstep plan"

_HERE = "extensions/balancing/"
_STAGE = "torch.distributed.pipelining.stage"
_SCHEDULES = "torch.distributed.pipelining.schedules"

PARTS = (
    Part("torch.distributed.tensor.DTensor._local_tensor", f"{_HERE}planner/trace.py", "a shard", PLAN),
    Part("torch.utils._python_dispatch.TorchDispatchMode", f"{_HERE}planner/trace.py", "intercepting operations", PLAN),
    Part("torch._ops.OpOverload._schema", f"{_HERE}planner/trace.py", "the name of an operation", PLAN),
    Part(
        f"{_SCHEDULES}.PipelineScheduleMulti._prepare_schedule_with_comms"
        f"|{_SCHEDULES}._PipelineScheduleRuntime._prepare_schedule_with_comms",
        f"{_HERE}pipeline/stages.py",
        "messages between stages, with the last stage on the first rank",
        PIPELINES,
    ),
    Part(
        "torch.Tensor._post_accumulate_grad_hooks",
        f"{_HERE}pipeline/split_check.py",
        "hooks on accumulated gradients",
        PIPELINES,
    ),
    Part(
        f"{_SCHEDULES}._PipelineScheduleRuntime", f"{_HERE}pipeline/stages.py", "all stages of one process", ONE_PROCESS
    ),
    Part(f"{_SCHEDULES}._Action", f"{_HERE}pipeline/stages.py", "all stages of one process", ONE_PROCESS),
    Part(f"{_SCHEDULES}._ComputationType", f"{_HERE}pipeline/stages.py", "all stages of one process", ONE_PROCESS),
    Part("torch._subclasses.fake_tensor.FakeTensorMode", f"{_HERE}planner/profile.py", "tensors without memory", PLAN),
    Part(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        f"{_HERE}plans/planning.py",
        "models that depend on values",
        PLAN,
    ),
    Part(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        f"{_HERE}plans/planning.py",
        "models that depend on values",
        PLAN,
    ),
    Part("torch.autograd._get_sequence_nr", f"{_HERE}planner/trace.py", "the forward that a backward belongs to", PLAN),
    Part("torch._C._current_autograd_node", f"{_HERE}planner/trace.py", "the forward that a backward belongs to", PLAN),
    Part(
        "torch.autograd.graph.Node._sequence_nr",
        f"{_HERE}planner/trace.py",
        "the forward that a backward belongs to",
        PLAN,
    ),
    Part("torch._ops.OpOverload._overloadpacket", f"{_HERE}planner/trace.py", "the name of an operation", PLAN),
    Part("torch.nn.Module._call_impl", f"{_HERE}pipeline/chain.py", "forward with the hooks around it", PIPELINES),
)
