"""GradBucket: the gradients of one bucket, as a communication hook receives them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.nn.parameter import Parameter


class GradBucket:
    """Gradients of one bucket, as a communication hook receives them in the argument ``bucket``.

    The methods are those of `torch.distributed.GradBucket`, so hooks for torch's ``DistributedDataParallel`` work
    without changes.

    Args:
        index: index of the bucket in the round.
        buffer: 1-D tensor of this rank's gradients, not divided by the number of ranks.
        gradients: views of ``buffer``, each with its parameter's shape.
        parameters: the parameters, in the order of their gradients.
        is_last: True for the last bucket of a round.
        absent: indices of the parameters without a gradient on this rank in this round; the buffer has zeros there.
    """

    __slots__ = ("_buffer", "_gradients", "_index", "_is_last", "_origin", "_parameters", "absent")

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Parameter],
        is_last: bool,
        absent: Collection[int] = (),
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._origin = buffer.storage_offset()
        self._parameters = list(parameters)
        self._is_last = is_last
        self.absent = absent

    def index(self) -> int:
        """Return the index of the bucket in the round of gradient reduction, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the gradients as one 1-D tensor, which a hook may change in place."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return a list with a view of the current buffer for each gradient. Views are contiguous, as in torch."""
        starts = [gradient.storage_offset() - self._origin for gradient in self._gradients]
        pairs = zip(starts, self._gradients, strict=True)
        return [self._buffer[start : start + one.numel()].view(one.shape) for start, one in pairs]

    def parameters(self) -> list[Parameter]:
        return self._parameters

    def is_last(self) -> bool:
        """Return True for the last bucket in the round of gradient reduction."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer with ``tensor``, which must have the same size."""
        self._buffer = tensor
