"""WeightAveraging: averages the weights during training, validates with the average, and leaves it in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import is_freed, refuse_lazy
from lockstep.ground.rank import rank_zero_warn

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

CHUNK = 64
"""Number of tensors in a ``torch._foreach`` call, which limits the memory for intermediate products."""


class WeightAveraging(Callback):
    """Callback that keeps an average of the weights, by default their equal mean over all steps (SWA).

    Validation uses the averaged weights, and the model keeps them when training ends. Before the first update there is
    no average, and the current weights are used. An update at the end of an epoch precedes the validation that ends the
    epoch.

    A checkpoint contains the average as ``"state_dict"``, the current weights as ``"current_model_state"`` and the
    number of updates as ``"averaging_state"``, as in Lightning. A resumed fit restores all three bit for bit. Every
    rank averages its own copy of the same weights, so a step needs no communication. Buffers, which may differ between
    ranks, are taken from rank 0 when the average is used. Pipelines over several processes are refused.

    Override :meth:`should_update` to choose when to average::

        class LateAveraging(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None):
                return epoch_idx is not None and epoch_idx >= 75

    Args:
        device: device of the average; None for the model's device. ``"cpu"`` saves GPU memory.
        use_buffers: average the buffers, too (such as running statistics of BatchNorm); otherwise they are copied.
        **kwargs: arguments of ``torch.optim.swa_utils.AveragedModel``: ``avg_fn`` or ``multi_avg_fn``.

    Raises:
        MisconfigurationException: when training starts, the ranks of a pipeline have only the weights of their own
            blocks, or a layer is lazy; later, parameters or buffers were added, removed or reshaped.

    Example::

        Trainer(max_epochs=100, callbacks=WeightAveraging(device="cpu")).fit(model)  # validates and keeps the average

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018.
    """

    averages_weights = True
    _other_weights = "current_model_state"

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        self._device = device
        self._use_buffers = use_buffers
        self._kwargs = kwargs
        self._average: AveragedModel | None = None
        self._is_swapped_in = False
        self._loaded: dict[str, Any] | None = None
        self._latest_step: int | None = None
        self._latest_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True if the current weights should enter the average; by default after each optimizer step.

        Called after each optimizer step with ``step_idx`` and after each epoch with ``epoch_idx``, both counted from 0.
        The result must be the same on all ranks.
        """
        return step_idx is not None

    # -- training ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the callback's state before a fit, which starts a new average."""
        if stage == "fit":
            self._average, self._is_swapped_in, self._loaded = None, False, None
            self._latest_step, self._latest_epoch = None, -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the average as a copy of the weights, or restore the average from the checkpoint.

        At this point the weights have their final device and dtype.

        Raises:
            MisconfigurationException: the ranks of a pipeline have only the weights of their own blocks.
        """
        if is_freed(pl_module):
            raise MisconfigurationException(
                f"{type(self).__name__}: each rank of a pipeline has only the weights of its own blocks, so no rank "
                "has the whole average. Use BalancedStrategy(one_process=True), another strategy, or "
                "StochasticWeightAveraging instead of this callback."
            )
        refuse_lazy(pl_module, type(self).__name__)
        tensors = nn.Module()
        for i, parameter in enumerate(pl_module.parameters()):
            tensors.register_parameter(str(i), parameter)
        for i, buffer in enumerate(pl_module.buffers()):
            tensors.register_buffer(f"buffer_{i}", buffer)
        # AveragedModel makes a deep copy. It gets bare tensors, because a module may refer to large other objects.
        # Its counter stays on the CPU, where reading it does not wait for the device.
        self._average = AveragedModel(tensors, use_buffers=self._use_buffers, **_for_parts(tensors, self._kwargs))
        self._average.module.to(self._device if self._device is not None else trainer.strategy.root_device)
        if self._latest_step is None:
            self._latest_step = trainer.global_step
        if self._loaded is not None:
            pairs = self._by_name(pl_module)
            with torch.no_grad():
                for name, value in self._loaded["average"].items():
                    if name in pairs:
                        pairs[name].copy_(value)
                self._average.n_averaged.copy_(self._loaded["n_averaged"])
            self._loaded = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        """Update the average after an optimizer step, if `should_update` returns True for the step."""
        # Compared with the last step, because only the last micro-batch of a window steps, and some steps are skipped.
        step = trainer.global_step
        assert self._latest_step is not None, "a batch before on_train_start"
        if step > self._latest_step:
            self._latest_step = step
            if self.should_update(step_idx=step - 1):
                self._update(pl_module)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        WeightAveraging.on_train_batch_end(self, trainer, pl_module, None, None, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the average after an epoch, if `should_update` returns True for the epoch."""
        # Called from two hooks, and again after a resume: one update an epoch.
        epoch = trainer.current_epoch
        if epoch > self._latest_epoch:
            self._latest_epoch = epoch
            if self.should_update(epoch_idx=epoch):
                self._update(pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the model's weights with the average during a validation within a fit.

        After the last batch of an epoch, the update of the epoch's end is made first, so that the metrics of this
        epoch's checkpoint belong to the weights in the checkpoint.
        """
        if trainer.state.fn == "fit":
            if trainer.is_last_batch and not trainer.sanity_checking:
                WeightAveraging.on_train_epoch_end(self, trainer, pl_module)
            self._swap_in(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the current weights back into the model, to continue training with them."""
        if trainer.state.fn == "fit":
            self._swap_out(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the model's weights with the average. Later checkpoints still save the current weights as well."""
        self._swap_in(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the current weights back into the model if an exception ends the fit during a validation."""
        if trainer.state.fn == "fit":
            self._swap_out(pl_module)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the last step and the last epoch for which `should_update` was called."""
        return {"latest_update_step": self._latest_step or 0, "latest_update_epoch": self._latest_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the last step and epoch for which `should_update` was called.

        Checkpoints of Lightning contain the step only.
        """
        self._latest_step = state_dict["latest_update_step"]
        self._latest_epoch = state_dict.get("latest_update_epoch", -1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the average as ``"state_dict"`` and the current weights as ``"current_model_state"``.

        A resumed fit that has nothing left to train saves the average that it has loaded.
        """
        if self._average is None:
            if self._loaded is not None:
                checkpoint["current_model_state"] = checkpoint["state_dict"]
                checkpoint["state_dict"] = dict(self._loaded["average"])
                checkpoint["averaging_state"] = {"n_averaged": self._loaded["n_averaged"]}
            return
        in_model, average = checkpoint["state_dict"], self._by_name(pl_module)
        here = {name: average[name].detach() if name in average else value for name, value in in_model.items()}
        if not self._has_average():
            here = in_model
        average, current = (in_model, here) if self._is_swapped_in else (here, in_model)
        checkpoint["state_dict"] = average
        checkpoint["current_model_state"] = current
        checkpoint["averaging_state"] = {"n_averaged": self._average.n_averaged.clone()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """In a resumed fit, load the current weights into the model, and store the average until training starts.

        Outside a fit the model uses the average in ``"state_dict"``, and the average of an earlier fit is dropped.
        """
        if trainer.state.fn != "fit":
            self._average, self._is_swapped_in, self._loaded = None, False, None
            return
        if "current_model_state" not in checkpoint:
            rank_zero_warn(
                "WeightAveraging: the checkpoint was written without the callback, so averaging restarts from the "
                "weights in the checkpoint."
            )
            return
        # Copied, because a sharded engine reads a checkpoint into the model's memory, which the load below overwrites.
        average = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in checkpoint["state_dict"].items()}
        self._loaded = {"average": average, "n_averaged": checkpoint["averaging_state"]["n_averaged"]}
        # Both in the dict and in the model: strategies load the model before or after this hook.
        checkpoint["state_dict"] = checkpoint["current_model_state"]
        strict = getattr(pl_module, "strict_loading", True)
        pl_module.load_state_dict(checkpoint["current_model_state"], strict=strict)

    # -- the average ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        average = self._average
        if average is not None and any(_kind(tensor) != (None, None) for tensor in _tensors(average.module)):
            # shards are meaningless in a process outside their device mesh
            kept.update(_average=None, _is_swapped_in=False)
        return kept

    def _check(self, pl_module: LightningModule) -> None:
        assert self._average is not None
        shapes = [[tensor.shape for tensor in _tensors(module)] for module in (self._average.module, pl_module)]
        if shapes[0] != shapes[1]:
            raise MisconfigurationException(
                f"{type(self).__name__}: the module's parameters or buffers have changed since training started, so "
                "they cannot be averaged. If ModelPruning changed them, remove one of the two callbacks."
            )

    def _update(self, pl_module: LightningModule) -> None:
        assert self._average is not None, "an update before on_train_start"
        self._check(pl_module)
        # The update copies the counter to the device, and a copy waits for all queued work. Filling a tensor does not.
        counter: Any = self._average.n_averaged
        counter.to = lambda device: torch.full_like(counter, int(counter), device=device)
        try:
            self._average.update_parameters(pl_module)
        finally:
            del counter.to

    def _has_average(self) -> bool:
        return self._average is not None and int(self._average.n_averaged) > 0

    def _swap_in(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_average() and not self._is_swapped_in:
            assert self._average is not None
            buffers = list(self._average.module.buffers())
            # Buffers are not reduced and may differ between ranks; all show those of rank 0.
            if trainer.world_size > 1 and buffers:
                sent = trainer.strategy.broadcast([buffer.cpu() for buffer in buffers])
                with torch.no_grad():
                    for own, first in zip(buffers, sent, strict=True):
                        own.copy_(first)
            self._swap(pl_module)
            self._is_swapped_in = True

    def _swap_out(self, pl_module: LightningModule) -> None:
        if self._is_swapped_in:
            self._swap(pl_module)
            self._is_swapped_in = False

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule) -> None:
        """Exchange the values of the average and the model's weights.

        The tensors stay the same, because optimizers and gradient buckets refer to them.
        """
        assert self._average is not None
        for averaged, shown in zip(_tensors(self._average.module), _tensors(pl_module), strict=True):
            before = shown.detach().clone()
            shown.copy_(averaged)
            averaged.copy_(before)

    def _by_name(self, pl_module: LightningModule) -> Mapping[str, Tensor]:
        """Return the averaged tensors by their names in the model. A tied weight occurs under each of its names."""
        assert self._average is not None
        self._check(pl_module)
        average = {id(t): k for k, t in zip(_tensors(self._average.module), _tensors(pl_module), strict=True)}
        parameters = pl_module.named_parameters(remove_duplicate=False)
        named = chain(parameters, pl_module.named_buffers(remove_duplicate=False))
        return {name: average[id(tensor)] for name, tensor in named}


class EMAWeightAveraging(WeightAveraging):
    """Callback that keeps an exponential moving average of the weights.

    An update is ``average = decay * average + (1 - decay) * weights``.

    Args:
        device: device of the average; None for the model's device.
        use_buffers: average the buffers, too; otherwise they are copied.
        decay: weight of the old average, between 0 and 1.
        update_every_n_steps: update after the first and then every n-th optimizer step; 0 for no updates by steps.
        update_starting_at_step: first step, counted from 0, with an update.
        update_starting_at_epoch: also update at the end of each epoch from this one on.
        **kwargs: arguments of ``torch.optim.swa_utils.AveragedModel``.

    Raises:
        MisconfigurationException: ``decay`` is not between 0 and 1, or ``update_every_n_steps`` is negative.

    Example::

        Trainer(callbacks=EMAWeightAveraging(decay=0.999, update_starting_at_step=1000))
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not 0 <= decay <= 1:
            raise MisconfigurationException(f"EMAWeightAveraging(decay={decay!r}): pass a number between 0 and 1.")
        if update_every_n_steps < 0:
            raise MisconfigurationException(
                f"EMAWeightAveraging(update_every_n_steps={update_every_n_steps!r}): pass a number of at least 0."
            )
        super().__init__(device, use_buffers, **{"multi_avg_fn": _exponential(decay), **kwargs})
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True for every n-th step from the first one on, and for epochs from `update_starting_at_epoch` on."""
        if step_idx is not None and self.update_every_n_steps:
            return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0
        return (
            epoch_idx is not None
            and self.update_starting_at_epoch is not None
            and epoch_idx >= self.update_starting_at_epoch
        )


def _exponential(decay: float) -> Callable[[list[Tensor], list[Tensor], object], None]:
    """Return the function that updates an average to ``average * decay + weights * (1 - decay)``.

    Each product is rounded, as in Lightning; torch's ``lerp`` rounds differently.
    """

    @torch.no_grad()
    def update(averages: list[Tensor], weights: list[Tensor], count: object) -> None:
        if not averages[0].is_floating_point():
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(average * decay + weight * (1 - decay))
            return
        for first in range(0, len(averages), CHUNK):
            part = averages[first : first + CHUNK]
            torch._foreach_mul_(part, decay)
            torch._foreach_add_(part, torch._foreach_mul(weights[first : first + CHUNK], 1 - decay))

    return update


def _for_parts(tensors: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which ``AveragedModel`` can average a model whose tensors are sharded in different ways.

    Some tensors may be unsharded, and others sharded over different meshes.

    torch's ``_foreach`` functions, which average many tensors at once, accept only one sharding in a call.
    """
    if len({_kind(tensor) for tensor in _tensors(tensors)}) < 2:
        return given
    at_once = given.get("multi_avg_fn")
    if at_once is None:
        return {"avg_fn": get_swa_avg_fn(), **given}

    def kind_by_kind(averages: list[Tensor], weights: list[Tensor], count: object) -> None:
        groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for average, weight in zip(averages, weights, strict=True):
            group = groups.setdefault(_kind(average), ([], []))
            group[0].append(average)
            group[1].append(weight)
        for group in groups.values():
            at_once(*group, count)

    return {**given, "multi_avg_fn": kind_by_kind}


def _kind(tensor: Tensor) -> tuple[object, object]:
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def _tensors(module: nn.Module) -> chain[Tensor]:
    return chain(module.parameters(), module.buffers())
