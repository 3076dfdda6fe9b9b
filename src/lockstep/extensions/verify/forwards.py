"""Sees which modules a script calls and how: through their wrapper or past it, with which inputs, reading ranks."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lockstep.extensions.verify import fake_group, mixed_precision
from lockstep.extensions.verify.float64 import widen_module, widened_tree
from lockstep.extensions.verify.loaders import fingerprint
from lockstep.extensions.verify.nudge import Nudge
from lockstep.extensions.verify.settings import is_users, location, stack
from lockstep.extensions.verify.watch import Watch, put

_ROUNDING = "torch.distributed.algorithms.ddp_comm_hooks."
_WRAPPERS = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_FORWARDS = 64
"""Calls of outermost modules that are written down."""


class Forwards:
    """Watches calls of modules, and the wrappers that synchronize them.

    Args:
        watch: of this process.

    Attributes:
        roots: modules that were called by no other module, without the wrappers around them.
        covered: ids of the parameters that such a wrapper synchronizes.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.roots: list[nn.Module] = []
        self.covered: set[int] = set()
        self._inner: set[int] = set()  # ids of the modules that a wrapper holds, and of those within
        self._wrappers: list[DistributedDataParallel] = []
        self._sharded_sync = True  # what modules of fully_shard were told last
        self._forwards = 0
        self._nudge = Nudge(watch)
        self._in_backward = False

    def install(self) -> None:
        """Put the hooks into torch."""
        # torch types it as if a hook could give no other arguments, which it can
        hooks.register_module_forward_pre_hook(self._before)  # type: ignore[arg-type]
        # torch types it as if a hook could give no other output, which it can
        hooks.register_module_forward_hook(self._after, always_call=True)  # type: ignore[arg-type]
        self._see_wrappers()
        self._see_ranks()
        self._see_backwards()

    # -- calls

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self.watch.depth += 1
        if self.watch.depth > 1:
            return None
        training = torch.is_grad_enabled() and module.training and _has_parameters(module)
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        if all(inner is not root for root in self.roots):
            self.roots.append(inner)
            if self.watch.settings.float64:
                widen_module(inner)
        if training:
            self.watch.begin_training()
            self._note_call(module, args)
        return widened_tree(args) if self.watch.settings.float64 else None

    def _after(self, module: nn.Module, args: object, output: object) -> Tensor | None:
        self.watch.depth -= 1
        return self._nudge.after(module, output)

    def _note_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self._inner:
            self.watch.journal.note_once("bypassed", name=type(module).__name__, where=location(), stack=stack())
        if self._forwards >= _FORWARDS:
            return
        self._forwards += 1
        tensors = [leaf for leaf in tree_leaves(args) if type(leaf) is Tensor]
        self.watch.journal.note(
            "forward",
            module=type(module).__name__,
            inputs=fingerprint([tensor for tensor in tensors if tensor.device.type == "cpu"]) if tensors else "",
            rows=[len(tensor) for tensor in tensors if tensor.dim()],
            update=self.watch.updates,
        )

    # -- wrappers

    def _see_hooks(self) -> None:
        """Leave out torch's own communication hooks, which round what travels; hooks of the user's do what they do."""
        register = DistributedDataParallel.register_comm_hook

        @functools.wraps(register)
        def registered(wrapper: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
            if self.watch.settings.simulated or getattr(hook, "__module__", "").startswith(_ROUNDING):
                self.watch.journal.note_once("comm hook", name=hook.__name__)
            else:
                register(wrapper, state, hook)

        put(DistributedDataParallel, "register_comm_hook", registered)

    def _see_wrappers(self) -> None:
        register = DistributedDataParallel.register_comm_hook
        made, no_sync = DistributedDataParallel.__init__, DistributedDataParallel.no_sync

        @functools.wraps(made)
        def init(wrapper: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self.watch.settings.float64:
                widen_module(module)
            if kwargs.pop("mixed_precision", None) is not None:
                self.watch.journal.note_once(mixed_precision.NOTE, name="DistributedDataParallel(mixed_precision=...)")
            made(wrapper, module, *args, **kwargs)
            if self.watch.settings.simulated:
                register(wrapper, None, fake_group.bucket_hook(self.watch))
            self._inner |= {id(each) for each in module.modules()}
            self._wrappers.append(wrapper)
            ignored = set(wrapper.parameters_to_ignore)
            named = module.named_parameters()
            self.covered |= {id(p) for name, p in named if p.requires_grad and name not in ignored}
            self.watch.journal.note("wrapped", name=type(module).__name__, where=location())

        @functools.wraps(no_sync)
        def without(wrapper: DistributedDataParallel) -> Any:
            self.watch.journal.note_once("no_sync", where=location())
            return no_sync(wrapper)

        self._see_hooks()
        join = Join.__init__

        @functools.wraps(join)
        def joined(context: Join, joinables: list[Any], enable: bool = True, *args: Any, **kwargs: Any) -> None:
            if enable:
                by_all = kwargs.get("divide_by_initial_world_size", True)
                self.watch.journal.note_once("join", by_all=bool(by_all), where=location())
            join(context, joinables, enable, *args, **kwargs)

        put(Join, "__init__", joined)
        put(DistributedDataParallel, "__init__", init)
        put(DistributedDataParallel, "no_sync", without)

    @property
    def synchronizes(self) -> bool:
        """Whether no wrapper is told to leave gradients alone at the moment."""
        return self._sharded_sync and all(wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def see_sharded(self, module: ModuleType) -> None:
        """Watch whether the modules that `fully_shard` makes are told to leave gradients alone."""
        told = module.FSDPModule.set_requires_gradient_sync

        @functools.wraps(told)
        def tell(sharded: object, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
            self._sharded_sync = requires_gradient_sync
            told(sharded, requires_gradient_sync, *args, **kwargs)

        put(module.FSDPModule, "set_requires_gradient_sync", tell)
        self._see_sharding(module, "fully_shard")
        self._see_sharding(module.FullyShardedDataParallel, "__init__")

    def _see_sharding(self, home: object, name: str) -> None:
        """Note that a function is called that shards a model."""
        shard = getattr(home, name)

        @functools.wraps(shard)
        def sharded(*args: Any, **kwargs: Any) -> Any:
            self.watch.journal.note_once("sharded data parallel")
            mesh = kwargs.get("mesh")
            if mesh is not None and mesh.size() < self.watch.settings.world:
                self.watch.journal.note_once("sharded in groups", size=mesh.size(), where=location())
            return shard(*args, **kwargs)

        put(home, name, sharded)

    # -- the rank, read within a module

    def _see_ranks(self) -> None:
        fixed = "rank in modules" in self.watch.settings.overrides
        for home in (dist, dist.distributed_c10d):
            get_rank: Callable[..., int] = vars(home)["get_rank"]

            @functools.wraps(get_rank)
            def asked(*args: Any, get_rank: Callable[..., int] = get_rank, **kwargs: Any) -> int:
                frame = sys._getframe(1)
                found = get_rank(*args, **kwargs)
                read = is_users(frame.f_code.co_filename) and self._is_read_in_module(frame)
                return 0 if read and fixed else found

            put(home, "get_rank", asked)

        self._see_environment(fixed)

    def _see_environment(self, fixed: bool) -> None:
        read = os._Environ.__getitem__

        def asked(environ: os._Environ[str], name: str) -> str:
            value = read(environ, name)
            if name not in ("RANK", "LOCAL_RANK"):
                return value
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not is_users(frame.f_code.co_filename):
                frame = frame.f_back
            is_read = frame is not None and self._is_read_in_module(frame)
            return "0" if is_read and fixed else value

        put(os._Environ, "__getitem__", asked)

    def _is_read_in_module(self, frame: FrameType) -> bool:
        """Whether a line that reads the rank is run by a module; that is noted."""
        within = _module_of(frame) or ("a module's call" if self.watch.depth else "")
        if within:
            self.watch.journal.note_once("rank read", within=within, where=location(frame))
        return bool(within)

    # -- backward

    def _see_backwards(self) -> None:
        backward = Tensor.backward
        run = torch.autograd.backward

        @functools.wraps(backward)
        def called(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            with self._one_backward(tensor):
                backward(tensor, *args, **kwargs)

        @functools.wraps(run)
        def called_alone(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not is_users(sys._getframe(1).f_code.co_filename):
                run(tensors, *args, **kwargs)
                return
            with self._one_backward(tensors if isinstance(tensors, Tensor) else tensors[0]):
                run(tensors, *args, **kwargs)

        put(Tensor, "backward", called)
        put(torch.autograd, "backward", called_alone)

    @contextmanager
    def _one_backward(self, loss: Tensor) -> Iterator[None]:
        """Around a call of backward that no other one makes."""
        if self._in_backward:
            yield
            return
        self._in_backward = True
        try:
            self._note_backward(loss)
            yield
        finally:
            self._in_backward = False
            self.watch.backwards += 1

    def _note_backward(self, loss: Tensor) -> None:
        self.watch.journal.note(
            "backward",
            update=self.watch.updates,
            number=self.watch.backwards,
            loss=float(loss.detach()) if loss.numel() == 1 else None,
            divisor=_divisor(loss),
            synchronizes=self.synchronizes,
            where=location(),
        )

    # -- names

    def names(self) -> dict[int, str]:
        """Names of parameters, by their ids, without what wrappers add."""
        found: dict[int, str] = {}
        models = list(filter(_has_parameters, self.roots))
        for root in sorted(models, key=lambda root: -len(list(root.parameters()))):
            prefix = f"{type(root).__name__}." if len(models) > 1 else ""
            for name, parameter in root.named_parameters():
                found.setdefault(id(parameter), prefix + plain(name))
        return found


def plain(name: str) -> str:
    """A parameter's name without what wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _module_of(frame: FrameType | None) -> str:
    """The class of the module in whose method a frame is; "" for none. Functions between them count as its own."""
    for _ in range(4):
        if frame is None:
            return ""
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module):
            return type(own).__name__
        frame = frame.f_back
    return ""


def _divisor(loss: Tensor) -> float | None:
    """By what a loss was divided last; None where it was not divided by a number."""
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
    """A tensor of one element as a number."""
    return float(value) if value is not None and value.numel() == 1 else None
