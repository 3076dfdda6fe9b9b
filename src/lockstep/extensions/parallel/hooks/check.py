"""Checks of a communication hook before the first step, and preparation of the hook's state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.parallel.hooks.compress import allreduce, bf16, fp16
from lockstep.extensions.parallel.hooks.hook_transport import innermost, name_of, torch_name
from lockstep.extensions.parallel.hooks.local_sgd import PostLocalSGDState, node_group, post_local_sgd
from lockstep.extensions.parallel.hooks.powersgd import PowerSGDState, power_sgd
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException

_OWN_STATES = (PowerSGDState, PostLocalSGDState)
_QUANTIZATION = ("quantization_pertensor_hook", "quantization_perchannel_hook")
_GROUP_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", *_QUANTIZATION)
_TORCH_STATES = {
    "powerSGD_hook": "PowerSGDState",
    "batched_powerSGD_hook": "PowerSGDState",
    "post_localSGD_hook": "PostLocalSGDState",
}
_DROP_IMAGINARY = ("fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook")


def check_hook(state: object, hook: object, parameters: Iterable[Tensor] = (), group: comm.Group = None) -> None:
    """Raise an error if a communication hook cannot work with its state and the parameters.

    Args:
        state: the hook's first argument.
        hook: a communication hook: a function of a state and a `GradBucket` that returns a future of the reduced
            gradients.
        parameters: the parameters of the buckets; their devices and dtypes are checked.
        group: process group of the ranks.

    Raises:
        TypeError: the hook is not callable, or not with two arguments.
        ValueError: the hook's annotations are not those of buckets and futures.
        MisconfigurationException: the hook cannot work here, or has the state of another hook.
    """
    check_pair(state, hook)
    _refuse_broken(torch_name(innermost(hook)), list(parameters), group)


def check_pair(state: object, hook: object) -> None:
    """Check a hook and its state as `check_hook` does, but without access to parameters and ranks."""
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable, as hook(state, bucket), but ddp_comm_hook={hook!r} is a "
            f"{type(hook).__name__}"
        )
    _check_signature(hook)
    inner = innermost(hook)
    _check_state(state, inner)
    if torch_name(inner) == "batched_powerSGD_hook":
        raise MisconfigurationException(
            "torch's batched_powerSGD_hook fails at iteration start_powerSGD_iter: it passes a 2-D matrix to a "
            "function that needs 3-D tensors. Use lockstep.engines.ddp.hooks.power_sgd with PowerSGDState(rank=...), "
            "or torch's powerSGD_hook"
        )


def _check_signature(hook: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"the communication hook {name_of(hook)}{signature} is called as hook(state, bucket): {error}"
        ) from None
    bucket = signature.parameters.get("bucket")
    if bucket is not None and not _allows(bucket.annotation, "GradBucket"):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket. {name_of(hook)} has "
            f"{_annotation_name(bucket.annotation)}"
        )
    if not _allows(signature.return_annotation, "Future"):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. {name_of(hook)} has "
            f"{_annotation_name(signature.return_annotation)}"
        )


def _allows(annotation: object, word: str) -> bool:
    """Return True if an annotation is missing, is Any or object, or contains ``word``."""
    return annotation is inspect.Parameter.empty or any(
        w in _annotation_name(annotation) for w in (word, "Any", "object")
    )


def _annotation_name(annotation: object) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


def _check_state(state: object, inner: object) -> None:
    ours = {power_sgd: PowerSGDState, post_local_sgd: PostLocalSGDState}
    if inner in ours:
        fits, wanted = isinstance(state, ours[inner]), f"lockstep.engines.ddp.hooks.{ours[inner].__name__}(...)"
    elif torch_name(inner) in _TORCH_STATES:
        kind = _TORCH_STATES[torch_name(inner) or ""]
        fits, wanted = _is_torch_state(state, kind), f"torch's {kind}(...)"
    elif _takes_group(inner):
        fits = state is None or isinstance(state, torch.distributed.ProcessGroup)
        wanted = "a process group, or None for the default one"
    else:
        return
    if not fits:
        raise MisconfigurationException(
            f"the communication hook {name_of(inner)} has the state {_describe(state)}. Pass {wanted} "
            "(ddp_comm_state=, or the first argument of register_comm_hook)"
        )


def _takes_group(inner: object) -> bool:
    """Return True if the hook ``inner`` expects a process group as its state."""
    return inner in (allreduce, fp16, bf16) or torch_name(inner) in _GROUP_HOOKS


def _describe(state: object) -> str:
    return "None" if state is None else f"of type {type(state).__qualname__}"


def _is_torch_state(state: object, kind: str) -> bool:
    return any(torch_name(base) == kind for base in type(state).__mro__)


def _refuse_broken(name: str | None, parameters: list[Tensor], group: comm.Group) -> None:
    kinds = {parameter.device.type for parameter in parameters} or {"cpu"}
    grouped = comm.is_distributed()
    if name in _QUANTIZATION and not (grouped and all(comm.backend_of(group, kind) == "nccl" for kind in kinds)):
        raise MisconfigurationException(
            f"torch's {name} works with NCCL only, but these gradients are sent by another backend. Use "
            "lockstep.engines.ddp.hooks.power_sgd with PowerSGDState(rank=4), which sends less and also runs on the CPU"
        )
    if name in _DROP_IMAGINARY and any(parameter.is_complex() for parameter in parameters):
        raise MisconfigurationException(
            f"torch's {name} drops the imaginary part of complex gradients. Use fp16, bf16 or power_sgd of "
            "lockstep.engines.ddp.hooks"
        )


def prepare_state(state: Any, group: comm.Group = None, hook: object = None) -> Any:
    """Assign process groups to a hook's state before the first step. Collective on ``group``.

    A state of post-local SGD, lockstep's or torch's, without a subgroup gets that of this rank's node. A state without
    a process group gets ``group``, unless that is the default group.

    Args:
        state: a hook's state; a state of an unknown class is not changed.
        group: process group of the ranks; ``None`` is the default group.
        hook: the state's hook; needed if ``state`` is None.

    Returns:
        the state to register: ``state`` itself, or ``group`` instead of None for a hook whose state is its group.
    """
    # None already means the default group, and a state with a group cannot be pickled
    named = group is not None and group is not dist.group.WORLD
    torchs = tuple(kind for kind in ("PostLocalSGDState", "PowerSGDState") if _is_torch_state(state, kind))
    if named and (torchs or isinstance(state, _OWN_STATES)) and state.process_group is None:
        state.process_group = group
    if isinstance(state, PostLocalSGDState):
        state.prepare()
    elif "PostLocalSGDState" in torchs and state.subgroup is None:
        averages = state.post_local_gradient_allreduce and comm.world_size(state.process_group) > 1
        # torch's own default, `dist.new_subgroups()`, needs GPUs
        state.subgroup = node_group(state.process_group) if averages else None
    if state is None and group is not None and _takes_group(innermost(hook)):
        return group
    return state
