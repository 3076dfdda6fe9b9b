"""How logged values are reduced: by which name, whatever users call it."""

from __future__ import annotations

import torch

from lockstep.ground.errors import MisconfigurationException

REDUCTIONS = ("mean", "sum", "min", "max")


def reduction_of(name: str, reduce_fx: object) -> str:
    """One of `REDUCTIONS`, for what ``self.log`` got as ``reduce_fx``: a name in any case, or a function.

    Args:
        name: that is logged.
        reduce_fx: as given.

    Raises:
        MisconfigurationException: for another reduction.

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
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): choose one of {', '.join(REDUCTIONS)}, or log a "
            "torchmetrics.Metric for a reduction of your own."
        )
    return found
