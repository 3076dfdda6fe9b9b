"""BaseFinetuning and BackboneFinetuning, which freeze layers at first and unfreeze them in a later epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

Modules = nn.Module | Iterable[Any]


def multiplicative(epoch: int) -> float:
    """Return 2.0, so that ``BackboneFinetuning`` doubles the backbone's learning rate each epoch by default."""
    return 2.0


class BaseFinetuning(Callback):
    """Callback that freezes parts of a model before training and unfreezes them later, as a subclass decides.

    Override :meth:`freeze_before_training`, called before ``configure_optimizers``, and
    :meth:`finetune_function`, called for each optimizer at the start of an epoch. Pass only trainable parameters to
    the optimizers in ``configure_optimizers``; parameters that are unfrozen later join as a new parameter group.

    A resumed fit restores the parameter groups and the frozen parameters. Every rank must freeze and unfreeze the same
    parameters, so decide by the epoch or by values that are the same on all ranks.

    Example::

        class ThawFeatures(BaseFinetuning):
            def __init__(self, epoch=10):
                super().__init__()
                self.epoch = epoch

            def freeze_before_training(self, pl_module):
                self.freeze(pl_module.features)

            def finetune_function(self, pl_module, epoch, optimizer):
                if epoch == self.epoch:
                    self.unfreeze_and_add_param_group(pl_module.features, optimizer)
    """

    def __init__(self) -> None:
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._restarting = False
        self._loaded: dict[str, Any] | None = None

    # -- to override ---------------------------------------------------------------------------------------

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze the parameters that are unfrozen later or never. Called in ``setup``, on every rank.

        Args:
            pl_module: module of the run.

        Raises:
            NotImplementedError: a subclass does not define the method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define freeze_before_training. Define it to freeze layers."
        )

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the layers to train from this epoch on. Called at the start of each epoch, for each optimizer.

        Args:
            pl_module: module of the run.
            epoch: epoch that starts, from 0.
            optimizer: one of the optimizers, to which unfrozen parameters are added.

        Raises:
            NotImplementedError: a subclass does not define the method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define finetune_function. Define it to unfreeze layers."
        )

    # -- hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Call :meth:`freeze_before_training`. Before a fit, first discard what an earlier fit has recorded."""
        if stage == "fit":
            self._internal_optimizer_metadata, self._restarting, self._loaded = {}, False, None
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a resumed fit, restore which parameters each optimizer group contains, and which are frozen."""
        if not self._restarting:
            return
        self._restarting = False
        parameters = dict(pl_module.named_parameters())
        for number, optimizer in enumerate(trainer.optimizers):
            stored = self._internal_optimizer_metadata.get(number)
            if stored:
                added = [name for group in stored[len(optimizer.param_groups) :] for name in group["params"]]
                optimizer.param_groups[:] = self._apply_mapping_to_param_groups(stored, parameters)
                for name in added:  # Lightning's checkpoints do not record what is frozen
                    parameters[name].requires_grad = True
        if self._loaded is not None:
            frozen, untracked = set(self._loaded["frozen"]), set(self._loaded["untracked"])
            for name, parameter in pl_module.named_parameters():
                if parameter.is_floating_point() or parameter.is_complex():  # integers cannot require gradients
                    parameter.requires_grad = name not in frozen
            for name, part in pl_module.named_modules():
                if isinstance(part, _BatchNorm) and part.running_mean is not None:
                    part.track_running_stats = name not in untracked
            self._loaded = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call :meth:`finetune_function`, and record the parameter groups that it adds."""
        for number, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            self._store(pl_module, number, before, optimizer.param_groups)

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return each optimizer's parameter groups, with parameter names in place of parameters."""
        return {"internal_optimizer_metadata": self._internal_optimizer_metadata}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the parameter groups until :meth:`on_fit_start`, because the optimizers do not exist yet."""
        self._restarting = True
        stored = state_dict.get("internal_optimizer_metadata", {})
        self._internal_optimizer_metadata = {number: list(groups) for number, groups in stored.items()}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the names of frozen parameters to this callback's state."""
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if own is not None:
            own.update(_frozen_names(pl_module))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if trainer.state.fn == "fit" and "frozen" in own:
            self._loaded = {key: own[key] for key in ("frozen", "untracked")}

    @staticmethod
    def _apply_mapping_to_param_groups(
        groups: list[dict[str, Any]], mapping: Mapping[Any, Any]
    ) -> list[dict[str, Any]]:
        return [{**group, "params": [mapping[parameter] for parameter in group["params"]]} for group in groups]

    def _store(self, pl_module: LightningModule, number: int, before: int, groups: list[dict[str, Any]]) -> None:
        stored = self._internal_optimizer_metadata.setdefault(number, [])
        fresh = groups[before:] if stored else groups
        if not fresh:
            return
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        stored.extend(self._apply_mapping_to_param_groups(fresh, names))

    # -- freezing and unfreezing ---------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return all submodules that have parameters of their own or no children, each once.

        Args:
            modules: a module, or a nest of iterables of modules.
        """
        found: dict[int, nn.Module] = {}
        for module in _walk(modules):
            if not any(True for _ in module.children()) or module._parameters:
                found.setdefault(id(module), module)
        return list(found.values())

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of modules; with ``requires_grad=False`` the frozen parameters.

        Args:
            modules: a module, or a nest of iterables of modules.
            train_bn: False omits the parameters of BatchNorm.
            requires_grad: True yields the trainable parameters, False the frozen ones.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters of modules, and let BatchNorm layers update their running statistics again.

        Args:
            modules: a module, or a nest of iterables of modules.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze a module's own parameters, but not its submodules'. A BatchNorm stops updating its statistics."""
        _set_trainable(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters in the given modules.

        Args:
            modules: a module, or a nest of iterables of modules.
            train_bn: leave BatchNorm trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        """Return those of ``params`` that are not in the optimizer yet, and warn about the others.

        Args:
            optimizer: optimizer whose parameter groups are searched.
            params: parameters of a group that is to be added.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        given = list(params)
        fresh = [parameter for parameter in given if id(parameter) not in known]
        if len(fresh) < len(given):
            rank_zero_warn(
                f"{len(given) - len(fresh)} parameters of the new group are omitted, because they are in "
                f"another group of {type(optimizer).__name__}. Pass only trainable parameters to the optimizer in "
                "`configure_optimizers`: `filter(lambda p: p.requires_grad, self.parameters())`."
            )
        return fresh

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules and add their parameters to an optimizer as a new group.

        Args:
            modules: a module, or a nest of iterables of modules.
            optimizer: the optimizer that receives the group.
            lr: learning rate of the group; default: that of the first group divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``.
            train_bn: False unfreezes BatchNorm, but does not add it to the optimizer.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        trainable = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        fresh = BaseFinetuning.filter_on_optimizer(optimizer, trainable)
        if fresh:
            optimizer.add_param_group({"params": fresh, "lr": rate})


class BackboneFinetuning(BaseFinetuning):
    """Callback that freezes ``pl_module.backbone``, and trains it from a later epoch with a growing learning rate.

    The learning rate grows to that of the other parameters.

    Before that epoch the backbone is frozen, except its BatchNorm. In ``configure_optimizers``, omit the backbone
    or pass only trainable parameters.

    Args:
        unfreeze_backbone_at_epoch: the epoch, counted from 0, at whose start the backbone is unfrozen.
        lambda_func: ``lambda_func(epoch + 1)`` is the factor by which the backbone's learning rate grows in
            each later epoch.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a fraction of that of the first group.
        backbone_initial_lr: the backbone's first learning rate itself, instead of the fraction.
        should_align: stop the growth at the learning rate of the first group.
        initial_denom_lr: accepted for compatibility; the first learning rate is always given here.
        train_bn: False keeps the backbone's BatchNorm out of the optimizer.
        verbose: report both learning rates each epoch.
        rounding: number of digits in that report.

    Raises:
        MisconfigurationException: at the setup of a call, the module has no ``backbone``.

    Example::

        Trainer(callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=5, lambda_func=lambda epoch: 1.5)])
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Freeze the backbone. Before a fit, first discard the backbone's learning rate of an earlier fit."""
        if stage == "fit":
            self.previous_backbone_lr = None
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _backbone(pl_module)
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freeze the backbone, except its BatchNorm."""
        self.freeze(_backbone(pl_module))

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone at ``unfreeze_backbone_at_epoch``; increase its learning rate in later epochs."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        rate = optimizer.param_groups[0]["lr"]
        # also a run that resumes after that epoch from a checkpoint without this callback's state
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            first = self.backbone_initial_lr
            backbone_rate = rate * self.backbone_initial_ratio_lr if first is None else first
            self.unfreeze_and_add_param_group(
                _backbone(pl_module),
                optimizer,
                backbone_rate,
                train_bn=self.train_bn,
                initial_denom_lr=self.initial_denom_lr,
            )
        else:
            backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align and backbone_rate > rate:
                backbone_rate = rate
            optimizer.param_groups[-1]["lr"] = backbone_rate
        self.previous_backbone_lr = backbone_rate
        if self.verbose:
            shown = [round(float(value), self.rounding) for value in (rate, backbone_rate)]
            rank_zero_info("Epoch %d: learning rate %s, backbone learning rate %s", epoch, *shown)

    def state_dict(self) -> dict[str, Any]:
        """Return each optimizer's parameter groups, and the backbone's learning rate."""
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)


def _backbone(pl_module: LightningModule) -> nn.Module:
    backbone = getattr(pl_module, "backbone", None)
    if not isinstance(backbone, nn.Module):
        raise MisconfigurationException(
            f"BackboneFinetuning: {type(pl_module).__name__}.backbone is {backbone!r:.80}, not an nn.Module. Assign "
            "the layers to unfreeze to `self.backbone`, or derive from BaseFinetuning."
        )
    return backbone


def _walk(modules: Modules) -> Iterator[nn.Module]:
    if isinstance(modules, nn.Module):
        yield from modules.modules()
    else:
        for part in modules:
            yield from _walk(part)


def _set_trainable(module: nn.Module, trainable: bool) -> None:
    if isinstance(module, _BatchNorm):
        module.track_running_stats = trainable
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad = trainable


def _frozen_names(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of frozen parameters, and of BatchNorm layers that do not update their statistics."""
    return {
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "untracked": [
            name
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and not part.track_running_stats
        ],
    }
