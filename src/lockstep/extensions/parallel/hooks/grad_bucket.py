"""What a communication hook is given: the gradients of one bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.nn.parameter import Parameter


class GradBucket:
    """The gradients of one bucket, as a communication hook sees them.

    The methods are those of `torch.distributed.GradBucket`, so that hooks written for torch's
    ``DistributedDataParallel`` work unchanged.

    Args:
        index: place of the bucket in the round, counted from 0.
        buffer: 1-D tensor of all gradients, of this rank, not divided by anything.
        gradients: views of ``buffer``, each with its parameter's shape.
        parameters: the parameters, in the order of their gradients.
        is_last: whether no other bucket comes after it in a round.
        absent: places of the parameters that have no gradient on this rank in this round; zeros stand for them.
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
        """Place of the bucket in the round, counted from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients as one 1-D tensor; a hook may change it in place."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients one by one: views of the buffer, also of one that was set, contiguous as torch gives them."""
        starts = [gradient.storage_offset() - self._origin for gradient in self._gradients]
        pairs = zip(starts, self._gradients, strict=True)
        return [self._buffer[start : start + one.numel()].view(one.shape) for start, one in pairs]

    def parameters(self) -> list[Parameter]:
        return self._parameters

    def is_last(self) -> bool:
        """Whether this is the last bucket of the round."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Put ``tensor`` (of the buffer's size) in the buffer's place."""
        self._buffer = tensor
