"""The private parts of torch that lockstep uses, and the torch releases and devices on which it was tested.

Each private part that a feature requires is listed with the files that use it, its purpose, and the first release that
has it. If a release of torch renames a part, a request for its feature raises an error, and everything else works. The
tests list the parts without which lockstep only does less (`tests/guards/torch_parts.py`).
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

REFUSED_FEATURES = (DDP, FSDP, SCALER, INIT)
"""Features that raise an error if one of their parts is missing."""


@dataclass(frozen=True)
class Part:
    """A private part of torch that a feature requires.

    Attributes:
        name: full name with module and class; names in several releases are separated by ``|``.
        files: files below ``src/lockstep/`` that use it, separated by spaces.
        why: the purpose for which lockstep uses it.
        feature: the feature that does not work without it.
        since: the oldest supported release that has it.
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
    Part("torch._C._current_graph_task_id", "engines/", "the number of the running backward", DDP),
    Part("torch.autograd.variable.Variable._execution_engine", "engines/", "a callback at the end of a backward", DDP),
    Part(
        "torch.autograd._unsafe_preserve_version_counter",
        "engines/ddp/consistency.py",
        "in-place broadcasts of buffers",
        DDP,
    ),
    Part("torch.distributed.ProcessGroup._get_backend", "engines/", "the backend for a device's tensors", DDP),
    # shards by fully_shard
    Part(f"{_FSDP}._fully_shard.FSDPModule._get_fsdp_state", "engines/", "the FSDP state of a module", FSDP),
    Part(
        f"{_STATE}._fsdp_param_groups|{_STATE}._fsdp_param_group",
        "engines/sharded/fsdp_groups.py",
        "parameters that are gathered together",
        FSDP,
    ),
    Part(
        f"{_STATE}._lazy_init",
        "engines/sharded/fully_shard.py",
        "initialization before a hook calls a layer",
        FSDP,
    ),
    Part(f"{_STATE}._mp_policy", "engines/sharded/fully_shard.py", "the dtype of a module's inputs", FSDP),
    Part(
        f"{_STATE}._register_pre_backward_hook",
        "engines/sharded/fully_shard.py",
        "a backward in manual optimization",
        FSDP,
    ),
    Part(
        f"{_STATE}._pre_forward",
        "engines/sharded/gathered_calls.py",
        "gathers before a layer is called in a hook",
        FSDP,
    ),
    Part(
        f"{_STATE}._post_forward",
        "engines/sharded/gathered_calls.py",
        "freeing parameters after a layer was called in a hook",
        FSDP,
    ),
    Part(
        f"{_GROUP}._to_sharded",
        "engines/sharded/fully_shard.py engines/sharded/gathered_parameter.py",
        "freeing gathered parameters after their changes are applied to the shards",
        FSDP,
    ),
    Part(
        f"{_GROUP}._to_sharded_post_forward",
        "engines/sharded/gathered_parameter.py",
        "freeing gathered parameters after a forward",
        FSDP,
    ),
    Part(
        f"{_GROUP}._to_unsharded",
        "engines/sharded/gathered_parameter.py",
        "checks before parameters are gathered",
        FSDP,
    ),
    Part(
        f"{_GROUP}._wait_all_gather_streams_on_event",
        "engines/sharded/gathered_parameter.py",
        "a gather after a write",
        FSDP,
    ),
    Part(
        f"{_FSDP}._fsdp_common.FSDPMeshInfo",
        "engines/sharded/gathered_parameter.py",
        "this rank's shard of a parameter",
        FSDP,
    ),
    Part(f"{_PARAM}._param_fqn", "engines/sharded/gathered_parameter.py", "a parameter's name", FSDP),
    Part(
        "torch.Tensor._backward_hooks",
        "engines/sharded/fully_shard.py engines/sharded/gathered_parameter.py",
        "hooks on gradients, copied to the parameters that torch creates",
        FSDP,
    ),
    Part(
        "torch._guards.TracingContext",
        "engines/sharded/gathered_parameter.py",
        "detecting that a graph is traced",
        FSDP,
    ),
    Part(
        "torch.nn.Module._parameters",
        "engines/sharded/gathered_parameter.py",
        "the current parameters of a layer",
        FSDP,
    ),
    Part(
        f"{_GROUP}.post_backward",
        "engines/sharded/fsdp_groups.py",
        "gradients of parameters that a rank did not use",
        FSDP,
    ),
    Part(f"{_PARAM}._unsharded_param", "engines/", "the gathered parameter and its gradient", FSDP),
    Part(f"{_PARAM}._module_info", "engines/", "the layers that a parameter belongs to", FSDP),
    Part("torch.distributed.tensor.DTensor._local_tensor", "ground/parameters.py", "a shard", FSDP),
    Part(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", "engines/sharded/fully_shard.py", "shards of states", FSDP
    ),
    Part(
        "torch.distributed.tensor._dtensor_spec.TensorMeta", "engines/sharded/fully_shard.py", "shards of states", FSDP
    ),
    # weights that are drawn a layer at a time
    Part("torch.utils._python_dispatch.TorchDispatchMode", "engines/", "intercepting operations", INIT),
    Part(
        "torch.utils._python_dispatch._disable_current_modes",
        "engines/sharded/sharded_init.py",
        "gathers that are not intercepted",
        INIT,
    ),
    Part(
        "torch._C.DisableTorchFunction",
        "engines/sharded/sharded_init.py",
        "intercepting operations of tensor subclasses",
        INIT,
    ),
    Part(
        "torch._ops.OpOverload._schema",
        "engines/sharded/sharded_init.py",
        "the name of an operation",
        INIT,
    ),
    Part(
        "torch.Tensor._post_accumulate_grad_hooks",
        "engines/sharded/fsdp_groups.py",
        "hooks on accumulated gradients",
        FSDP,
    ),
    # memory
    Part(f"{_HOOKS}._top_saved_tensors_default_hooks", "memory/meter.py", "other hooks of saved tensors", MEMORY),
    Part(f"{_HOOKS}._pop_saved_tensors_default_hooks", "memory/meter.py", "other hooks of saved tensors", MEMORY),
    Part(f"{_HOOKS}._push_saved_tensors_default_hooks", "memory/meter.py", "other hooks of saved tensors", MEMORY),
    Part(
        "torch.UntypedStorage._new_with_weak_ptr",
        "memory/meter.py engines/sharded/sharded_init.py",
        "detecting whether memory is still in use",
        MEMORY,
    ),
    # precision
    Part(
        "torch.amp.GradScaler._per_optimizer_states",
        "engines/sharded/fully_shard.py precision/base.py",
        "an overflow on one rank only",
        SCALER,
    ),
    Part(
        "torch.amp.GradScaler._unscale_grads_",
        "precision/base.py",
        "the check for finite gradients, also in float16",
        SCALER,
    ),
)


@cache
def missing(feature: str, more: tuple[Part, ...] = ()) -> tuple[Part, ...]:
    """Return the private parts of torch that a feature needs and that the installed torch lacks.

    ``more`` has the parts that an extension needs.
    """
    return tuple(part for part in (*PARTS, *more) if part.feature == feature and not is_there(part.name))


def refuse_without(feature: str, what: str, instead: str, more: tuple[Part, ...] = ()) -> None:
    """Raise an error if the installed torch lacks a part that a feature requires.

    Args:
        feature: one of `REFUSED_FEATURES`.
        what: the feature as the user wrote it.
        instead: an alternative to a different release of torch.
        more: the parts that an extension lists.

    Raises:
        MisconfigurationException: a part is missing; the message names it.
    """
    lacking = missing(feature, more)
    if lacking:
        part = lacking[0]
        raise MisconfigurationException(
            f"{what} needs {part.name.replace('|', ' or ')} ({part.why}), which torch {torch.__version__} lacks: "
            f"install torch {part.since} or newer, in a release that lockstep was tested with, or {instead}."
        )


def is_there(name: str) -> bool:
    """Return True if the installed torch has ``name``, a module or an attribute of a module, class or instance."""
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
    """Import the longest prefix of a dotted name that is a module. Return the module and the remaining names."""
    for length in range(len(names), 0, -1):
        try:
            return importlib.import_module(".".join(names[:length])), names[length:]
        except ImportError:
            continue
    return None, names


def _gives(kind: type, attribute: str) -> bool:
    """Return True if instances of a class seem to have an attribute: it is annotated, or used in a method."""
    for base in kind.__mro__:
        if attribute in vars(base).get("__annotations__", {}):
            return True
        methods = [vars(base)[name] for name in vars(base)]
        if any(attribute in getattr(getattr(method, "__code__", None), "co_names", ()) for method in methods):
            return True
    return False


NEWEST_TESTED = (2, 15)
"""The newest torch that lockstep was tested with. A test compares it with constraints.txt and pyproject.toml."""
TESTED_ON = ("cpu", "cuda")
"""Kinds of devices on which this release has run. A test compares it with the table in the README."""
TESTED_ON_SEVERAL = ("cpu",)
"""Kinds of devices on which this release has run with several ranks, each with its own device."""


def warn_of_untested_torch(version: str = torch.__version__) -> None:
    """Warn, once and on rank 0, if torch is newer than all tested releases.

    Args:
        version: version as torch writes it: ``"2.13.0+cpu"``.
    """
    major, minor = version.split(".")[:2]
    # Loader workers would repeat the warning of their rank.
    if (int(major), int(minor)) > NEWEST_TESTED and multiprocessing.parent_process() is None:
        newest = ".".join(map(str, NEWEST_TESTED))
        warn_once(
            f"torch {version} is newer than {newest}, the newest release that this version of lockstep was tested "
            f"with. If something fails, run `pip install 'torch=={newest}.*'`."
        )


def untested_device_warning(kind: str, several: bool = False) -> str | None:
    """Return a warning if this release of lockstep has never run on devices of this kind. Otherwise, return None.

    Args:
        kind: kind of the devices.
        several: True if there are several ranks with a device each.
    """
    if kind in (TESTED_ON_SEVERAL if several else TESTED_ON):
        return None
    where, reference = ("such a device", "the CPU") if kind not in TESTED_ON else ("several such devices", "one")
    return (
        f'accelerator={kind!r}: this release of lockstep has not run on {where} yet (README, "Where it has '
        f'run"). Compare the first losses with a run on {reference}, and report differences.'
    )
