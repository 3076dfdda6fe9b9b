"""ModelCopies: tracks differences between the ranks' replicas of a model, and makes the replicas equal again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.io import snapshot
from lockstep.engines.collectives import ReplicaMap
from lockstep.ground.methods import kept

if TYPE_CHECKING:
    from lockstep.engines.buffers import SynchronizedNorms, WindowBuffers


class Diverged(Protocol):
    """Interface to switch between this rank's own weights and the mean over ranks, while weights differ."""

    @property
    def shown(self) -> bool:
        """True while the mean over all ranks replaces this rank's weights."""

    def show_mean(self) -> None:
        """Replace this rank's weights by the mean over all ranks. Collective."""

    def show_own(self) -> None:
        """Restore this rank's own weights."""


class LocalSteps(Protocol):
    """Interface to a fit's local steps, which average gradients over some ranks only, so that weights differ."""

    @property
    def differ(self) -> bool:
        """True if the ranks' weights may differ now."""

    @property
    def apart(self) -> Diverged:
        """Object that switches between this rank's own weights and the mean over the ranks."""

    def averaged_ranks(self) -> Sequence[int]:
        """Return the ranks, including this one, over which the next gradient reduction averages."""

    def summed_weight(self, weight: Tensor) -> tuple[Tensor, int]:
        """Return the sum of ``weight`` over the ranks whose gradients were averaged, and the number of these ranks.

        Collective.
        """


class Partitioned(Protocol):
    """Interface to a model that is partitioned over the ranks during a fit."""

    def gather(self) -> None:
        """Gather the complete model on each rank. Collective."""


class ModelCopies:
    """Tracks differences between the ranks' replicas of a model, and makes the replicas equal again.

    Does nothing if there are no differences. An engine calls :meth:`watch_buffers` after it has placed the module,
    :meth:`synchronize_norms` at the start of training, and `forward_begins` and `backward_ends` while training. It sets
    :attr:`local_steps` and :attr:`parts`.

    Attributes:
        buffers: buffers that each rank changes until a window ends; None: no buffers, or they are not synchronized.
        norms: synchronized BatchNorm layers; None: there are none.
        local_steps: local steps of this fit; None: the ranks' weights never differ.
        parts: gathers the model at the end of training; None: each rank has all of it.
    """

    def __init__(self) -> None:
        self.buffers: WindowBuffers | None = None
        self.norms: SynchronizedNorms | None = None
        self.local_steps: LocalSteps | None = None
        self.parts: Partitioned | None = None
        self._norms_group: tuple[Any, Any] | None = None  # the default group, and that of the layers

    def __getstate__(self) -> dict[str, Any]:
        # a process group, and everything that uses it, belongs to its process
        return kept(self, "norms", "local_steps", "_norms_group")

    # -- called by an engine

    def watch_buffers(self, module: nn.Module, synchronize: bool) -> None:
        """Make each window start with rank 0's buffers, if ``synchronize`` is True and the module has buffers."""
        self.buffers = None
        if synchronize and any(True for _ in module.buffers()):
            from lockstep.engines.buffers import WindowBuffers  # replicas alone need it

            self.buffers = WindowBuffers(module)

    def synchronize_norms(self, module: nn.Module, convert: bool, timeout: timedelta, replicas: ReplicaMap) -> None:
        """Set up synchronized BatchNorm layers for one fit; with ``convert``, also plain BatchNorm layers. Collective.

        The arguments are those of `SynchronizedNorms`.
        """
        if len(replicas.of_rank) == 1:
            return
        from lockstep.engines.buffers import SynchronizedNorms  # as above

        default, group = self._norms_group or (None, None)
        # the layers' group of an earlier fit is lost with the default group
        norms = SynchronizedNorms(module, convert, group if default is dist.group.WORLD else None, timeout, replicas)
        self._norms_group = dist.group.WORLD, norms.group
        if norms.layers:
            self.norms = norms
            # synchronized layers keep their own buffers equal; if there are no others, none are broadcast
            self.buffers = self.buffers if self.own_buffers(module) else None

    def forward_begins(self) -> None:
        """Before a window's first training forward, copy rank 0's buffers to all ranks. Collective in that case."""
        if self.buffers is not None:
            if self.buffers.due:
                self.buffers.align()
            self.buffers.differ = not self.have_diverged

    def backward_ends(self, reduced: bool) -> None:
        """Mark buffers for synchronization if the backward reduced gradients, which ends an accumulation window."""
        if self.buffers is not None:
            self.buffers.due = reduced and not self.have_diverged

    def close(self) -> None:
        """Restore the module's layers at the end of a fit."""
        if self.norms is not None:
            self.norms.restore()
            self.norms = None

    # -- called by loops and strategies

    @property
    def have_diverged(self) -> bool:
        """True if the ranks' weights differ now."""
        return self.local_steps is not None and self.local_steps.differ

    def own_buffers(self, module: nn.Module) -> list[Tensor]:
        """Return the buffers that a forward computes from this rank's samples alone: those of unsynchronized layers."""
        return list(module.buffers()) if self.norms is None else self.norms.others_buffers(module)

    @contextmanager
    def one_model(self) -> Iterator[None]:
        """In the context, give every rank the model that checkpoints save. Afterwards, restore each rank's own model.

        The checkpoint's model has rank 0's buffers; under local steps it is the mean over the ranks. Collective.
        """
        local = self.local_steps
        if local is None or not local.differ or local.apart.shown:
            with nullcontext() if self.buffers is None else self.buffers.rank_0_values():
                yield
            return
        local.apart.show_mean()
        try:
            yield
        finally:
            local.apart.show_own()

    def end_training(self) -> None:
        """After the last step, set every rank's model to the final model, which checkpoints save. Collective.

        Each rank's own weights under local steps can still be saved.
        """
        if self.local_steps is not None and self.local_steps.differ:
            self.local_steps.apart.show_mean()
        elif self.buffers is not None:
            self.buffers.align()
        if self.parts is not None:
            self.parts.gather()

    def window_state(self) -> dict[str, Tensor]:
        """Return copies of this rank's buffers for a checkpoint; empty between windows."""
        own = {} if self.buffers is None or self.have_diverged else self.buffers.window_state()
        copied: dict[str, Tensor] = snapshot(own)
        return copied

    def load_window_state(self, saved: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`window_state`."""
        if self.buffers is not None:
            self.buffers.load_window_state(saved)
