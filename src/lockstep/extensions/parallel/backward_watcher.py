"""Detection of the start and end of a backward with hooks on a module's outputs."""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import autograd, rpc
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.engines.ddp.reducer import Reducer
from lockstep.ground.installed import Installation

OPTIMIZER_HOOK = Installation(
    "torch's hook before each optimizer step",
    ("extensions/parallel/backward_watcher.py",),
    "reports a step to containers that wait for a backward; torch's loop over its hooks fails if one is removed in it",
)

# -- contexts of torch.distributed.autograd ------------------------------------------------------------------


IN_CONTEXT = (
    "a forward in a context of torch.distributed.autograd, whose backward does not write to .grad, so gradients are "
    "not averaged. Run forward and loss.backward() outside of it, or use torch's DistributedDataParallel"
)

_has_agent = getattr(rpc, "_is_current_rpc_agent_set", bool)  # torch is built without RPC on some systems


def is_in_context() -> bool:
    """Return True if this thread is in a context of torch.distributed.autograd."""
    if not _has_agent():
        return False
    try:
        autograd._current_context()
    except RuntimeError:
        return False
    return True


# -- optimizers that step in the backward ------------------------------------------------------------------


APPLY = "torch.distributed.optim.apply_optimizer_in_backward"
"""Torch's module for these optimizers; if it has not been imported, no parameter has one."""


def remove_step_hooks(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Remove the hooks of optimizers that step inside the backward, and return the parameters of these optimizers.

    The hooks would step on this rank's own gradient; `step_all` steps when gradients are averaged.
    """
    apply = sys.modules.get(APPLY)
    if apply is None:
        return []
    found = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in found:
        for handle in apply.param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()
    return found


def step_all(parameters: Iterable[Parameter]) -> None:
    """Step the in-backward optimizers of ``parameters``, and set ``.grad`` to None, as torch does in the backward."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None


# -- the watch -----------------------------------------------------------------------------------------------


SKIPPED = (
    "rank {rank}: an optimizer steps, but no backward has reached the outputs of the last forward in training mode. "
    "Other ranks may wait for this rank, so this rank now joins their reduction with zero gradients; clipping and "
    "unscaling before the step did not include other ranks' gradients. Call skip_backward() instead of the backward, "
    "or let the loss depend on the outputs (loss + 0 * outputs.sum()). Run forwards without a backward under "
    "torch.no_grad()"
)
DEPTH = 3
"""Depth of the search for tensors in attributes of objects that are not collections."""


class WatchedContainer(Protocol):
    """Interface between a container and the `BackwardWatcher` that detects its backwards."""

    module: nn.Module
    _reducer: Reducer | None
    _watch: BackwardWatcher
    _has_skipped: bool

    @property
    def _distributed_rank(self) -> int: ...

    def _before_backward(self) -> None:
        """Check that all ranks are in the same backward, before this backward's gradient reduction is prepared."""
        ...

    def _prepare(self) -> None:
        """Start a round of gradient reduction for the current backward."""
        ...

    def _backward_ended(self) -> None:
        """Finish the round of gradient reduction at the end of the backward."""
        ...

    def skip_backward(self) -> None:
        """Run a round of gradient reduction on the gradients in ``.grad``, without running a backward."""
        ...


class BackwardWatcher:
    """Watcher of a container's backwards. It starts and finishes the gradient reduction of each synchronized backward.

    Args:
        reducer: the container's reducer.
        parameters: parameters whose gradients the reducer averages.
        container: receives the calls of `WatchedContainer`, and calls `Reducer.prepare` and `Reducer.finish`.
        static: if True, all backwards have the same graph, and a round is always prepared when the backward starts.

    Attributes:
        expected: True if a synchronized forward waits for its backward.
        zero_weight: True if all forwards since the last backward had weight 0.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Sequence[Parameter],
        container: WatchedContainer,
        static: bool = False,
    ) -> None:
        self.expected = False
        self.zero_weight = False
        self._reducer = reducer
        self.parameters = list(parameters)
        # only graphs of its outputs keep the container alive, so it is freed when the user drops it
        self._container = weakref.ref(container)
        self._static = static
        self._prepared = False
        self._sync = True  # the last forward was synchronized
        self._must_reduce = False  # the next backward reduces, even if its forwards were not synchronized
        self._waiting = False  # there was a forward since the last backward
        self._index = 0  # index of the parameter that the last backward reached (torch.autograd.grad reaches none)
        self._node: Any = None  # the graph's node that accumulates its gradient
        self._ignored_task = -1  # graph task that leaves no gradients
        self._current_task = -1  # graph task whose end calls `_end`
        self._leaf_hooks: list[Any] = []
        # parameters with optimizers that step in the backward; set by a forward
        self._self_stepping: list[Parameter] | None = None

    def before_forward(self) -> None:
        """Reset the state before a forward that is not part of a backward."""
        self._prepared = False  # a backward that is still prepared has raised
        self._current_task = -1
        # not at construction: torch's function may be called after the model was wrapped
        if self._self_stepping is None:
            self._self_stepping = remove_step_hooks(self.parameters)

    def watch_outputs(self, outputs: object, sync: bool, zero_weight: bool = False, expected: bool = True) -> None:
        """Register hooks on a forward's outputs, which detect a backward of these outputs.

        Args:
            outputs: any object; tensors are found in collections, dataclasses and attributes.
            sync: True if a backward of these outputs reduces.
            zero_weight: True if the batch has weight 0.
            expected: True if a backward must follow.
        """
        for hook in self._leaf_hooks:
            hook.remove()
        self._leaf_hooks = []
        only = (outputs,) if isinstance(outputs, Tensor) else None
        for output in only or find_tensors(outputs):
            if output.requires_grad:
                hook = output.register_hook(self._make_hook(weakref.ref(output), sync))
                # a parameter that is returned itself outlives this forward, so its hook must be removed
                if output.is_leaf:
                    self._leaf_hooks.append(hook)
        self.expected = self.expected or (sync and expected)
        self.zero_weight = zero_weight and (self.zero_weight or not self._waiting)
        self._sync = sync
        self._waiting = True

    def _make_hook(self, output: weakref.ref[Tensor], sync: bool) -> Callable[[Tensor | None], None]:
        container = self._container()  # kept alive by the outputs' graph, through this hook

        def reached(grad: Tensor | None) -> None:
            if container is not None:
                with self._reducer.lock:
                    self._reach(sync, output)

        return reached

    def _reach(self, sync: bool, output: weakref.ref[Tensor]) -> None:
        """Start the reduction when a backward reaches an output, if the backward will accumulate into ``.grad``."""
        reducer = self._reducer
        if self._prepared:
            reducer.sync = reducer.sync or sync
            return
        sync = sync or self._must_reduce
        # each output has a hook, but one of them decides for the whole backward
        task = torch._C._current_graph_task_id()
        if task in (self._ignored_task, self._current_task):
            return
        leaves = self._leaves_gradients(output())
        if leaves is False:
            self._ignored_task = task
            return
        self._current_task = task
        Variable._execution_engine.queue_callback(self._end)
        self._sync = sync
        if leaves or self._static:
            self._prepare(sync)

    def unprepared_grad(self) -> None:
        """Start the reduction when a parameter gets a gradient, unless an output's hook has already started it."""
        if self._prepared or not (self._waiting or self._current_task != -1) or self._container() is None:
            return
        if self._current_task == -1:
            Variable._execution_engine.queue_callback(self._end)
        self._prepare(self._sync or self._must_reduce)

    def reduce_next(self, outputs: object = None) -> None:
        """Reduce gradients in the next backward, even after forwards without sync, like ``prepare_for_backward``."""
        self._must_reduce = True

    def _prepare(self, sync: bool) -> None:
        container = self._container()
        if container is None:
            return
        if sync:
            container._before_backward()
        self._prepared = True
        self._reducer.sync = sync
        self._reducer.zero_weight = self.zero_weight
        container._prepare()

    def _end(self) -> None:
        self._current_task = -1
        if self._prepared:
            self.reset()
            container = self._container()
            if container is not None:
                container._backward_ended()

    def step(self) -> None:
        """Step the in-backward optimizers if the gradients were reduced."""
        if self._self_stepping and self._reducer.sync:
            step_all(self._self_stepping)

    def reset(self) -> None:
        """Reset the state. Earlier forwards then no longer wait for a backward."""
        self._prepared = self._must_reduce = self._waiting = self.expected = self.zero_weight = False

    def _leaves_gradients(self, output: Tensor | None) -> bool | None:
        """Return True in a backward that fills ``.grad``, False in `torch.autograd.grad`, None if this is unknown."""
        # the parameter of the last backward is tried first: usually one check is enough
        count, first = len(self.parameters), self._index
        for step in range(count):
            index = (first + step) % count
            parameter = self.parameters[index]
            if not parameter.requires_grad:
                continue
            if step or self._node is None:
                self._index, self._node = index, get_gradient_edge(parameter).node
            try:
                if torch._C._will_engine_execute_node(self._node):
                    return True
            except RuntimeError:  # torch raises for a gradient that is returned to the caller of autograd.grad
                return False
        # no parameter is in this graph, but reentrant checkpoints inside it may have graphs with parameters
        return None if output is None or output.grad_fn is None else not _is_part(output.grad_fn)


def _is_part(start: Node) -> bool:
    """Return True if the current backward runs only a part of the graph below ``start``.

    `torch.autograd.grad` with respect to inputs does so.
    """
    seen = {start}
    ahead = [start]
    try:
        while ahead:
            for node, _ in ahead.pop().next_functions:
                if node is not None and node not in seen:
                    if not torch._C._will_engine_execute_node(node):
                        return True
                    seen.add(node)
                    ahead.append(node)
    except RuntimeError:  # torch raises for a gradient that is returned to the caller of autograd.grad
        return True
    return False


def find_tensors(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors in nested collections, dataclasses and attributes of other objects."""
    yield from _find(outputs, DEPTH, set())


def _find(item: object, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif item is None or isinstance(item, str | bytes | int | float | complex | type) or id(item) in seen:
        return
    elif isinstance(item, list | tuple | set | frozenset | Mapping):
        seen.add(id(item))
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _find(part, depth, seen)
    elif (depth > 0 and not callable(item)) or dataclasses.is_dataclass(item):
        seen.add(id(item))
        for name in _attributes(item):
            yield from _find(getattr(item, name, None), depth - 1, seen)


def _attributes(item: object) -> list[str]:
    if isinstance(item, nn.Module):
        return []
    names = list(getattr(item, "__dict__", ()))
    for kind in type(item).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots  # one slot may be a plain string
    return names


waiting_for_steps: weakref.WeakValueDictionary[int, WatchedContainer] = weakref.WeakValueDictionary()
"""Containers to be checked before an optimizer steps, by id; ordered by creation, which is the same on all ranks."""


def watch_optimizers() -> None:
    """Install `_before_any_step` as a hook that runs before the steps of all optimizers, once in a process."""
    OPTIMIZER_HOOK.install(lambda: register_optimizer_step_pre_hook(_before_any_step).remove)


def _before_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Before an optimizer steps, run `skip_backward` on containers of its parameters that still wait for a backward."""
    for container in list(waiting_for_steps.values()):
        if container._reducer is None or not container._watch.expected:
            continue
        mine = {id(parameter) for parameter in container.module.parameters()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            if not container._has_skipped:
                container._has_skipped = True
                warnings.warn(SKIPPED.format(rank=container._distributed_rank), stacklevel=3)
            container.skip_backward()
