"""DistributedDataParallel for hand-written loops: a container over the reducer, in the place of torch's."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork import protect_forks, settle_at_exit
from lockstep.ground.rank import warn_once
from lockstep.parallel.backward_watcher import Watch, hear_steps, waiting_for_steps
from lockstep.parallel.bucket import Plan, plan_by_caps
from lockstep.parallel.consistency import (
    RollCall,
    check_alike,
    describe,
    find_group,
    find_unusable,
    leave_word,
    named_failure,
    sparse_names,
    told_to_all,
)
from lockstep.parallel.consistency import broadcast_module_state as broadcast_module_state
from lockstep.parallel.consistency import check_same_module as check_same_module
from lockstep.parallel.consistency import sync_buffers as sync_buffers
from lockstep.parallel.data_parallel import Device, OnDevices
from lockstep.parallel.late_parameters import LateParameters, find_cast, find_changed
from lockstep.parallel.reducer import MIB, Reducer
from lockstep.parallel.torch_compat import IGNORED, TorchNames, buffers_in_forwards
from lockstep.parallel.uneven import JoinsUneven, Weight, check_weight

# -- copies of a container -----------------------------------------------------------------------------------


MADE_ANEW = (
    "process_group",
    "_reducer",
    "_make_reducer",
    "_watch",
    "_checks",
    "_late",
    "_release",
    "_world",
    "_holders",
)


class Copies(nn.Module):
    """The part of `lockstep.parallel.ddp.DistributedDataParallel` that lets it be copied."""

    process_group: Any
    _reducer: Any

    def _kept(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in MADE_ANEW}

    def _restore(self, state: dict[str, Any], group: Any) -> None:
        self.process_group, self._reducer = group, None
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "pickling a DistributedDataParallel: only one over the default process group can be pickled, since "
                "another group cannot be found again; pickle model.module, or its state dict"
            )
        return self._kept()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, find_group(None, None, state["_modules"]["module"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.process_group)] = self.process_group  # a communication hook's state may hold it
        made._restore(copy.deepcopy(self._kept(), memo), self.process_group)
        return made


# -- the container -------------------------------------------------------------------------------------------


WHOLE = (
    "{name} is compiled as a whole: its gradients come all at once, when its backward has ended, so no reduction "
    "overlaps the computation. Compile its blocks instead: for block in model.blocks: block.compile()"
)
ALIKE = (
    *("bucket_cap_mb", "bucket_bytes_cap_list", "static_graph", "check_reduction", "shared_memory"),
    *("skip_all_reduce_unused_params", "forward_sync_buffers", "mixed_precision"),
)
"""Attributes that have to be the same on all ranks, as they decide what is sent."""
FORWARD = "DistributedDataParallel.forward"
"""A forward's range in a profile, by torch's name."""


class DistributedDataParallel(Copies, OnDevices, JoinsUneven, TorchNames):
    """Trains ``module`` on every rank of a group, each with its own part of the batch, as one.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel`` when the import is changed; ``docs/ddp.md``
    lists what differs. At construction every rank takes rank 0's parameters and buffers. A backward leaves every
    rank with the mean of the ranks' gradients: they are averaged while it still runs, and are there when
    ``loss.backward()`` returns. Parameters that a rank, or no rank, uses in a step need no flag.

    Construction, a forward with gradients and its backward are points where ranks meet: all must come there equally
    often. A rank whose loss depends on none of the outputs calls `skip_backward`; if it goes on to its optimizer's
    step without, it takes part just before it, and is warned.

    Args:
        module: on the device where it is to run; at least one parameter requires a gradient.
        device_ids: ``None`` leaves inputs and module where they are; ``[device]`` moves tensors among the inputs
            there; several devices (CPUs too: ``["cpu", "cpu"]``) or ``"all"`` cut the batch up among them, with a
            replica on each (`lockstep.parallel.data_parallel.DataParallel`) and the module on the first.
        output_device: where outputs of several devices are put together; default: the first of them.
        dim: along which a batch is cut up.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: compare the ranks' modules, then give all of them rank 0's parameters and buffers.
        process_group: the ranks; ``None`` is the default group.
        bucket_cap_mb: size in MiB of the buckets in which gradients travel; default 25.
        find_unused_parameters: taken and not needed: unused parameters are found whatever this says.
        check_reduction: at each forward and backward, make sure that all ranks are at the same point, that the last
            backward reduced everything, and that it left the same gradients everywhere. For finding faults: slow.
        gradient_as_bucket_view: let ``.grad`` be views of the buckets, which saves a copy and their memory.
        static_graph: every backward gives gradients to the same parameters in the same order: costs less.
        delay_all_reduce_named_params, param_to_hook_all_reduce: taken, both or none; buckets travel when they are
            full, so there is nothing to delay.
        mixed_precision: torch's ``_MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)``: forwards with casts of
            parameters and inputs, gradients sent in low precision; parameters and ``.grad`` stay in full.
        device_mesh: a mesh of one dimension whose ranks are the group.
        skip_all_reduce_unused_params: leave out the buckets that no rank uses in the first backward; none of their
            parameters may be used later.
        bucket_cap_mb_list: sizes in MiB of the buckets one by one, that of the parameters defined first in front;
            the last one holds for all that come after.
        batched_grad_copy: taken and not needed: views are not copied.
        forward_sync_buffers: before a forward that follows a synchronised one, take rank 0's buffers (BatchNorm's
            running statistics); default True.
        shared_memory: on one host, let CPU gradients be summed in memory that the ranks share, not over TCP.

    Attributes:
        module: the module.
        reducer: the `lockstep.parallel.reducer.Reducer`.
        device_ids, output_device, dim, process_group: as given; a GPU by its number.
        require_backward_grad_sync: whether the next forward's backward is synchronised (`no_sync`).

    Raises:
        ValueError: on every rank, if the ranks' modules differ; if nothing in ``module`` requires a gradient; if
            parameters have no values, or share memory with themselves; if there is no process group, or this rank
            is not in it.

    Example::

        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(Net())
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | str | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: comm.Group = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        shared_memory: bool = True,
    ) -> None:
        super().__init__()
        self.process_group = find_group(process_group, device_mesh, module)
        self.device_mesh = device_mesh
        protect_forks()  # of loader workers, beside the group's threads
        settle_at_exit()
        with told_to_all(self.process_group):
            if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
                raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce: give both, or none")
            self.parameters_to_ignore = set(getattr(module, IGNORED, ()))
            problem = find_unusable(module, self.parameters_to_ignore, self.process_group)
            if problem is not None:
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}")
            self.module = module
            self.dim = dim
            self.device = next(p for n, p in module.named_parameters() if n not in self.parameters_to_ignore).device
            self.device_type = self.device.type
            self._set_devices(device_ids, output_device)
            self.forward_sync_buffers = buffers_in_forwards(forward_sync_buffers, broadcast_buffers)
            self.find_unused_parameters = find_unused_parameters
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.batched_grad_copy = batched_grad_copy
            self.mixed_precision = mixed_precision
            if mixed_precision is not None:
                from lockstep.parallel.mixed_precision import LowPrecision  # with hooks behind it: most runs have none

                self._low = LowPrecision(mixed_precision, module, self.parameters_to_ignore)
            self.gradient_as_bucket_view = gradient_as_bucket_view
            self.static_graph = static_graph
            self.check_reduction = check_reduction
            self.shared_memory = shared_memory
            caps = list(bucket_cap_mb_list or ())
            self.bucket_cap_mb = max(caps) if caps else _first(bucket_cap_mb, 25)
            if min([self.bucket_cap_mb, *caps]) <= 0:
                said = f"bucket_cap_mb={bucket_cap_mb}, bucket_cap_mb_list={bucket_cap_mb_list}: sizes above 0"
                raise ValueError(said)
            self.bucket_bytes_cap = int(self.bucket_cap_mb * MIB)
            self.bucket_bytes_cap_list = [int(cap * MIB) for cap in caps]
            self.bucket_bytes_cap_default = bucket_cap_mb is None and not caps
            lines = [f"init_sync={init_sync}", *(f"{name}={getattr(self, name)}" for name in ALIKE)]
            lines += describe(module, self.parameters_to_ignore) if init_sync else []
        check_alike(type(module).__name__, lines, self.process_group)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        self._weight: float | None = None
        self._comm_hook: tuple[Any, ...] | None = None
        self._buffer_futures: list[Any] = []
        self._reducer: Reducer | None = None
        self._has_skipped = False  # and has been told
        _tell_if_whole(module)
        if init_sync:
            buffers = forward_sync_buffers is not None or self.forward_sync_buffers
            broadcast_module_state(self.module, self.process_group, ignored=self.parameters_to_ignore, buffers=buffers)
        if self._low is not None:
            self._low.set_up()
            self._comm_hook = self._low.comm_hook(self.process_group)
        self._attach()

    # -- the reducer

    _make_reducer: Callable[..., Reducer] = Reducer

    def _attach(self) -> None:
        """Make the reducer and what tells it when; on all ranks at the same time."""
        named = [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        named = [(name, p) for name, p in named if name not in self._frozen]
        plan: Plan | None = None
        if self.bucket_bytes_cap_list:
            plan = plan_by_caps(named, self.bucket_bytes_cap_list)
        options: dict[str, Any] = {}
        if (
            self.skip_all_reduce_unused_params
            and self._make_reducer is Reducer
            and comm.world_size(self.process_group) > 1
        ):
            from lockstep.parallel.used_parameters import Sparing

            options["transport"] = Sparing.open(self.process_group, (p for _, p in named), self.shared_memory)
        self._reducer = reducer = self._make_reducer(
            named,
            self.process_group,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            plan=plan,
            static_graph=self.static_graph,
            sparse=sparse_names(self.module),
            shared_memory=self.shared_memory,
            **options,
        )
        if self._comm_hook is not None:
            reducer.register_comm_hook(*self._comm_hook)
        self._first_plan = reducer.plan()
        self._world = comm.world_size(self.process_group)
        self._checks = RollCall(self.process_group, self.module) if self.check_reduction and self._world > 1 else None
        parameters = [parameter for _, parameter in named]
        self._watch = Watch(reducer, parameters, self, self.static_graph)
        reducer.stray = self._watch.stray
        reducer.prepare_for_backward = self._watch.reduce_next  # type: ignore[attr-defined]  # torch's PipelineStage asks
        self._release = weakref.finalize(self, _let_go, reducer, os.getpid())
        self._release.atexit = False
        self._late = LateParameters(self.module, self.parameters_to_ignore) if self._world > 1 else None
        if self._world > 1:
            hear_steps()
            waiting_for_steps[id(self)] = self

    def _detach(self) -> None:
        """Let go of the reducer; the next forward makes another."""
        if self._reducer is not None:
            self._release()
            self._reducer = None
            if self._world > 1:
                waiting_for_steps.pop(id(self), None)

    def use_reducer(self, make: Callable[..., Reducer]) -> None:
        """From now on have gradients reduced by what ``make`` gives, called as `Reducer` is, between two steps.

        A collective. Copies of the container go without.
        """
        self._detach()
        self._make_reducer = make
        self._attach()

    @property
    def reducer(self) -> Reducer:
        """What averages the gradients."""
        if self._reducer is None:
            self._attach()
        assert self._reducer is not None
        return self._reducer

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the buckets; once, and before the first backward, alike on every rank.

        Args:
            state: its first argument.
            hook: ``(state, bucket) -> torch.futures.Future`` of the reduced buffer; the bucket has the methods of
                ``torch.distributed.GradBucket``, and nothing has been divided by the world size.

        Raises:
            TypeError, ValueError: ``hook`` cannot be one, by its signature.
            RuntimeError: there is one already, or a backward has been.
        """
        from lockstep.parallel.hooks.check import check_hook, prepare_state
        from lockstep.parallel.hooks.local_sgd import marks_of

        try:
            check_hook(state, hook, self._watch.parameters, self.process_group)
            state = prepare_state(state, self.process_group, hook)
            marks = marks_of(hook, state)
            self.reducer.register_comm_hook(state, hook, marks)
        except Exception as error:
            self._noted(error)
            raise
        self._comm_hook = (state, hook, marks)

    # -- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward; ranks meet here where gradients are enabled."""
        profiled = profiler._is_profiler_enabled and profiler.record_function(FORWARD).__enter__()
        try:
            # what torch.func differentiates leaves no gradients in parameters
            grad = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            if self._reducer is None:
                if not (grad or self._join_config.enable):
                    return self._run(inputs, kwargs)
                self._attach()
            if torch._C._current_graph_task_id() != -1:  # a checkpoint runs it again, inside the backward
                outputs = self._run(inputs, kwargs)
                if grad and self._world > 1:
                    self._watch.outputs(outputs, self.require_backward_grad_sync, expected=False)
                return outputs
            alone = self._world == 1 and self._comm_hook is None
            if alone and self._weight is None and not self._join_config.enable:
                return self._run(inputs, kwargs)
            sync = grad and self.require_backward_grad_sync
            weight = self._prepare_forward(grad, sync)
            outputs = self._run(inputs, kwargs)
            if self._buffers_at(_BufferCommHookLocation.POST_FORWARD):
                self._align_buffers(0)
            self.require_forward_param_sync = sync
            if not sync:  # no backward will wait for them
                self._await_buffers()
            if grad:
                if weight is not None:
                    outputs = weight.apply(outputs)
                light = weight is not None and weight.weight == 0
                self._watch.outputs(outputs, sync, light, expected=sync and self.training)
            return outputs
        except Exception as error:
            if self._reducer is not None and self._world > 1:
                leave_word(self.process_group, self._reducer.rounds + 1, error)
            raise
        finally:
            if profiled:
                profiled.__exit__(None, None, None)

    def _prepare_forward(self, grad: bool, sync: bool) -> Weight | None:
        """Meet the other ranks before a forward."""
        self._watch.forward_begins()
        self._await_buffers()
        if torch.compiler.is_compiling():
            warn_once(WHOLE.format(name=type(self.module).__name__))
        if sync:
            problem = find_changed(self._frozen, self._late)
            if problem is not None:
                raise self._noted(MisconfigurationException(f"rank {self._distributed_rank}: {problem}"))
        buffers = self._buffers_at(_BufferCommHookLocation.PRE_FORWARD)
        if self._join_config.enable:
            if self._weight is not None:
                raise MisconfigurationException(
                    "weight() inside of join(): a rank without batches has no weight to give; use one of them"
                )
            self._notify(sync, buffers)
        else:
            if sync:
                self._compare("forward")
            if buffers:
                self._align_buffers(0)
        if self._weight is None or not grad:
            return None
        return Weight(self._weight, self.process_group, self.device, self._named_failure)

    def _buffers_at(self, location: _BufferCommHookLocation) -> bool:
        """Whether buffers are brought in line there."""
        if not (self.require_forward_param_sync and self.forward_sync_buffers) or self._world == 1:
            return False
        hook = self.__dict__.get("buffer_hook")
        before = _BufferCommHookLocation.PRE_FORWARD
        return (before if hook is None else hook.buffer_comm_hook_location) is location and self._has_buffers()

    def _align_buffers(self, src: int) -> None:
        with self._named_failure("taking the buffers"):
            self._sync_module_buffers(src)

    def _compare(self, stage: str) -> None:
        """With check_reduction: whether all ranks are at the same point, and how the last backward ended."""
        if self._checks is not None:
            with self._named_failure("comparing the ranks' places"):
                self._checks.answer(stage, self.reducer.missing() if stage == "forward" else [])

    def _backward_begins(self) -> None:
        """Called inside a synchronised backward before its round is prepared."""
        self._compare("backward")

    def _prepare(self) -> None:
        """Called inside a backward that may leave gradients in parameters."""
        try:
            self.reducer.prepare()
        except RuntimeError as error:
            problem = find_cast(self.reducer._buckets)
            with self._named_failure("a backward"):
                if problem is None:
                    raise
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}") from error

    def _backward_ended(self) -> None:
        """Called when a backward has ended: reduces what is left, and waits."""
        with self._named_failure("averaging the gradients"):
            self.reducer.finish()
        self._await_buffers()
        if self._checks is not None and self.reducer.sync:
            self._checks.note(self.reducer.over)
        self._watch.step()

    def _named_failure(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Where a collective fails in the block: say which rank was not there, and why."""
        return named_failure(self.process_group, doing, self.reducer.rounds + 1, self._noted)

    def skip_backward(self) -> None:
        """In place of a backward, where this rank's loss depends on no output: let the others go on.

        Their gradients arrive here, averaged with what this rank has accumulated, or with nothing.
        """
        self._watch.forget()
        if self._world == 1 and self._comm_hook is None:
            return
        self._backward_begins()
        reducer = self.reducer
        reducer.sync, reducer.muted = True, False
        self._prepare()
        self._backward_ended()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this context have backwards that accumulate on this rank only.

        What they add up is averaged with the first backward whose forward was outside.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def weight(self, n: float) -> Iterator[None]:
        """Forwards in this context count ``n``: gradients are the mean over the ranks weighted by it.

        With the number of samples and a loss that is a mean over them, it is the mean over all samples. Every rank
        gives its own; all zero gives no gradients.

        Args:
            n: what this rank's batch counts; 0 for a batch whose gradients are to be dropped, whatever they are.

        Example::

            with model.weight(len(batch)):
                loss = loss_fn(model(batch), target)  # a mean
            loss.backward()
        """
        with self._named_failure("a forward"):
            before, self._weight = self._weight, check_weight(n, self._distributed_rank)
        try:
            yield
        finally:
            self._weight = before

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As of any module; it is said that nothing overlaps then."""
        warn_once(WHOLE.format(name=type(self.module).__name__))
        super().compile(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        kinds = [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]
        super()._apply(fn, recurse)
        if kinds != [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]:
            self._detach()  # its buffers are of the old kind
            self.device = next(self.module.parameters()).device
            if self._low is not None:
                self._low.tell()
        return self


def _let_go(reducer: Reducer, process: int) -> None:
    """Detach the reducer of a container that is gone; not in a forked child, which shares the memory."""
    if os.getpid() == process:
        reducer.detach()


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _tell_if_whole(module: nn.Module) -> None:
    """Warn, once, where a module is compiled as a whole."""
    dynamo = sys.modules.get("torch._dynamo")  # torch imports it when something is compiled
    whole = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    if whole or module._compiled_call_impl is not None:
        warn_once(WHOLE.format(name=type(getattr(module, "_orig_mod", module)).__name__))
