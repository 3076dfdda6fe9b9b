"""Means over ranks, plain or with fewer bytes on the wire: the exchange, hooks without a memory, and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import GradBucket
from lockstep.parallel.hooks.error_feedback import Memory
from lockstep.parallel.hooks.hook_transport import completed, future_of, submit, tensor_of
from lockstep.parallel.transport import all_gather

# -- exchange ------------------------------------------------------------------------------------------------


CHUNK = 256
"""Numbers that share a scale in `Bytes`."""


class Code(Protocol):
    """How numbers travel: rows of numbers to rows of bytes, and back."""

    def encode(self, rows: Tensor) -> Tensor:
        """``rows``: 2-D, floating point. Returns 2-D uint8, a row a row."""
        ...

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        """The ``numbers`` numbers of each row, in float32."""
        ...


class Halves:
    """Two bytes a number.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``. What is too large for it becomes infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        return message.view(self._dtype).to(torch.float32)


class Bytes:
    """One byte a number and a float32 scale for each `CHUNK` of them: 0.254 of float32.

    A chunk's scale is its largest absolute value over 127; numbers are rounded to the nearest of its 255 multiples. A
    chunk that holds inf or NaN arrives as inf and NaN.
    """

    def encode(self, rows: Tensor) -> Tensor:
        count, numbers = rows.shape
        chunks = _chunks(rows.float())
        scales = chunks.abs().amax(dim=2) / 127
        codes = (chunks / scales.masked_fill(scales == 0, 1).unsqueeze(2)).round_().clamp_(-127, 127)
        codes = codes.nan_to_num_(0).to(torch.int8).view(count, -1)[:, :numbers]
        return torch.cat([scales.view(torch.uint8), codes.contiguous().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        count = message.shape[0]
        bytes_of_scales = -(-numbers // CHUNK) * 4
        scales = message[:, :bytes_of_scales].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = message[:, bytes_of_scales:].contiguous().view(torch.int8).float()
        return (_chunks(codes) * scales.unsqueeze(2)).view(count, -1)[:, :numbers]


def _chunks(rows: Tensor) -> Tensor:
    """``rows`` in chunks, the last filled up with zeros."""
    count, numbers = rows.shape
    lacking = -numbers % CHUNK
    if lacking:
        rows = torch.nn.functional.pad(rows, (0, lacking))
    return rows.reshape(count, -1, CHUNK)


def mean(flat: Tensor, group: comm.Group) -> None:
    """Overwrite ``flat`` (contiguous, real) with its mean over the ranks; one all-reduce in its dtype."""
    world = comm.world_size(group)
    if world > 1:
        flat.mul_(1 / world)
        dist.all_reduce(flat, group=group)


def coded_mean(flat: Tensor, code: Code, group: comm.Group, error: Tensor | None = None) -> None:
    """Overwrite ``flat`` with its mean over the ranks, which travels as ``code`` says.

    Args:
        flat: 1-D, real floating point, of the same length on all ranks.
        code: what is sent.
        group: the ranks.
        error: what rounding took away so far and is owed to the mean, of ``flat``'s length, in float32; it is added
            to ``flat`` first, and holds what is owed now afterwards. The errors of all ranks together make good for
            both roundings: that of a rank's own numbers, and that of the mean, which the rank that made it keeps.
            Where the mean is not finite the error stays as it was: nobody will use that mean.
    """
    if flat.numel() == 0:
        return
    world, rank, length = comm.world_size(group), comm.rank(group), flat.numel()
    numbers = -(-length // world)
    if error is not None:
        flat.add_(error)
    rows = flat if numbers * world == length else torch.nn.functional.pad(flat, (0, numbers * world - length))
    rows = rows.view(world, numbers)
    message = code.encode(rows)
    owed = None if error is None else rows.float() - code.decode(message, numbers)
    arrived = message
    if world > 1:
        arrived = torch.empty_like(message)
        dist.all_to_all_single(arrived, message, group=group)
    total = code.decode(arrived[:1], numbers)
    for other in range(1, world):
        total += code.decode(arrived[other : other + 1], numbers)
    total.mul_(1 / world)
    message = code.encode(total)
    if owed is not None:
        owed[rank] += (total - code.decode(message, numbers)).view(-1) * world
    if world > 1:
        arrived = message.new_empty((world, message.shape[1]))
        all_gather(arrived.view(-1), message.view(-1), group).wait()
    else:
        arrived = message
    flat.copy_(code.decode(arrived, numbers).reshape(-1)[:length])
    if error is not None and owed is not None:
        torch.where(flat.isfinite(), owed.view(-1)[:length], error, out=error)


def real(tensor: Tensor) -> Tensor:
    """A 1-D tensor's numbers as real ones, in place: two for each complex one."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)


# -- means ---------------------------------------------------------------------------------------------------


def allreduce(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over the ranks, by one all-reduce in the gradients' dtype: what is done without a hook.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any dtype.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(None, allreduce)
    """
    buffer, world = bucket.buffer(), comm.world_size(state)
    if world == 1:
        return completed(buffer)
    flat = real(buffer)
    flat.mul_(1 / world)
    return dist.all_reduce(flat, group=state, async_op=True).get_future().then(lambda _: buffer)


def fp16(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, sent as float16 and summed in float32: half the bytes of float32.

    Each gradient is rounded once before it is sent, and the mean once after it was summed; with a 16-bit all-reduce
    each of the W - 1 sums on the way would be rounded too. (`lockstep.parallel.hooks.compress` has the messages:
    slices all-to-all, then an all-gather of the slices of the mean.) What is above 65504 arrives as inf, on all ranks.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any floating point dtype; complex ones travel as pairs of real numbers, and those of 16
            bits as they are. float64 has the precision of float16 afterwards.
    """
    return _in_halves(state, bucket, torch.float16)


def bf16(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, sent as bfloat16 and summed in float32: as `fp16`, with float32's range and 8 bits of precision."""
    return _in_halves(state, bucket, torch.bfloat16)


def _in_halves(group: comm.Group, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    flat = real(buffer)
    code = Halves(flat.dtype if flat.element_size() == 2 else dtype)

    def reduce(own: comm.Group) -> Tensor:
        coded_mean(flat, code, own)
        return buffer

    return submit(group, buffer.device, reduce)


# -- wrappers ------------------------------------------------------------------------------------------------


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


def fp16_wrapper(hook: Hook) -> Hook:
    """``hook``, called with the gradients cast to float16, its result cast back.

    A hook that sends what it is given sends half the bytes. `allreduce` in this wrapper sums in float16 on the way
    (with NCCL; gloo does too), which `lockstep.parallel.hooks.compress.fp16` does not.

    Args:
        hook: any communication hook.

    Returns:
        A hook with the same state.

    Example::

        model.register_comm_hook(PowerSGDState(rank=4), fp16_wrapper(power_sgd))
    """
    return _wrapped(hook, torch.float16)


def bf16_wrapper(hook: Hook) -> Hook:
    """``hook``, called with the gradients cast to bfloat16, its result cast back: as `fp16_wrapper`."""
    return _wrapped(hook, torch.bfloat16)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    def wrapped(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():
            raise TypeError(
                f"{wrapped.__qualname__}: the gradients are {buffer.dtype}, and no 16-bit dtype is complex; take the "
                "hooks fp16, bf16 or int8, which send pairs of real numbers"
            )
        narrow = buffer.to(dtype)
        starts = [gradient.storage_offset() - buffer.storage_offset() for gradient in bucket.gradients()]
        parts = [
            narrow.as_strided(gradient.shape, gradient.stride(), start)
            for gradient, start in zip(bucket.gradients(), starts, strict=True)
        ]
        small = GradBucket(bucket.index(), narrow, parts, bucket.parameters(), bucket.is_last(), bucket.absent)

        def widen(future: torch.futures.Future[Any]) -> Tensor:
            return buffer.copy_(tensor_of(future.value(), small, hook))

        return future_of(hook(state, small), hook).then(widen)

    wrapped.wrapped_hook = hook  # type: ignore[attr-defined]
    name = f"{'fp16' if dtype is torch.float16 else 'bf16'}_wrapper({getattr(hook, '__qualname__', hook)})"
    wrapped.__qualname__ = wrapped.__name__ = name
    return wrapped


# -- 8 bits, with error feedback -----------------------------------------------------------------------------


_CODE = Bytes()


class Int8State:
    """What `int8` keeps.

    Args:
        process_group: the ranks; ``None`` is the default group.
        error_feedback: add to each gradient what rounding has taken away from it so far, so that nothing is lost in
            the long run. It takes the memory of the gradients once more, in float32. Without it the rounding of each
            step stands, of a rank's gradients and of their mean: each by at most 1/254 of the largest among 256
            neighbours, beside which a small one may never arrive.

    Rounding is to the nearest. Stochastic rounding would need no memory to be right on average, but adds noise to
    every step, and random states to every checkpoint.
    """

    def __init__(self, process_group: comm.Group = None, *, error_feedback: bool = True) -> None:
        self.process_group = process_group
        self.error_feedback = error_feedback
        self._memory = Memory()

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank keeps from one round to the next."""
        return self._memory.bytes

    def state_dict(self) -> dict[str, Any]:
        """The errors of this rank: tensors and plain types."""
        return {"memory": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the errors of ``state``, which this rank saved.

        Raises:
            ValueError: it was saved by another hook's state.
        """
        if set(state) != {"memory"}:
            raise ValueError(
                f"Int8State: the checkpoint holds the state of another communication hook ({', '.join(state)}); resume "
                "with the hook and the state of that run"
            )
        self._memory.load_state_dict(state["memory"])

    def _errors(self, bucket: GradBucket, numbers: int) -> Tensor:
        """The errors of a bucket as one flat tensor, of which each parameter's record holds its part."""
        parts = bucket.gradients()
        width = numbers // max(1, bucket.buffer().numel())  # 2 for complex numbers
        starts = [width * (part.storage_offset() - bucket.buffer().storage_offset()) for part in parts]
        sizes = [width * part.numel() for part in parts]
        records = self._memory.records(bucket)
        known = [record.get("error") for record in records]
        flat = next((error._base for error in known if error is not None), None)
        if flat is not None and flat.numel() == numbers and flat.device == bucket.buffer().device:
            places = zip(known, starts, sizes, strict=True)
            if all(
                e is not None and e._base is flat and e.storage_offset() == s and e.numel() == n for e, s, n in places
            ):
                return flat
        flat = torch.zeros(numbers, device=bucket.buffer().device)
        for record, error, start, size in zip(records, known, starts, sizes, strict=True):
            record["error"] = flat[start : start + size]
            if error is not None:
                record["error"].copy_(error)
        return flat

    def _withhold(self, bucket: GradBucket) -> list[tuple[Tensor, Tensor]]:
        """Take the errors of gradients that are absent out of what is paid now: (where they were, what they were)."""
        records = self._memory.records(bucket) if bucket.absent else []
        kept = [(records[place]["error"], records[place]["error"].clone()) for place in bucket.absent]
        for part, _ in kept:
            part.zero_()
        return kept


def int8(state: Int8State | comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, sent in 8 bits with a scale for each 256 numbers, and summed in float32: a quarter of the bytes.

    The messages are those of `fp16`, a byte a number and 4 for each scale: 0.254 of float32. inf and NaN reach all
    ranks; they take the neighbours that share their scale along.

    Args:
        state: `Int8State`, or a process group (``None``: the default one) for no error feedback.
        bucket: gradients of any floating point dtype; complex ones travel as pairs of real numbers.

    Example::

        model.register_comm_hook(Int8State(), int8)
    """
    buffer = bucket.buffer()
    flat = real(buffer)
    group = state.process_group if isinstance(state, Int8State) else state

    def reduce(own: comm.Group) -> Tensor:
        error: Tensor | None = None
        withheld: list[tuple[Tensor, Tensor]] = []
        if isinstance(state, Int8State) and state.error_feedback:
            error = state._errors(bucket, flat.numel())
            withheld = state._withhold(bucket)
        if flat.element_size() == 2:
            wide = flat.float()
            coded_mean(wide, _CODE, own, error)
            flat.copy_(wide)
        else:
            coded_mean(flat, _CODE, own, error)
        for part, owed in withheld:
            part.add_(owed)
        return buffer

    return submit(group, buffer.device, reduce)
