"""Parameters in flat buffers, cut into one slice a rank: a rank's part of each, its state, and waiting for others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy
from torch.optim.optimizer import Optimizer

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.transport import all_gather
from lockstep.parallel.zero.exchange import Fragment, SharedBuffer, fragments

# -- a gradient of which each rank has its slice -------------------------------------------------------------


UNREADABLE = (
    "this gradient is spread over the ranks (shard_optimizer): after a backward that reduces, each rank has the mean "
    "of its slice only. Read or change whole gradients inside `with trainer.strategy.whole_gradients():` (in a "
    "hand-written loop: `with reducer.shards.whole_gradients():`), on all ranks together; clip them by "
    "`self.clip_gradients(...)` (`reducer.shards.clip(optimizer, ...)`), unscale them by "
    "`reducer.shards.unscale(scaler, optimizer)`, drop them by `zero_grad()`"
)

_HARMLESS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "type",
        "get_device",
        "requires_grad_",
        "detach_",
        "__len__",
        "_has_compatible_shallow_copy_type",
    ]
)
_CASTS = frozenset(["to", "cpu", "cuda", "float", "double", "half", "bfloat16"])


class SlicedGradient(Tensor):
    """Stands in ``.grad`` for a gradient of which each rank has its slice: it has a shape, and no values.

    ``zero_grad`` of both kinds takes it as any gradient; whatever reads values is told where they are.
    """

    shard: ParamShard

    @classmethod
    def of(cls, shard: ParamShard) -> SlicedGradient:
        """The one for a parameter."""
        parameter = shard.parameter
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: SlicedGradient = torch.Tensor._make_subclass(cls, nothing)
        made.shard = shard
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what needs no values; zero the slices; refuse the rest."""
        name = getattr(func, "__name__", "")
        if name in _HARMLESS or name == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if not isinstance(result, Tensor) or name in _HARMLESS:
                return result
        elif name in ("zero_", "_foreach_zero_"):
            for gradient in [args[0]] if name == "zero_" else args[0]:
                if isinstance(gradient, SlicedGradient):
                    gradient.shard.gradient.zero_()
                else:
                    gradient.zero_()
            return args[0]
        elif name in _CASTS:  # as in `module.to(device)`, which is nothing where the module is there
            with torch._C.DisableTorchFunctionSubclass():
                if func(*args, **(kwargs or {})) is args[0]:
                    return args[0]
        elif name == "__set__" and args[0] is args[1]:
            return None
        raise RuntimeError(UNREADABLE)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SlicedGradient(shape={tuple(self.shard.parameter.shape)})"

    def __reduce_ex__(self, protocol: object) -> Any:
        """Nothing to be copied or pickled."""
        raise RuntimeError(UNREADABLE)


class ParamShard:
    """A parameter, and this rank's fragment of it.

    Attributes:
        parameter: the module's; its memory is a part of the bucket's.
        flat: the bucket in which it lies.
        whole_gradient: all of its gradient's place in the bucket, with the parameter's shape.
        start, stop: of the fragment, in elements in the order of memory; equal where this rank has none.
        value: the fragment as a parameter for the optimizer, None where there is none.
        gradient: the fragment's gradient; empty where there is none.
        shown: what stands in ``parameter.grad`` while the gradient is spread over the ranks.
        is_kept: it was spread when a further backward began.
        kept: what the fragment's gradient was then.
    """

    __slots__ = (
        "_address",
        "_offset",
        "_place",
        "_start",
        "_strides",
        "flat",
        "gradient",
        "is_kept",
        "kept",
        "parameter",
        "shown",
        "start",
        "stop",
        "value",
        "whole_gradient",
    )

    def __init__(
        self, flat: FlatBuffer, parameter: Parameter, whole_gradient: Tensor, place: int, part: Fragment
    ) -> None:
        self.parameter, self.flat, self.whole_gradient = parameter, flat, whole_gradient
        self.start, self.stop, self._offset = part.start, part.stop, part.offset - flat.begin
        self._strides = whole_gradient.stride()
        self._start = place
        self._place = flat.values.as_strided(parameter.shape, self._strides, place)
        self._address = self._place.data_ptr()
        end = part.offset + part.stop - part.start
        self.gradient = flat.gradients[part.offset : end]
        self.value: Parameter | None = None
        if part.stop > part.start:
            value = flat.values[part.offset : end]
            if parameter.dim() == 0:  # so that its state is told from counts by nothing, as it is for the parameter
                value, self.gradient = value.view(()), self.gradient.view(())
            self.value = Parameter(value)
        self.shown = SlicedGradient.of(self)
        self.is_kept = False
        self.kept: Tensor | None = None
        self.bind()

    def is_bound(self) -> bool:
        """Whether the parameter's memory is still in the bucket (``parameter.data = ...`` takes it elsewhere)."""
        return self.parameter.data_ptr() == self._address

    def is_of_its_kind(self) -> bool:
        """Whether the parameter has the dtype and the device that the bucket has."""
        return (self.parameter.dtype, self.parameter.device) == (self.flat.dtype, self.flat.device)

    def bind(self) -> None:
        """Take the parameter's values into the bucket, and let its memory be there.

        Raises:
            RuntimeError: its shape, dtype or device is another than when it was laid out.
        """
        parameter, place = self.parameter, self._place
        if (parameter.shape, parameter.dtype, parameter.device) != (place.shape, place.dtype, place.device):
            raise RuntimeError(
                f"a parameter of shape {tuple(place.shape)} ({place.dtype}, {place.device}) became one of shape "
                f"{tuple(parameter.shape)} ({parameter.dtype}, {parameter.device}) while its optimizer is sharded: "
                "convert and move the module before the fit"
            )
        place.copy_(parameter.data)
        parameter.data = place

    def release(self) -> None:
        """Give the parameter memory of its own again, and hold on to none of the bucket's."""
        parameter = self.parameter
        if self.is_bound():
            parameter.data = torch.empty_like(self._place).copy_(parameter.data)
        if parameter.grad is self.shown:
            parameter.grad = None
        nothing = self.gradient.new_empty(0)
        if self.value is not None:  # which stays the key to its state
            self.value.data, self.value.grad = nothing, None
        self.gradient = self.whole_gradient = nothing
        self._place, self._address = nothing, -1
        self.kept = None

    def keep(self) -> None:
        """Set the gradient aside, for a backward to come."""
        self.is_kept, self.kept = True, self.gradient.clone()
        self.parameter.grad = None

    def show_kept(self) -> None:
        """Let the gradient be what was kept."""
        assert self.kept is not None
        self.gradient.copy_(self.kept)
        self.parameter.grad = self.shown
        self.is_kept, self.kept = False, None

    def part_of(self, part: Tensor) -> Tensor:
        """The fragment's place in something that is laid out as this rank's slice of the bucket."""
        return part[self._offset : self._offset + self.stop - self.start]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's fragment of a tensor of the parameter's shape: a view of it where strides allow."""
        if whole.stride() != self._strides:
            whole = torch.empty_strided(whole.shape, self._strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        part = whole.as_strided((whole.numel(),), (1,), whole.storage_offset())[self.start : self.stop]
        return part.view(()) if whole.dim() == 0 and part.numel() else part

    def joined(self, flat: Tensor) -> Tensor:
        """The tensor of the parameter's shape that lies in ``flat``, which is laid out as the bucket; a copy."""
        view = flat.as_strided(self.parameter.shape, self._strides, self._start)
        return torch.empty_strided(view.shape, self._strides, dtype=flat.dtype, device=flat.device).copy_(view)

    def lend_gradient(self) -> None:
        """Give the fragment the gradient that ``parameter.grad`` stands for."""
        assert self.value is not None
        grad = self.parameter.grad
        if grad is self.shown:
            self.value.grad = self.gradient
        elif grad is None:
            self.value.grad = None
        else:  # somebody put it there, alike on all ranks
            if grad.stride() != self._strides:
                grad = self.parameter.grad = torch.empty_like(self._place).copy_(grad)
            self.value.grad = self.cut(grad.detach())


def find_aliases(buckets: Iterable[Bucket], module: nn.Module) -> dict[int, tuple[Parameter, Parameter]]:
    """Parameters whose memory is that of a parameter in a bucket, by id, each with that other one.

    ``weight_norm`` makes such a pair in the middle of a fit: its ``original1`` takes over the memory of the weight
    that it replaces, and the optimizer goes on to update the weight, if that still has a gradient. ``original1`` may
    be frozen by then, and in no bucket.

    Args:
        buckets: laid out.
        module: whose parameters stay themselves, where there is a choice.

    Raises:
        ValueError: two tensors of which one is in a bucket have a part of their memory in common, or a buffer has.
    """
    own = {id(parameter) for parameter in module.parameters()}
    laid_out = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    named: list[tuple[str, Tensor]] = [one for b in buckets for one in zip(b.names, b.parameters, strict=True)]
    named += [(name, frozen) for name, frozen in module.named_parameters() if id(frozen) not in laid_out]
    named += [(name, buffer) for name, buffer in module.named_buffers()]
    named = [one for one in named if not is_lazy(one[1]) and one[1].layout is torch.strided and one[1].numel()]
    named.sort(key=lambda one: (one[1].data_ptr(), id(one[1]) not in laid_out, id(one[1]) not in own))
    aliases: dict[int, tuple[Parameter, Parameter]] = {}
    owner: tuple[str, Tensor] | None = None
    for name, tensor in named:
        if owner is None or tensor.device != owner[1].device or tensor.data_ptr() >= _end(owner[1]):
            owner = name, tensor
            continue
        if id(owner[1]) not in laid_out and id(tensor) not in laid_out:  # neither will be moved
            owner = max(owner, (name, tensor), key=lambda one: _end(one[1]))
            continue
        kinds = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (owner[1], tensor)]
        if kinds[0] == kinds[1] and isinstance(owner[1], Parameter) and isinstance(tensor, Parameter):
            aliases[id(tensor)] = tensor, owner[1]
        elif _is_dense(owner[1]) and _is_dense(tensor):
            one, other = sorted([owner[0], name])
            raise ValueError(
                f"{one!r} and {other!r} have memory in common that a sharded optimizer moves to a buffer of its own: "
                "give each memory of its own (clone it), or leave the optimizer unsharded (shard_optimizer=False)"
            )
    return aliases


def _end(parameter: Tensor) -> int:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr() + extent * parameter.element_size()


def _is_dense(parameter: Tensor) -> bool:
    return _end(parameter) - parameter.data_ptr() == parameter.numel() * parameter.element_size()


class FlatBuffer:
    """The parameters of a bucket in one buffer, of which each rank updates its slice.

    Args:
        bucket: laid out.
        aliases: ids of those whose memory is another parameter's: every rank updates them whole.
        padded: its buffer with the padding.
        group: the ranks.
        shared_buffer: over which the parameters' slices are exchanged; None: through the group.

    Attributes:
        values: the parameters.
        gradients: the padded buffer, in the parameters' dtype.
        shards: by parameter.
        aliased: parameters of the bucket that are no shards, with their gradients' places.
        work: the other ranks' slices on their way; None where they are here.
    """

    def __init__(
        self,
        bucket: Bucket,
        padded: Tensor,
        group: comm.Group,
        shared_buffer: SharedBuffer | None = None,
        aliases: Collection[int] = (),
    ) -> None:
        self.index = bucket.index
        self.gradients = torch.view_as_complex(padded.view(-1, 2)) if bucket.dtype.is_complex else padded
        self.values = torch.zeros_like(self.gradients)
        self.work: Any = None
        self._shared_buffer = shared_buffer
        self._group = group
        self._world, self._rank = comm.world_size(group), comm.rank(group)
        self.dtype, self.device = bucket.dtype, bucket.device
        self.length = self.values.numel() // self._world
        self.begin = self.length * self._rank
        numels = [parameter.numel() for parameter in bucket.parameters]
        parts = fragments(bucket.starts, numels, self.begin, self.begin + self.length)
        everything = zip(bucket.parameters, bucket.views, bucket.starts, parts, strict=True)
        # what has no elements is nobody's: every rank does what there is to do
        self.shards = [ParamShard(self, *one) for one in everything if one[0].numel() and id(one[0]) not in aliases]
        pairs = zip(bucket.parameters, bucket.views, strict=True)
        self.aliased = [(parameter, view) for parameter, view in pairs if id(parameter) in aliases]

    def send(self) -> None:
        """Begin to exchange the parameters' slices."""
        whole, part = self._real(self.values)
        if self._shared_buffer is None:
            self.work = all_gather(whole, part, self._group)
        else:
            self.work = self._shared_buffer.send(self.index, whole.view(torch.uint8))

    def release(self) -> None:
        """Give the parameters memory of their own again, and let go of the bucket's."""
        for shard in self.shards:
            shard.release()
        self.values = self.gradients = self.values.new_empty(0)
        self.work = None

    def gather_gradients(self) -> None:
        """Fill the gradients with all ranks' slices."""
        all_gather(*self._real(self.gradients), self._group).wait()

    def gather(self, dtype: torch.dtype, fill: Callable[[Tensor], None], only: int | None) -> Tensor | None:
        """All ranks' slices of something else that is laid out as the parameters are.

        Args:
            dtype: of its elements.
            fill: gets this rank's slice, of zeros, and puts there what it has.
            only: the rank that gets the result; None is all.

        Returns:
            a tensor as long as the bucket, on the ranks that get it.
        """
        device = self.device
        part = torch.zeros(self.length, dtype=dtype, device=device)
        fill(part)
        if only is None or self._world == 1:
            whole = torch.empty(self.length * self._world, dtype=dtype, device=device)
            all_gather(whole, part, self._group).wait()
            return whole
        target = only if self._group is None else dist.get_global_rank(self._group, only)
        if self._rank != only:
            dist.gather(part.view(torch.uint8), None, dst=target, group=self._group)
            return None
        whole = torch.empty(self.length * self._world, dtype=dtype, device=device)
        dist.gather(part.view(torch.uint8), list(whole.view(torch.uint8).chunk(self._world)), target, self._group)
        return whole

    def gather_kept(self) -> list[tuple[Parameter, Tensor]]:
        """Parameters whose gradients were set aside, with all of each; for another layout. A collective."""
        kept = [shard for shard in self.shards if shard.is_kept]
        if not kept:
            return []

        def fill(part: Tensor) -> None:
            for shard in kept:
                if shard.kept is not None:
                    shard.part_of(part).copy_(shard.kept.view(-1))

        joined = self.gather(self.dtype, fill, None)
        assert joined is not None
        return [(shard.parameter, shard.joined(joined)) for shard in kept]

    def _real(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        part = flat[self.begin : self.begin + self.length]
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1), torch.view_as_real(part).view(-1)
        return flat, part


# -- an optimizer's state: whole, and in fragments -----------------------------------------------------------


State = dict[str, Any]


def cut_state(shard: ParamShard, whole: Mapping[str, Any], optimizer: Optimizer) -> State:
    """This rank's part of a parameter's state.

    Args:
        shard: of which parameter.
        whole: tensors of the parameter's shape, and what belongs to the parameter as a whole (a count of steps).
        optimizer: for the error.

    Raises:
        ValueError: for a tensor of another shape.
    """
    shape = shard.parameter.shape
    part: State = {}
    for key, value in whole.items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape != shape:
                raise ValueError(_odd(optimizer, key, value.shape, shape))
            part[key] = shard.cut(value.to(shard.parameter.device)).clone()
        else:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return part


def whole_states(
    flats: Sequence[FlatBuffer],
    state_of: Callable[[ParamShard], Mapping[str, Any]],
    optimizer: Optimizer,
    group: comm.Group,
    only: int | None = None,
) -> Iterator[tuple[ParamShard, str, Any]]:
    """Join the ranks' parts of the state, one bucket and one key after another. A collective.

    Args:
        flats: the layout.
        state_of: this rank's part of a parameter's state.
        optimizer: for the error.
        group: the ranks.
        only: the rank that gets what is joined; None is all.

    Yields:
        parameter, key and value: a tensor of the parameter's shape, or what belongs to the parameter as a whole;
        the value is None on ranks that do not get it.

    Raises:
        ValueError: on all ranks, for a tensor that is no fragment.
    """
    everything: dict[tuple[int, int], dict[str, Any]] = {}
    for described in comm.all_gather_object(_describe(flats, state_of, optimizer), group):
        if isinstance(described, str):
            raise ValueError(described)
        for place, state in described.items():
            everything.setdefault(place, state)
    for flat in flats:
        mine = {index: state for (of, index), state in sorted(everything.items()) if of == flat.index}
        kinds = {(key, what.dtype): None for state in mine.values() for key, what in state.items() if _is_cut(what)}
        joined = {}
        for key, dtype in kinds:
            holders = [index for index, state in mine.items() if _is_cut(state.get(key)) and state[key].dtype == dtype]

            def fill(part: Tensor, key: str = key, holders: list[int] = holders, flat: FlatBuffer = flat) -> None:
                for index in holders:
                    shard = flat.shards[index]
                    if shard.value is not None:
                        shard.part_of(part).copy_(state_of(shard)[key])

            whole = flat.gather(dtype, fill, only)
            for index in holders:
                joined[index, key] = None if whole is None else flat.shards[index].joined(whole)
        for index, state in mine.items():
            for key, what in state.items():
                if isinstance(what, _Number):
                    yield flat.shards[index], key, what.value.to(flat.device) if what.on_device else what.value
                else:
                    yield flat.shards[index], key, joined[index, key] if _is_cut(what) else what


class _Number:
    """A tensor without dimensions, on its way over the CPU."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.on_device = value.detach().cpu(), value.device.type != "cpu"


class _Cut:
    """Stands for a tensor of which each rank has a fragment."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _is_cut(value: object) -> bool:
    return isinstance(value, _Cut)


def _describe(
    flats: Sequence[FlatBuffer], state_of: Callable[[ParamShard], Mapping[str, Any]], optimizer: Optimizer
) -> Any:
    """What this rank has, by bucket and place in it; a sentence where there is something that cannot be joined."""
    described: dict[tuple[int, int], dict[str, Any]] = {}
    for flat in flats:
        for index, shard in enumerate(flat.shards):
            if shard.value is None:
                continue
            state = state_of(shard)
            if state:
                entry = described[flat.index, index] = {}
                for key, value in state.items():
                    if not isinstance(value, Tensor):
                        entry[key] = value
                    elif value.dim() == 0:
                        entry[key] = _Number(value)
                    elif value.shape == (shard.stop - shard.start,):
                        entry[key] = _Cut(value.dtype)
                    else:
                        return _odd(optimizer, key, value.shape, (shard.stop - shard.start,))
    return described


def _odd(optimizer: Optimizer, key: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    return (
        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(shape)} for a tensor of shape {tuple(expected)}: "
        "it is not elementwise, and cannot be sharded; leave it unsharded (shard_optimizer=False)"
    )


# -- parameters under way: whoever reads one waits for it ----------------------------------------------------


WaitFor = Callable[[Iterable["Parameter | None"]], None]


class AwaitedParameters(dict[str, "Parameter | None"]):
    """A module's ``_parameters``: reading a value waits until it is there.

    Copies and pickles of it are plain dicts.
    """

    def __init__(self, parameters: dict[str, Parameter | None], wait_for: WaitFor) -> None:
        super().__init__(parameters)
        self._wait_for = wait_for

    def __getitem__(self, name: str) -> Parameter | None:
        parameter = dict.__getitem__(self, name)
        self._wait_for((parameter,))
        return parameter

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # its own `__getitem__` waits

    def items(self) -> Any:
        """Names and parameters, when all are there."""
        self._wait_for(dict.values(self))
        return dict.items(self)

    def values(self) -> Any:
        self._wait_for(dict.values(self))
        return dict.values(self)

    def copy(self) -> dict[str, Parameter | None]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (self.copy(),)


class AwaitedList(list[Parameter]):
    """The parameters of an optimizer's group: reading one waits until it is there. Copies of it are plain lists."""

    def __init__(self, parameters: Iterable[Parameter], wait_for: WaitFor) -> None:
        super().__init__(parameters)
        self._wait_for = wait_for

    def __iter__(self) -> Any:
        self._wait_for(self.unawaited())
        return list.__iter__(self)

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found: Any = list.__getitem__(self, place)
        self._wait_for(found if isinstance(place, slice) else (found,))
        return found

    def unawaited(self) -> list[Parameter]:
        """As they are; not to be read."""
        return list(list.__iter__(self))

    def __reduce_ex__(self, protocol: object) -> Any:
        return list, (list(self),)


class _BeforeForward:
    """A forward pre-hook that waits for the module's own parameters; a copy of it does nothing."""

    def __init__(self, parameters: Sequence[Parameter | None], wait_for: WaitFor) -> None:
        self._parameters, self._wait_for = parameters, wait_for

    def __call__(self, module: nn.Module, args: object) -> None:
        self._wait_for(self._parameters)

    def __reduce_ex__(self, protocol: object) -> Any:
        return _Nothing, ()


class _Nothing:
    """What becomes of the hook in a copied or pickled module."""

    def __call__(self, module: nn.Module, args: object) -> None:
        pass


class PrefetchWait:
    """Has every module under ``module`` wait for its own parameters.

    Args:
        module: whose parameters are exchanged while others are already used.
        wait_for: waits for those of the given parameters that are under way.
    """

    def __init__(self, module: nn.Module, wait_for: WaitFor) -> None:
        self._modules: list[nn.Module] = []
        self._hooks: list[Any] = []
        for owner in module.modules():
            if owner._parameters:
                parameters = tuple(owner._parameters.values())
                self._hooks.append(owner.register_forward_pre_hook(_BeforeForward(parameters, wait_for), prepend=True))
                vars(owner)["_parameters"] = AwaitedParameters(owner._parameters, wait_for)
                self._modules.append(owner)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()
        for owner in self._modules:
            vars(owner)["_parameters"] = dict(dict.items(owner._parameters))
        self._hooks, self._modules = [], []
