"""Private parts of torch that this extension uses."""

from lockstep.ground.torch_support import DDP, Part

_HERE = "extensions/parallel/"

PARTS = (
    Part("torch._C._current_graph_task_id", _HERE, "the current backward, if any", DDP),
    Part(
        "torch._C._will_engine_execute_node", f"{_HERE}backward_watcher.py", "parameters that a backward reaches", DDP
    ),
    Part("torch._C._are_functorch_transforms_active", f"{_HERE}container.py", "a forward within torch.func", DDP),
    Part("torch._C.Future", f"{_HERE}hooks/hook_transport.py", "the result of a communication hook", DDP),
    Part(
        "torch.Tensor._is_view",
        f"{_HERE}hooks/powersgd.py",
        "views that would keep a whole bucket in a hook's state",
        DDP,
    ),
    Part(
        "torch.autograd.variable.Variable._execution_engine",
        f"{_HERE}backward_watcher.py",
        "a callback at the end of a backward",
        DDP,
    ),
    Part(
        "torch.nn.parallel.distributed._BufferCommHook",
        f"{_HERE}torch_names.py",
        "an argument of torch's DistributedDataParallel",
        DDP,
    ),
    Part(
        "torch.nn.parallel.distributed._BufferCommHookLocation",
        f"{_HERE}container.py {_HERE}torch_names.py",
        "an argument of torch's DistributedDataParallel",
        DDP,
    ),
    Part("torch.distributed.algorithms.join._JoinConfig", f"{_HERE}join.py", "torch's Join", DDP),
    Part("torch.distributed.ProcessGroup._get_backend", f"{_HERE}hooks/", "the backend of a device's tensors", DDP),
    Part(
        "torch.distributed.distributed_c10d._get_default_store",
        f"{_HERE}absent_ranks.py",
        "reports of ranks after a failed collective",
        DDP,
    ),
)
