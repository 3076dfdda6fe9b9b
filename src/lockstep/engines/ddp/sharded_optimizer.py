"""``DDPStrategy(shard_optimizer=True)``: incompatible options, and optimizer states for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lockstep.engines.collectives import gather_on_zero
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.optimizers import by_parts
from lockstep.ground.rank import log

if TYPE_CHECKING:
    from lockstep.engines.ddp.owned_optimizer import OwnedOptimizers

START = "DDPStrategy(shard_optimizer=True)"


def check_options(parts: bool) -> None:
    """Refuse arguments of the strategy that are incompatible with owners.

    Args:
        parts: True if a communication hook lets the ranks' weights diverge for a while.

    Raises:
        MisconfigurationException: names the argument and the way out.
    """
    if parts:
        raise MisconfigurationException(
            f"{START} with local steps (post-local SGD, model_averaging_period, outer_optimizer): ranks go their own "
            "ways there, and here each has the values of a parameter from its owner: use one of them."
        )


def check_shareable(optimizers: list[Optimizer], sparse: list[str]) -> None:
    """Refuse optimizers and gradients that cannot be divided among ranks.

    Args:
        optimizers: the optimizers of the run.
        sparse: names of parameters with sparse gradients.

    Raises:
        MisconfigurationException: names the parameter or the optimizer's class, and the way out.
    """
    from lockstep.engines.owners import check_parameter_wise

    if sparse:
        raise MisconfigurationException(
            f"{START}: the gradients of {', '.join(sparse)} are sparse: build the layers with sparse=False, or leave "
            "shard_optimizer off."
        )
    try:
        check_parameter_wise(optimizers)
    except ValueError as error:
        raise MisconfigurationException(f"{START}: {error}.") from None


def whole_states(
    owned: OwnedOptimizers, optimizers: list[Optimizer], alone: bool
) -> list[dict[str, Any] | None] | None:
    """Gather the ordinary states on rank 0. Collective. Return None for a rank alone, which has only its part."""
    from lockstep.engines.owners import union

    if not alone:
        return [
            by_parts(optimizer, lambda part: union(gather_on_zero(owned.part_of(part)))) for optimizer in optimizers
        ]
    log.warning(
        "A checkpoint from one rank alone holds the weights and no optimizer states, of which every rank has a "
        "part (shard_optimizer=True): a fit can begin with these weights, and cannot go on from there."
    )
    return None
