"""StochasticWeightAveraging: averages the weights over the last epochs, and sets the learning rate in these epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import swa_utils

from lockstep.callbacks.base import Callback
from lockstep.engines.ddp.sync_batchnorm import SyncBatchNorm
from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import refuse_lazy
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.types import LRSchedulerConfig

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

AverageFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of (average, current weights, number of averaged weights) that returns the new average."""


class StochasticWeightAveraging(Callback):
    """Callback that averages the weights over the last epochs, and leaves the average in the model at the end.

    From epoch ``swa_epoch_start`` on, an ``SWALR`` replaces the scheduler and anneals the learning rate to ``swa_lrs``.
    The weights at the start of each of these epochs enter the average. After the last epoch of ``max_epochs``, the
    average is written into the model. If the model has BatchNorm layers, one more pass over the training batches,
    without hooks, logs or updates, computes their statistics for the averaged weights. A fit that ends earlier
    (EarlyStopping, ``max_steps``) keeps its current weights; a fit without a limit (``max_epochs=-1``) takes the
    average whenever it ends.

    Every rank averages its own copy of the same weights, and BatchNorm statistics are averaged over the ranks, so that
    all ranks end with the same model. Validation within the fit uses the current weights; use
    :class:`~lockstep.extensions.extras.weight_averaging.WeightAveraging` to validate the average.

    Args:
        swa_lrs: the final learning rate; a list has one for each parameter group.
        swa_epoch_start: first epoch of averaging: an int of at least 1 is its number counted from 1, a float in [0, 1]
            the fraction of ``max_epochs`` before it.
        annealing_epochs: number of epochs until the final learning rate is reached.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: function of three tensors (average, current weights, number of averaged weights) that returns the new
            average of one parameter; default: the equal mean.
        device: device of the average; None for the model's device.

    Attributes:
        n_averaged: number of weights in the average, a tensor; None before averaging starts.

    Raises:
        MisconfigurationException: an argument is out of its range; or, when the fit starts, there are several
            optimizers or schedulers, ``swa_epoch_start`` is a fraction but ``max_epochs`` is unlimited, or a module
            with BatchNorm uses manual optimization.

    Example::

        trainer = Trainer(max_epochs=100, callbacks=StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=0.75))

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018.
    """

    averages_weights = True

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: AverageFn | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not rates or not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise _refused("swa_lrs", swa_lrs, "pass a float above 0, or a list with one for each parameter group")
        # A bool is an int, and would mean the first epoch.
        is_epoch = isinstance(swa_epoch_start, int) and not isinstance(swa_epoch_start, bool) and swa_epoch_start >= 1
        if not is_epoch and not (isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1):
            way_out = "pass an int of at least 1, or a float between 0 and 1"
            raise _refused("swa_epoch_start", swa_epoch_start, way_out)
        if not isinstance(annealing_epochs, int) or annealing_epochs < 0:
            raise _refused("annealing_epochs", annealing_epochs, "pass an int of at least 0")
        if annealing_strategy not in ("cos", "linear"):
            raise _refused("annealing_strategy", annealing_strategy, 'pass "cos" or "linear"')
        if avg_fn is not None and not callable(avg_fn):
            raise _refused("avg_fn", avg_fn, "pass a function of (average, weights, number), or None")
        if device is not None and not isinstance(device, (torch.device, str)):
            raise _refused("device", device, "pass a torch.device, its name, or None")
        self.swa_epoch_start = swa_epoch_start
        self._swa_lrs = swa_lrs
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        self._avg_fn: AverageFn = avg_fn or self.avg_fn
        self._device = device
        self._first = 0
        self._max_epochs = -1
        self._forget()

    def _forget(self) -> None:
        self.n_averaged: Tensor | None = None
        self._average: dict[str, Tensor] = {}
        self._latest_update_epoch = -1
        self._scheduler: SWALR | None = None
        self._scheduler_state: dict[str, Any] | None = None
        self._done = False

    @property
    def swa_start(self) -> int:
        """First epoch of averaging, counted from 0."""
        return self._first

    @property
    def swa_end(self) -> int | float:
        """Last epoch of averaging, counted from 0; infinite if ``max_epochs`` sets no limit."""
        return math.inf if self._max_epochs == -1 else self._max_epochs - 1

    @staticmethod
    def avg_fn(averaged_model_parameter: Tensor, model_parameter: Tensor, num_averaged: Tensor) -> Tensor:
        """Update the equal-weight mean of ``num_averaged`` values with one more value, and return the new mean.

        Args:
            averaged_model_parameter: mean so far.
            model_parameter: value that is added, of the same shape.
            num_averaged: number of values in the mean so far, a scalar integer tensor.
        """
        return averaged_model_parameter + (model_parameter - averaged_model_parameter) / (num_averaged + 1)

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: LightningModule) -> bool:
        """Return True if the module has BatchNorm layers.

        Args:
            pl_module: module to search.
        """
        return any(isinstance(part, _BatchNorm) for part in pl_module.modules())

    # -- training ------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the average of an earlier fit, and check that the module can be averaged.

        Raises:
            MisconfigurationException: a module with BatchNorm uses manual optimization.
        """
        if stage == "fit":
            self._forget()
            if not pl_module.automatic_optimization and self.pl_module_contains_batch_norm(pl_module):
                raise MisconfigurationException(
                    "StochasticWeightAveraging runs `training_step` without updates to refresh BatchNorm, which manual "
                    "optimization does not allow. Use WeightAveraging, which averages the statistics."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the epoch in which averaging starts.

        If the checkpoint of a resumed fit was written during averaging, the learning rate of averaging is restored.

        Raises:
            MisconfigurationException: there are several optimizers or schedulers, or ``max_epochs`` is unlimited and
                ``swa_epoch_start`` a fraction.
        """
        if len(trainer.optimizers) != 1:
            raise MisconfigurationException(
                f"StochasticWeightAveraging works with one optimizer, but `configure_optimizers` returned "
                f"{len(trainer.optimizers)}. Use WeightAveraging."
            )
        if len(trainer.lr_scheduler_configs) > 1:
            raise MisconfigurationException(
                "StochasticWeightAveraging replaces one lr scheduler, but `configure_optimizers` returned "
                f"{len(trainer.lr_scheduler_configs)}. Return one or none."
            )
        self._max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        first = self.swa_epoch_start
        if isinstance(first, float):
            if self._max_epochs == -1:
                raise MisconfigurationException(
                    f"StochasticWeightAveraging(swa_epoch_start={first}) is a fraction of max_epochs, which has no "
                    "limit here. Use an int, or set Trainer(max_epochs=...)."
                )
            first = int(self._max_epochs * first)
        self._first = max(first - 1, 0)
        if self._scheduler_state is not None:
            # Before the checkpoint's scheduler state is loaded, because that is the state of this scheduler.
            self._install(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In an averaged epoch, add the current weights to the average. In the first such epoch, install ``SWALR``."""
        epoch = trainer.current_epoch
        if not self.swa_start <= epoch <= self.swa_end:
            return
        if self._scheduler is None:
            if epoch != self.swa_start:
                rank_zero_warn(
                    f"StochasticWeightAveraging starts in epoch {epoch}, not in epoch {self.swa_start} as requested, "
                    "because the resumed checkpoint contains no average."
                )
            self._install(trainer)
            trainer.fit_loop.step.update.schedulers.use(trainer.lr_scheduler_configs)
        # A resumed fit may have added the weights of this epoch already.
        if epoch > self._latest_update_epoch:
            self._update(pl_module)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the average into the model after the last epoch."""
        self._finish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the average into the model, also if the fit resumed after its last epoch and trained nothing."""
        self._finish(trainer, pl_module)

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the progress of averaging, under Lightning's keys."""
        return {
            "n_averaged": 0 if self.n_averaged is None else int(self.n_averaged),
            "latest_update_epoch": self._latest_update_epoch,
            "scheduler_state": None if self._scheduler is None else self._scheduler.state_dict(),
            "average_model_state": dict(self._average) or None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_epoch = state_dict["latest_update_epoch"]
        self._scheduler_state = state_dict["scheduler_state"]
        if state_dict["n_averaged"]:
            self.n_averaged = torch.tensor(state_dict["n_averaged"], dtype=torch.long)
            self._average = dict(state_dict["average_model_state"])

    # -- the average ---------------------------------------------------------------------------------------

    def _install(self, trainer: Trainer) -> None:
        """Create an ``SWALR`` for the optimizer, in place of the optimizer's scheduler, if there is one."""
        optimizer, configs = trainer.optimizers[0], trainer.lr_scheduler_configs
        rates = self._swa_lrs if isinstance(self._swa_lrs, list) else [self._swa_lrs] * len(optimizer.param_groups)
        if len(rates) != len(optimizer.param_groups):
            raise _refused(
                "swa_lrs",
                rates,
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, and each needs a rate",
            )
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate
        self._scheduler = SWALR(
            optimizer,
            rates,  # type: ignore[arg-type]
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,
        )
        if self._scheduler_state is not None:
            self._scheduler.load_state_dict(self._scheduler_state)
        for config in configs:
            rank_zero_info(
                "StochasticWeightAveraging: from now on, SWALR sets the learning rate instead of "
                f"{type(config.scheduler).__name__}."
            )
        configs[:] = [LRSchedulerConfig(cast(Any, self._scheduler))]

    @torch.no_grad()
    def _update(self, module: nn.Module) -> None:
        refuse_lazy(module, type(self).__name__)
        if self.n_averaged is None:
            self.n_averaged = torch.tensor(0, dtype=torch.long)
        count = int(self.n_averaged)
        for name, parameter in module.named_parameters():
            device = parameter.device if self._device is None else torch.device(self._device)
            now = parameter.detach().to(device)
            if count == 0:
                self._average[name] = now.clone()
            elif name not in self._average:
                raise MisconfigurationException(
                    f"StochasticWeightAveraging: the parameter {name!r} was added after averaging started. If "
                    "ModelPruning added it, keep only one of the two callbacks."
                )
            else:
                before = self._average[name].to(device)
                self._average[name] = self._avg_fn(before, now, self.n_averaged.to(device)).detach()
        self.n_averaged = self.n_averaged + 1

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        over = trainer.current_epoch > self.swa_end or self._max_epochs == -1
        if self._done or not self._average or not over:
            return
        self._done = True
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                if name in self._average:
                    parameter.copy_(self._average[name])
        layers = [
            layer
            for layer in pl_module.modules()
            if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
        ]
        if not layers:
            return
        if self._max_epochs == -1 and trainer.num_training_batches == math.inf:
            rank_zero_warn(
                "StochasticWeightAveraging: the training data may have no end, so BatchNorm keeps the statistics of "
                "the weights before averaging. Set Trainer(max_epochs=...) or limit_train_batches=..."
            )
            return
        self._refresh(trainer, layers)

    @torch.no_grad()
    def _refresh(self, trainer: Trainer, layers: list[_BatchNorm]) -> None:
        """Recompute the BatchNorm layers' statistics for the averaged weights, over all batches on all ranks."""
        momenta = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # torch then computes the mean over all batches so far
        batches = run_forwards(trainer)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        if trainer.world_size == 1:
            return
        for layer in layers:
            if isinstance(layer, SyncBatchNorm):
                continue  # its statistics cover the samples of all ranks already
            for statistic in (layer.running_mean, layer.running_var):
                assert statistic is not None
                # Ranks may have different numbers of batches, so their means are weighted; one collective for both.
                wide = statistic.to(widest(statistic.device))
                packed = torch.cat([wide * batches, wide.new_tensor([batches])])
                total = trainer.strategy.reduce(packed, reduce_op="sum")
                statistic.copy_(total[:-1] / total[-1])
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.copy_(trainer.strategy.reduce(layer.num_batches_tracked, reduce_op="sum"))


def run_forwards(trainer: Trainer) -> int:
    """Run ``training_step`` on the batches of the next epoch, without hooks, gradients, logs and updates.

    Call it on all ranks inside a fit, between two epochs or after the last one, under automatic optimization. It
    updates the statistics of BatchNorm, for example.

    Returns:
        The number of batches with samples on this rank, without those that are None.
    """
    session, step = trainer.session, trainer.fit_loop.step
    feed, strategy, results = session.fit.loaded, session.strategy, session.results
    hook, table, muted = results.hook, results.table, results.muted
    results.enter("training_step")
    feed.begin(session.fit.progress.epoch, 0)
    number = drawn = 0
    for window in feed.windows(1):
        for batch, weight, _ in window:
            results.muted = True
            absent = () if window.absent is None else strategy.replicas.ranks(window.absent[0])
            with torch.no_grad(), strategy.without_ranks(absent) if absent else nullcontext():
                used = bool(weight) and batch is not None
                if used:
                    batch = step.transfer(batch) if step.moves else batch
                    arguments = (batch, number) if step.takes_idx else (batch,)
                    strategy.run(step.training_step, *arguments)
            number += 1
            drawn += used
    results.hook, results.table, results.muted = hook, table, muted
    return drawn


class SWALR(swa_utils.SWALR):
    """Variant of torch's ``SWALR`` that accepts parameter groups added later, for example with unfrozen layers.

    An added group has the final learning rate of the group before it.
    """

    def get_lr(self) -> list[float | Tensor]:
        rate = None
        for group in self.optimizer.param_groups:
            rate = group.setdefault("swa_lr", rate)
        return super().get_lr()


def _refused(argument: str, value: object, way_out: str) -> MisconfigurationException:
    return MisconfigurationException(f"StochasticWeightAveraging({argument}={value!r}): {way_out}.")
