"""What the ranks' copies of a model have beside its parameters: buffers, layers that communicate, local steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.io import snapshot
from lockstep.engines.buffers import SynchronizedNorms, WindowBuffers
from lockstep.engines.collectives import ReplicaMap
from lockstep.ground.methods import kept


class Diverged(Protocol):
    """This rank's own weights, while those of other ranks differ."""

    @property
    def shown(self) -> bool:
        """Whether the mean is in their place now."""

    def show_mean(self) -> None:
        """Put the mean over all ranks in their place. Collective."""

    def show_own(self) -> None:
        """Put them back."""


class LocalSteps(Protocol):
    """Steps of a fit that are made with the gradients of a part of the ranks; between them weights differ."""

    @property
    def differ(self) -> bool:
        """Whether the ranks' weights may differ now."""

    @property
    def apart(self) -> Diverged:
        """The weights of this rank."""

    def averaged_ranks(self) -> Sequence[int]:
        """The ranks, this one among them, over which gradients are averaged in the next round."""

    def summed_weight(self, weight: Tensor) -> tuple[Tensor, int]:
        """The sum of ``weight`` over the ranks whose gradients were averaged, and their number. Collective."""


class InParts(Protocol):
    """A model of which each rank has a part while a fit runs."""

    def gather(self) -> None:
        """Let each rank have all of it again. Collective."""


class ModelCopies:
    """How the ranks' copies of a model differ, and how they become one again; where they do not, it has nothing to do.

    An engine gives it what there is: :meth:`watch_buffers` when the module is placed, :meth:`synchronize_norms` when
    training begins, :attr:`local_steps` and :attr:`parts`; and tells it of the forwards and backwards of training.

    Attributes:
        buffers: each rank's own until a window ends; None: nothing is to be kept alike.
        norms: the layers through which ranks go together; None: there are none.
        local_steps: of this fit, where it takes such.
        parts: brings the model together when training ends; None: each rank has all of it.
    """

    def __init__(self) -> None:
        self.buffers: WindowBuffers | None = None
        self.norms: SynchronizedNorms | None = None
        self.local_steps: LocalSteps | None = None
        self.parts: InParts | None = None
        self._norms_group: tuple[Any, Any] | None = None  # the default group, and that of the layers

    def __getstate__(self) -> dict[str, Any]:
        # a group belongs to its process, and so does what works with it
        return kept(self, "norms", "local_steps", "_norms_group")

    # -- what an engine tells

    def watch_buffers(self, module: nn.Module, some: bool) -> None:
        """Let windows begin with rank 0's buffers; ``some``: there are other ranks, and it is asked for."""
        self.buffers = WindowBuffers(module) if some and any(True for _ in module.buffers()) else None

    def synchronize_norms(self, module: nn.Module, convert: bool, timeout: timedelta, replicas: ReplicaMap) -> None:
        """For the length of a fit, let layers that the user made synchronized, or that are converted, find each other.

        Collective. Arguments as of `SynchronizedNorms`.
        """
        if len(replicas.of_rank) == 1:
            return
        default, group = self._norms_group or (None, None)
        norms = SynchronizedNorms(module, convert, group if default is dist.group.WORLD else None, timeout, replicas)
        self._norms_group = dist.group.WORLD, norms.group
        if norms.layers:
            self.norms = norms
            self.buffers = self.buffers if self.own_buffers(module) else None

    def forward_begins(self) -> None:
        """A training forward begins: take rank 0's buffers if it is the first of its window. Collective then."""
        if self.buffers is not None:
            if self.buffers.due:
                self.buffers.align()
            self.buffers.differ = not self.are_apart

    def backward_ends(self, reduced: bool) -> None:
        """A backward has ended; behind one that was reduced, buffers are due."""
        if self.buffers is not None:
            self.buffers.due = reduced and not self.are_apart

    def close(self) -> None:
        """The fit is over: the module's layers are what they were."""
        if self.norms is not None:
            self.norms.put_back()
            self.norms = None

    # -- what is asked of it

    @property
    def are_apart(self) -> bool:
        """Whether weights differ now."""
        return self.local_steps is not None and self.local_steps.differ

    def own_buffers(self, module: nn.Module) -> list[Tensor]:
        """The buffers that a forward changes by this rank's samples alone; synchronized layers are alike on all."""
        return list(module.buffers()) if self.norms is None else self.norms.others_buffers(module)

    @contextmanager
    def one_model(self) -> Iterator[None]:
        """Inside, every rank has the model that a checkpoint holds, and afterwards its own again. Collective.

        That has rank 0's buffers; where local steps have let the weights part, it is the ranks' mean.
        """
        local = self.local_steps
        if local is None or not local.differ or local.apart.shown:
            with nullcontext() if self.buffers is None else self.buffers.shown():
                yield
            return
        local.apart.show_mean()
        try:
            yield
        finally:
            local.apart.show_own()

    def end_training(self) -> None:
        """No step follows in this fit: leave every rank with the model that a checkpoint holds. Collective.

        What each rank has to itself under local steps can be saved still.
        """
        if self.local_steps is not None and self.local_steps.differ:
            self.local_steps.apart.show_mean()
        elif self.buffers is not None:
            self.buffers.align()
        if self.parts is not None:
            self.parts.gather()

    def held(self) -> dict[str, Tensor]:
        """This rank's own buffers, where a window is under way, as a checkpoint takes them."""
        copied: dict[str, Tensor] = snapshot({} if self.buffers is None or self.are_apart else self.buffers.held())
        return copied

    def hold(self, saved: dict[str, Tensor]) -> None:
        """Put back what :meth:`held` gave."""
        if self.buffers is not None:
            self.buffers.hold(saved)
