"""The mean in 8 bits on the wire, with error feedback."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.compress import Bytes, coded_mean, real
from lockstep.parallel.hooks.ordering import submit
from lockstep.parallel.hooks.state import Memory

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
