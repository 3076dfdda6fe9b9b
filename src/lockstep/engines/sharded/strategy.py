"""Base class of strategies that shard a model. All ranks run each forward and backward together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint import sharded
from lockstep.checkpoint.io import CheckpointWriter, Path
from lockstep.checkpoint.pretrained import is_of_transformers
from lockstep.checkpoint.sharded import Place
from lockstep.checkpoint.sharded_io import AsyncShardedCheckpointIO, ShardedCheckpointIO
from lockstep.engines.ddp.consistency import sparse_names
from lockstep.engines.ddp.late_parameters import LateParameters, refuse
from lockstep.engines.owners import NOT_ELEMENTWISE, TOGETHER, needs_whole, with_parameters
from lockstep.engines.ranks import RankedStrategy, check_others
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import parameters_outside
from lockstep.ground.types import LRSchedulerConfig
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.engines.sharded.sharded_init import ShardedInit

LATE = (
    "rank {rank}: parameter {name!r} was added after the module was sharded, so each rank would train its own copy. "
    "Create the parameter in `__init__` or in `configure_model`"
)
STRANGE = (
    "{optimizer} has a parameter of shape {shape} that the module does not have. Create the optimizer in "
    "`configure_optimizers` from self.parameters(), since {engine} replaces the module's parameters by shards. If the "
    "parameter is in a plain list, make it an attribute of the module."
)
ALL_AT_ONCE = (
    "{strategy} does not support {optimizer}, which mixes a parameter's elements, because parameters are sharded. Use "
    'an elementwise optimizer (SGD, Adam, AdamW), or strategy="ddp".'
)
UNKNOWN = (
    "{strategy} does not recognize this class {optimizer}. Optimizers with this name mix a parameter's elements, but "
    "parameters are sharded. If the class updates each parameter independently of the others, decorate it with "
    '`@lockstep.parameter_wise(whole=True)`. Otherwise use torch\'s class, or strategy="ddp".'
)
LAID_END_TO_END = (
    "{strategy} does not support {optimizer}, which needs full matrices: {engine} splits the concatenated parameters. "
    'Use strategy="fsdp", DDPStrategy(shard_optimizer=True), or an elementwise optimizer (SGD, Adam, AdamW).'
)


class ShardedStrategy(RankedStrategy):
    """Base class of strategies with one process per device. Each process stores a part of the model's states.

    A subclass implements :meth:`_through`, :meth:`setup_module` (which calls :meth:`_watch`), and
    :meth:`setup_optimizers` (which calls ``copies.synchronize_norms``).

    Attributes:
        gathers_updates: True if parameters are gathered for optimizers that need full parameters.
    """

    runs_padding = True
    places_first = True  # and later calls continue with the parts
    gathers_updates = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._built: ShardedInit | None = None
        self._late: LateParameters | None = None

    @staticmethod
    def _take_others(kind: type, others: Mapping[str, object], no_effect: Mapping[str, str]) -> None:
        """Raise if ``others``, extra keyword arguments of the strategy ``kind``, are unknown or not supported."""
        known = [*inspect.signature(kind).parameters]
        check_others(kind.__name__, others, known, no_effect)

    def _save_in_parts(self, asynchronous: bool = False) -> None:
        """Make this run's checkpoints sharded: each rank writes its part of a checkpoint."""
        self.saves_shards = True
        self.checkpoints = CheckpointWriter(AsyncShardedCheckpointIO() if asynchronous else ShardedCheckpointIO())

    # -- set up

    @contextmanager
    def building(self, module: LightningModule) -> Iterator[None]:
        """Context for ``configure_model`` in which the ranks together create a module too large for one. Collective.

        The caller runs ``configure_model`` inside the block. All ranks use rank 0's random numbers.
        """
        from lockstep.checkpoint.first_values import leave_meta
        from lockstep.engines.sharded import sharded_init

        if self.world.size == 1:
            yield
            leave_meta(module, self.root_device)
            return
        with sharded_init.rank_0_draws(self.own_devices), sharded_init.ShardedInit(sharded_init.BUDGET) as self._built:
            yield
            leave_meta(module, torch.device("cpu"))

    def _watch(self, module: LightningModule, gathered: type[Parameter] | None = None) -> None:
        """Start to record parameters that are added to the module later, and to synchronize the module's buffers.

        Args:
            module: the module of the run.
            gathered: class of full parameters that represent shards. Parametrizations register them in a forward, such
                as those of peft's adapters of experts.
        """
        if self._late is not None:
            self._late.close()
        # layers with their own `__setattr__` (nn.LSTM): torch sets their parameters by it, which looks like an addition
        set_by_torch = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, layer in module.named_modules()
            if inspect.getattr_static(layer, "__setattr__") is not nn.Module.__setattr__
            for name, _ in layer.named_parameters(recurse=False)
        }
        self._late = LateParameters(module, set_by_torch, gathered)
        self.copies.watch_buffers(self.module, self.world.size > 1)

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Store the optimizers. Raise if they cannot update shards, or if gradients cannot be sharded.

        Args:
            optimizers: optimizers of the fit.
            configs: schedulers of the fit, with the interval and frequency of their steps.

        Raises:
            MisconfigurationException: an optimizer cannot update shards, a parameter with a sparse gradient is sharded,
                or an optimizer has parameters that the module lacks.
        """
        super().setup_optimizers(optimizers, configs)
        parameters = dict(self.module.named_parameters())
        sparse = [name for name in sorted(sparse_names(self.module)) if hasattr(parameters.get(name), "placements")]
        if sparse:
            raise MisconfigurationException(
                f"{type(self).__name__}() does not support the sparse gradients of {', '.join(sparse)}. Build the "
                'layers with sparse=False, or use strategy="ddp".'
            )
        for optimizer in with_parameters(optimizers):
            update_one_by_one(optimizer, self.module.parameters())
            name, reason = type(optimizer).__name__, None
            if needs_whole(optimizer):
                reason = None if self.gathers_updates else LAID_END_TO_END
            elif name in NOT_ELEMENTWISE:
                reason = ALL_AT_ONCE if name in TOGETHER else UNKNOWN
            if reason is not None:
                text = reason.format(strategy=type(self).__name__, optimizer=name, engine=self.engine)
                raise MisconfigurationException(text)
            for parameter in parameters_outside(self.module, [optimizer]).values():
                shape = tuple(parameter.shape)
                raise MisconfigurationException(STRANGE.format(optimizer=name, shape=shape, engine=self.engine))

    def check_trained(self, replaced: bool = False) -> None:
        """Raise if optimizers were replaced, since new optimizers are not checked and have no states in the engine.

        Raises:
            MisconfigurationException: optimizers were replaced during a fit.
        """
        if replaced:
            raise MisconfigurationException(
                f"The optimizers were replaced during a fit, which {type(self).__name__} does not support. Change "
                "the optimizers' param_groups instead."
            )

    def teardown(self) -> None:
        """Release module and optimizers; the module remains partitioned."""
        super().teardown()
        # an instance attribute with a reference to the shards: it would keep the module alive, and cannot be pickled
        for optimizer in self.optimizers:
            vars(optimizer).pop("zero_grad", None)
        self.copies.close()
        if self._late is not None:
            self._late.close()
            self._late = None

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Run a step method. A layer's parameters are gathered when the forward reaches the layer.

        Raises:
            MisconfigurationException: a parameter or buffer was added to the module after it was sharded.
        """
        late = self._late
        if late is not None and late.found is not None:
            raise MisconfigurationException(LATE.format(rank=self.world.rank, name=late.found))
        if late is not None and late.buffer is not None and self.world.size > 1:
            refuse(self.world.rank, "buffer", late.buffer)
        if torch.is_grad_enabled():
            self.copies.forward_begins()
        with nullcontext() if self.context is None else self.context():
            return self._through(fn, *args)

    def _through(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a step method with the parameters gathered as the engine requires; implemented by each subclass."""
        raise NotImplementedError

    def _backward_ends(self) -> None:
        """Mark buffers for synchronization after a backward that reduced gradients."""
        self.rounds += self.sync_gradients
        self.copies.backward_ends(self.sync_gradients)

    # -- checkpoints

    def _refuse_alone(self, alone: bool) -> None:
        """Raise if only one rank would save a checkpoint, since its part is useless without the other ranks' parts."""
        if alone and self.world.size > 1:
            raise MisconfigurationException(
                f"rank {self.world.rank} cannot save a checkpoint alone: each rank has only a part of the "
                f"states ({self.engine}), and after a failure the other ranks do not save their parts. Save "
                "regularly with ModelCheckpoint(every_n_train_steps=...)."
            )

    def load_checkpoint(self, filepath: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint on every rank: a complete file, or this rank's parts from a folder. Collective.

        Args:
            filepath: path or URL of a file or folder.
            weights_only: as in ``trainer.fit``.

        Returns:
            the state of the run, by name; from a folder, with this rank's parts.
        """
        if not sharded.is_sharded(filepath):
            return super().load_checkpoint(filepath, weights_only)
        self.checkpoints.io.wait()
        needs = partial(self.replicas.needs, self.world.rank)
        return sharded.load_parts(filepath, self._reads_into(), needs, weights_only)

    def _reads_into(self) -> Place:
        """Return a function that creates the tensors into which this rank's parts of a checkpoint are read."""
        raise NotImplementedError


# -- optimizers with full parameters and shards ---------------------------------------------------------------


def update_one_by_one(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Disable an optimizer's foreach functions if a device has several kinds of parameters (full tensors, DTensors).

    A user's choice is not changed. Groups that are added and states that are loaded later are changed too. Saved states
    do not show the change.

    Args:
        optimizer: the optimizer.
        parameters: parameters of the module, including those that are added to the optimizer later.
    """
    # On devices other than the CPU, torch's optimizers use foreach functions by default for all parameters of a kind
    # of device. These accept only tensors of one kind: no whole ones with DTensors, nor DTensors on two meshes.
    kinds = {getattr(each, "device_mesh", None) for each in parameters if each.device.type != "cpu"}
    if optimizer.defaults.get("foreach", False) is not None or len(kinds) < 2:
        return

    def choose(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if group.get("foreach") is None and not group.get("fused"):
                group["foreach"] = False

    def hide(optimizer: Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            if group.get("foreach") is False:
                group["foreach"] = None

    optimizer.defaults["foreach"] = False
    choose(optimizer)
    optimizer.register_load_state_dict_post_hook(choose)
    optimizer.register_state_dict_post_hook(hide)


# -- layers that a sharded module needs to treat separately ---------------------------------------------------


def bring_states(module: nn.Module, device: torch.device) -> None:
    """Move states of layers that are neither parameters nor buffers to the device.

    Only layers that define ``_apply`` and have no parameters, such as torchmetrics' objects, have such states.
    """
    for layer in module.modules():
        if type(layer)._apply is not nn.Module._apply and next(layer.parameters(), None) is None:
            layer.to(device)


def generate_together(module: nn.Module) -> None:
    """Make transformers' ``generate`` continue on every rank until the texts on all ranks are complete.

    Each call gathers parameters, so if a rank stopped at the end of its own texts, other ranks would wait.
    """
    for layer in module.modules():
        if is_of_transformers(layer):
            vars(layer)["_is_fsdp_managed_module"] = True
