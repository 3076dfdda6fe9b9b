"""Compiles layers of a module for the length of a call, and says what torch's compiler made of it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lockstep.config.compile import CompileOptions
from lockstep.engines.sharded.fully_shard import blocks_by, find_blocks
from lockstep.engines.strategy import Strategy
from lockstep.ground.compiled import CompiledForward, is_compiled_layer
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.loop.hooks import is_overridden
from lockstep.loop.metrics import is_metric
from lockstep.loop.session import Session
from lockstep.module import LightningModule

NO_BLOCKS = (
    "Trainer(compile=...): {name} has no repeated blocks (layers side by side, of one class, made of layers), so that "
    "its layers are compiled from the top. Name others by their classes: compile={{'blocks': [Block]}}."
)
NO_COMPILER = (
    'Trainer(compile=...): torch\'s compiler "inductor" builds for the CPU with a C++ compiler, and finds none '
    "({error:.200}): install g++, name one in the environment variable CXX, or give "
    "compile={{'backend': 'aot_eager'}}, which builds nothing."
)
AROUND = "external_utils.py:"
"""Where the function of the compiler's lies that stands for the ``forward`` of a layer of torch's own."""
SHOWN = 20
"""Lines of recompilations, and of graph breaks, that are shown at most."""


def check_compiler(strategy: Strategy, options: CompileOptions) -> None:
    """Refuse to compile where no compiler is, or none that can follow; nothing of the module is needed for it.

    Raises:
        MisconfigurationException: with the way out.
    """
    if strategy.drives_all_devices and len(strategy.devices) > 1:
        raise MisconfigurationException(
            f"Trainer(compile=...) with {type(strategy).__name__}: it runs copies of the layers in threads, which "
            'torch\'s compiler cannot follow: use strategy="ddp".'
        )
    if options.backend != "inductor" or strategy.root_device.type != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own class has moved between releases
        raise MisconfigurationException(NO_COMPILER.format(error=str(error) or type(error).__name__)) from None


class CompiledLayers:
    """The layers of a module that a call compiles.

    Args:
        session: of the call; the module is not placed and not in shards yet, so that what an engine does to a layer
            by hooks lies outside of the compiled code.

    Raises:
        MisconfigurationException: the options do not go with the module.
    """

    def __init__(self, session: Session, options: CompileOptions) -> None:
        layers = [*_chosen(session.module, options, session.strategy.world_size > 1)]
        self._forwards = [CompiledForward(layer, options.options) for layer in layers]
        for forward in self._forwards:
            vars(forward.layer)["forward"] = forward
        of_torch = {type(layer).__name__ for layer in layers if type(layer).__module__.startswith("torch.")}
        self.report = CompilerReport(options.graph_breaks, ", ".join(sorted(of_torch)))
        rank_zero_info(
            f"trainer.{session.state.fn}: {_counted(layers)} compiled by {options.backend}: the first batch of each "
            "shape takes longer."
        )

    def end(self) -> None:
        """Let the layers run as they did before, and say what has been compiled."""
        for forward in self._forwards:
            forward.put_back()
        self.report.end()
        for line in self.report.lines():
            rank_zero_info(line)


def _chosen(module: LightningModule, options: CompileOptions, on_ranks: bool) -> Iterator[nn.Module]:
    """The layers that are compiled; none that the user has compiled, or that lies in such a one."""
    blocks = options.blocks
    if blocks is None:
        blocks = on_ranks
    found: list[nn.Module] = []
    if blocks is True:
        found = find_blocks(module)
        if not found and options.blocks:
            rank_zero_warn(NO_BLOCKS.format(name=type(module).__name__))
    elif blocks:
        found = _of_classes(module, blocks)
    if not found:
        found = [*_from_the_top(module)]
    if not found:
        raise MisconfigurationException(
            f"Trainer(compile=...): {type(module).__name__} has no layers that could be compiled."
        )
    for layer in found:
        if not is_compiled_layer(layer):
            yield layer


def _of_classes(module: nn.Module, kinds: tuple[type[nn.Module] | str, ...]) -> list[nn.Module]:
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


def _from_the_top(module: nn.Module) -> Iterator[nn.Module]:
    """The module, if it has a forward of its own, and those below it that its steps may call by themselves."""
    if isinstance(module, LightningModule) and is_overridden("forward", module, LightningModule):
        yield module
    for child in module.children():
        if is_metric(child) or is_compiled_layer(child):
            continue
        if type(child).forward is nn.Module.forward:  # a list of layers, which nobody calls
            yield from _from_the_top(child)
        elif any(True for _ in child.children()) or not type(child).__module__.startswith("torch."):
            yield child


def _counted(layers: list[nn.Module]) -> str:
    kinds = Counter(type(layer).__name__ for layer in layers)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + (" are" if len(layers) > 1 else " is")


# -- what the compiler did -----------------------------------------------------------------------------------


class CompilerReport:
    """What torch's compiler does from now on, in this process.

    Args:
        graph_breaks: collect, too, where it could not follow.
        of_torch: what to call layers of torch's own, of which the compiler shows a function of its own.

    Attributes:
        graphs: how often it has compiled a function, or a part of one.
        seconds: that it took, with the compiling of backwards.
        recompiled: functions that it has compiled once more, with the reason, and how often.
        broken: where it could not follow, and why.
    """

    def __init__(self, graph_breaks: bool, of_torch: str = "") -> None:
        from torch._dynamo import callback

        self._of_torch = of_torch

        self.graphs, self.seconds = 0, 0.0
        self.recompiled: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self._handlers = callback.callback_handler
        self._forward = callback.CallbackTrigger.DYNAMO
        self._begun = 0.0
        self._heard = [_Heard("recompiles", self._take_recompilation)]
        if graph_breaks:
            self._heard.append(_Heard("graph_breaks", self._take_graph_break))
        self._handlers.register_start_callback(self._begin)
        self._handlers.register_end_callback(self._ended)

    def _begin(self, _: object) -> None:
        self._begun = time.perf_counter()

    def _ended(self, compiled: Any) -> None:
        self.seconds += time.perf_counter() - self._begun
        self.graphs += compiled.callback_trigger is self._forward

    def _take_recompilation(self, message: str) -> None:
        """A first line with the function and its place; then one for each earlier version, with what did not fit."""
        first, *reasons = message.splitlines()
        name, _, place = first.removeprefix("Recompiling function ").partition(" in ")
        told = [line.strip().removeprefix("- ").partition(": ")[2] for line in reasons if line.strip().startswith("- ")]
        of_shapes = [reason for reason in told if "mismatch at index" in reason or "rank mismatch" in reason]
        reason = (of_shapes or told or ["torch gives no reason"])[0]
        file = os.path.basename(place)
        shown = f"forward of {self._of_torch}" if file.startswith(AROUND) and self._of_torch else f"{name} ({file})"
        self.recompiled[f"{shown}: {reason}"] += 1

    def _take_graph_break(self, message: str) -> None:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("Graph break", "Graph Break Reason", "Explanation"))]
        if "suppressed due to duplicate" not in message:
            self.broken["; ".join(dict.fromkeys(told or lines[:1]))] += 1

    def end(self) -> None:
        """Look no longer."""
        self._handlers.remove_start_callback(self._begin)
        self._handlers.remove_end_callback(self._ended)
        for each in self._heard:
            each.end()

    def lines(self) -> Iterator[str]:
        """What there is to say: nothing where nothing was compiled."""
        if not self.graphs:
            return
        again = sum(self.recompiled.values())
        graphs = "1 graph" if self.graphs == 1 else f"{self.graphs} graphs"
        yield f"torch.compile: {graphs} in {self.seconds:.1f} s, {again} of them compiled anew{':' if again else '.'}"
        yield from _listed("", self.recompiled)
        yield from _listed("graph break: ", self.broken)


def _listed(kind: str, counted: Counter[str]) -> Iterator[str]:
    for text, count in counted.most_common(SHOWN):
        yield f"  {kind}{text}{f' ({count} times)' if count > 1 else ''}"
    if len(counted) > SHOWN:
        yield f"  {kind}and {len(counted) - SHOWN} more"


class _Heard(logging.Handler):
    """Hears what torch's compiler logs of one kind, which goes to the user's own handlers only where he has asked.

    Args:
        artifact: the kind, as in ``TORCH_LOGS``.
        tell: is given each message.
    """

    LOGGERS = {
        "recompiles": ("torch._dynamo.guards.__recompiles",),
        "graph_breaks": ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks"),
    }

    def __init__(self, artifact: str, tell: Callable[[str], None]) -> None:
        from torch._logging._internal import log_state

        super().__init__(logging.DEBUG)
        self._tell, self._artifact, self._enabled = tell, artifact, log_state.artifact_names
        self._was_on = artifact in self._enabled
        self._loggers = [logging.getLogger(name) for name in self.LOGGERS[artifact]]
        self._before = [(logger.level, logger.propagate) for logger in self._loggers]
        log_state.enable_artifact(artifact)
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
            logger.propagate = self._was_on and logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Take in a message."""
        self._tell(record.getMessage())

    def end(self) -> None:
        """Hear no longer."""
        if not self._was_on:
            self._enabled.discard(self._artifact)
        for logger, (level, propagates) in zip(self._loggers, self._before, strict=True):
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagates
