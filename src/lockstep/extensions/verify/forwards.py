"""Recorder of forwards and backwards, and of data-parallel wrappers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.extensions.verify import fake_group
from lockstep.extensions.verify.float64 import widen, widen_module
from lockstep.extensions.verify.imports import MIXED_PRECISION
from lockstep.extensions.verify.loaders import fingerprint
from lockstep.extensions.verify.nudge import Nudge
from lockstep.extensions.verify.settings import call_lines, is_user_code, location, stack
from lockstep.extensions.verify.watch import Watch, before_each_call, patch

_ROUNDING_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_MAX_FORWARDS = 64
"""Maximum number of calls of outermost modules that are recorded."""


class Forwards:
    """Recorder of forwards and backwards, and of data-parallel wrappers.

    Args:
        watch: state that this process's observers share.

    Attributes:
        roots: modules that no other module calls, without the wrappers around them.
        covered: ids of the parameters that a wrapper synchronizes.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.roots: list[nn.Module] = []
        self.covered: set[int] = set()
        self._wrapped: set[int] = set()  # ids of the modules within wrappers
        self._wrappers: list[DistributedDataParallel] = []
        self._shards_synchronize = True  # the newest set_requires_gradient_sync of fully_shard's modules
        self._forwards = 0
        self._nudge = Nudge(watch)

    def install(self) -> None:
        """Start to observe: register module hooks, and wrap functions of torch."""
        # torch's annotation has no hook that returns other arguments, which hooks may do
        call = nn.Module.__call__

        # torch's hooks before a forward do not get keyword arguments, by which many models are called
        def observed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return call(module, *self._before(module, args, kwargs), **kwargs)

        patch(nn.Module, "__call__", observed_call)
        # torch's annotation has no hook that changes the output; always, so that a failed forward leaves a right depth
        hooks.register_module_forward_hook(self._after, always_call=True)  # type: ignore[arg-type]
        self._watch_wrappers()
        self._watch_join()
        self._watch_backwards()

    # -- calls

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        watch = self.watch
        watch.depth += 1
        if watch.depth > 1:
            return args
        training = torch.is_grad_enabled() and module.training and _has_parameters(module)
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if _has_parameters(module):
            watch.evaluates = not training
            rows = [len(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
            if watch.evaluates and rows:
                watch.journal.record("evaluated", rows=rows[0])
        # by identity, since a module may define __eq__
        if all(inner is not root for root in self.roots):
            self.roots.append(inner)
            if watch.settings.float64:
                widen_module(inner)
        if training:
            watch.start_training()
            if id(module) in self._wrapped:
                # called past its wrapper, which then does not see the backward
                watch.journal.record_once("bypassed", name=type(module).__name__, where=location(), stack=stack())
            if self._forwards < _MAX_FORWARDS:
                self._forwards += 1
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor]
                watch.journal.record(
                    "forward",
                    module=type(module).__name__,
                    inputs=fingerprint(tensors) if tensors else "",
                    rows=[len(tensor) for tensor in tensors if tensor.dim()],
                    update=watch.updates,
                )
        return tree_map(widen, args) if watch.settings.float64 else args

    def _after(self, module: nn.Module, args: object, output: object) -> Tensor | None:
        self.watch.depth -= 1
        return self._nudge.after(module, output)

    # -- wrappers

    def _watch_wrappers(self) -> None:
        """Observe DistributedDataParallel, and disable its mixed precision and torch's own communication hooks."""
        original = DistributedDataParallel.__init__
        register = DistributedDataParallel.register_comm_hook
        watch = self.watch

        @functools.wraps(original)
        def init(wrapper: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            # before the wrapper makes its buckets, which have the parameters' types
            if watch.settings.float64:
                widen_module(module)
            if kwargs.pop("mixed_precision", None) is not None:
                watch.journal.record_once(MIXED_PRECISION, name="DistributedDataParallel(mixed_precision=...)")
            # a rank's GPU, which a CPU does not have
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device_ids", "output_device")}
            original(wrapper, module, None, None, *args[2:], **kwargs)
            if watch.settings.simulated:
                register(wrapper, None, fake_group.bucket_hook(watch))
            self._wrapped |= {id(each) for each in module.modules()}
            self._wrappers.append(wrapper)
            ignored = set(wrapper.parameters_to_ignore)
            named = module.named_parameters()
            self.covered |= {id(p) for name, p in named if p.requires_grad and name not in ignored}
            watch.journal.record("wrapped", name=type(module).__name__, where=location())

        @functools.wraps(register)
        def register_comm_hook(wrapper: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            # torch's own hooks round what is sent; a user's hook is part of what is verified
            if watch.settings.simulated or getattr(hook, "__module__", "").startswith(_ROUNDING_HOOKS):
                watch.journal.record_once("comm hook", name=hook.__name__)
            else:
                register(wrapper, state, hook)

        patch(DistributedDataParallel, "__init__", init)
        record = watch.journal.record_once
        before_each_call(DistributedDataParallel, "no_sync", lambda *_: record("no_sync", where=call_lines(stack())))
        patch(DistributedDataParallel, "register_comm_hook", register_comm_hook)

    def _watch_join(self) -> None:
        original = Join.__init__

        @functools.wraps(original)
        def init(context: Join, joinables: list[Any], enable: bool = True, *args: Any, **kwargs: Any) -> None:
            if enable:
                self.watch.joins = True
                self.watch.journal.record_once("join")
            original(context, joinables, enable, *args, **kwargs)

        patch(Join, "__init__", init)

    def watch_sharded(self, module: ModuleType) -> None:
        """Wrap functions of ``module``, `torch.distributed.fsdp`, to record sharding and its synchronization."""
        original = module.FSDPModule.set_requires_gradient_sync

        @functools.wraps(original)
        def set_sync(sharded: object, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
            self._shards_synchronize = requires_gradient_sync
            original(sharded, requires_gradient_sync, *args, **kwargs)

        patch(module.FSDPModule, "set_requires_gradient_sync", set_sync)
        for owner, name in ((module, "fully_shard"), (module.FullyShardedDataParallel, "__init__")):
            shard = getattr(owner, name)

            @functools.wraps(shard)
            def sharded(*args: Any, shard: Callable[..., Any] = shard, **kwargs: Any) -> Any:
                self.watch.journal.record("sharded data parallel", where=location())
                mesh = kwargs.get("mesh")
                if mesh is not None and mesh.size() < self.watch.settings.world:
                    self.watch.journal.record_once("sharded in groups", size=mesh.size(), where=location())
                return shard(*args, **kwargs)

            patch(owner, name, sharded)

    # -- backward

    def _watch_backwards(self) -> None:
        backward = Tensor.backward
        run = torch.autograd.backward

        @functools.wraps(backward)
        def tensor_backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            with self._one_backward(tensor):
                backward(tensor, *args, **kwargs)

        @functools.wraps(run)
        def autograd_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # torch calls it as well, within a backward or to recompute a checkpointed part
            if not is_user_code(sys._getframe(1).f_code.co_filename):
                run(tensors, *args, **kwargs)
                return
            with self._one_backward(tensors if isinstance(tensors, Tensor) else tensors[0]):
                run(tensors, *args, **kwargs)

        patch(Tensor, "backward", tensor_backward)
        patch(torch.autograd, "backward", autograd_backward)

    @contextmanager
    def _one_backward(self, loss: Tensor) -> Iterator[None]:
        """Record and count one backward from ``loss``. Ignore a backward that runs inside another one."""
        if self.watch.in_backward:
            yield
            return
        self.watch.in_backward = True
        try:
            is_synchronized = self._shards_synchronize and all(
                wrapper.require_backward_grad_sync for wrapper in self._wrappers
            )
            self.watch.journal.record(
                "backward",
                update=self.watch.updates,
                number=self.watch.backwards,
                divisor=_divisor(loss),
                synchronizes=is_synchronized,
                where=location(),
                made=self.watch.loss_line or location(),
                scaled=self.watch.scale_line or location(),
            )
            self.watch.loss_line = self.watch.scale_line = ""
            yield
        finally:
            self.watch.in_backward = False
            self.watch.backwards += 1

    # -- names

    def names(self) -> dict[int, str]:
        """Return a dict from the id of each parameter to its name, without the prefixes that wrappers add."""
        found: dict[int, str] = {}
        models = list(filter(_has_parameters, self.roots))
        # the largest first: a part that is also called by itself keeps its name within the whole
        for root in sorted(models, key=lambda root: -len(list(root.parameters()))):
            prefix = f"{type(root).__name__}." if len(models) > 1 else ""
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), prefix + plain(name))
        return found


def plain(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers add."""
    for wrapper in _WRAPPERS:
        # a user's module may be called "module" as well: only the first one is a wrapper's
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _divisor(loss: Tensor) -> float | None:
    """Return d if the last operation of a loss divides by d or multiplies by 1/d. Return None for other operations."""
    node = loss.grad_fn
    name = type(node).__name__
    if name == "DivBackward0":
        return _number(getattr(node, "_saved_other", None))
    if name == "MulBackward0":
        # the factor is saved on the side that has the gradient
        factor = _number(getattr(node, "_saved_self", None)) or _number(getattr(node, "_saved_other", None))
        return 1.0 / factor if factor else None
    return None


def _number(value: Tensor | None) -> float | None:
    """Return a one-element tensor as a float. Return None for any other argument."""
    return float(value) if value is not None and value.numel() == 1 else None
