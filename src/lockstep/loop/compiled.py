"""``Trainer(compile=...)``, which compiles layers during a call, and modules that the user compiled."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from lockstep.config.compile import CompileOptions
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import CompiledForward, is_compiled_layer
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.loop.hooks import is_overridden
from lockstep.loop.metrics import is_metric
from lockstep.loop.session import Session
from lockstep.memory.blocks import blocks_by, find_blocks
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from torch._dynamo.eval_frame import OptimizedModule

NO_BLOCKS = (
    "Trainer(compile=...): {name} has no repeated blocks (sibling layers of one class that contain layers), so its "
    "outermost layers are compiled. Name other blocks by their classes: compile={{'blocks': [Block]}}."
)

COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled(model: object) -> TypeGuard[OptimizedModule]:
    """Return True if ``model`` is the result of ``torch.compile(module)``. Never imports torch's compiler."""
    dynamo = sys.modules.get("torch._dynamo")  # torch imports it at the first compilation
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def from_compiled(model: nn.Module) -> LightningModule:
    """Return the LightningModule that ``torch.compile`` wrapped, with compiled ``forward`` and step methods.

    The result of ``torch.compile(module)`` is not a LightningModule. ``trainer.fit`` and the other calls of the Trainer
    apply this function themselves.

    Args:
        model: result of ``torch.compile``; the module inside is changed in place.

    Raises:
        ValueError: ``model`` is not compiled, or not a LightningModule.

    Example::

        model = from_compiled(torch.compile(Net()))
    """
    if not is_compiled(model):
        raise ValueError(f"from_compiled({type(model).__name__}): pass the result of torch.compile(module).")
    module = model._orig_mod
    if not isinstance(module, LightningModule):
        raise ValueError(f"from_compiled: a {type(module).__name__} was compiled, which is not a LightningModule.")
    if module._compiler_ctx is None:
        module._compiler_ctx = {"dynamo_ctx": model.dynamo_ctx}
        for name in COMPILED:
            if is_overridden(name, module, LightningModule):
                setattr(module, name, model.dynamo_ctx(getattr(module, name)))
        # `log` is not part of the model, and tracing it takes the compiler a minute
        module.log = torch.compiler.disable(module.log)  # type: ignore[method-assign, no-untyped-call]
    return module


def to_uncompiled(model: nn.Module) -> LightningModule:
    """Undo ``torch.compile`` on a LightningModule in place, and return the module.

    Args:
        model: result of ``torch.compile`` or :func:`from_compiled`.

    Raises:
        ValueError: ``model`` is not compiled, or not a LightningModule.
    """
    module = model._orig_mod if is_compiled(model) else model
    if not isinstance(module, LightningModule):
        raise ValueError(f"to_uncompiled: {type(module).__name__} is not a LightningModule.")
    if module._compiler_ctx is None and module is model:
        raise ValueError(f"to_uncompiled({type(module).__name__}): this module is not compiled.")
    for name in (*COMPILED, "log") if module._compiler_ctx is not None else ():
        vars(module).pop(name, None)
    module._compiler_ctx = None
    return module


def unwrapped(model: object) -> object:
    """Return the LightningModule inside a compiled ``model``. Return any other ``model`` unchanged."""
    return from_compiled(model) if is_compiled(model) and isinstance(model._orig_mod, LightningModule) else model


# -- Trainer(compile=...) ------------------------------------------------------------------------------------


def check_threads(strategy: Strategy) -> None:
    """Raise if the strategy runs copies of the layers in threads, which torch's compiler does not support.

    Raises:
        MisconfigurationException: names a strategy that works.
    """
    if strategy.drives_all_devices and len(strategy.devices) > 1:
        raise MisconfigurationException(
            f"Trainer(compile=...) with {type(strategy).__name__}: it runs copies of the layers in threads, which "
            'torch\'s compiler does not support: use strategy="ddp".'
        )


class CompiledLayers:
    """Compiles layers of a module for the duration of one Trainer call.

    Args:
        session: the session of the call. The module is not yet placed or sharded, so that hooks of an engine on a layer
            are outside of the compiled code.

    Raises:
        MisconfigurationException: the options do not fit the module.
    """

    def __init__(self, session: Session, options: CompileOptions) -> None:
        layers = [*_choose_layers(session.module, options, session.strategy.world_size > 1)]
        self._forwards = [CompiledForward(layer, options.options) for layer in layers]
        for forward in self._forwards:
            vars(forward.layer)["forward"] = forward
        rank_zero_info(
            f"trainer.{session.state.fn}: {_count_by_class(layers)} compiled by {options.backend}: the first batch of "
            "each shape takes longer."
        )

    def end(self) -> None:
        """Restore the uncompiled ``forward`` of each layer."""
        for forward in self._forwards:
            forward.put_back()


def _choose_layers(module: LightningModule, options: CompileOptions, on_ranks: bool) -> Iterator[nn.Module]:
    """Yield the layers to compile. Layers that the user has compiled are skipped."""
    blocks = options.blocks
    if blocks is None:  # with several ranks in blocks, so that the reduction of one overlaps the backward of the next
        blocks = on_ranks
    found: list[nn.Module] = []
    if blocks is True:
        found = find_blocks(module)
        if not found and options.blocks:
            rank_zero_warn(NO_BLOCKS.format(name=type(module).__name__))
    elif blocks:
        found = _find_classes(module, blocks)
    if not found:
        found = [*_top_layers(module)]
    if not found:
        raise MisconfigurationException(
            f"Trainer(compile=...): {type(module).__name__} has no layers that could be compiled."
        )
    for layer in found:
        if not is_compiled_layer(layer):  # by the user, with options of their own
            yield layer


def _find_classes(module: nn.Module, kinds: tuple[type[nn.Module] | str, ...]) -> list[nn.Module]:
    named = {kind for kind in kinds if isinstance(kind, str)}
    classes = {kind for kind in kinds if not isinstance(kind, str)}
    classes |= {type(layer) for layer in module.modules() if type(layer).__name__ in named}
    missing = named - {kind.__name__ for kind in classes}
    try:
        if missing:
            raise ValueError(f"there is no layer of class {sorted(missing)[0]!r}")
        return blocks_by(classes, module, alone=False)
    except ValueError as error:
        raise MisconfigurationException(f"Trainer(compile={{'blocks': ...}}): {error}.") from None


def _top_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module if it defines ``forward``, and the submodules that its step methods may call directly."""
    if isinstance(module, LightningModule) and is_overridden("forward", module, LightningModule):
        yield module
    for child in module.children():
        if is_metric(child) or is_compiled_layer(child):
            continue
        if type(child).forward is nn.Module.forward:  # a container of layers, which is never called
            yield from _top_layers(child)
        elif any(True for _ in child.children()) or not type(child).__module__.startswith("torch."):
            yield child


def _count_by_class(layers: list[nn.Module]) -> str:
    kinds = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + (" are" if len(layers) > 1 else " is")
