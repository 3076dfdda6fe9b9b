"""Sharding with torch's ``fully_shard`` (FSDP2): initial weights, backwards, gradient clipping and checkpoints."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.engines.ddp.consistency import broadcast_buffers, check_same_module
from lockstep.engines.ddp.transport import Flags
from lockstep.engines.sharded.fsdp_groups import (
    groups_of,
    reduce_unused_parameters,
    refuse_accumulated,
    set_waiting_gradient,
    waiting_gradient,
)
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import box_in, box_of, local_part, plain_name, starts_of
from lockstep.ground.tree import tensors_in, tree_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

# -- from a module to shards ---------------------------------------------------------------------------------


def is_sharded(module: nn.Module) -> bool:
    """Return True if ``fully_shard`` was called on the module itself."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def refuse_unmanaged(module: nn.Module) -> None:
    """Raise an error if a parameter is sharded although no layer of the module gathers it.

    A fit of another module with the same layers leaves such parameters, and so does ``parallelize_module``.

    Raises:
        MisconfigurationException: the module has such a parameter.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    gathered = {id(p) for layer in module.modules() if isinstance(layer, FSDPModule) for p in layer.parameters()}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in gathered:
            raise MisconfigurationException(
                f"strategy='fsdp': {type(module).__name__}.{name} is already sharded, but no layer of the module "
                "gathers it. If a fit of another module sharded it, fit that module again, or load its checkpoint into "
                "a new module. If parallelize_module sharded it, use ModelParallelStrategy."
            )


def shard(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    mesh: DeviceMesh,
    device: torch.device,
    whole: set[Parameter],
    reshard_after_forward: bool,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    gather: Callable[[Iterable[Tensor]], object] = list,
    autocast_dtype: torch.dtype | None = None,
) -> None:
    """Shard a module with ``fully_shard``, so that all ranks get shards of rank 0's weights. Collective.

    Args:
        module: the same on all ranks except for its values; becomes an ``FSDPModule`` in place. Parameters on the
            meta device are sharded there.
        blocks: layers that are gathered and freed separately, inner ones first; all other parameters are gathered
            with the module.
        mesh: a mesh with one dimension, or with two: replicas, and the ranks of a replica.
        device: this rank's device; each block is moved there before it is sharded.
        whole: parameters that are not sharded.
        reshard_after_forward: free a block's parameters between its forward and its backward.
        mp_policy, offload_policy: as in ``fully_shard``.
        gather: called with a block's parameters before the block is sharded; gathers them in full.
        autocast_dtype: dtype of autocast in forwards; see `gathered_parameter.gather_in`.

    Raises:
        ValueError: the ranks' modules differ.
    """
    from torch.distributed.fsdp import FSDPModule

    # before anything is sent: a rank with another module would wait in a broadcast that the others do not make
    check_same_module(module)
    buffers = with_memory(module.buffers())
    gather(buffers)
    for buffer in buffers:
        buffer.data = buffer.data.to(device)
    broadcast_buffers(buffers, 0, None)
    done: set[int] = {id(p) for m in module.modules() if isinstance(m, FSDPModule) for p in m.parameters()}
    # block by block, so that a device never holds more than one whole block besides shards
    for block in (*blocks, module):
        if isinstance(block, FSDPModule):
            continue
        mine = with_memory(parameter for parameter in block.parameters() if id(parameter) not in done)
        gather(mine)
        for parameter in mine:
            parameter.data = parameter.data.to(device)
        comm.broadcast_tensors([parameter.data for parameter in mine], 0, None)
        _cut(
            block,
            mesh=mesh,
            # the module's own parameters are needed at the start of the backward: freeing them would gather them twice
            reshard_after_forward=reshard_after_forward if block is not module else False,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=whole,
        )
        if autocast_dtype is not None:
            from lockstep.engines.sharded.gathered_parameter import gather_in

            gather_in(block, autocast_dtype)
        done.update(id(parameter) for parameter in block.parameters())


def _cut(block: nn.Module, **given: Any) -> None:
    """Call ``fully_shard`` on a block, and copy the users' gradient hooks to the new parameters.

    Raises:
        MisconfigurationException: a parameter has a hook for accumulated gradients.
    """
    from torch.distributed.fsdp import fully_shard

    hooked = []
    for layer in block.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            refuse_accumulated(name, parameter)
            if parameter._backward_hooks:
                hooked.append((layer, name, parameter))
    fully_shard(block, **given)
    # the same dict, not a copy: the user's handles then remove hooks from the new parameter too
    for layer, name, parameter in hooked:
        layer.get_parameter(name)._backward_hooks = parameter._backward_hooks


def with_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are not on the meta device."""
    return [tensor for tensor in tensors if not tensor.is_meta]


def find_odd(module: nn.Module, blocks: Iterable[nn.Module]) -> list[Parameter]:
    """Return parameters that cannot be sharded with the rest: of a different dtype, complex, 0-dimensional, or empty.

    torch raises for all of these except complex ones. Adam computes wrong values on shards of complex parameters,
    because it uses views of them as pairs of real numbers.
    """
    odd = [p for p in module.parameters() if p.is_complex() or not p.dim() or not p.numel()]
    done = {id(parameter) for parameter in odd}
    for block in (*blocks, module):
        mine = [parameter for parameter in block.parameters() if id(parameter) not in done]
        done.update(id(parameter) for parameter in mine)
        sizes: Counter[torch.dtype] = Counter()
        for parameter in mine:
            sizes[parameter.dtype] += parameter.numel()
        odd += [parameter for parameter in mine if parameter.dtype != sizes.most_common(1)[0][0]]
    return odd


def find_norms(module: nn.Module) -> list[nn.Module]:
    """Return the normalization layers with running statistics in buffers, such as batch norms."""
    return [m for m in module.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def compute_in_own_dtype(norm: nn.Module) -> None:
    """Make a norm compute in its statistics' dtype: cast its input to that dtype, and its output back.

    torch's kernels accept 16-bit inputs with float32 weights and statistics, or a single dtype. Under a policy of
    ``fully_shard`` only weights and inputs would be cast. torch's first FSDP excludes batch norms in the same way.
    """
    statistics, given = norm.get_buffer("running_mean"), list[torch.dtype]()

    def cast(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given.append(args[0].dtype)
        return tuple(each.to(statistics.dtype) for each in args)

    def cast_back(layer: nn.Module, args: object, output: Tensor) -> Tensor:
        return output.to(given.pop())

    norm.register_forward_pre_hook(cast)
    norm.register_forward_hook(cast_back)


# -- while it trains -----------------------------------------------------------------------------------------


NO_COPY = (
    "copy.deepcopy cannot copy {name}, because it is sharded (fully_shard) and only this object can gather it. Create "
    "the copy in `__init__`, so that it is sharded with the module; average weights with "
    "lockstep.callbacks.WeightAveraging; or copy this rank's shards: "
    "{{name: p.detach().clone() for name, p in module.named_parameters()}}"
)


def _refuse_copy(module: nn.Module, memo: object) -> None:
    own = type(module).__mro__[2]  # after torch's combined class and FSDPModule
    raise NotImplementedError(NO_COPY.format(name=own.__name__))


ENTRY = "_lockstep_entry"
"""Attribute of a sharded module that stores the method through which its steps are called."""


class ShardedModule:
    """Wrapper around a sharded module that runs its methods and backwards, and gives access to its gradients.

    Args:
        module: an ``FSDPModule``, a module with such layers, or a module with other DTensors as parameters.

    Attributes:
        parameters: the sharded parameters by name; each rank has a shard of each.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
        from torch.distributed.tensor import DTensor

        from lockstep.engines.sharded.gathered_parameter import ShardWrites, watch

        self.module = module
        self._parts: list[FSDPModule] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._params: dict[int, FSDPParam] = {}
        self._groups: list[Any] = []
        self._writes = ShardWrites()
        root: object = module
        for part in self._parts:
            part.reshard()
            type(part).__deepcopy__ = _refuse_copy  # type: ignore[attr-defined]  # torch's explains less
            for group in groups_of(part):
                watch(group, None if part is root else self._writes)
                self._groups.append(group)
                self._params.update({id(param.sharded_param): param for param in group.fsdp_params})
        self.parameters = {plain_name(name): p for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self._split = [p for p in self.parameters.values() if id(p) not in self._params]
        self._syncs = True
        self._drops = False
        self._is_running = self._goes_back = False
        self._used: set[int] = set()  # ids of parameters with a gradient from this rank's samples since a reduction
        self._hooked: set[int] = set()  # ids of parameters with a hook that reports their gradients
        self._device: torch.device = self._groups[0].device if self._groups else torch.device("cpu")
        self._flags: Flags | None = None  # this rank's flags for used parameters; their collective may be pending
        for part in self._parts:
            reduce_unused_parameters(part)
        self._entry: Callable[..., Any] = _called
        self._casts_to: torch.dtype | None = None
        if is_sharded(module):
            if ENTRY not in vars(module):
                vars(module)[ENTRY] = _called
                register_fsdp_forward_method(module, ENTRY)
            self._entry = vars(module)[ENTRY]  # torch gathers the module's own parameters around it
            state = self._module_state()
            state._lazy_init()  # torch does so in the first forward, which may be a layer's, in a hook
            if state._mp_policy.cast_forward_inputs:
                self._casts_to = state._mp_policy.param_dtype

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self._casts_to) if value.is_floating_point() else value

    @property
    def reduced_by_torch(self) -> set[int]:
        """Ids of the parameters whose gradients ``fully_shard`` reduces."""
        return set(self._params)

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a method of the module. During the call, the parameters that belong to no block are gathered.

        The method's floating-point inputs are cast according to the module's policy.
        """
        if self._casts_to is not None:
            args = tree_map(self._cast, args, Tensor)
        # torch gathers around one registered method: the step methods are passed to it
        self._is_running = self._writes.is_first = True
        try:
            return self._entry(partial(fn, *args))
        finally:
            self._is_running = False

    def serve_calls(self, within: bool) -> Callable[[], None]:
        """Gather layers' parameters for calls of the layers in hooks and, if ``within``, in steps after a backward.

        Returns:
            A function that disables such calls again.
        """
        from lockstep.engines.sharded.gathered_calls import GatheredCalls

        return GatheredCalls(self.module, lambda: self._is_running or self._goes_back, self.free, within).close

    def reshard(self) -> None:
        """Free gathered parameters, except parameters outside all blocks while a step or an evaluation needs them."""
        for part in self._parts:
            part.reshard()

    def free(self) -> None:
        """Free all gathered parameters, before their shards are read or changed."""
        for group in self._groups:
            if group.is_unsharded:
                group._to_sharded()

    @contextmanager
    def backward(self, loss: Tensor, sync: bool, drops: bool) -> Iterator[None]:
        """Prepare the sharded parameters for a backward of ``loss`` in the ``with`` block. Collective with ``sync``.

        A parameter that no rank has used since the last reduction gets no gradient, as on one process. torch gives it
        zeros, with which weight decay and momentum would change it.

        Within `run`, as in manual optimization, torch has not seen the end of the forward, so the module's own group is
        prepared for the backward here.

        Args:
            loss: root of the backward.
            sync: True if the backward reduces gradients; otherwise each rank accumulates its own unsharded gradients.
            drops: set the gradients of this backward to zero before they are added.
        """
        if sync is not self._syncs:
            self._syncs = sync
            for part in self._parts:
                part.set_requires_gradient_sync(sync, recurse=False)
        self._drops = drops
        handles = []
        for key, param in self._params.items():
            gathered = getattr(param, "_unsharded_param", None)  # exists after the first forward that used it
            if gathered is None or not gathered.requires_grad:
                continue
            if key not in self._hooked:
                self._hooked.add(key)
                gathered.register_post_accumulate_grad_hook(partial(_note, weakref.ref(self), key))
            # zeros instead of no backward at all: the reduce-scatters must be the same on all ranks
            if drops:
                handles.append(gathered.register_hook(torch.zeros_like))
        if self._is_running and is_sharded(self.module):
            self._module_state()._register_pre_backward_hook(loss)
        before = [param for param in self._params.values() if sync and param.sharded_param.grad is None]
        self._goes_back = True
        try:
            yield
        finally:
            self._goes_back = False
            for handle in handles:
                handle.remove()
        # parameters of tensor parallelism alone; `fully_shard` places the gradients of the others itself
        for parameter in self._split:
            parameter.grad = placed_as(parameter, parameter.grad)
        if sync:
            # remove gradients of this reduction to which no rank has contributed
            keys = [key for key, param in self._params.items() if param.sharded_param.requires_grad]
            self._flags = flags = Flags(bytes(key in self._used for key in keys), None, self._device)
            unused = [param for param in before if id(param.sharded_param) not in self._used]
            # a rank that has used all parameters need not read the others' flags, for which a GPU would wait
            if unused or self._device.type == "cpu":
                anywhere = dict(zip(keys, flags.maxima(), strict=True))
                for param in unused:
                    if not anywhere.get(id(param.sharded_param)):
                        param.sharded_param.grad = None
            self._used.clear()

    def _module_state(self) -> Any:
        return self._parts[0]._get_fsdp_state()

    def set_requires_grad(self, parameter: Tensor, needed: bool) -> None:
        """Set ``requires_grad`` of a gathered parameter now; torch would update it only at the next gather."""
        gathered = getattr(self._params.get(id(parameter)), "_unsharded_param", None)
        if gathered is not None:
            gathered.requires_grad_(needed)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Drop the unreduced gradients of these parameters, which earlier backwards have accumulated."""
        for parameter in parameters:
            param = self._params.get(id(parameter))
            if param is not None:
                set_waiting_gradient(param, None)

    def groups(self) -> list[Any]:
        """Return torch's FSDP parameter groups. The parameters of a group are gathered together."""
        return self._groups

    def gathered(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return (gathered parameters and communication buffers, unsharded gradients that are not reduced yet)."""
        groups = self.groups()
        whole, waiting = list(tensors_in(vars(groups[0].comm_ctx), 3)) if groups else [], []
        for param in self._params.values():
            parameter = getattr(param, "_unsharded_param", None)
            if parameter is not None:
                whole.append(parameter)
            gradient = waiting_gradient(param)
            waiting += [] if gradient is None else [gradient]
        return whole, waiting

    # -- the state of this rank alone

    def window_state(self) -> dict[str, dict[str, Any]]:
        """Return copies of this rank's gradients, sharded or not yet reduced, and their offsets in full gradients."""
        self.reshard()
        shards, waiting = {}, {}
        for name, parameter in self.parameters.items():
            param, gradient = self._params.get(id(parameter)), parameter.grad
            if gradient is not None:
                shards[name] = gradient
            if param is None:
                continue
            unreduced = waiting_gradient(param)
            if unreduced is not None:
                waiting[name] = unreduced
        found: dict[str, dict[str, Any]] = {}
        for kind, gradients in (("shards", shards), ("waiting", waiting)):
            found[kind] = {name: local_part(each).detach().cpu().clone() for name, each in gradients.items()}
            in_parts = {name: each for name, each in gradients.items() if hasattr(each, "placements")}
            found[f"{kind} from"] = {name: starts_of(each) for name, each in in_parts.items()}
        return found

    def load_window_state(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the gradients that `window_state` returned. Collective."""
        for name, part in saved.get("shards", {}).items():
            parameter: Any = self.parameters[name]
            parameter.grad = _like(parameter, part.to(parameter.device))
        waiting = saved.get("waiting", {})
        # on all ranks if any rank has some: `unshard` is collective
        if any(comm.all_gather_object(bool(waiting))):
            for each in self._parts:  # creates the whole parameters
                each.unshard()
            self.reshard()
        for name, whole in waiting.items():
            param = self._params[id(self.parameters[name])]
            gathered = param._unsharded_param
            gradient = whole.to(gathered.device)
            if hasattr(gathered, "placements"):  # also sharded by tensor parallelism
                gradient = _like(gathered, gradient)
            set_waiting_gradient(param, gradient)


def _note(shards: weakref.ref[ShardedModule], key: int, parameter: Tensor) -> None:
    # the garbage collector cannot see the references of such a hook: a strong one would leak the model
    own = shards()
    if own is not None and not own._drops:
        own._used.add(key)


def whole_gradients(
    parts: Sequence[Mapping[str, Any]], members: Sequence[int], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Assemble the full gradients of one replica from the saved states of all ranks.

    Shards contain means over all ranks, so every replica's full gradients include the shards as they are.

    Args:
        parts: states of all ranks, with full tensors in ``"gradients"`` and, if the engine shards parameters, the
            result of `ShardedModule.window_state` in ``"sharded"``.
        members: the ranks of the replica.
        shapes: shapes of the full parameters.

    Raises:
        ValueError: the shards do not add up to a parameter.
    """
    found = dict(parts[members[0]].get("gradients", {}))
    everyone, own = ([parts[rank].get("sharded", {}) for rank in ranks] for ranks in (range(len(parts)), members))
    for kind, states in (("shards", everyone), ("waiting", own)):
        for name in own[0].get(kind, {}):
            whole = _assembled([each for each in states if name in each.get(kind, {})], kind, name, shapes[name])
            found[name] = whole.to(found[name].dtype) + found[name] if name in found else whole
    return found


def _assembled(states: Sequence[Mapping[str, Any]], kind: str, name: str, shape: torch.Size) -> Tensor:
    """Assemble a full gradient from the parts in the ranks' saved states."""
    first: Tensor = states[0][kind][name]
    if first.shape == shape:
        return first
    if any(name not in each.get(f"{kind} from", {}) for each in states):  # an earlier version, which sharded rows only
        return _joined_rows([each[kind][name] for each in states], name, shape)
    whole = torch.zeros(shape, dtype=first.dtype)
    for each in states:
        part = each[kind][name]
        at = [slice(begin, begin + size) for begin, size in zip(each[f"{kind} from"][name], part.shape, strict=True)]
        whole[tuple(at)] = part
    return whole


def _joined_rows(shards: Sequence[Tensor], name: str, shape: torch.Size) -> Tensor:
    taken: list[Tensor] = []
    for shard in shards:  # if the model has replicas, the shards of the first are enough
        if sum(each.shape[0] for each in taken) < shape[0]:
            taken.append(shard)
    whole = torch.cat(taken)
    if whole.shape != shape:
        raise ValueError(
            f"the saved shards of {name!r}'s gradient have shapes {[tuple(shard.shape) for shard in taken]}, which do "
            f"not add up to the parameter's shape {tuple(shape)}. Resume with the strategy that saved them"
        )
    return whole


def _called(self_and_work: Callable[[], Any]) -> Any:
    return self_and_work()


def placed_as(parameter: Tensor, gradient: Any) -> Any:
    """Return the gradient of a DTensor with the DTensor's placements, since autograd may leave partial sums.

    Collective if the placements differ.
    """
    placements = getattr(parameter, "placements", None)
    if gradient is None or gradient.placements == placements:
        return gradient
    return gradient.redistribute(placements=placements)


def whole_of(tensor: Tensor) -> Tensor:
    """Gather a DTensor into a full tensor (collective), or return any other tensor unchanged."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _like(sharded: Any, part: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def shard_like(own: object, value: Any) -> Any:
    """Return ``value`` sharded like ``own``, or as a full tensor if ``own`` is not a DTensor or has another shape.

    Collective if ``value`` is already sharded differently.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        if isinstance(own, DTensor) and own.device_mesh == value.device_mesh:
            return value if own.placements == value.placements else value.redistribute(own.device_mesh, own.placements)
        value = value.full_tensor()
    if not isinstance(own, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != own.shape:
        return value
    # every rank has read the whole tensor: nothing is sent
    made = _empty_part(value.shape, value.dtype, own.device_mesh, own.placements, own)
    local_part(made).copy_(value.detach()[box_of(own)])
    return made


def place_like(module: nn.Module, in_place: bool) -> Callable[[str, torch.Size, torch.dtype], Tensor]:
    """Return a function that allocates the destination for each tensor read from a sharded checkpoint.

    A tensor of the state dict (``model.NAME``) is sharded like the module's tensor, any other tensor like a parameter
    of the same shape, and a tensor without a counterpart along its first dimension.

    Args:
        module: the sharded module.
        in_place: read the module's shards into its own memory, so that a rank needs no second copy. The module then
            changes before the loaded values can be checked.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    own = module.state_dict()
    cut = [value for value in own.values() if isinstance(value, DTensor)]
    by_shape = {value.shape: value for value in reversed(cut)}

    def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        mine = own.get(name.removeprefix("model.")) if name.startswith("model.") else None
        is_own = isinstance(mine, Tensor) and mine.shape == shape
        like = mine if is_own else by_shape.get(shape)
        if like is None and cut and shape:
            mesh = cut[0].device_mesh
            return _empty_part(shape, dtype, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)], cut[0])
        if isinstance(like, DTensor):
            if is_own and in_place and like.dtype == dtype:
                return like
            return _empty_part(shape, dtype, like.device_mesh, like.placements, like)
        return torch.empty(shape, dtype=dtype)

    return place


def _empty_part(shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh, placements: Any, other: Any) -> Tensor:
    """Return an uninitialized DTensor, with this rank's shard on the same device as that of ``other``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    size = [each.stop - each.start for each in box_in(shape, mesh, placements)]
    part = torch.empty(size, dtype=dtype, device=local_part(other).device)
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    # not DTensor.from_local, which would move an offloaded part to the mesh's device
    made: Any = DTensor
    tensor: Tensor = made(part, DTensorSpec(mesh, tuple(placements), tensor_meta=whole), requires_grad=False)
    return tensor


def gathered(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Gather the DTensors of a state dict into full tensors on the CPU, one by one. Collective.

    Args:
        state: a state dict with DTensors, with the same keys on all ranks.
        keep: True on ranks that get the values; other ranks get tensors on the meta device instead.
    """
    from torch.distributed.tensor import DTensor

    made = dict(state)
    for name, value in state.items():
        if isinstance(value, DTensor):
            whole = whole_of(value.detach())
            made[name] = whole.cpu() if keep else torch.empty_like(whole, device="meta")
    return made


def optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return an optimizer's state dict with full tensors (on the meta device if not ``keep``). Collective."""
    state = optimizer.state_dict()
    return {**state, "state": {number: gathered(entry, keep) for number, entry in state["state"].items()}}


def load_optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load this rank's shards from an optimizer's state dict with full tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    state = dict(saved["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state:
            state[number] = {name: shard_like(parameter, value) for name, value in state[number].items()}
    optimizer.load_state_dict({**saved, "state": state})


def clip_norm(parameters: Iterable[Tensor], limit: float) -> Tensor | None:
    """Scale gradients so that their 2-norm over all parameters and ranks is at most ``limit``. Collective.

    Parameters may be unsharded, or sharded over different meshes.

    Returns:
        The norm before the scaling; None without gradients.
    """
    # torch's foreach norms accept only gradients of one mesh and placement
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter.grad, "device_mesh", None)
            placed = getattr(parameter.grad, "placements", None)
            groups.setdefault((mesh, placed), []).append(parameter)
    if not groups:
        return None
    norms = [
        whole_of(torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
        for group in groups.values()
    ]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, limit, total.to(group[0].device))
    return total


def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Run ``scaler.unscale_(optimizer)`` on shards. All ranks find non-finite values if one rank does. Collective."""
    # the groups contain this rank's plain shards meanwhile; the ranks agree about non-finite values below
    groups, wholes = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(groups, wholes, strict=True):
            group["params"] = [part_with_gradient(p) for p in parameters if p.grad is not None]
        scaler.unscale_(optimizer)
    finally:
        for group, parameters in zip(groups, wholes, strict=True):
            group["params"] = parameters
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        found.copy_(comm.all_reduce(found, "max"))


def part_with_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, whose ``.grad`` is the shard of the gradient, without copies."""
    assert parameter.grad is not None
    part = Parameter(local_part(parameter.detach()), requires_grad=False)
    part.grad = local_part(parameter.grad)
    return part
