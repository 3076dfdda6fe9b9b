"""Placement of a pipeline's blocks and parameters on ranks and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.extensions.balancing.pipeline.chain import Chain


def equal_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks in each stage if ``blocks`` are split over ``stages`` as evenly as possible.

    Example:
        >>> equal_split(8, 3)
        (3, 3, 2)
    """
    least, more = divmod(blocks, stages)
    return tuple(least + (stage < more) for stage in range(stages))


@dataclass(frozen=True)
class Layout:
    """Assignment of a pipeline's blocks to stages, and of the stages to ranks.

    The last stage is on the first rank, the one before it on the next, and so on. With more stages than ranks, the
    stages go round the ranks. If one process drives all devices of a pipeline, the ranks are its devices.

    Attributes:
        counts: number of blocks of each stage.
        ranks: number of ranks of the pipeline, which divides the number of stages.

    Example:
        >>> layout = Layout((2, 2, 1, 1), ranks=2)
        >>> layout.place_of(0), layout.stages_of(1)
        (1, (0, 2))
    """

    counts: tuple[int, ...]
    ranks: int

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.counts)

    def place_of(self, stage: int) -> int:
        """Return the rank of the pipeline that runs a stage."""
        # losses, and with them logged values, are to be on rank 0
        return self.ranks - 1 - stage % self.ranks

    def stages_of(self, place: int) -> tuple[int, ...]:
        """Return the stages of a rank in ascending order."""
        return tuple(range(self.ranks - 1 - place, self.stages, self.ranks))

    def blocks_of(self, stage: int) -> range:
        """Return the indices of a stage's blocks in the chain."""
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])

    def stage_of(self, block: int) -> int:
        """Return the index of the stage that contains a block."""
        return next(stage for stage in range(self.stages) if block in self.blocks_of(stage))


class StagePlacement:
    """Mapping from the parameters and buffers of a pipelined module to the devices of this process.

    Args:
        chain: chain of the module.
        layout: layout of the blocks.
        devices: devices of this process, by position in the pipeline. With several, blocks are on the device of their
            stage, and layers outside the chain on the device of the last stage.

    Attributes:
        root: the device of the layers outside the chain.
    """

    def __init__(self, chain: Chain, layout: Layout, devices: Mapping[int, torch.device]) -> None:
        self.root = devices[min(devices)]
        self._chain = chain
        places = [layout.place_of(layout.stage_of(block)) for block in range(len(chain.blocks))]
        self._of_blocks = [devices.get(place, self.root) for place in places]

    def device_of(self, name: str) -> torch.device:
        """Return the device for an entry of the module's state dict."""
        block = self._chain.block_of(name)
        return self.root if block is None else self._of_blocks[block]


def find_torn(module: nn.Module, where: Callable[[str], object]) -> tuple[str, str] | None:
    """Find a shared tensor whose names ``where`` maps to different places. Return two of these names, or None.

    Args:
        module: the full module.
        where: returns the place of an entry of the module's state dict.
    """
    first: dict[int, str] = {}
    named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    for name, tensor in [*named, *module.named_buffers(remove_duplicate=False)]:
        before = first.setdefault(id(tensor), name)
        if where(before) != where(name):
            return before, name
    return None


class Ownership:
    """Mapping from the parameters and buffers of a pipelined module to the ranks that store them.

    A block's tensors are stored by the rank of the block. Layers outside the chain are stored by all ranks, since the
    code before and after the chain may use them. Gradients of parameters on several ranks are summed. The owner is the
    first of these ranks, whose values are saved.

    Args:
        module: the module, with the same parameter names on each rank.
        chain: the module's chain of blocks.
        layout: layout of the chain's blocks.
        place: this rank's position in the pipeline.

    Attributes:
        local: this rank's parameters.
        remote: parameters that only other ranks store.
        shared: parameters that several ranks store, in the same order on all ranks.
        outside_buffers: names of buffers outside the chain.
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
        self.local = [p for key, p in parameters.items() if place in holders[key]]
        self.remote = [p for key, p in parameters.items() if place not in holders[key]]
        self.shared = [p for key, p in parameters.items() if len(holders[key]) > 1]
        self.outside_buffers = [name for name, _ in module.named_buffers() if self._of_block(name) is None]

    def holders_of(self, name: str) -> range:
        """Return the ranks that store an entry of the module's state dict."""
        owner = self._of_block(name)
        return range(self._ranks) if owner is None else range(owner, owner + 1)

    def owner_of(self, name: str) -> int:
        """Return the rank whose value of a state dict entry is written to checkpoints."""
        return self._of_block(name) or 0

    def is_spread(self, prefix: str) -> bool:
        """Return True if the layer with this name prefix contains blocks."""
        return any(block.startswith(prefix) and block != prefix for block in self._prefixes)

    def holders(self, parameter: Parameter) -> set[int]:
        """Return the ranks that store a parameter."""
        return self._holders[id(parameter)]

    def owner(self, parameter: Parameter) -> int:
        """Return the rank whose value of a parameter is written to checkpoints."""
        return min(self._holders[id(parameter)])

    def _of_block(self, name: str) -> int | None:
        return next((place for prefix, place in self._prefixes.items() if name.startswith(prefix)), None)

    def mine(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return the parameters that this rank owns."""
        return [parameter for parameter in parameters if self.owner(parameter) == self.place]
