"""Optimizers whose work and state the ranks share (ZeRO stages 1 and 2): each rank updates a slice of every bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from lockstep.ground import comm
from lockstep.parallel.consistency import sparse_names
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.shared_memory import timeout_of
from lockstep.parallel.zero.exchange import Scatter, SharedBuffer, SharedScatter
from lockstep.parallel.zero.optimizers import ShardedOptimizers, check_elementwise, concerned


class ShardedReducer(Reducer):
    """A reducer that leaves each rank with its slices, and has optimizers work on those.

    Between a `finish` that reduced and ``zero_grad``, ``.grad`` holds a placeholder (None where no rank used the
    parameter): see `ShardedOptimizers.whole_gradients`.

    Args:
        module: whose parameters are reduced.
        optimizers: over parameters of it; others that they have are updated on every rank. Elementwise ones only.
        process_group: the ranks; with one rank everything stays as it is.
        named_parameters: those of ``module`` that are reduced; None is all.
        **options: of `lockstep.parallel.reducer.Reducer`.

    Attributes:
        shards: the optimizers' side.

    Raises:
        ValueError: for an optimizer that needs whole parameters, or options that do not go together with slices.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        process_group: comm.Group = None,
        *,
        named_parameters: Iterable[tuple[str, Parameter]] | None = None,
        **options: Any,
    ) -> None:
        for name, allowed in (("gradient_as_bucket_view", True), ("transport", None)):
            if options.get(name, allowed) is not allowed:
                raise ValueError(f"ShardedReducer({name}={options[name]!r}): gradients lie in buckets of its own")
        _check_dense(options.get("sparse", ()))
        named = list(module.named_parameters() if named_parameters is None else named_parameters)
        several, shared_buffer = comm.world_size(process_group) > 1, None
        options["transport"] = Scatter(process_group, lambda: not self._layout_settled) if several else None
        parameters = [parameter for _, parameter in named]
        check_elementwise(concerned(parameters, optimizers))
        if several and options.get("shared_memory", True) and all(p.device.type == "cpu" for _, p in named):
            shared = SharedScatter.open(process_group)
            if shared is not None:
                options["transport"] = shared
                shared_buffer = SharedBuffer.open(process_group, timeout_of(process_group))
        self.shards = ShardedOptimizers(module, parameters, optimizers, process_group, shared_buffer)
        super().__init__(named, process_group, **options)

    def _fill_buckets(self, awake: dict[str, Parameter]) -> None:
        super()._fill_buckets(awake)
        if not isinstance(self._transport, (Scatter, SharedScatter)):  # shared memory could not be had
            self._transport = Scatter(self._group, lambda: not self._layout_settled)
            super()._fill_buckets(awake)
        assert isinstance(self._transport, (Scatter, SharedScatter))
        self.shards.lay_out(self._buckets, self._transport.flats)

    def memory(self) -> list[Tensor]:
        """The buckets' buffers on this rank, and those in which the others' slices come."""
        spare = self._transport.spare.values() if isinstance(self._transport, Scatter) else ()
        return [*super().memory(), *(room for rooms in spare for room in rooms)]

    def prepare(self) -> None:
        """Just before a backward: let its gradients fall into the buckets."""
        self.shards.set_aside()
        super().prepare()

    def finish(self) -> None:
        """After a backward: reduce what is not yet reduced, and wait. With `sync` off, only tidy up."""
        super().finish()
        self.shards.take(self.sync)

    def detach(self, patience: timedelta | None = None) -> None:
        """Remove the autograd hooks, and give parameters memory of their own; see `ShardedOptimizers.detach`."""
        try:
            self.shards.detach(patience)
        finally:
            super().detach()

    def register_comm_hook(self, state: object, hook: Callable[..., Any], round_group: object = None) -> None:
        raise RuntimeError(
            "register_comm_hook: a communication hook reduces whole buckets, and with a sharded optimizer "
            "(shard_optimizer) each rank reduces its slice: use one of them"
        )


def shard_optimizers(container: DistributedDataParallel, *optimizers: Optimizer) -> ShardedOptimizers:
    """Share out the work and the state of ``optimizers`` among the ranks of a container. A collective.

    The loop stays as it is, but for clipping: ``shards.clip(optimizer, 1.0)`` in place of ``clip_grad_norm_``, and
    for ``optimizer.state_dict()``, which all ranks call together.

    Args:
        container: whose module's parameters they update; between two steps.
        *optimizers: elementwise ones.

    Returns:
        the optimizers' side of the container's reducer.

    Raises:
        ValueError: for an optimizer that needs whole parameters, or a container with ``check_reduction``,
            ``gradient_as_bucket_view=False``, ``mixed_precision``, a communication hook or sparse gradients.

    Example::

        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        shards = shard_optimizers(model, optimizer)
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            shards.clip(optimizer, 1.0)
            optimizer.step()
    """
    _check_container(container)
    check_elementwise(concerned(container.module.parameters(), optimizers))
    ref = weakref.ref(container)

    def make(named_parameters: Iterable[tuple[str, Parameter]], group: comm.Group, **options: Any) -> Reducer:
        found = ref()
        assert found is not None
        return ShardedReducer(found.module, optimizers, group, named_parameters=named_parameters, **options)

    container.use_reducer(make)
    reducer = container.reducer
    assert isinstance(reducer, ShardedReducer)
    return reducer.shards


def _check_container(container: DistributedDataParallel) -> None:
    """Refuse what does not go together with slices, before anything is changed."""
    reasons = {
        "check_reduction=True": container.check_reduction
        and "it compares the ranks' gradients, of which each rank has other slices here",
        "gradient_as_bucket_view=False": not container.gradient_as_bucket_view
        and "ranks exchange slices of the buckets, in which gradients lie",
        "mixed_precision": container.mixed_precision is not None
        and "it sends whole buckets; run the forward under torch.autocast()",
        "a communication hook": container._comm_hook is not None
        and "it reduces whole buckets, and here each rank reduces its slice",
    }
    for what, reason in reasons.items():
        if reason:
            raise ValueError(f"shard_optimizers() with {what}: {reason}; wrap the model without it")
    _check_dense(sparse_names(container.module))


def _check_dense(sparse: Collection[str]) -> None:
    if sparse:
        raise ValueError(
            f"a sharded optimizer cannot take sparse gradients, as those of {sorted(sparse)}: build the layers with "
            "sparse=False, or leave the optimizer unsharded (shard_optimizer=False)"
        )
