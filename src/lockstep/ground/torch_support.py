"""What lockstep needs of torch, and where this release was tried: releases of torch, and kinds of devices.

Private parts of torch by which a feature is refused are listed with where, for what, and since when. A release may
rename one. What needs it is then refused by name where it is asked for; all else works. Private parts that are used
with care, without which lockstep does less, are listed by the tests (`tests/guards/torch_parts.py`).
"""

from __future__ import annotations

import importlib
import multiprocessing
from dataclasses import dataclass
from functools import cache

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

DDP = "DistributedDataParallel"
FSDP = "FSDPStrategy and ModelParallelStrategy"
SCALER = "precision='16-mixed'"
MEMORY = "the activations of trainer.memory()"
INIT = "drawing weights in shards"

ASKED_FOR = (DDP, FSDP, SCALER, INIT)
"""What is refused without its parts. All else is used with care: without its part it does less."""


@dataclass(frozen=True)
class Part:
    """A private part of torch.

    Attributes:
        name: with its module, and its class where it has one; names of the same thing in several releases by ``|``.
        files: that use it, below ``src/lockstep/``, by spaces.
        why: what it is used for.
        feature: what does not work without it.
        since: the oldest of the supported releases that has it.
    """

    name: str
    files: str
    why: str
    feature: str
    since: str = "2.11"


_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FSDP}._fsdp_state.FSDPState"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param.FSDPParam"
_HOOKS = "torch._C._autograd"

PARTS: tuple[Part, ...] = (
    # the DistributedDataParallel engine
    Part("torch._C._current_graph_task_id", "engines/", "whether a backward runs, and which", DDP),
    Part("torch.autograd.variable.Variable._execution_engine", "engines/", "a callback at a backward's end", DDP),
    Part(
        "torch.autograd._unsafe_preserve_version_counter",
        "engines/ddp/consistency.py",
        "buffers as rank 0 has them",
        DDP,
    ),
    Part("torch.distributed.ProcessGroup._get_backend", "engines/", "what carries a device's tensors", DDP),
    # shards by fully_shard
    Part(f"{_FSDP}._fully_shard.FSDPModule._get_fsdp_state", "engines/", "what torch keeps of a module", FSDP),
    Part(
        f"{_STATE}._fsdp_param_groups|{_STATE}._fsdp_param_group",
        "engines/sharded/fsdp_groups.py",
        "parameters that are gathered together",
        FSDP,
    ),
    Part(
        f"{_STATE}._lazy_init",
        "engines/sharded/fully_shard.py",
        "torch's setting up, before a hook calls a layer",
        FSDP,
    ),
    Part(f"{_STATE}._mp_policy", "engines/sharded/fully_shard.py", "the dtype of a module's inputs", FSDP),
    Part(
        f"{_STATE}._register_pre_backward_hook",
        "engines/sharded/fully_shard.py",
        "a backward within manual steps",
        FSDP,
    ),
    Part(f"{_STATE}._pre_forward", "engines/sharded/gathered_calls.py", "a layer that is called in a hook", FSDP),
    Part(f"{_STATE}._post_forward", "engines/sharded/gathered_calls.py", "as above", FSDP),
    Part(
        f"{_GROUP}._to_sharded",
        "engines/sharded/fully_shard.py engines/sharded/gathered_parameter.py",
        "free what is whole, and keep what steps have written there",
        FSDP,
    ),
    Part(f"{_GROUP}._to_sharded_post_forward", "engines/sharded/gathered_parameter.py", "as above", FSDP),
    Part(f"{_GROUP}._to_unsharded", "engines/sharded/gathered_parameter.py", "parameters as they are gathered", FSDP),
    Part(
        f"{_GROUP}._wait_all_gather_streams_on_event",
        "engines/sharded/gathered_parameter.py",
        "a gather behind a write",
        FSDP,
    ),
    Part(f"{_FSDP}._fsdp_common.FSDPMeshInfo", "engines/sharded/gathered_parameter.py", "this rank's part", FSDP),
    Part(f"{_PARAM}._param_fqn", "engines/sharded/gathered_parameter.py", "a parameter's name", FSDP),
    Part(
        "torch.Tensor._backward_hooks",
        "engines/sharded/fully_shard.py engines/sharded/gathered_parameter.py",
        "hooks on gradients, for the parameters that torch makes",
        FSDP,
    ),
    Part("torch._guards.TracingContext", "engines/sharded/gathered_parameter.py", "whether a graph is traced", FSDP),
    Part("torch.nn.Module._parameters", "engines/sharded/gathered_parameter.py", "what a layer has now", FSDP),
    Part(
        f"{_GROUP}.post_backward",
        "engines/sharded/fsdp_groups.py",
        "gradients of parameters that a rank did not use",
        FSDP,
    ),
    Part(f"{_PARAM}._unsharded_param", "engines/", "the whole parameter, for its gradient's hooks", FSDP),
    Part(f"{_PARAM}._module_info", "engines/", "the layers that a parameter belongs to", FSDP),
    Part("torch.distributed.tensor.DTensor._local_tensor", "ground/parameters.py", "a shard", FSDP),
    Part(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", "engines/sharded/fully_shard.py", "shards of states", FSDP
    ),
    Part("torch.distributed.tensor._dtensor_spec.TensorMeta", "engines/sharded/fully_shard.py", "as above", FSDP),
    # weights that are drawn a layer at a time
    Part("torch.utils._python_dispatch.TorchDispatchMode", "engines/", "each operation", INIT),
    Part(
        "torch.utils._python_dispatch._disable_current_modes",
        "engines/sharded/sharded_init.py",
        "to be out of it",
        INIT,
    ),
    Part("torch._C.DisableTorchFunction", "engines/sharded/sharded_init.py", "as above", INIT),
    Part(
        "torch._ops.OpOverload._schema",
        "engines/sharded/sharded_init.py",
        "what an operation changes",
        INIT,
    ),
    Part(
        "torch.Tensor._post_accumulate_grad_hooks",
        "engines/sharded/fsdp_groups.py",
        "whether somebody waits for a gradient",
        FSDP,
    ),
    # memory
    Part(f"{_HOOKS}._top_saved_tensors_default_hooks", "memory/meter.py", "hooks of saved tensors beside ours", MEMORY),
    Part(f"{_HOOKS}._pop_saved_tensors_default_hooks", "memory/meter.py", "as above", MEMORY),
    Part(f"{_HOOKS}._push_saved_tensors_default_hooks", "memory/meter.py", "as above", MEMORY),
    Part(
        "torch.UntypedStorage._new_with_weak_ptr",
        "memory/meter.py engines/sharded/sharded_init.py",
        "memory that is still there",
        MEMORY,
    ),
    # precision
    Part(
        "torch.amp.GradScaler._per_optimizer_states",
        "engines/sharded/fully_shard.py precision/base.py",
        "an overflow that only one rank has seen",
        SCALER,
    ),
    Part(
        "torch.amp.GradScaler._unscale_grads_",
        "precision/base.py",
        "whether gradients are finite, in float16 too",
        SCALER,
    ),
)


@cache
def missing(feature: str, more: tuple[Part, ...] = ()) -> tuple[Part, ...]:
    """The parts of a feature that this torch does not have; ``more``: those of an extension."""
    return tuple(part for part in (*PARTS, *more) if part.feature == feature and not is_there(part.name))


def refuse_without(feature: str, what: str, instead: str, more: tuple[Part, ...] = ()) -> None:
    """Refuse a feature whose parts this torch lacks.

    Args:
        feature: one of `ASKED_FOR`.
        what: as the user wrote it.
        instead: the way out that is no other torch.
        more: the parts that an extension lists.

    Raises:
        MisconfigurationException: it lacks one, which is named.
    """
    lacking = missing(feature, more)
    if lacking:
        part = lacking[0]
        raise MisconfigurationException(
            f"{what} needs {part.name.replace('|', ' or ')} ({part.why}), which torch {torch.__version__} has not: "
            f"take a torch from {part.since} on that lockstep was tested with, or {instead}."
        )


def is_there(name: str) -> bool:
    """Whether this torch has a part: a module, what a module or a class has, or what objects of a class get."""
    return any(map(_is_there, name.split("|")))


def _is_there(name: str) -> bool:
    found, names = _longest_module(name.split("."))
    if found is None:
        return False
    for step, each in enumerate(names):
        if hasattr(found, each):
            found = getattr(found, each)
            continue
        return step == len(names) - 1 and isinstance(found, type) and _gives(found, each)
    return True


def _longest_module(names: list[str]) -> tuple[object, list[str]]:
    """The module that a name begins with, and what is left of the name."""
    for length in range(len(names), 0, -1):
        try:
            return importlib.import_module(".".join(names[:length])), names[length:]
        except ImportError:
            continue
    return None, names


def _gives(kind: type, attribute: str) -> bool:
    """Whether the objects of a class have an attribute: by an annotation, or since a method names it."""
    for base in kind.__mro__:
        if attribute in vars(base).get("__annotations__", {}):
            return True
        methods = [vars(base)[name] for name in vars(base)]
        if any(attribute in getattr(getattr(method, "__code__", None), "co_names", ()) for method in methods):
            return True
    return False


TRIED = (2, 15)
"""The newest torch that this release was tested with; a test holds it to constraints.txt and pyproject.toml."""
RAN = ("cpu", "cuda")
"""Kinds of devices on which this release has run: the README's table says when, and a test holds the two together."""
RAN_ON_SEVERAL = ("cpu",)
"""The same of ranks with a device each."""


def warn_of_untried_torch(version: str = torch.__version__) -> None:
    """Warn, once and on rank 0, of a torch that is newer than all that were tried.

    Args:
        version: as torch writes its own, ``"2.13.0+cpu"``.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > TRIED and multiprocessing.parent_process() is None:  # not in loader workers
        tried = ".".join(map(str, TRIED))
        warn_once(
            f"torch {version} is newer than {tried}, the newest that this release of lockstep was tested with: should "
            f"something be wrong, `pip install 'torch=={tried}.*'` takes that one."
        )


def untried(kind: str, several: bool = False) -> str | None:
    """What to say at the start of a run on devices on which this release never ran; None where it did.

    Args:
        kind: of the devices.
        several: whether ranks have one each.
    """
    if kind in (RAN_ON_SEVERAL if several else RAN):
        return None
    where, reference = ("such a device", "the CPU") if kind not in RAN else ("several such devices", "one")
    return (
        f'accelerator={kind!r}: this release of lockstep has not run on {where} yet (README, "Where it has '
        f'run"): compare the first losses with a run on {reference}, and report what differs.'
    )
