"""Trace of the operations of a training step: forward, backward and update, with hashes of their results."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.extensions.replay.hashes import TensorHash
from lockstep.ground.tree import tree_leaves
from lockstep.launch.started import FOLDER
from lockstep.supervise.stack import LOCKSTEP, Frame

SAMPLED = 2048
"""Elements of each result that the trace contains."""
_HERE = os.path.dirname(__file__)
EVENTS, VALUES = "operations.json", "values.npz"


@dataclass(frozen=True)
class Operation:
    """One operation of a step.

    Attributes:
        name: name of the operation in torch, such as ``"native_layer_norm"``.
        phase: "forward", "backward" or "update".
        module: path of the submodule that runs it; "" if unknown.
        line: the user's line that has called it, in the backward the line of its forward; "" if there is none.
        inputs: hashes of the tensors that it gets.
        outputs: hashes of its results.
        is_view: True if it computes nothing.
    """

    name: str
    phase: str
    module: str
    line: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    is_view: bool = False

    def __str__(self) -> str:
        """Return the operation with its place."""
        inside = f" in {self.module!r}" if self.module else ""
        phase = "" if self.phase == "forward" else f" in the {self.phase}"
        return f"{self.name}{inside}{phase}" + (f", {self.line}" if self.line else "")


def users_line() -> str:
    """Return the user's line that runs, as file:line; "" if lockstep or torch has not been called by a step method."""
    frame = sys._getframe(1)
    while frame is not None and not Frame(frame.f_code.co_filename, 0, "").is_users:
        is_ours = frame.f_code.co_filename.startswith(LOCKSTEP)
        if is_ours and not frame.f_code.co_filename.startswith(_HERE):
            return ""  # further out is only the line of `trainer.fit`
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(file: str) -> str:
    """Return a file's path relative to the folder in which the script was started; unchanged if it is elsewhere."""
    path = os.path.relpath(file, FOLDER)
    return file if path.startswith("..") else path


def line_of_forward(node: Any) -> str:
    """Return the user's line whose forward has made a node of the autograd graph, if anomaly mode was on then."""
    found = ""
    for text in "".join(node.metadata.get("traceback_", [])).splitlines():
        if text.strip().startswith('File "'):
            file, _, rest = text.strip().removeprefix('File "').partition('", line ')
            if Frame(file, 0, "").is_users:
                found = f"{_short(file)}:{rest.partition(',')[0]}"
    return found


class OperationWatch(TorchDispatchMode, ABC):
    """Dispatch mode that looks at every operation before and after it runs.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._running: list[str] = []  # paths of the submodules whose forward runs
        self._module_of_line: dict[str, str] = {}
        self._in_update = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch operations in the ``with`` block."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(lambda *_: self._set_update(True)).remove)
            stack.callback(register_optimizer_step_post_hook(lambda *_: self._set_update(False)).remove)
            for name, module in self._module.named_modules():
                enter = module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
                leave = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            self._running.clear()
            # stores the line of each forward operation, which its backward shows
            stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            stack.enter_context(self)
            yield

    def _leave(self) -> None:
        self._running.pop()

    def _set_update(self, is_on: bool) -> None:
        self._in_update = is_on

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look at it."""
        given = self.look([*tree_leaves((args, kwargs or {}), (Tensor, float))])
        result = func(*args, **(kwargs or {}))
        outputs = [*tree_leaves(result, Tensor)]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if outputs and "empty" not in name:  # memory without values differs each time
            node = torch._C._current_autograd_node()
            if node is None:
                line, module = users_line(), self._running[-1] if self._running else ""
                phase = "forward" if (line or module) and not self._in_update else "update"
                self._module_of_line[line] = module
            else:
                phase, line = "backward", line_of_forward(node)
                module = self._module_of_line.get(line, "")
            self.record(Operation(name, phase, module, line, is_view=func.is_view), given, outputs)
        return result

    @abstractmethod
    def look(self, given: list[Any]) -> Any:
        """Return what :meth:`record` needs of the tensors and numbers that an operation gets, which it may change."""

    @abstractmethod
    def record(self, operation: Operation, given: Any, outputs: list[Tensor]) -> None:
        """Look at the results of an operation.

        Args:
            operation: the operation, without hashes.
            given: result of :meth:`look`.
            outputs: its results.
        """


class OperationTrace(OperationWatch):
    """Dispatch mode that records every operation.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._hash = TensorHash(0)
        self._operations: list[Operation] = []
        self._values: list[np.ndarray] = []

    def look(self, given: list[Any]) -> tuple[int, ...]:
        """Return the hashes of the tensors."""
        return tuple(self._hashed(each) for each in given if isinstance(each, Tensor))

    def record(self, operation: Operation, given: tuple[int, ...], outputs: list[Tensor]) -> None:
        """Append the operation to the trace."""
        self._operations.append(replace(operation, inputs=given, outputs=tuple(map(self._hashed, outputs))))
        self._values.append(_sampled(outputs))

    def _hashed(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0
        return int(self._hash({f"{tensor.dtype} {tuple(tensor.shape)}": tensor}, tensor.device))

    def write(self, folder: str) -> None:
        """Write the trace to files in ``folder``."""
        Path(folder, EVENTS).write_text(json.dumps([asdict(each) for each in self._operations]))
        np.savez(Path(folder, VALUES), *self._values)


def _sampled(outputs: list[Tensor]) -> np.ndarray:
    """Return up to `SAMPLED` elements of each floating-point result, at equal distances."""
    found = [np.zeros(0)]
    for tensor in outputs:
        if tensor.is_floating_point() and tensor.layout is torch.strided:
            flat = tensor.detach().flatten()
            found.append(flat[:: max(1, len(flat) // SAMPLED)].to("cpu", torch.float64).numpy())
    return np.concatenate(found)


@dataclass(frozen=True)
class Trace:
    """A trace that was read from its files.

    Attributes:
        operations: the operations in order.
        values: elements of the results of each operation.
    """

    operations: list[Operation]
    values: list[np.ndarray]

    @classmethod
    def read(cls, folder: str) -> Trace:
        """Read a trace that `OperationTrace.write` has written."""
        events = json.loads(Path(folder, EVENTS).read_text())
        operations = [
            Operation(**{**event, "inputs": tuple(event["inputs"]), "outputs": tuple(event["outputs"])})
            for event in events
        ]
        with np.load(Path(folder, VALUES)) as values:
            return cls(operations, [values[f"arr_{number}"] for number in range(len(operations))])


@torch.no_grad()
def nudge(module: nn.Module, size: float) -> None:
    """Change each weight by a random factor between 1 - ``size`` and 1 + ``size``."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
        parameter.mul_((1 + size * noise).to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)))
