"""Gathered FSDP parameters: changes to them are applied to the shards. For autocast they are gathered in 16 bits.

torch's ``fully_shard`` replaces a shard by the full parameter while a layer is gathered, and discards it afterwards.
Here in-place writes, ``.data``, ``requires_grad`` and ``.grad`` of the full parameter apply to the shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parameter import Parameter

from lockstep.engines.sharded.fsdp_groups import groups_of, own_gradient, refuse_accumulated, set_own_gradient
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import local_part

ROUNDED = (
    "A step wrote to parameter {name!r}, which is gathered in {low}. This would round its {own} shards. Write to it in "
    "a hook (`on_before_zero_grad`, `on_train_batch_start`), where parameters are shards, or gather in {own} with "
    "FSDPStrategy(mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy())."
)
REPLACED = (
    "Parameter {name!r} was replaced by another tensor, through torch.func.functional_call or an assignment. FSDP "
    "would ignore this tensor, because it gathers the layer separately. Exclude the layer with "
    'FSDPStrategy(auto_wrap_policy=...), so that it is gathered with the module, or use strategy="ddp".'
)
DATA_SET = (
    "`.data` of parameter {name!r} was assigned while the parameter was sharded, which torch ignores. Write in place "
    "instead: `parameter.copy_(values)` under torch.no_grad(), or `parameter.data.copy_(values)`."
)
WHOLE_GRADIENT = (
    "The gradient of parameter {name!r} was set to a full tensor in a step, but each rank needs a shard. Compute "
    "gradients with `manual_backward`, or set the gradient in `on_before_optimizer_step` to a DTensor with the "
    "parameter's placements."
)


class GatheredParameter(Parameter):
    """Full parameter that stands for its shard while the layer is gathered.

    During a backward ``.grad`` is the gradient of this rank's samples; otherwise it is the shard's gradient.
    """

    _of: weakref.ref[FSDPParam]
    _version_before: int
    _needed_before: bool
    _may_be_written: bool
    _memory: Tensor | None  # the memory into which torch gathers, if `.data` is another tensor now

    @property
    def data(self) -> Tensor:
        """The values, detached from the graph. Writing to them does not change the version counter."""
        self._may_be_written = True
        return _raw_data.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        self._may_be_written = True
        if self._memory is None:
            self._memory = _raw_data.__get__(self)
        _raw_data.__set__(self, values)

    @property
    def grad(self) -> Tensor | None:
        """This rank's unreduced gradient if one exists or a backward is running; otherwise the shard's gradient."""
        own = own_gradient(self)
        if own is not None or _is_torchs_turn():
            return own
        return self._shard().grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if _is_torchs_turn():
            set_own_gradient(self, gradient)
            return
        if gradient is not None and not hasattr(gradient, "placements"):
            raise MisconfigurationException(WHOLE_GRADIENT.format(name=_name_of(self._param())))
        set_own_gradient(self, None)
        self._shard().grad = gradient

    def _param(self) -> FSDPParam:
        param = self._of()
        assert param is not None
        return param

    def _shard(self) -> Parameter:
        return self._param().sharded_param


_raw_data: Any = torch.Tensor.data


def _is_torchs_turn() -> bool:
    """Return True while torch itself accesses ``.grad``: during a backward, or while a graph is traced."""
    return torch._C._current_graph_task_id() != -1 or torch._guards.TracingContext.try_get() is not None


class ShardWrites:
    """Order of the gathers of a module's blocks after the writes of a step to their shards.

    torch gathers blocks on streams of its own. Before a step these wait for the optimizer's update, but they do not
    wait for writes that the step itself queues on the current stream. Here they wait for these writes, at the first
    gather of a step and whenever a version counter has changed. If every gather waited, no gather could overlap with
    the computation of the previous block.

    Attributes:
        groups: groups of the module's blocks.
        is_first: the next gather is the first one of a step. Writes to ``.data`` change no version counter.
    """

    def __init__(self) -> None:
        self.groups: list[GatheredGroup] = []
        self.is_first = False

    def before_gather(self, group: GatheredGroup) -> None:
        """Let the streams that gather ``group`` wait for the writes that the step has queued."""
        if self.is_first or group.versions() != group.ordered:
            self.is_first = False
            group.gather_after_writes()
            for each in self.groups:
                each.ordered = each.versions()


class GatheredGroup(FSDPParamGroup):
    """Parameters that are gathered together. Changes to them are applied to their shards before memory is freed."""

    writes: ShardWrites | None  # None for the module's own group, which torch gathers before the step runs
    ordered: list[int]  # version counters up to which the gathers wait for writes

    def unshard(self, async_op: bool = False) -> None:
        if self.writes is not None and self._training_state is TrainingState.FORWARD and self.is_sharded:
            self.writes.before_gather(self)
        super().unshard(async_op)

    def versions(self) -> list[int]:
        """Return the version counters of the shards."""
        return [_version_of(param.sharded_param) for param in self.fsdp_params]

    def gather_after_writes(self) -> None:
        """Let later gathers wait for the work that is queued on the current stream."""
        written = self.device_handle.Event()
        written.record()
        self._wait_all_gather_streams_on_event(written)

    def _to_unsharded(self) -> None:
        if self.is_unsharded:
            return
        # what a user has set on a shard is lost when the full parameter replaces it
        for param in self.fsdp_params if self.is_sharded else ():
            info, name = param._module_info, _name_of(param)
            if info.module._parameters.get(info.param_name) is not param.sharded_param:
                raise MisconfigurationException(REPLACED.format(name=name))
            refuse_accumulated(name, param.sharded_param)
            if _is_data_set(param.sharded_param):
                raise MisconfigurationException(DATA_SET.format(name=name))
        super()._to_unsharded()
        for param in self.fsdp_params:
            _begin(param)

    def _to_sharded(self) -> None:
        self._carry()
        super()._to_sharded()

    def _to_sharded_post_forward(self) -> None:
        self._carry()
        super()._to_sharded_post_forward()

    def _carry(self) -> None:
        if not self.is_unsharded:
            return
        wrote = False
        for param in self.fsdp_params:
            wrote = _carry(param) or wrote
        if wrote:  # the next gather reads the shards on its own streams
            self.gather_after_writes()


def watch(group: Any, writes: ShardWrites | None) -> None:
    """Start applying changes of a group's gathered parameters to their shards.

    Args:
        group: torch's group.
        writes: order of the gathers of a module's blocks. None for the module's own group.
    """
    if type(group) is FSDPParamGroup:
        group.__class__ = GatheredGroup  # torch constructs the groups
    if isinstance(group, GatheredGroup):
        group.writes, group.ordered = writes, []
        if writes is not None:
            writes.groups.append(group)
    for param in group.fsdp_params:
        _is_data_set(param.sharded_param)


def _is_data_set(shard: Parameter) -> bool:
    """Return True if ``shard.data`` was assigned after this function's first call for ``shard``.

    The assignment replaces the empty memory of a DTensor.
    """
    memory = shard.untyped_storage()._cdata
    return bool(vars(shard).setdefault("_lockstep_memory", memory) != memory)


def _begin(param: FSDPParam) -> None:
    """Record the state of a parameter that has just been gathered."""
    gathered: Any = param._unsharded_param
    if type(gathered) is Parameter:  # not a DTensor, whose class torch checks
        made: Any = param._unsharded_param
        made.__class__ = GatheredParameter  # torch constructs the parameters
        made._of = weakref.ref(param)
        made._memory = None
    shard = param.sharded_param
    if shard._backward_hooks and shard._backward_hooks is not gathered._backward_hooks:
        gathered._backward_hooks = shard._backward_hooks  # the same dict: a handle removes its hook from both
    gathered._may_be_written = False
    gathered._version_before = _version_of(gathered)
    gathered._needed_before = gathered.requires_grad


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _carry(param: FSDPParam) -> bool:
    """Apply changes of the gathered parameter to the shard. Return True if values may have been copied."""
    gathered: Any = param._unsharded_param
    shard = param.sharded_param
    if gathered.requires_grad is not gathered._needed_before:
        shard.requires_grad_(gathered.requires_grad)
    is_written = _version_of(gathered) != gathered._version_before
    if not (is_written or gathered._may_be_written):
        return False
    part = local_part(shard)
    if hasattr(part, "fsdp_post_all_gather"):  # torch's subclasses write to it when they gather
        return False
    with torch.no_grad():
        values = _own_part(param, local_part(gathered.detach()))
        if values.dtype == part.dtype:
            part.copy_(values)
        elif not torch.equal(values, part.to(values.device, values.dtype)):
            low, own = (str(dtype).removeprefix("torch.") for dtype in (values.dtype, part.dtype))
            raise MisconfigurationException(ROUNDED.format(name=_name_of(param), low=low, own=own))
    if isinstance(gathered, GatheredParameter) and gathered._memory is not None:
        _raw_data.__set__(gathered, gathered._memory)  # torch gathers into its own memory, also next time
        gathered._memory = None
    return True


def _own_part(param: FSDPParam, whole: Tensor) -> Tensor:
    """Return the part of ``whole``, a full parameter, that this rank's shard stores."""
    mesh, dim = param.mesh_info, param.fsdp_placement.dim
    if not isinstance(mesh, FSDPMeshInfo):
        return whole
    parts = torch.chunk(whole, mesh.shard_mesh_size, dim)
    if mesh.shard_mesh_rank < len(parts):
        return parts[mesh.shard_mesh_rank]
    return whole.narrow(dim, 0, 0)


def _name_of(param: FSDPParam) -> str:
    return param._param_fqn or param._module_info.param_name


# -- gathering under autocast ----------------------------------------------------------------------------------


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")

CAST: dict[Callable[..., Any], tuple[str, ...]] = {kind.forward: ("weight", "bias") for kind in _LAYERS}
CAST[nn.MultiheadAttention.forward] = _ATTENTION
"""Forward of a layer -> names of parameters that it passes only to operators whose inputs autocast casts."""


def is_cast(layer: nn.Module, name: str) -> bool:
    """Return True if autocast casts a layer's own parameter wherever the layer's forward uses it.

    Parameters of a norm, an embedding or a user's own layer do not qualify: autocast leaves them as they are, or
    casts them to float32.
    """
    return "forward" not in vars(layer) and name in CAST.get(type(layer).forward, ())


def gather_in(block: nn.Module, dtype: torch.dtype) -> None:
    """Gather a block's float32 parameters in ``dtype`` if autocast casts them; reduce all gradients in float32.

    On one process autocast creates the same tensors, once for each use. Gathering in ``dtype`` halves the bytes sent
    and the memory. Other parameters are gathered in float32, in the same collective.

    Args:
        block: a block that was passed to ``fully_shard`` without a policy, and was not used yet.
        dtype: the dtype of autocast.
    """
    assert isinstance(block, FSDPModule)
    for group in groups_of(block):
        if any(param.sharded_param.dtype != torch.float32 for param in group.fsdp_params):
            continue
        group.mp_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for param in group.fsdp_params:
            param.__class__ = _InOwnDtype  # torch constructs them, with the same dtype for all of a group


class _InOwnDtype(FSDPParam):
    """FSDP parameter that may be gathered in a different dtype from the other parameters of its group."""

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Apply the policy, except that parameters which autocast does not cast keep their dtype."""
        super().init_dtype_attrs(mp_policy)
        if not all(is_cast(layer, name) for layer, name in _owners(self)):
            self.param_dtype = None

    # torch casts the gradients of a reduce-scatter while it copies them, from a single dtype

    @property
    def unsharded_grad_data(self) -> Tensor:
        return super().unsharded_grad_data.to(self.reduce_dtype)

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        return super().unsharded_zero_grad_data.to(self.reduce_dtype)


def _owners(param: FSDPParam) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)
