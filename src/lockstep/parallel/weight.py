"""What a rank's batch counts: gradients as the weighted mean over ranks, for batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.tree import tree_map
from lockstep.parallel.watch import find_tensors


def check_weight(n: float, rank: int) -> float:
    """``n`` as a float.

    Raises:
        ValueError: it is no number of samples.
    """
    weight = float(n)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(
            f"weight({n}) on rank {rank}: give what this rank's batch counts, 0 or more (its samples, say)"
        )
    return weight


class Weight:
    """The weight of one forward, and what its gradients are multiplied by; made on every rank at the same time.

    Args:
        weight: of this rank's batch.
        group: the ranks.
        device: of the model.
        naming: gives a context in which it is said which rank was not there.
    """

    def __init__(
        self,
        weight: float,
        group: comm.Group,
        device: torch.device,
        naming: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
    ) -> None:
        self.weight = weight
        self._naming = naming
        self._world = comm.world_size(group)
        self._factor: Tensor | None = None
        if self._world > 1:
            # not `torch.tensor`, for which a GPU would be waited for
            self._total = torch.full((), weight, dtype=torch.float64, device=comm.carrier(group, device))
            self._work: Any = dist.all_reduce(self._total, group=group, async_op=True)

    def factor(self) -> Tensor | float:
        """The weight times the number of ranks over the sum of all weights, 1 where all are equal."""
        if self._world == 1:
            return 1.0
        if self._factor is None:
            with self._naming("adding up the weights"):
                self._work.wait()
            self._factor = self.weight * self._world / self._total
        return self._factor

    def apply(self, outputs: Any) -> Any:
        """``outputs`` with the same values, whose gradients are multiplied by `factor` on their way back.

        Raises:
            TypeError: there is a tensor in an object that is neither a collection nor a dataclass.
        """
        weighed: set[int] = set()

        def weigh(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            through = _Weighed.apply(tensor, self)
            weighed.add(id(through))
            return through

        result = tree_map(weigh, outputs, Tensor)
        if any(tensor.requires_grad and id(tensor) not in weighed for tensor in find_tensors(result)):
            raise TypeError(
                f"weight(): the model returned a {type(outputs).__name__} with tensors in the attributes of an object; "
                "return them in a tuple, list, dict or dataclass, so that their gradients can be weighed"
            )
        return result


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight: Weight = ctx.weight
        # 0 times inf is NaN, and what a batch of weight 0 gives may be anything
        return (grad * weight.factor() if weight.weight else torch.zeros_like(grad)), None
