"""Trace of a training step: memory and work of each block's operations, on real or fake tensors."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.ground.tree import tensors_in

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
REST = -1
"""Number of the code outside the blocks: embeddings, a head, the loss."""

# -- costs of operations -----------------------------------------------------------------------------------------


@dataclass
class OperationWork:
    """Total work of a set of operations: floating-point operations, memory traffic and number of calls.

    Attributes:
        products: floating-point operations of matrix products, convolutions and attention.
        moved: bytes that all operations read and write.
        calls: the number of operations that compute.
    """

    products: float = 0.0
    moved: float = 0.0
    calls: int = 0

    def add(self, other: OperationWork) -> None:
        """Add the work of other operations to this total."""
        self.products += other.products
        self.moved += other.moved
        self.calls += other.calls


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> float:
    # two products: of queries and keys, and of weights and values
    *batch, length, width = query.shape
    return 2.0 * math.prod(batch) * length * key.shape[-2] * (width + value.shape[-1])


def _lstm(values: Any, weight: Any, recurrent: Any, *args: Any, **kwargs: Any) -> float:
    length, batch, _ = values.shape
    return 2.0 * length * batch * (weight.numel() + recurrent.numel())


OURS: dict[str, Callable[..., float]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    # five products instead of two: the weights are recomputed; the first argument is the gradient
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda _, *args, **__: 2.5 * _attention(*args),
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": lambda *args, **_: 2 * _lstm(*args),
}
"""Operations of a CPU that are missing in torch's counter."""


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> OperationWork:
    """Return the floating-point operations and memory traffic of one operation that has run."""
    from torch.utils.flop_counter import flop_registry

    name = func._schema.name
    counted = flop_registry.get(func._overloadpacket)
    products = 0.0
    if name in OURS:
        products = OURS[name](*args, **kwargs)
    elif counted is not None:
        products = float(counted(*args, **kwargs, out_val=out))
    moved = sum(t.numel() * t.element_size() for t in tensors_in((args, kwargs, out), 3))
    return OperationWork(products, float(moved), 1)


PAGE = 4096
LOSSES = ("aten::mse_loss", "aten::smooth_l1_loss")
"""Losses whose mean shares the storage of the elements."""


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _padded(length: int) -> int:
    """Return the number of elements that oneDNN allocates for a row of a workspace, with padding."""
    whole = -(-length // 16) * 16
    return whole + 16 * (whole % 256 == 0)


def workspace_of_lstm(length: int, batch: int, hidden: int) -> int:
    """Return the size in bytes of oneDNN's workspace for the forward of one float32 LSTM layer.

    Inputs and outputs are not included. The workspace contains gates, states and gradients of states, each padded to
    pages. The formula was found by trying sizes.

    Example:
        >>> workspace_of_lstm(64, 32, 128)
        16023552
    """
    gates, row, states = _padded(4 * hidden), _padded(hidden), 2 * (length + 1) * batch
    kept = _pages(4 * length * batch * gates) + _pages(4 * length * batch * row)
    return kept + 3 * _pages(4 * states * row) + 2 * _pages(4 * states * hidden)


def hidden_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that an operation retains on a CPU but that fake tensors do not account for.

    These are the workspace of an LSTM, and the elements of a mean in some losses. They exist as long as the last
    result of the operation.
    """
    if func._schema.name in LOSSES and not out.dim():
        return int(args[0].numel() * args[0].element_size())
    if func._schema.name != "aten::mkldnn_rnn_layer" or out[3].numel() or args[0].dtype is not torch.float32:
        return 0
    length, batch, _ = args[0].shape
    return workspace_of_lstm(length, batch, args[2].shape[-1])


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the size in bytes of the temporary memory that an operation allocates on a CPU.

    A convolution, for example, copies images to oneDNN's layout.
    """
    name = func._schema.name
    if name.startswith("aten::mkldnn_rnn_layer"):
        length, batch, _ = args[0].shape
        return _pages(4 * length * batch * _padded(4 * args[2].shape[-1]))
    if name in LOSSES:
        return int(args[0].numel() * args[0].element_size())
    if name in ("aten::convolution", "aten::convolution_backward"):
        images = args[:1] if name == "aten::convolution" else args[:2]
        return sum(x.numel() * x.element_size() for x in images if x.dim() > 2 and x.shape[1] % 8 == 0)
    return 0


# -- the trace ----------------------------------------------------------------------------------------------------


@dataclass
class TracedAllocation:
    """A memory allocation within a traced step, with its lifetime.

    Attributes:
        size: bytes.
        born: count of operations at its start.
        span: the number of the span in which it was made.
        node: sequence number of autograd's node then; -1 outside of a backward.
        died: count of operations at its end; infinite if it still exists.
        kind: "" (temporary), "gradient" or "state", which stay after the step.
    """

    size: int
    born: int
    span: int
    node: int = -1
    died: float = math.inf
    kind: str = ""


@dataclass
class Span:
    """Consecutive operations that belong to one block, or to the code outside all blocks.

    Attributes:
        phase: FORWARD, BACKWARD or UPDATE.
        unit: the block's number, or REST.
        start: count of operations at its start.
        stop: count of operations at its end.
        work: work of the operations.
    """

    phase: str
    unit: int
    start: int
    stop: int = 0
    work: OperationWork = field(default_factory=OperationWork)


class StepTrace(TorchDispatchMode):
    """Dispatch mode that records the operations and allocations of a training step.

    Args:
        units: the number of each block, by the id of its module.
        known: tensors that existed before, which do not count.

    Attributes:
        spans: the spans, in the order in which they ran.
        allocations: all allocations of operations.
        sends: bytes of each block's output, by its number.
        operations: number of operations so far.
        arrivals: by the id of a parameter, the position of its gradient in the order in which gradients arrived.
        nodes: sequence number of autograd's node, by the count of operations; -1 outside of a backward.
    """

    def __init__(self, units: Mapping[int, int], known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.units = units
        self.allocations: list[TracedAllocation] = []
        self.spans: list[Span] = []
        self.sends: dict[int, int] = {}
        self.arrivals: dict[int, int] = {}
        self._live: dict[int, TracedAllocation | None] = {t.untyped_storage()._cdata: None for t in known}
        # referenced, so that no other storage gets their keys
        self._known = list(known)
        self.operations = 0
        self.nodes: list[int] = [-1]
        self._phase = FORWARD
        self._running: list[int] = []
        # autograd's sequence numbers at the start of each forward span, by which a backward finds its block
        self._numbers: list[int] = []
        self._owners: list[int] = []

    # -- phases and blocks

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Assign the operations in the context to a phase: forward, backward or update."""
        self._phase = name
        self._open(REST)
        yield
        self.spans[-1].stop = self.operations
        self._running.clear()

    def _open(self, unit: int) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.phase == self._phase and last.unit == unit:
            return
        if last is not None:
            last.stop = self.operations
        self.spans.append(Span(self._phase, unit, self.operations))
        if self._phase == FORWARD:
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._owners.append(unit)

    def enter(self, layer: nn.Module, args: object) -> None:
        """As a forward pre-hook, start the span of a block before its forward."""
        if self._phase == FORWARD:
            self._running.append(self.units[id(layer)])
            self._open(self._running[-1])

    def leave(self, layer: nn.Module, args: object, output: object) -> None:
        """As a forward hook, end the span after the forward of a block, and record the bytes of the output."""
        if self._phase == FORWARD and self._running:
            unit = self._running.pop()
            self.sends[unit] = sum(t.numel() * t.element_size() for t in tensors_in(output, 3))
            self._open(self._running[-1] if self._running else REST)

    def _follow_backward(self) -> int:
        """Start the span of the block whose backward runs. Return the number of the current autograd node, or -1."""
        node = torch._C._current_autograd_node()
        if node is None:
            return -1
        number = int(node._sequence_nr())
        # nodes that accumulate gradients have no sequence number of their own
        if number < 2**62 and self._numbers:
            self._open(self._owners[max(bisect_right(self._numbers, number) - 1, 0)])
        return number

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "prim":
            return out
        node = self._follow_backward() if self._phase == BACKWARD else -1
        self.operations += 1
        self.nodes.append(node)
        for tensor in [out] if isinstance(out, Tensor) else tensors_in(out, 3):
            self._add(tensor, node)
        if scratch := scratch_bytes(func, args):
            self.allocations.append(
                TracedAllocation(scratch, self.operations, len(self.spans) - 1, node, self.operations)
            )
        if self._phase == FORWARD and (more := hidden_bytes(func, args, out)):
            made = TracedAllocation(more, self.operations, len(self.spans) - 1, node)
            self.allocations.append(made)
            owner = out if isinstance(out, Tensor) else out[3]
            weakref.finalize(owner.untyped_storage(), self._freed, -1, made).atexit = False
        # views compute nothing
        if not func.is_view and func._schema.name != "aten::detach":
            self.spans[-1].work.add(work_of(func, args, kwargs, out))
        return out

    def _add(self, tensor: Tensor, node: int) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
            return
        if storage._cdata not in self._live:
            made = TracedAllocation(storage.nbytes(), self.operations, len(self.spans) - 1, node)
            self._live[storage._cdata] = made
            self.allocations.append(made)
            weakref.finalize(storage, self._freed, storage._cdata, made).atexit = False

    def _freed(self, key: int, made: TracedAllocation) -> None:
        made.died = self.operations
        self._live.pop(key, None)

    def arrived(self, parameter: Tensor) -> None:
        """As a hook on accumulated gradients, record a parameter's position in the order in which gradients arrive."""
        self.arrivals.setdefault(id(parameter), len(self.arrivals))
        self.mark(tensors_in(parameter.grad, 1), "gradient")

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Mark the allocations of ``tensors``, which outlive the step, with their kind: "gradient" or "state"."""
        for tensor in tensors:
            found = self._live.get(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
            if found is not None:
                found.kind = kind


# -- a step -------------------------------------------------------------------------------------------------------


def fake(module: nn.Module, dtype: torch.dtype | None = None) -> Callable[[], None]:
    """Replace a module's parameters and buffers with fake tensors. Must be called within ``FakeTensorMode``.

    Args:
        module: changed in place. Shared tensors stay shared.
        dtype: dtype of floating-point tensors; None: unchanged.

    Returns:
        a function that restores the module's own tensors.
    """
    made: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    # RNNs keep a second list of their weights
    flat = [(layer, list(layer._flat_weights)) for layer in module.modules() if isinstance(layer, nn.RNNBase)]

    def swapped(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            where = "cpu" if tensor.is_meta else tensor.device
            plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=where)
            found = Parameter(plain, tensor.requires_grad) if isinstance(tensor, Parameter) else plain
            made[id(tensor)] = found
        return made[id(tensor)]

    for layer in module.modules():
        places: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        for place in places:
            for name, tensor in place.items():
                if tensor is not None:
                    before.append((place, name, tensor))
                    place[name] = swapped(tensor)
    for layer, weights in flat:
        layer._flat_weights = [None if w is None else swapped(w) for w in weights]

    def restore() -> None:
        for place, name, tensor in before:
            place[name] = tensor
        for layer, weights in flat:
            layer._flat_weights = weights

    return restore


@dataclass(frozen=True)
class TracedStep:
    """Everything that is needed to run a training step without a Trainer: model, loss, optimizers and context.

    Attributes:
        module: the model.
        loss: runs the forward, and returns the loss.
        optimizers: creates the optimizers.
        context: returns the context around the forward, for example autocast.
        dtype: dtype of floating-point parameters and buffers, if a precision converts them; None: unchanged.
    """

    module: nn.Module
    loss: Callable[[], Tensor]
    optimizers: Callable[[], Sequence[Optimizer]]
    context: Callable[[], Any]
    dtype: torch.dtype | None = None


class PhaseWatch(Protocol):
    """Interface of observers of a training step, which `run_step` calls at each phase and block."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager inside which one phase of the step runs."""

    def enter(self, layer: nn.Module, args: object) -> None:
        """Observe the start of a block's forward, as a forward pre-hook."""

    def leave(self, layer: nn.Module, args: object, output: object) -> None:
        """Observe the end of a block's forward, as a forward hook."""


def run_step(step: TracedStep, optimizers: Sequence[Optimizer], blocks: Iterable[nn.Module], watch: PhaseWatch) -> None:
    """Run forward, backward and update of a step, and notify the observer ``watch`` of phases and blocks.

    Args:
        step: the step, whose module has no gradients yet.
        optimizers: optimizers of the module.
        blocks: submodules whose forwards are reported to ``watch``.
        watch: observer of blocks and phases.

    Raises:
        ValueError: the step returns no loss with a gradient.
    """
    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(watch.enter).remove)
            hooks.callback(block.register_forward_hook(watch.leave).remove)
        with watch.phase(FORWARD), step.context():
            loss = step.loss()
        if not isinstance(loss, Tensor) or loss.grad_fn is None:
            raise ValueError("the step returns no loss that depends on parameters: return a tensor, or {'loss': ...}")
        with watch.phase(BACKWARD):
            loss.backward()
        del loss
        with watch.phase(UPDATE):
            for optimizer in optimizers:
                optimizer.step()


def trace_step(
    step: TracedStep, blocks: Sequence[nn.Module], batch: object = None
) -> tuple[StepTrace, list[Optimizer]]:
    """Run one training step, and record its operations and allocations.

    Args:
        step: the step, whose module has no gradients yet.
        blocks: modules that have spans of their own, in any order.
        batch: the batch, whose tensors do not count as memory of the step.

    Returns:
        the trace, and the optimizers with their states.

    Raises:
        ValueError: the step returns no loss with a gradient.
    """
    module = step.module
    known = [*module.parameters(), *module.buffers(), *tensors_in(batch, 6)]
    trace = StepTrace({id(block): number for number, block in enumerate(blocks)}, known)
    optimizers = list(step.optimizers())
    with ExitStack() as hooks:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(trace.arrived).remove)
        with trace:
            run_step(step, optimizers, blocks, trace)
            states = (value for optimizer in optimizers for value in optimizer.state.values())
            trace.mark(tensors_in([list(state.values()) for state in states], 6), "state")
    return trace, optimizers
