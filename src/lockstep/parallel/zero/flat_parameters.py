"""A bucket whose parameters lie in one buffer, laid out as their gradients are, and what a rank has of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.zero.reduce_scatter import all_gather
from lockstep.parallel.zero.shard_layout import Fragment, fragments
from lockstep.parallel.zero.shared_buffer import Stage

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

    piece: Piece

    @classmethod
    def of(cls, piece: Piece) -> SlicedGradient:
        """The one for a parameter."""
        parameter = piece.parameter
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        made: SlicedGradient = torch.Tensor._make_subclass(cls, nothing)
        made.piece = piece
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
                    gradient.piece.gradient.zero_()
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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values."""
        return f"SlicedGradient(shape={tuple(self.piece.parameter.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Nothing to be copied or pickled."""
        raise RuntimeError(UNREADABLE)


class Piece:
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

    def __init__(self, flat: Flat, parameter: Parameter, whole_gradient: Tensor, place: int, part: Fragment) -> None:
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


def find_aliases(buckets: Iterable[Bucket], first: Iterable[Parameter]) -> dict[int, Parameter]:
    """Parameters whose memory is another parameter's, by id, each with that other one.

    ``weight_norm`` makes such a pair in the middle of a fit: its ``original1`` takes over the memory of the weight
    that it replaces, and the optimizer goes on to update the weight, if that still has a gradient.

    Args:
        buckets: laid out.
        first: parameters that stay themselves, where there is a choice.

    Raises:
        ValueError: two of them have a part of their memory in common.
    """
    preferred = {id(parameter) for parameter in first}
    named = [one for bucket in buckets for one in zip(bucket.names, bucket.parameters, strict=True) if one[1].numel()]
    named.sort(key=lambda one: (one[1].data_ptr(), id(one[1]) not in preferred))
    aliases: dict[int, Parameter] = {}
    owner: tuple[str, Parameter] | None = None
    for name, parameter in named:
        if owner is None or parameter.device != owner[1].device or parameter.data_ptr() >= _end(owner[1]):
            owner = name, parameter
            continue
        kinds = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in (owner[1], parameter)]
        if kinds[0] == kinds[1]:
            aliases[id(parameter)] = owner[1]
        elif _is_dense(owner[1]) and _is_dense(parameter):
            one, other = sorted([owner[0], name])
            raise ValueError(
                f"parameters {one!r} and {other!r} have a part of their memory in common, and a sharded optimizer "
                "moves each to a buffer: give them memory of their own, or leave it unsharded (shard_optimizer=False)"
            )
    return aliases


def _end(parameter: Tensor) -> int:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data_ptr() + extent * parameter.element_size()


def _is_dense(parameter: Tensor) -> bool:
    return _end(parameter) - parameter.data_ptr() == parameter.numel() * parameter.element_size()


class Flat:
    """The parameters of a bucket in one buffer, of which each rank updates its slice.

    Args:
        bucket: laid out.
        aliases: ids of those whose memory is another parameter's: every rank updates them whole.
        padded: its buffer with the padding.
        group: the ranks.
        stage: over which the parameters' slices are exchanged; None: through the group.

    Attributes:
        values: the parameters.
        gradients: the padded buffer, in the parameters' dtype.
        pieces: by parameter.
        aliased: parameters of the bucket that are no pieces, with their gradients' places.
        work: the other ranks' slices on their way; None where they are here.
    """

    def __init__(
        self,
        bucket: Bucket,
        padded: Tensor,
        group: comm.Group,
        stage: Stage | None = None,
        aliases: Collection[int] = (),
    ) -> None:
        self.index = bucket.index
        self.gradients = torch.view_as_complex(padded.view(-1, 2)) if bucket.dtype.is_complex else padded
        self.values = torch.zeros_like(self.gradients)
        self.work: Any = None
        self._stage = stage
        self._group = group
        self._world, self._rank = comm.world_size(group), comm.rank(group)
        self.dtype, self.device = bucket.dtype, bucket.device
        self.length = self.values.numel() // self._world
        self.begin = self.length * self._rank
        numels = [parameter.numel() for parameter in bucket.parameters]
        parts = fragments(bucket.starts, numels, self.begin, self.begin + self.length)
        everything = zip(bucket.parameters, bucket.views, bucket.starts, parts, strict=True)
        # what has no elements is nobody's: every rank does what there is to do
        self.pieces = [Piece(self, *one) for one in everything if one[0].numel() and id(one[0]) not in aliases]
        pairs = zip(bucket.parameters, bucket.views, strict=True)
        self.aliased = [(parameter, view) for parameter, view in pairs if id(parameter) in aliases]

    def send(self) -> None:
        """Begin to exchange the parameters' slices."""
        whole, part = self._real(self.values)
        if self._stage is None:
            self.work = all_gather(whole, part, self._group)
        else:
            self.work = self._stage.send(self.index, whole.view(torch.uint8))

    def release(self) -> None:
        """Give the parameters memory of their own again, and let go of the bucket's."""
        for piece in self.pieces:
            piece.release()
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
        kept = [piece for piece in self.pieces if piece.is_kept]
        if not kept:
            return []

        def fill(part: Tensor) -> None:
            for piece in kept:
                if piece.kept is not None:
                    piece.part_of(part).copy_(piece.kept.view(-1))

        joined = self.gather(self.dtype, fill, None)
        assert joined is not None
        return [(piece.parameter, piece.joined(joined)) for piece in kept]

    def _real(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        part = flat[self.begin : self.begin + self.length]
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1), torch.view_as_real(part).view(-1)
        return flat, part
