"""Which rank or device of a pipeline has which blocks, and with them which parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.extensions.balancing.pipeline.chain import Chain


def equal_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as even as can be.

    Example:
        >>> equal_split(8, 3)
        (3, 3, 2)
    """
    least, more = divmod(blocks, stages)
    return tuple(least + (stage < more) for stage in range(stages))


@dataclass(frozen=True)
class Layout:
    """The blocks of each stage, and the rank of each stage among the ranks of its pipeline.

    The last stage is on the first rank: there the losses are, and with them what is logged. The one before it is on the
    next rank, and so on; where there are more stages than ranks, the ranks take turns. Where one process drives all
    devices of a pipeline, the ranks are its devices.

    Attributes:
        counts: blocks of each stage.
        ranks: of the pipeline; their number divides that of the stages.

    Example:
        >>> layout = Layout((2, 2, 1, 1), ranks=2)
        >>> layout.place_of(0), layout.stages_of(1)
        (1, (0, 2))
    """

    counts: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.counts)

    def place_of(self, stage: int) -> int:
        """The rank of a stage in its pipeline."""
        return self.ranks - 1 - stage % self.ranks

    def stages_of(self, place: int) -> tuple[int, ...]:
        """The stages of a rank, in their order."""
        return tuple(range(self.ranks - 1 - place, self.stages, self.ranks))

    def blocks_of(self, stage: int) -> range:
        """The places of a stage's blocks in the chain."""
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])

    def stage_of(self, block: int) -> int:
        """The stage that has a block."""
        return next(stage for stage in range(self.stages) if block in self.blocks_of(stage))


class StagePlacement:
    """The device of each parameter and buffer that this process holds of a module in stages.

    Args:
        chain: of the module.
        layout: of its blocks.
        devices: of this process, by their place in the pipeline. Where it drives several, blocks are on the device of
            their stage, and what is outside of the chain is on the one that has the last stage.

    Attributes:
        root: the device of what is outside of the chain.
    """

    def __init__(self, chain: Chain, layout: Layout, devices: Mapping[int, torch.device]) -> None:
        self.root = devices[min(devices)]
        self._chain = chain
        places = [layout.place_of(layout.stage_of(block)) for block in range(len(chain.blocks))]
        self._of_blocks = [devices.get(place, self.root) for place in places]

    def device_of(self, name: str) -> torch.device:
        """The device of what has this name in the module's state dict."""
        block = self._chain.block_of(name)
        return self.root if block is None else self._of_blocks[block]


def torn_apart(module: nn.Module, where: Callable[[str], object]) -> tuple[str, str] | None:
    """Two names of one parameter or buffer that is in two places at once; None: there is none.

    Args:
        module: whole.
        where: the place of what has a name.
    """
    first: dict[int, str] = {}
    named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    for name, tensor in [*named, *module.named_buffers(remove_duplicate=False)]:
        before = first.setdefault(id(tensor), name)
        if where(before) != where(name):
            return before, name
    return None


class Ownership:
    """Who holds and who answers for each tensor of a module whose chain is laid out over the ranks of a pipeline.

    What is inside blocks is held by the ranks that have them. What is outside is held by all: the code before the chain
    may use it, and the code after it, whose gradients are added up. So are those of a parameter that blocks of several
    stages share. Of the ranks that hold something, the first answers for it.

    Args:
        module: whole or not, with parameters of the same names on each rank.
        chain: in it.
        layout: of its blocks.
        place: this rank in the pipeline.

    Attributes:
        held: this rank's parameters.
        freed: those of the blocks of others.
        shared: parameters that several ranks hold, in an order that is the same on all.
        outside_buffers: names of buffers outside of the chain.
    """

    def __init__(self, module: nn.Module, chain: Chain, layout: Layout, place: int) -> None:
        self._prefixes = {
            f"{name}.": layout.place_of(layout.stage_of(number)) for number, name in enumerate(chain.names)
        }
        self.place, self._ranks = place, layout.ranks
        holders: dict[int, set[int]] = {}
        parameters: dict[int, Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameters[id(parameter)] = parameter
            holders.setdefault(id(parameter), set()).update(self.holders_of(name))
        self._holders = holders
        self.held = [p for key, p in parameters.items() if place in holders[key]]
        self.freed = [p for key, p in parameters.items() if place not in holders[key]]
        self.shared = [p for key, p in parameters.items() if len(holders[key]) > 1]
        self.outside_buffers = [name for name, _ in module.named_buffers() if self._of_block(name) is None]

    def holders_of(self, name: str) -> range:
        """The ranks that hold what has this name in the module's state dict."""
        owner = self._of_block(name)
        return range(self._ranks) if owner is None else range(owner, owner + 1)

    def owner_of(self, name: str) -> int:
        """The rank that answers for what has this name in the module's state dict."""
        return self._of_block(name) or 0

    def is_spread(self, prefix: str) -> bool:
        """Whether blocks are below a layer, whose names begin so in the module's state dict."""
        return any(block.startswith(prefix) and block != prefix for block in self._prefixes)

    def holders(self, parameter: Parameter) -> set[int]:
        """The ranks that hold a parameter."""
        return self._holders[id(parameter)]

    def owner(self, parameter: Parameter) -> int:
        """The rank that answers for a parameter."""
        return min(self._holders[id(parameter)])

    def _of_block(self, name: str) -> int | None:
        return next((place for prefix, place in self._prefixes.items() if name.startswith(prefix)), None)

    def mine(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Of these, the ones for which this rank answers."""
        return [parameter for parameter in parameters if self.owner(parameter) == self.place]
