"""Base class of all engines; on its own it trains in one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import kept
from lockstep.ground.optimizers import EagerClosure, takes_closure
from lockstep.ground.parameters import (
    DEEPSPEED,
    FSDP,
    PIPELINE,
    clip_by_value,
    engine_that_split,
    parameters_outside,
    plain_name,
    refuse_lazy,
)
from lockstep.ground.tree import tree_map
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.recompute import Layers, Policy, Recomputation, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

PARTITIONED_BY = {
    FSDP: ('a fit with strategy="fsdp" or its own `configure_model`', 'strategy="fsdp" or ModelParallelStrategy(...)'),
    DEEPSPEED: ("a fit with DeepSpeed's stage 3", 'strategy="deepspeed_stage_3"'),
    PIPELINE: ('a fit with strategy="balanced" that failed', "that fit's last checkpoint as `ckpt_path`"),
}
"""Engine that leaves a module partitioned -> (calls that leave it so, ways to continue training that module)."""


@dataclass
class EngineState:
    """Model, optimizer and engine states that an engine contributes to a checkpoint; a field without content is None.

    Attributes:
        module: the module's state dict with full tensors, or this rank's part of it if the engine saves shards.
        optimizers: the states of the optimizers. In :meth:`Engine.load`, an optimizer with None keeps its states.
        own: state of the engine that is the same on all ranks and determines the bits of later steps (the bucket plan).
        by_rank: a state for each rank, in the order of the ranks: filled on rank 0, and on all ranks in
            :meth:`Engine.load`.
    """

    module: dict[str, Any] | None = None
    optimizers: list[dict[str, Any] | None] | None = None
    own: dict[str, Any] | None = None
    by_rank: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of an accumulation window, for an engine that runs complete windows.

    Attributes:
        args: arguments of the step method.
        enter: called before the step method, so that its logging counts for this micro-batch. An engine that runs the
            step several times, each time on a part of the samples, passes the size of the part.
        loss: called with the step's output, and the size of the part again; returns the tensor on which to call
            ``backward``: the loss times its share of the window. None: skip the micro-batch.
        empty: True if this rank has no samples for it, but other ranks have; ``args`` is then empty.
    """

    args: tuple[Any, ...]
    enter: Callable[..., None]
    loss: Callable[..., Tensor | None]
    empty: bool = False


class BatchByHand(NamedTuple):
    """Index and weight of the current batch in manual optimization, for a user's own call of ``loss.backward()``.

    Attributes:
        number: index of the batch in its epoch.
        share: factor for gradients of a ``loss.backward()``.
    """

    number: int
    share: float


class WindowRunner(Protocol):
    """A function that runs all forwards and backwards of a window in the order that suits the engine.

    Args:
        step: the module's ``training_step``.
        micro_batches: the micro-batches of the window.

    Returns:
        The outputs of the step, by micro-batch; gradients are then reduced.
    """

    def __call__(self, step: Callable[..., Any], micro_batches: Sequence[MicroBatch]) -> list[Any]: ...


Holder = TypeVar("Holder", covariant=True)


class Gradients(Generic[Holder]):
    """Access to the gradients between a window's last backward and the optimizer step.

    In this class gradients are unsharded, in ``.grad`` of each parameter. An engine that stores them differently
    provides a subclass as ``strategy.gradients``.

    Args:
        engine: the engine that trains the parameters.
        holder: the object of the engine that stores the gradients, if ``.grad`` does not.
    """

    def __init__(self, engine: Engine, holder: Holder) -> None:
        self.engine = engine
        self.holder = holder

    def local(self, stepped: bool = False) -> list[Tensor]:
        """Return all gradient tensors in this rank's memory, including gradients that are not reduced yet.

        In-place changes of the returned tensors change the gradients.

        Args:
            stepped: return only the gradients with which the optimizers step.
        """
        groups = [group["params"] for optimizer in self.engine.optimizers for group in optimizer.param_groups]
        every = groups if stepped else [*groups, self.engine.module.parameters()]
        found = {id(p): p.grad for parameters in every for p in parameters}  # once, also in several groups
        return [gradient for gradient in found.values() if gradient is not None]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather sharded gradients, so that each parameter's ``.grad`` is unsharded inside the block. Collective."""
        yield

    def window_state(self) -> dict[str, Any]:
        """Return copies of an unfinished window's gradients, for a checkpoint. Collective.

        The result is ``{"gradients": {parameter name: tensor on the CPU}}``.
        """
        named = self.engine.named_parameters()
        return {"gradients": {name: p.grad.detach().cpu().clone() for name, p in named.items() if p.grad is not None}}

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Restore gradients that `window_state` returned, or full gradients under the key ``"gradients"``. Collective.

        Full gradients come from a run with other ranks or another engine; they are the mean over its replicas.
        """
        parameters = self.engine.named_parameters()
        for name, gradient in saved.get("gradients", {}).items():
            parameter = parameters[name]
            # `grad_dtype` exists since torch 2.10; None accepts any
            dtype = getattr(parameter, "grad_dtype", parameter.dtype) or gradient.dtype
            parameter.grad = gradient.to(parameter.device, dtype)


class Engine:
    """Engine for one process on one device, and base class of all others.

    The loops call :meth:`setup_module` → :meth:`setup_optimizers` → :meth:`load` → per window :meth:`run` and
    :meth:`backward` (or :meth:`skip`) for each micro-batch, :meth:`clip`, :meth:`step` → :meth:`save` at any boundary →
    :meth:`teardown`. They may call :meth:`named_parameters` and :meth:`whole_parameters` at any time.

    Attributes:
        root_device: device of the module and its batches.
        precision: precision of the run.
        module: module of the current fit or evaluation.
        optimizers, lr_scheduler_configs: those of the fit.
        sync_gradients: True if the next backward reduces over the ranks; the loops set it before each forward.
        drops_gradients: True while a padding batch runs: the gradients of its backward are dropped.
        by_hand: the current batch while ``training_step`` runs in manual optimization; otherwise None.
        launcher: how ranks are started: None (nothing to start), "script", "spawn" or "fork".
        drives_all_devices: one process uses all devices of its node; otherwise each rank has one.
        window: method of an engine that runs whole windows; the loop reads it once, at the start of a fit.
        runs_padding: forwards communicate, so a rank without samples for a micro-batch runs ``training_step`` on a
            padding batch. That changes no state, and the gradients of its backward are dropped.
        cuts_parameters: each rank has a part of every parameter.
        places_first: :meth:`setup_module` places the module before a checkpoint's weights are loaded, and it stays
            there at the end of a call; otherwise module and optimizer states return to the CPU then.
        saves_shards: each rank has a part of the module and of the optimizers, and all ranks write.
        steps_itself: the engine reduces, clips and steps at once. :meth:`step` accepts no closure, and no gradients are
            left after it. Within a window none can be saved: a run that resumes there runs the window again.
        shares: a number for each replica, to which its part of each global batch is proportional; None: equal parts.
        init_device: device on which ``configure_model`` creates layers, such as "meta"; None: the module's device.
        step_device: device of the steps if parameters are on several devices; None: the device of the parameters.
    """

    launcher: str | None = None
    window: WindowRunner | None = None
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
        self.module: LightningModule = None  # type: ignore[assignment]  # set by each call
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.sync_gradients = True
        self.drops_gradients = False
        self.by_hand: BatchByHand | None = None
        self.left_out = False  # True if an engine with `steps_itself` skipped the last step: gradients overflowed
        self.context: Callable[[], AbstractContextManager[Any]] | None = None
        self._own_backward: Callable[..., Any] | None = None
        self._recomputation = Recomputation(type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without those that belong to this process or to the running call.

        Raises:
            NotImplementedError: the model is partitioned, and only this object can gather it.
        """
        if self.module is not None and self.holds_parts:
            raise NotImplementedError(
                f"{type(self).__name__}, its Trainer and its loops cannot be copied or pickled after the first call of "
                "the Trainer, because the model is partitioned and only this process can gather it. Copy before the "
                "first call, or save the model with trainer.save_checkpoint(path)."
            )
        return kept(self, "_own_backward")

    @property
    def holds_parts(self) -> bool:
        """True if no rank has the full model: forwards communicate, or ranks run windows as stages of a pipeline."""
        return self.runs_padding or self.window is not None

    @property
    def root_device(self) -> torch.device:
        """Device of the module and its batches. A user's strategy may override this property."""
        return self._root_device

    @root_device.setter
    def root_device(self, device: torch.device) -> None:
        self._root_device = device

    # -- set up

    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Move the module to this rank's device and convert it to the run's precision.

        Args:
            module: the module to train or evaluate.
            own_backward: the module's override of ``backward``; None if it has none.

        Raises:
            MisconfigurationException: the module has lazy layers, or another engine has left it partitioned.
        """
        self._refuse_parts(module)
        converted: Any = self.precision.convert_module(module)
        self.module = converted.to(self.root_device)
        self._own_backward = own_backward
        self._begin_recomputation()

    def _refuse_parts(self, module: LightningModule, accepted: str = "") -> None:
        """Raise if the module has lazy layers, or if an engine other than ``accepted`` has left it partitioned."""
        engine = engine_that_split(module) or accepted
        if self.launcher is not None or self.drives_all_devices:  # otherwise the first step sets the layers' shapes
            refuse_lazy(module, type(self).__name__)
        if engine != accepted:
            (cause, way), name = PARTITIONED_BY[engine], type(module).__name__
            raise MisconfigurationException(
                f"{name} is still partitioned after {cause}, but {type(self).__name__} needs full parameters. Save a "
                f"checkpoint and load it into a new module, or continue with {way}."
            )

    def _recompute(
        self,
        activation_checkpointing: Layers | Literal[False] | None,
        activation_checkpointing_policy: Policy | None,
        activation_checkpointing_save: Save,
    ) -> None:
        """Check and store a strategy's ``activation_checkpointing*`` arguments."""
        given = (activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        try:
            self._recomputation = Recomputation(type(self).__name__, *given)
        except ValueError as error:
            raise MisconfigurationException(f"{error}.") from None

    def _begin_recomputation(self) -> None:
        """Start recomputing activations of layers that the arguments select, and of torch's ``CheckpointWrapper``."""
        try:
            self._recomputation.begin(self.module)
        except ValueError as error:
            raise MisconfigurationException(f"{error}.") from None

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Store the optimizers and schedulers from ``configure_optimizers``, before training starts.

        Args:
            optimizers: optimizers of the fit.
            configs: schedulers of the fit, with the interval and frequency of their steps.
        """
        self.optimizers, self.lr_scheduler_configs = optimizers, configs
        for optimizer in optimizers:
            states_to_parameters(optimizer)

    def teardown(self) -> None:
        """Clean up at the end of a fit or evaluation. Ranks stay connected, and optimizers can still be saved."""
        self._recomputation.end()

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a step method of the user's module in the run's precision. Loops call step methods only through `run`.

        Args:
            fn: step method, such as the module's ``training_step``.
            args: positional arguments of ``fn``.

        Returns:
            the result of ``fn``.
        """
        if self.context is None:
            return fn(*args)
        with self.context():
            return fn(*args)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the backward of one micro-batch, and reduce the gradients if ``sync_gradients`` is True.

        Args:
            loss: scalar tensor, already multiplied by the micro-batch's share of the window and, under "16-mixed", by
                the loss scale.
            args, kwargs: further arguments of ``torch.Tensor.backward``.
        """
        if self._own_backward is not None:
            self._own_backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def skip(self, absent: bool = False) -> None:
        """Join the other ranks' gradient reduction without a backward, for a micro-batch without a loss on this rank.

        Args:
            absent: True if this rank has no samples for the micro-batch and ran no forward; False if
                ``training_step`` returned no loss.
        """

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """Clip the reduced gradients of an optimizer's parameters, by their 2-norm or by value.

        Args:
            optimizer: optimizer of the parameters.
            value: bound of the norm, or of each element.
            algorithm: "norm" or "value".

        Returns:
            The norm before clipping; None if none was computed.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            return torch.nn.utils.clip_grad_norm_(parameters, value)
        clip_by_value(parameters, value)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters of one optimizer.

        Args:
            optimizer: optimizer to step.
            closure: function without arguments that computes the loss and gradients again; None for most optimizers.
            options: further keyword arguments of ``optimizer.step``.

        Returns:
            the result of ``optimizer.step``, usually None or the loss of the closure.
        """
        scaler = self.precision.scaler
        # A scaler decides about a step by its gradients, so the closure has to run before it, not within it.
        if scaler is not None and isinstance(closure, EagerClosure):
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

    # -- parameters and states

    def named_parameters(self) -> dict[str, Parameter]:
        """Return all parameters by name: the module's, and unregistered ones (in a plain list) that optimizers have."""
        others: dict[str, Any] = {**parameters_outside(self.module, self.optimizers)}
        return {**{plain_name(name): p for name, p in self.module.named_parameters()}, **others}

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield (name, value, gradient) for each parameter, with sharded tensors gathered. Collective."""
        for name, parameter in self.named_parameters().items():
            yield name, parameter.detach(), parameter.grad

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """Return the model, optimizer and engine states for a checkpoint. Collective, unless ``alone``.

        Args:
            alone: do not communicate with other ranks; fields that need them are None.
            weights_only: save only the module.
        """
        if weights_only:
            return EngineState(self.module.state_dict())
        own = self._other_parameters()
        return EngineState(self.module.state_dict(), [each.state_dict() for each in self.optimizers], own)

    def _other_parameters(self) -> dict[str, Any]:
        """Return the values of parameters that are in optimizers but not in the module."""
        others = parameters_outside(self.module, self.optimizers)
        return {"other parameters": {name: p.detach().cpu().clone() for name, p in others.items()}} if others else {}

    def load(self, state: EngineState) -> None:
        """Load the fields of a saved state that are not None, before the first window.

        Args:
            state: state from a checkpoint.
        """
        if state.module is not None:
            self.module.load_state_dict(state.module, strict=self.module.strict_loading)
        for optimizer, saved in zip(self.optimizers, state.optimizers or (), strict=False):
            if saved is not None:
                optimizer.load_state_dict(saved)
        others = parameters_outside(self.module, self.optimizers) if state.own else {}
        with torch.no_grad():
            for name, value in (state.own or {}).get("other parameters", {}).items():
                if name in others:
                    others[name].copy_(value)


# -- the device of an optimizer's states: that of its parameters during a fit, the CPU afterwards ----------------


def states_to_cpu(optimizer: Optimizer) -> None:
    """Move an optimizer's states to the CPU, except for scalars: optimizers choose the device of a step count."""
    cpu = torch.device("cpu")
    _map_states(optimizer, lambda _, value: value.to(cpu) if value.dim() else value)


def states_to_parameters(optimizer: Optimizer) -> None:
    """Move an optimizer's states from the CPU, where an earlier fit left them, to the devices of their parameters."""

    def bring(parameter: Tensor, value: Tensor) -> Tensor:
        stays = not value.dim() or value.device.type != "cpu"
        return value if stays else value.to(parameter.device)

    _map_states(optimizer, bring)


def _map_states(optimizer: Optimizer, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    states: Any = getattr(optimizer, "state", None)  # any object, if the optimizer is not torch's
    for parameter, state in [*states.items()] if isinstance(states, Mapping) else []:
        if not isinstance(parameter, Tensor):
            continue
        changed = tree_map(partial(change, parameter), state, Tensor)
        if isinstance(state, dict):
            state.update(changed)
        else:
            states[parameter] = changed
