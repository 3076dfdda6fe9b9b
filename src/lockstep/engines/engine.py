"""The seam for engines: what runs, reduces, updates and saves a model. Here: one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.engines.optimizer_states import states_to_parameters
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import kept
from lockstep.ground.optimizers import PlayedFirst, takes_closure
from lockstep.ground.parameters import DEEPSPEED, FSDP, PIPELINE, beside, clip_by_value, cut_by, plain_name, refuse_lazy
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.recompute import Layers, Policy, Recomputation, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

LEFT_IN_PARTS = {
    FSDP: ('a fit with strategy="fsdp", or its `configure_model`,', 'strategy="fsdp" or ModelParallelStrategy(...)'),
    DEEPSPEED: ("a fit with DeepSpeed's stage 3", 'strategy="deepspeed_stage_3"'),
    PIPELINE: ('a fit with strategy="balanced" that did not end well', "that fit's last checkpoint as `ckpt_path`"),
}
"""By the engine that has cut a module: what has left it so, and what goes on with it."""


@dataclass
class EngineState:
    """An engine's part of a checkpoint; None where there is nothing of a kind.

    Attributes:
        module: the module's state dict: whole, or this rank's part where the engine saves shards.
        optimizers: their states, by optimizer. In a call of :meth:`Engine.load`, those that are None stay as they are.
        own: what all ranks have alike, and the engine needs to go on with the same bits (the bucket plan).
        by_rank: what each rank alone needs, by rank: on rank 0, and in a call of :meth:`Engine.load` on all.
    """

    module: dict[str, Any] | None = None
    optimizers: list[dict[str, Any] | None] | None = None
    own: dict[str, Any] | None = None
    by_rank: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a window, for an engine that plays the window itself.

    Attributes:
        args: of the step method.
        enter: to be called before the step method, so that what it logs counts for this micro-batch. An engine that
            runs it several times, each time on a part of the samples, says how large the part is.
        loss: what backward begins from, given the step's output, and the part again: the loss by its share of the
            window; None: the micro-batch is skipped.
        empty: this rank has no samples of it, and ``args`` are not there; others do.
    """

    args: tuple[Any, ...]
    enter: Callable[..., None]
    loss: Callable[..., Tensor | None]
    empty: bool = False


class BatchByHand(NamedTuple):
    """A batch of manual optimization, whose backwards may pass the engine by.

    Attributes:
        number: of the batch, in its epoch.
        share: by which a ``loss.backward()`` in the place of ``manual_backward`` is weighed.
    """

    number: int
    share: float


class WindowPlayer(Protocol):
    """An engine's own way through a window: all forwards and backwards, in the order that suits it.

    Args:
        step: the module's ``training_step``.
        micro_batches: of the window.

    Returns:
        the outputs of the step, by micro-batch; then gradients are reduced.
    """

    def __call__(self, step: Callable[..., Any], micro_batches: Sequence[MicroBatch]) -> list[Any]: ...


class Engine:
    """One process on one device, and the methods that another engine answers.

    It has twelve methods. :meth:`named_parameters` and :meth:`whole_parameters` are asked for at any time; the order of
    calls of the others, by the loops, is :meth:`setup_module` → :meth:`setup_optimizers` → :meth:`load` → per window
    :meth:`run` and :meth:`backward` (or :meth:`skip`) for each micro-batch, :meth:`clip`, :meth:`step` →
    :meth:`save` at any boundary → :meth:`teardown`.

    Attributes:
        root_device: where the module and its batches go.
        precision: of the run.
        module: of the call.
        optimizers, lr_scheduler_configs: of the fit.
        sync_gradients: whether the next backward reduces over the ranks; the loops set it before each forward.
        drops_gradients: the batch at hand is a padding batch: gradients of its backward are to be dropped.
        by_hand: the batch at hand while ``training_step`` runs in manual optimization; None outside.
        launcher: how ranks are started: None (nothing to start), "script", "spawn" or "fork".
        drives_all_devices: one process works with all devices of its node; else each rank has one.
        window: an engine that plays whole windows has a method of this name; it is asked for once, when a fit begins.
        runs_padding: forwards communicate, so that a rank without samples for a micro-batch runs ``training_step``,
            too: on a padding batch, which leaves no trace, and with a backward that counts for nothing.
        cuts_parameters: each rank holds its part of every parameter, and not the whole.
        places_first: the module is placed, by :meth:`setup_module`, before a checkpoint's weights are loaded, and stays
            there when a call is over; else module and optimizer states go back to the CPU then.
        saves_shards: each rank has a part of the module and of the optimizers, and all ranks write.
        steps_itself: it reduces, clips and steps in one go. No closure can be given to :meth:`step`, no gradients are
            left behind it, and within a window none can be saved: a run that resumes there plays it again.
        shares: a number for each replica, to which its part of each global batch is proportional; None: equal.
        init_device: where ``configure_model`` makes its layers ("meta", say); None: where the module is.
        step_device: where steps run while parameters are on several devices; None: where the parameters are.
    """

    launcher: str | None = None
    window: WindowPlayer | None = None
    drives_all_devices: bool = False
    runs_padding: bool = False
    cuts_parameters: bool = False
    places_first: bool = False
    saves_shards: bool = False
    steps_itself: bool = False
    shares: Sequence[float] | None = None
    init_device: torch.device | None = None
    step_device: torch.device | None = None

    def __init__(self) -> None:
        self._root_device = torch.device("cpu")
        self.precision: Precision = Precision()
        self.module: LightningModule = None  # type: ignore[assignment]  # before a call
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.sync_gradients = True
        self.drops_gradients = False
        self.by_hand: BatchByHand | None = None
        self.left_out = False  # by the engine itself: the last step, whose gradients overflowed
        self.context: Callable[[], AbstractContextManager[Any]] | None = None
        self._own_backward: Callable[..., Any] | None = None
        self._recomputation = Recomputation(type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has; engines leave out what works with a process group, or belongs to the call that runs.

        Raises:
            NotImplementedError: the model is in parts, which only this object can gather.
        """
        if self.module is not None and self.holds_parts:
            raise NotImplementedError(
                f"{type(self).__name__} cannot be copied or pickled once a call has set it up, nor can its Trainer and "
                "its loops: the model is in parts, and what gathers them belongs to this process. Copy before the "
                "first call, or write what is there by trainer.save_checkpoint(path)."
            )
        return kept(self, "_own_backward")

    @property
    def holds_parts(self) -> bool:
        """Whether no rank has the whole model: its forwards communicate, or it plays windows over stages."""
        return self.runs_padding or self.window is not None

    @property
    def root_device(self) -> torch.device:
        """Where the module and its batches go; a strategy of one's own may say so itself, by a property."""
        return self._root_device

    @root_device.setter
    def root_device(self, device: torch.device) -> None:
        self._root_device = device

    # -- set up

    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Put the module on its device and in its precision; ``own_backward``: the module's override of backward."""
        self._refuse_parts(module)
        converted: Any = self.precision.convert_module(module)
        self.module = converted.to(self.root_device)
        self._own_backward = own_backward
        self._begin_recomputation()

    def _refuse_parts(self, module: LightningModule, goes_on: str = "") -> None:
        """Refuse a module that an engine has left in parts, unless it is the one that it goes on with; or lazy."""
        engine = cut_by(module) or goes_on
        if self.launcher is not None or self.drives_all_devices:  # else they get their shapes in the first step
            refuse_lazy(module, type(self).__name__)
        if engine != goes_on:
            (left, way), name = LEFT_IN_PARTS[engine], type(module).__name__
            raise MisconfigurationException(
                f"{name} is in shards: {left} left it so, and {type(self).__name__} needs it whole. Save a checkpoint "
                f"and load it into a new module, or go on with {way}."
            )

    def _recompute(
        self,
        activation_checkpointing: Layers | Literal[False] | None,
        activation_checkpointing_policy: Policy | None,
        activation_checkpointing_save: Save,
    ) -> None:
        """Take in a strategy's arguments of these names."""
        asked = (activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        try:
            self._recomputation = Recomputation(type(self).__name__, *asked)
        except ValueError as error:
            raise MisconfigurationException(f"{error}.") from None

    def _begin_recomputation(self) -> None:
        """Recompute the layers that the strategy was asked for, and those in torch's wrappers."""
        try:
            self._recomputation.begin(self.module)
        except ValueError as error:
            raise MisconfigurationException(f"{error}.") from None

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Take over what ``configure_optimizers`` made; training begins after this."""
        self.optimizers, self.lr_scheduler_configs = optimizers, configs
        for optimizer in optimizers:
            states_to_parameters(optimizer)

    def teardown(self) -> None:
        """The run is over; ranks stay connected, and the optimizers can still be saved."""
        self._recomputation.end()

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """The one door to the user's step methods: in the run's precision, through the engine's forward."""
        if self.context is None:
            return fn(*args)
        with self.context():
            return fn(*args)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Backward of one micro-batch; where ``sync_gradients`` the gradients are reduced when it returns."""
        if self._own_backward is not None:
            self._own_backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def skip(self, absent: bool = False) -> None:
        """Take part in the reduction of a micro-batch that has no loss on this rank.

        Args:
            absent: this rank has no samples for it, and no forward was run; else ``training_step`` gave no loss.
        """

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """Clip the whole (reduced) gradient of an optimizer's parameters by its 2-norm or by value.

        Returns:
            the norm before clipping; None where none was computed.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            return torch.nn.utils.clip_grad_norm_(parameters, value)
        clip_by_value(parameters, value)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters of one optimizer."""
        scaler = self.precision.scaler
        if scaler is not None and isinstance(closure, PlayedFirst):
            scaler.step(optimizer, closure=closure)
            scaler.update(optimizer)
            return closure.loss
        if scaler is not None and (closure is None or not takes_closure(optimizer)):
            result = closure() if closure is not None else None
            scaler.step(optimizer)
            scaler.update(optimizer)
            return result
        if closure is None:
            return optimizer.step(**options)
        return optimizer.step(closure=closure, **options)

    # -- what it holds

    def named_parameters(self) -> dict[str, Parameter]:
        """The module's parameters by name, and those that the optimizers alone have (in a plain list, say)."""
        others: dict[str, Any] = {**beside(self.module, self.optimizers)}
        return {**{plain_name(name): p for name, p in self.module.named_parameters()}, **others}

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Name, value and gradient of each parameter, whole, however the engine holds them. Collective."""
        for name, parameter in self.named_parameters().items():
            yield name, parameter.detach(), parameter.grad

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """The engine's part of a checkpoint. Collective, unless ``alone``.

        Args:
            alone: ask no other rank; what cannot be had so is None.
            weights_only: the module alone.
        """
        if weights_only:
            return EngineState(self.module.state_dict())
        own = self._other_parameters()
        return EngineState(self.module.state_dict(), [each.state_dict() for each in self.optimizers], own)

    def _other_parameters(self) -> dict[str, Any]:
        """The values of parameters that no module has, so that they are in no state dict of one."""
        others = beside(self.module, self.optimizers)
        return {"other parameters": {name: p.detach().cpu().clone() for name, p in others.items()}} if others else {}

    def load(self, state: EngineState) -> None:
        """Take over what is there of a saved state, before the first window."""
        if state.module is not None:
            self.module.load_state_dict(state.module, strict=self.module.strict_loading)
        for optimizer, saved in zip(self.optimizers, state.optimizers or (), strict=False):
            if saved is not None:
                optimizer.load_state_dict(saved)
        others = beside(self.module, self.optimizers) if state.own else {}
        with torch.no_grad():
            for name, value in (state.own or {}).get("other parameters", {}).items():
                if name in others:
                    others[name].copy_(value)
