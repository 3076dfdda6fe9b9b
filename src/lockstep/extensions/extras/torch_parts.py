"""The private parts of torch that this extension uses."""

from lockstep.ground.torch_support import EVERYTHING, Part

PARTS = (
    Part(
        "torch.nn.Module._forward_pre_hooks",
        "extensions/extras/pruning.py",
        "the masks of torch.nn.utils.prune",
        EVERYTHING,
    ),
    Part(
        "torch.nn.utils.prune.BasePruningMethod._tensor_name",
        "extensions/extras/pruning.py",
        "the parameter that a mask is for",
        EVERYTHING,
    ),
    Part("torch._foreach_mul", "extensions/extras/weight_averaging.py", "averages of weights", EVERYTHING),
    Part("torch._foreach_add_", "extensions/extras/weight_averaging.py", "averages of weights", EVERYTHING),
)
