"""Collectives that also work without a process group, where this process counts as the only rank.

Every function that communicates takes a process group, or ``None`` for the default group. Tensors are made contiguous
before they are sent: gloo reduces strided views wrongly, without an error. Ranks (``src``) are counted within the
    group.

This file also has the table of torch's collectives, the reductions of logged values, the pickling of objects for other
processes, and the grouping of tensors that are copied or sent together.

Objects are pickled with their tensors on the CPU. A pickled tensor of a device is unpickled onto the device of the same
number, so a rank would start to use the devices of other ranks, with some hundred megabytes for each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.ground.device import current_device, current_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import waits

Group: TypeAlias = dist.ProcessGroup | None
Operation = Literal["sum", "mean", "min", "max"]

Combine: TypeAlias = Callable[[Tensor], Tensor]
"""Function that combines k stacked tensors in their order, from ``(..., k, *shape)`` to ``(..., *shape)``. Its results
can be combined again."""

BRANCHES = 8
"""Number of neighboring ranks whose tensors are combined at once; most hosts have this many ranks."""
_TAG = 40_961  # of messages between ranks that combine; users' messages do not have it

BROADCAST_BYTES = 64 * 2**20
"""Maximum number of bytes of small tensors that are copied together for one broadcast. A larger tensor is sent from its
own memory."""


# -- the group


def is_distributed() -> bool:
    """Return True if this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def world_size(group: Group = None) -> int:
    """Return the number of ranks of ``group``; 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def rank(group: Group = None) -> int:
    """Return this process's rank in ``group``; 0 without a process group."""
    return dist.get_rank(group) if is_distributed() else 0


def ranks_of(group: Group = None) -> list[int]:
    """Return the global ranks of the members of ``group``."""
    if not is_distributed():
        return [0]
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def carrier(group: Group, preferred: torch.device) -> torch.device:
    """Return the device to which a tensor must be moved before ``group`` can send it: ``preferred`` if possible.

    That is ``preferred`` if possible, else the CPU, else this process's accelerator. NCCL carries only GPU tensors, so
    CPU tensors travel by way of a GPU: see `travel_by`.
    """
    entries = dist.get_backend_config(group).split(",")  # "cpu:gloo", "cuda:nccl", ...
    kinds = [entry.partition(":")[0] for entry in entries]
    if preferred.type in kinds:
        return preferred
    if "cpu" in kinds:
        return torch.device("cpu")
    return _accelerators.get(_found(group)) or current_of(kinds[0])


def backend_of(group: Group, kind: str) -> str:
    """Return the name of the backend with which ``group`` sends tensors of a device type; "" without such a backend."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    return backends.get(kind, "")


def travel_by(device: torch.device, group: Group = None) -> None:
    """From now on, send CPU tensors over ``group`` through ``device`` if the group's backend cannot send CPU tensors.

    Without this call, they travel through the current accelerator.

    Nothing changes if ``device`` is the CPU. The current accelerator is GPU 0 on all ranks of a host if the program
    places its model by hand and does not set it. NCCL refuses two ranks on one GPU.
    """
    if device.type != "cpu":
        _accelerators[_found(group)] = device


_accelerators: WeakKeyDictionary[Any, torch.device] = WeakKeyDictionary()


def _found(group: Group) -> Any:
    return dist.group.WORLD if group is None else group


def _on_accelerator(group: Group) -> AbstractContextManager[Any]:
    """Return a context in which the accelerator that `travel_by` chose for ``group`` is the current device."""
    found = _accelerators.get(_found(group))
    return nullcontext() if found is None else current_device(found)


# -- collectives


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a 1-D uint8 tensor. The result is a view if the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # a single element may have any stride, with which it cannot be viewed as bytes
    return (flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat).view(torch.uint8)


@waits()
def barrier(group: Group = None) -> None:
    """Wait until every rank of ``group`` has called this function."""
    if world_size(group) == 1:
        return
    if backend_of(group, "cpu"):
        if getattr(_found(group), "bound_device_id", None) is None:
            dist.barrier(group)
        else:  # torch's barrier would use the device that the group is bound to
            dist.all_reduce(torch.zeros(1), group=group)
    else:
        dist.barrier(group, device_ids=[carrier(group, torch.device("cpu")).index])


@waits()
def all_reduce(tensor: Tensor, op: Operation = "sum", group: Group = None) -> Tensor:
    """Return the sum, mean, minimum or maximum of ``tensor`` over the ranks, element by element.

    Args:
        tensor: same shape and dtype on every rank. It is not changed.
        op: ``"mean"`` of whole numbers is a float tensor. ``"min"`` and ``"max"`` of floats are NaN if any rank's
            value is NaN. (gloo's own maximum ignores a NaN that is not on the first rank.)

    Returns:
        A new tensor on ``tensor``'s device, the same on every rank.
    """
    if op not in ("sum", "mean", "min", "max"):
        raise ValueError(f'all_reduce(op={op!r}) is not supported: choose "sum", "mean", "min" or "max"')
    world = world_size(group)
    if world == 1:
        whole = op == "mean" and not (tensor.is_floating_point() or tensor.is_complex())
        return tensor.detach().to(torch.get_default_dtype()) if whole else tensor.detach().clone()
    source = tensor.detach().to(carrier(group, tensor.device))
    if op in ("min", "max") and source.is_floating_point():
        result = _extreme(source, op, group)
    else:
        result = source.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, _operation(op), group)
        if op == "mean":
            result = result / world
    return result.to(tensor.device)


def _extreme(source: Tensor, op: Operation, group: Group) -> Tensor:
    """Return the elementwise minimum or maximum of floats over the ranks. An element is NaN if any rank has NaN there.

    Marks for NaN are reduced together with the values.
    """
    sign = 1 if op == "max" else -1
    missing = source.isnan()
    pair = torch.stack([torch.where(missing, -sign * torch.inf, source), missing.to(source.dtype) * sign])
    dist.all_reduce(pair, _operation(op), group)
    return torch.where(pair[1] != 0, torch.nan, pair[0])


def _operation(op: Operation) -> dist.ReduceOp.RedOpType:
    return {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(op, dist.ReduceOp.SUM)


@waits()
def all_gather_tensor(tensor: Tensor, group: Group = None) -> Tensor:
    """Return every rank's ``tensor`` (same shape and dtype everywhere), stacked: shape ``(world size, *shape)``."""
    world = world_size(group)
    if world == 1:
        return tensor.detach().clone().unsqueeze(0)
    source = tensor.detach().to(carrier(group, tensor.device)).contiguous()
    if source.numel() == 0:
        return tensor.detach().new_empty((world, *tensor.shape))
    # gloo does not support every dtype, so bytes are sent.
    parts = source.new_empty((world, source.nbytes), dtype=torch.uint8)
    if source.device.type == "cpu":
        dist.all_gather(list(parts.unbind()), as_bytes(source), group)
    else:  # NCCL gathers a list in its own memory and copies each piece out
        dist.all_gather_into_tensor(parts.view(-1), as_bytes(source), group)
    return parts.view(source.dtype).view(world, *source.shape).to(tensor.device)


class RowExchange:
    """Asynchronous all-gather of one list of numbers per rank. The constructor starts it; `read` waits for the result.

    Args:
        row: this rank's numbers, of the same length on all ranks.
        group: the ranks.
        alone: use this rank's row only, even if there is a group.

    Example:
        >>> RowExchange([1.0, 2.0]).read()
        [[1.0, 2.0]]
    """

    def __init__(self, row: Sequence[float], group: Group = None, *, alone: bool = False) -> None:
        mine = torch.tensor(row, dtype=torch.float64)
        self._rows, self._work = mine.unsqueeze(0), None
        world = 1 if alone else world_size(group)
        if world > 1:
            mine = mine.to(carrier(group, mine.device))
            self._rows = mine.new_empty(world, len(row))
            self._work = dist.all_gather(list(self._rows), mine, group=group, async_op=True)

    @waits()
    def read(self) -> list[list[float]]:
        """Wait for the numbers of all ranks, and return one list per rank, ordered by rank."""
        if self._work is not None:
            self._work.wait()
        return self._rows.tolist()

    @waits()
    def send_only(self) -> None:
        """Wait at most 5 seconds until this rank's numbers are sent. Ignore errors, and do not read any numbers."""
        if self._work is not None and is_distributed():
            with suppress(RuntimeError):  # a rank that is gone cannot answer
                self._work.wait(timedelta(seconds=5))


def combined(tensor: Tensor, combine: Combine, group: Group = None) -> Tensor:
    """Combine the tensors of all ranks with the function ``combine``: in groups of eight neighbors, level by level.

    The shape of the tree, and so the bits of the result, depend on the number of ranks alone. With up to eight ranks,
    and if only GPUs can send, each rank gets all tensors and combines them itself. Otherwise a rank gets at most seven
    tensors at each of log8(ranks) levels, and finally the result.

    Args:
        tensor: same shape and dtype on every rank.
        combine: the same function on every rank.

    Returns:
        A tensor on the CPU, the same on every rank.

    Example:
        >>> combined(torch.ones(2), lambda rows: rows.sum(-2))
        tensor([1., 1.])
    """
    world = world_size(group)
    if world == 1:
        return combine(tensor.detach().cpu().unsqueeze(0))
    if world <= BRANCHES:
        return combine(all_gather_tensor(tensor, group).cpu())
    if carrier(group, tensor.device).type != "cpu":
        return _by_tree(all_gather_tensor(tensor, group).cpu(), combine)
    return combined_by_messages(tensor.detach().contiguous(), combine, group)


def combined_there(tensor: Tensor, combine: Combine, group: Group = None) -> Tensor:
    """Compute `combined` on the tensor's device, with the same bits and without waiting for the device."""
    return _by_tree(all_gather_tensor(tensor, group), combine)


def _by_tree(rows: Tensor, combine: Combine) -> Tensor:
    while True:
        whole = len(rows) // BRANCHES * BRANCHES
        found = [combine(rows[:whole].unflatten(0, (-1, BRANCHES)))] if whole else []
        if whole < len(rows):
            found.append(combine(rows[whole:].unsqueeze(0)))
        rows = torch.cat(found)
        if len(rows) == 1:
            return rows[0]


@waits()
def combined_by_messages(tensor: Tensor, combine: Combine, group: Group = None) -> Tensor:
    """Compute `combined` for CPU tensors with point-to-point messages: one of eight neighbors receives all tensors.

    The call is recorded as one collective, since no rank returns before all ranks have entered.
    """
    world, me, step = world_size(group), rank(group), 1
    while step < world and me % step == 0:
        block = BRANCHES * step
        if me % block:
            dist.send(tensor, _global_rank(me - me % block, group), group, _TAG)
        else:
            others = range(me + step, min(me + block, world), step)
            rows = tensor.new_empty((1 + len(others), *tensor.shape))
            rows[0] = tensor
            # All receives are posted before the first wait, so that messages may arrive in any order.
            waiting = [
                dist.irecv(rows[number], _global_rank(other, group), group, _TAG)
                for number, other in enumerate(others, 1)
            ]
            for each in waiting:
                if each is not None:
                    each.wait()
            tensor = combine(rows.unsqueeze(0))[0]
        step = block
    # A copy, since the broadcast writes into it and the argument must not change.
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(result, _global_rank(0, group), group)
    return result


@waits()
def all_gather_uneven(tensor: Tensor, group: Group = None) -> list[Tensor]:
    """Return every rank's ``tensor``, by rank. The sizes of the first dimension may differ, and may be 0.

    Raises:
        ValueError: on every rank, if the dtypes or the other dimensions differ.
    """
    if world_size(group) == 1:
        return [tensor.detach().clone()]
    kinds = all_gather_object((tuple(tensor.shape), tensor.dtype), group)
    for other, (shape, dtype) in enumerate(kinds):
        if not shape or shape[1:] != kinds[0][0][1:] or dtype != kinds[0][1]:
            raise ValueError(
                f"all_gather_uneven: rank 0 has a {kinds[0][1]} tensor of shape {kinds[0][0]}, but rank {other} has a "
                f"{dtype} tensor of shape {shape}: tensors need the same dtype and shape, except in dimension 0"
            )
    lengths = [shape[0] for shape, _ in kinds]
    # Collectives need the same shape on all ranks.
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor.detach()
    gathered = all_gather_tensor(padded, group)
    return [part[:length] for part, length in zip(gathered, lengths, strict=True)]


@waits()
def all_gather_with_grad(tensor: Tensor, group: Group = None) -> Tensor:
    """Gather every rank's tensor as `all_gather_tensor` does, with support for gradients in the backward.

    The gradient of this rank's ``tensor`` is the sum, over all ranks, of the gradients of its copies. Every rank must
    therefore run the backward.
    """
    if world_size(group) == 1:
        return tensor.unsqueeze(0)
    return _AllGather.apply(tensor, group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather_tensor(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group)[rank(ctx.group)], None


@waits()
def all_gather_object(obj: object, group: Group = None) -> list[Any]:
    """Return the ``obj`` of every rank, ordered by rank. Objects are pickled, so all processes must be trusted.

    Tensors of a device arrive on the CPU, here and in the three functions below.
    """
    world = world_size(group)
    if world == 1:
        return [obj]
    objects: list[Any] = [None] * world
    with _on_accelerator(group):
        dist.all_gather_object(objects, packed(obj), group)
    return list(map(unpacked, objects))


@waits()
def broadcast_object(obj: object, src: int = 0, group: Group = None) -> Any:
    """Return rank ``src``'s ``obj`` on every rank, by pickling it. The arguments of other ranks are ignored."""
    if world_size(group) == 1:
        return obj
    box: list[Any] = [packed(obj) if rank(group) == src else None]
    with _on_accelerator(group):
        dist.broadcast_object_list(box, src=_global_rank(src, group), group=group)
    return obj if rank(group) == src else unpacked(box[0])


@waits()
def gather_objects(obj: object, group: Group = None) -> list[Any]:
    """On the group's first rank, return every rank's ``obj``, by rank. On the other ranks, return an empty list."""
    world = world_size(group)
    if world == 1:
        return [obj]
    objects: list[Any] | None = [None] * world if rank(group) == 0 else None
    with _on_accelerator(group):
        dist.gather_object(packed(obj), objects, _global_rank(0, group), group)
    return list(map(unpacked, objects or []))


@waits()
def scatter_objects(objects: list[Any], group: Group = None) -> Any:
    """Send each item of the first rank's list to the rank with the item's index. Return this rank's item.

    The arguments of other ranks are ignored.
    """
    if world_size(group) == 1:
        return objects[0]
    box: list[Any] = [None]
    with _on_accelerator(group):
        sent = [packed(obj) for obj in objects] if rank(group) == 0 else None
        dist.scatter_object_list(box, sent, _global_rank(0, group), group)
    return unpacked(box[0])


@waits()
def broadcast_tensors(
    tensors: Iterable[Tensor],
    src: int = 0,
    group: Group = None,
    *,
    piece: int | None = None,
    over: torch.device | None = None,
) -> None:
    """Overwrite ``tensors`` on every rank with those of rank ``src``, bit for bit. A message contains many tensors.

    Args:
        tensors: same shapes, dtypes and order on every rank; strided views and any dtype are supported.
        piece: bytes of a message (more for a larger tensor); `BROADCAST_BYTES` if None.
        over: this rank's device, by which all tensors travel. Required if a tensor may be on the CPU on one rank and
            on a device on another: a group may have two backends for these, and each waits for all ranks.
    """
    if world_size(group) == 1:
        return
    with torch.no_grad():
        # Wide dtypes first: each tensor starts at a multiple of its width, so that its bytes can be viewed as its
        # dtype. Empty tensors have no bytes to send.
        sent = sorted((tensor for tensor in tensors if tensor.numel()), key=lambda tensor: -tensor.element_size())
        max_bytes = BROADCAST_BYTES if piece is None else piece
        for indices in grouped(sent, max_bytes, lambda tensor: tensor.device if over is None else None):
            chunk = [sent[index] for index in indices]
            there = carrier(group, chunk[0].device if over is None else over)
            parts = [as_bytes(tensor) if over is None else as_bytes(tensor).to(there) for tensor in chunk]
            flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(there)
            dist.broadcast(flat, _global_rank(src, group), group)
            if len(parts) == 1 and flat.data_ptr() == chunk[0].data_ptr():
                continue
            arrived = flat.to(chunk[0].device) if over is None else flat
            for tensor, data in zip(chunk, arrived.split([part.numel() for part in parts]), strict=True):
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def _global_rank(member: int, group: Group) -> int:
    return member if group is None else dist.get_global_rank(group, member)


COLLECTIVES = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "input",
    "gather": "tensor",
    "scatter": "tensor",
    "all_to_all": "",
    "all_to_all_single": "input",
    "barrier": "",
    "monitored_barrier": "",
    "all_gather_object": "",
    "broadcast_object_list": "",
    "gather_object": "",
    "scatter_object_list": "",
}
"""Collectives in ``torch.distributed``, with the name of their tensor argument ("" for none)."""

RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""New names of collectives since torch 2.13, which its FSDP2 uses."""


REDUCTIONS = ("mean", "sum", "min", "max")


def reduction_of(name: str, reduce_fx: object) -> str:
    """Convert the argument ``reduce_fx`` of ``self.log`` to the name of a reduction in `REDUCTIONS`.

    Args:
        name: name of the logged value.
        reduce_fx: the value that was passed.

    Raises:
        MisconfigurationException: the reduction is not supported.

    Example:
        >>> reduction_of("loss", torch.max), reduction_of("loss", "AVG")
        ('max', 'mean')
    """
    op = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", sum: "sum", min: "min", max: "max"}
    found = reduce_fx.lower() if isinstance(reduce_fx, str) else op.get(reduce_fx)  # type: ignore[call-overload]
    if found == "avg":
        found = "mean"
    if found not in REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported: choose one of {', '.join(REDUCTIONS)}, or "
            "log a torchmetrics.Metric for another reduction."
        )
    return found


_HOSTS = ("cpu", "meta")
_PLAIN = (Tensor, Parameter)
"""Tensor classes that are moved to the CPU before pickling; other classes define their own pickling."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in _PLAIN or value.device.type in _HOSTS:
            return NotImplemented
        return on_host(value).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def on_host(value: Tensor) -> Tensor:
    """Return a CPU copy of a plain tensor or parameter on a device. Return any other tensor unchanged."""
    if type(value) not in _PLAIN or value.device.type in _HOSTS:
        return value
    copy = value.detach().cpu()
    return Parameter(copy, value.requires_grad) if type(value) is Parameter else copy


def packed(value: object) -> bytes:
    """Pickle an object to bytes. Tensors on devices are copied to the CPU first."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.DEFAULT_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Unpickle the bytes that `packed` returned. The bytes must come from a trusted process."""
    return pickle.loads(data)


ALONE = 2**20
"""Size in bytes at which a tensor forms its own group, because copying it would cost more than it saves."""


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor. `grouped` uses this function by default."""
    return tensor.dtype


def grouped(
    tensors: Sequence[Tensor], max_bytes: int, kind: Callable[[Tensor], Hashable] = dtype_of
) -> Iterator[list[int]]:
    """Divide tensors into groups of the same kind, with at most ``max_bytes`` in a group. Yield each group's indices.

    A tensor of `ALONE` bytes or more, or one that is not strided (a sparse one), is a group of its own. The groups
    depend on kinds and sizes alone, so ranks with equal tensors make equal groups in the same order.

    Args:
        tensors: the tensors to group.
        max_bytes: size of the tensors of a group together.
        kind: returns the property that the tensors of a group have in common.

    Yields:
        The indices of a group's tensors. Each index is in one group.

    Example:
        >>> tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(4), torch.ones(2)]
        >>> list(grouped(tensors, max_bytes=28))
        [[0, 2], [3], [1]]
    """
    alike: dict[Hashable, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(kind(tensor), []).append(index)
    for indices in alike.values():
        group: list[int] = []
        size = 0
        for index in indices:
            tensor = tensors[index]
            if tensor.layout is not torch.strided or tensor.nbytes >= ALONE:
                yield [index]
                continue
            if group and size + tensor.nbytes > max_bytes:
                yield group
                group, size = [], 0
            group.append(index)
            size += tensor.nbytes
        if group:
            yield group


PIECE = 16 * 2**20
"""Maximum number of bytes of tensors that are copied together for one message. A larger tensor is sent alone.

The allocator keeps memory of this size and reuses it. It requests memory of 64 MiB from the system each time, which
takes longer than sending it.
"""


def numbers_of(tensor: Tensor) -> Tensor:
    """Flatten a tensor to a 1-D tensor of real numbers. A complex number becomes two real numbers."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide tensors into lists to send together. Each list has one dtype, one device and at most `PIECE` bytes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        piece: list[Tensor] = []
        size = 0
        for tensor in alike:
            if piece and size + tensor.nbytes > PIECE:
                yield piece
                piece, size = [], 0
            piece.append(tensor)
            size += tensor.nbytes
        yield piece
