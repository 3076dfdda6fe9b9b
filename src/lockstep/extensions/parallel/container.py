"""Replacement of torch's DistributedDataParallel for hand-written loops, based on lockstep's reducer."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchContainer
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parameter import Parameter

from lockstep.engines.ddp.bucket import infos_of, plan_buckets
from lockstep.engines.ddp.consistency import (
    DesyncCheck,
    broadcast_module_state,
    check_alike,
    describe,
    raise_on_all,
    sparse_names,
)
from lockstep.engines.ddp.late_parameters import LateParameters
from lockstep.engines.ddp.reducer import MIB, Reducer, choose_transport
from lockstep.engines.ddp.transport import Transport
from lockstep.extensions.parallel.absent_ranks import named_failure, report_failure
from lockstep.extensions.parallel.backward_watcher import (
    IN_CONTEXT,
    BackwardWatcher,
    is_in_context,
    waiting_for_steps,
    watch_optimizers,
)
from lockstep.extensions.parallel.dp import replicas as copies
from lockstep.extensions.parallel.dp.replicas import Device, as_device, as_id, choose_devices
from lockstep.extensions.parallel.join import JoinState, Weight, agree_on_forward, check_weight, join_hook
from lockstep.extensions.parallel.skip_unused import SkipUnused
from lockstep.extensions.parallel.torch_names import IGNORED, TorchNames
from lockstep.extensions.parallel.wrapping import (
    buffers_in_forwards,
    find_cast,
    find_changed,
    find_group,
    find_unusable,
)
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork_and_exit import protect_forks, settle_at_exit
from lockstep.ground.rank import warn_once
from lockstep.ground.transfer import move_data_to_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NOT_COPIED = (
    *("process_group", "_reducer", "_make_reducer", "_watch", "_checks", "_late", "_release", "_world", "_holders"),
)
"""Attributes that a copy of a container does not take over, but creates itself."""
COMPILED_WHOLE = (
    "{name} is compiled as a whole: all gradients arrive at the end of its backward, so no reduction overlaps the "
    "computation. Compile its blocks instead: for block in model.blocks: block.compile()"
)
SAME_ON_ALL_RANKS = (
    *("bucket_cap_mb", "bucket_bytes_cap_list", "static_graph", "check_reduction", "shared_memory"),
    *("skip_all_reduce_unused_params", "forward_sync_buffers"),
)
"""Attributes that must be the same on all ranks, since they decide what is sent."""
FORWARD = "DistributedDataParallel.forward"
"""Name of a forward's range in a profile, as in torch."""


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Container that trains ``module`` on all ranks of a group, where each rank has its own part of the batch.

    It replaces ``torch.nn.parallel.DistributedDataParallel`` when the import is changed; ``docs/ddp.md`` lists the
    differences. At construction every rank takes rank 0's parameters and buffers. After a backward every rank has the
    mean of the ranks' gradients, which are averaged while the backward runs. Parameters that no rank uses in a step
    need no flag.

    Construction, a forward with gradients and its backward are collective: all ranks must run the same number of them.
    A rank whose loss depends on none of the outputs calls `skip_backward`. Without that call it takes part just before
    its optimizer's step, with a warning.

    Args:
        module: the module on its device; at least one parameter requires a gradient.
        device_ids: ``None`` moves nothing. ``[device]`` moves the tensors among the inputs to the device. Several
            devices (also ``["cpu", "cpu"]``) or ``"all"`` split the batch among them, with a replica on each
            (`lockstep.DataParallel`); the module must be on the first.
        output_device: device where outputs of several devices are gathered; default: the first of them.
        dim: dimension along which a batch is split.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also excludes buffers from ``init_sync``.
        init_sync: compare the ranks' modules, then broadcast rank 0's parameters and buffers.
        process_group: process group of the ranks; ``None`` is the default group.
        bucket_cap_mb: size of a gradient bucket, in MiB; default 25.
        find_unused_parameters, batched_grad_copy, lazy_bucket_allocation: accepted without effect: unused parameters
            are always found, and gradients of a bucket are always copied together.
        check_reduction: at each forward and backward, check that all ranks are at the same point, that the last
            backward reduced everything, and that all ranks have the same gradients. For debugging: slow.
        gradient_as_bucket_view: make ``.grad`` views of the buckets, which saves a copy and memory.
        static_graph: all backwards give gradients to the same parameters in the same order, which costs less.
        delay_all_reduce_named_params, param_to_hook_all_reduce: accepted without effect, both or none: a bucket is
            sent when it is full.
        mixed_precision: must be None; use ``torch.autocast`` for forwards in low precision.
        device_mesh: a 1-D device mesh instead of ``process_group``.
        skip_all_reduce_unused_params: skip the buckets that no rank uses in the first backward; their parameters must
            not be used later.
        bucket_cap_mb_list: sizes of the first buckets, in MiB, starting with that of the parameters registered first;
            the last one is used for all others.
        forward_sync_buffers: take rank 0's buffers (such as BatchNorm statistics) before a forward that follows a
            synchronized one; default True.
        shared_memory: if all ranks are on one host, sum CPU gradients in memory that they share, not over TCP.

    Attributes:
        module: the module.
        reducer: the `lockstep.engines.ddp.reducer.Reducer`.
        device_ids, output_device, dim, process_group: the arguments; a GPU is given by its number.
        require_backward_grad_sync: True if the next forward's backward is synchronized (see `no_sync`).

    Raises:
        ValueError: on every rank, if the ranks' modules differ, nothing in ``module`` requires a gradient, parameters
            have no values or overlap in memory, or this rank is not in the process group.
        MisconfigurationException: ``mixed_precision`` is given, or a part of the module is a DistributedDataParallel
            already.

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
        mixed_precision: None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        shared_memory: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.joining = JoinState()
        self._authoritative_rank = 0
        self.process_group = find_group(process_group, device_mesh, module)
        self.device_mesh = device_mesh
        # a loader worker forked while a thread of the group holds a lock would wait for it forever
        protect_forks()
        settle_at_exit()
        # a rank that raised alone would leave the others waiting in `check_alike`
        with raise_on_all(self.process_group):
            if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
                raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce: pass both or neither")
            if mixed_precision is not None:
                raise MisconfigurationException(
                    f"{mixed_precision=} is not supported. Remove it, and run the forward under torch.autocast"
                )
            self.parameters_to_ignore = set(getattr(module, IGNORED, ()))
            problem = find_unusable(module, self.parameters_to_ignore, self.process_group)
            if problem is not None:
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}")
            self.module = module
            self.steps_together = False  # True with sharded optimizers, whose steps are collective
            self.dim = dim
            self._set_devices(device_ids, output_device)
            self.forward_sync_buffers = buffers_in_forwards(forward_sync_buffers, broadcast_buffers)
            self.find_unused_parameters = find_unused_parameters
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.batched_grad_copy, self.lazy_bucket_allocation = batched_grad_copy, lazy_bucket_allocation
            self.gradient_as_bucket_view = gradient_as_bucket_view
            self.static_graph = static_graph
            self.check_reduction = check_reduction
            self.shared_memory = shared_memory
            caps = list(bucket_cap_mb_list or ())
            self.bucket_cap_mb = max(caps) if caps else 25 if bucket_cap_mb is None else bucket_cap_mb
            if min([self.bucket_cap_mb, *caps]) <= 0:
                raise ValueError(f"{bucket_cap_mb=}, {bucket_cap_mb_list=}: pass sizes above 0")
            # torch's names
            self.bucket_bytes_cap = int(self.bucket_cap_mb * MIB)
            self.bucket_bytes_cap_list = [int(cap * MIB) for cap in caps]
            lines = [f"init_sync={init_sync}", *(f"{name}={getattr(self, name)}" for name in SAME_ON_ALL_RANKS)]
            lines += describe(module, self.parameters_to_ignore) if init_sync else []
        check_alike(type(module).__name__, lines, self.process_group)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        self._weight: float | None = None
        self._comm_hook: tuple[Any, ...] | None = None
        self._buffer_futures: list[Any] = []
        self._reducer: Reducer | None = None
        self._has_skipped = False  # a missing backward was reported
        dynamo = sys.modules.get("torch._dynamo")  # not imported before something is compiled, since that is slow
        whole = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if whole or module._compiled_call_impl is not None:
            warn_once(COMPILED_WHOLE.format(name=type(getattr(module, "_orig_mod", module)).__name__))
        if init_sync:
            buffers = forward_sync_buffers is not None or self.forward_sync_buffers
            broadcast_module_state(self.module, self.process_group, ignored=self.parameters_to_ignore, buffers=buffers)
        self._attach()

    def _set_devices(self, device_ids: Sequence[Device] | str | None, output_device: Device | None) -> None:
        """Choose the devices of the module, the replicas and the outputs."""
        module = self.module
        self.device = next(p for n, p in module.named_parameters() if n not in self.parameters_to_ignore).device
        self.device_type = self.device.type
        self._devices, out = choose_devices(device_ids, output_device, self.device)
        if len(self._devices) > 1 and isinstance(module, DistributedDataParallel):
            raise MisconfigurationException(
                f"device_ids={device_ids!r}: the module is a DistributedDataParallel, which cannot be replicated. "
                "Wrap the model inside it (model.module)"
            )
        self.device_ids = [as_id(device) for device in self._devices] or None
        self.output_device = None if out is None else as_id(out)

    # -- the reducer

    _make_reducer: Callable[..., Reducer] = Reducer
    _holders: list[dict[str, Tensor | None]] | None = None
    broadcast_bucket_size = 250 * 2**20  # read by torch's libraries

    def _attach(self) -> None:
        """Create the reducer, and the watcher that detects when a backward starts and ends. Collective."""
        ignored = {*self.parameters_to_ignore, *self._frozen}
        named = [(name, p) for name, p in self.module.named_parameters() if name not in ignored]
        plan = plan_buckets(infos_of(named), self.bucket_bytes_cap_list) if self.bucket_bytes_cap_list else None
        world = comm.world_size(self.process_group)
        transport: Transport | None = None
        if self.skip_all_reduce_unused_params and self._make_reducer is Reducer and world > 1:
            carried = choose_transport([p for _, p in named], self.process_group, self.shared_memory)
            transport = SkipUnused(carried, self.process_group)
        self._reducer = reducer = self._make_reducer(
            named,
            self.process_group,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            plan=plan,
            static_graph=self.static_graph,
            sparse=sparse_names(self.module),
            shared_memory=self.shared_memory,
            **({} if transport is None else {"transport": transport}),
        )
        if self._comm_hook is not None:
            from lockstep.extensions.parallel.hooks.hook_transport import attach_hook

            attach_hook(reducer, *self._comm_hook)
        self._world = world
        checked = self.check_reduction and self._world > 1
        self._checks = DesyncCheck(self.process_group, self.module) if checked else None
        self._watch = BackwardWatcher(reducer, [p for _, p in named], self, self.static_graph)
        reducer.on_unprepared_grad = self._watch.unprepared_grad
        # torch's PipelineStage calls it
        reducer.prepare_for_backward = self._watch.reduce_next  # type: ignore[attr-defined]
        # not at exit: the process group may be gone by then
        self._release = weakref.finalize(self, _detach_reducer, reducer, os.getpid())
        self._release.atexit = False
        self._late = LateParameters(self.module, self.parameters_to_ignore) if self._world > 1 else None
        if self._world > 1:
            watch_optimizers()
            waiting_for_steps[id(self)] = self

    def _detach(self) -> None:
        if self._reducer is not None:
            self._release()
            self._reducer = None
            if self._world > 1:
                waiting_for_steps.pop(id(self), None)

    def use_reducer(self, make: Callable[..., Reducer]) -> None:
        """Replace the reducer by the result of ``make``, between two steps. Collective.

        Args:
            make: called with the arguments of `Reducer`. Copies of the container do not keep it.
        """
        self._detach()
        self._make_reducer = make
        self._attach()

    @property
    def reducer(self) -> Reducer:
        """Reducer that averages the gradients."""
        if self._reducer is None:
            self._attach()
        assert self._reducer is not None
        return self._reducer

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook, once and before the first backward, on every rank.

        Args:
            state: the hook's first argument.
            hook: ``(state, bucket) -> torch.futures.Future`` of the reduced buffer. The bucket has the methods of
                ``torch.distributed.GradBucket``; its gradients are not divided by the world size.

        Raises:
            TypeError, ValueError: ``hook`` has the wrong signature.
            RuntimeError: there is a hook already, or a backward has run.
        """
        from lockstep.extensions.parallel.hooks.check import check_hook, prepare_state
        from lockstep.extensions.parallel.hooks.hook_transport import attach_hook
        from lockstep.extensions.parallel.hooks.local_sgd import marks_of

        check_hook(state, hook, self._watch.parameters, self.process_group)
        state = prepare_state(state, self.process_group, hook)
        round_group = marks_of(hook, state)
        attach_hook(self.reducer, state, hook, round_group)
        self._comm_hook = (state, hook, round_group)

    # -- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Collective if gradients are enabled.

        Args:
            inputs, kwargs: arguments of the module's forward; with several devices, tensors are split along ``dim``.

        Returns:
            the module's output; from several devices, gathered on ``output_device``.

        Raises:
            MisconfigurationException: the forward cannot take part in a step: parameters were unfrozen or added, or it
                runs in a context that the reduction does not support.
        """
        profiled = profiler._is_profiler_enabled and profiler.record_function(FORWARD).__enter__()
        try:
            # what torch.func differentiates leaves no gradients in parameters
            grad = torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
            if self._reducer is None:
                if not (grad or self._join_config.enable):
                    return self._run(inputs, kwargs)
                self._attach()
            # activation checkpointing repeats the forward inside the backward, on each rank at its own time
            if torch._C._current_graph_task_id() != -1:
                outputs = self._run(inputs, kwargs)
                if grad and self._world > 1:
                    self._watch.watch_outputs(outputs, self.require_backward_grad_sync, expected=False)
                return outputs
            alone = self._world == 1 and self._comm_hook is None
            if alone and self._weight is None and not self._join_config.enable:
                return self._run(inputs, kwargs)
            return self._run_together(inputs, kwargs, grad)
        except Exception as error:
            # the other ranks wait for this one, and then name its error
            if self._reducer is not None and self._world > 1:
                report_failure(self.process_group, self._reducer.rounds + 1, error)
            raise
        finally:
            if profiled:
                profiled.__exit__(None, None, None)

    def _run_together(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Any:
        """Run a collective forward, and register hooks on its outputs that detect the backward."""
        sync = grad and self.require_backward_grad_sync
        weight = self._prepare_forward(grad, sync)
        outputs = self._run(inputs, kwargs)
        if self._buffers_at(_BufferCommHookLocation.POST_FORWARD):
            self._align_buffers(0)
        self.require_forward_param_sync = sync
        # otherwise the end of the backward waits for the futures
        if not sync:
            self._await_buffers()
        if grad:
            if weight is not None:
                outputs = weight.apply(outputs)
            empty = weight is not None and weight.weight == 0
            self._watch.watch_outputs(outputs, sync, empty, expected=sync and self.training)
        return outputs

    def _prepare_forward(self, grad: bool, sync: bool) -> Weight | None:
        """Check that a forward may run (on all ranks, if required), and synchronize buffers. Collective."""
        self._watch.before_forward()
        self._await_buffers()
        if torch.compiler.is_compiling():
            warn_once(COMPILED_WHOLE.format(name=type(self.module).__name__))
        if sync:
            problem = IN_CONTEXT if is_in_context() else find_changed(self._frozen, self._late)
            if problem is not None:
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}")
        buffers = self._buffers_at(_BufferCommHookLocation.PRE_FORWARD)
        if self._join_config.enable:
            if self._weight is not None:
                raise MisconfigurationException(
                    "weight() inside join(): a rank without batches has no weight. Use either weight() or join()"
                )
            Join.notify_join_context(self)
            agree_on_forward(self, sync, buffers)
        else:
            if sync:
                self._compare("forward")
            if buffers:
                self._align_buffers(0)
        if self._weight is None or not grad:
            return None
        return Weight(self._weight, self.process_group, self.device, self._named_failure)

    def _buffers_at(self, location: _BufferCommHookLocation) -> bool:
        if not (self.require_forward_param_sync and self.forward_sync_buffers) or self._world == 1:
            return False
        hook = self.__dict__.get("buffer_hook")
        before = _BufferCommHookLocation.PRE_FORWARD
        return (before if hook is None else hook.buffer_comm_hook_location) is location and self._has_buffers()

    def _align_buffers(self, src: int) -> None:
        with self._named_failure("taking the buffers"):
            self._sync_module_buffers(src)

    def _compare(self, stage: str) -> None:
        """If ``check_reduction``, check that all ranks are at ``stage`` and have reduced all gradients. Collective."""
        if self._checks is not None:
            with self._named_failure("comparing the ranks' places"):
                self._checks.compare(stage, self.reducer.missing() if stage == "forward" else [])

    def _before_backward(self) -> None:
        self._compare("backward")

    def _prepare(self) -> None:
        try:
            self.reducer.prepare()
        except RuntimeError as error:
            problem = find_cast(self.reducer.buckets)
            with self._named_failure("a backward"):
                if problem is None:
                    raise
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}") from error

    def _backward_ended(self) -> None:
        with self._named_failure("averaging the gradients"):
            self.reducer.finish()
        self._await_buffers()
        if self._checks is not None and self.reducer.sync:
            self._checks.remember(self.reducer.round_group)
        self._watch.step()

    def _named_failure(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that extends the error of a failed collective by the missing rank and that rank's error."""
        return named_failure(self.process_group, doing, self.reducer.rounds + 1)

    def skip_backward(self) -> None:
        """Join the other ranks' gradient reduction, if this rank's loss depends on no output. Collective.

        Afterwards ``.grad`` is the mean as on the other ranks; this rank adds what it has accumulated, or zero.
        """
        self._watch.reset()
        if self._world == 1 and self._comm_hook is None:
            return
        self._before_backward()
        reducer = self.reducer
        reducer.sync, reducer.zero_weight = True, False
        self._prepare()
        self._backward_ended()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Disable gradient synchronization for forwards in the context and their backwards, even after the context.

        Gradients accumulate on this rank. The first backward of a forward outside the context averages their sum.

        Example::

            with model.no_sync():
                loss_fn(model(first), first_target).backward()  # accumulates on this rank
            loss_fn(model(second), second_target).backward()  # averages the sum of both
            optimizer.step()
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def weight(self, n: float) -> Iterator[None]:
        """Weight this rank's gradients of forwards in the context by ``n``. All ranks get the weighted mean.

        If ``n`` is the number of samples and the loss a mean, this is the mean over all samples. Every rank passes its
        own weight; if all are zero, there are no gradients.

        Args:
            n: weight of this rank's batch, for example its number of samples; 0 drops its gradients, also infinite
                ones.

        Raises:
            ValueError: ``n`` is negative or not finite.
            MisconfigurationException: a forward in the context runs inside ``join``.

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

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the container, and warn that the reduction of gradients will not overlap with the backward."""
        warn_once(COMPILED_WHOLE.format(name=type(self.module).__name__))
        super().compile(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        kinds = [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]
        super()._apply(fn, recurse)
        if kinds != [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]:
            self._detach()  # its buffers have the old dtype or device
            self.device = next(self.module.parameters()).device
        return self

    # -- uneven numbers of batches

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context for a training loop in which ranks have different numbers of batches.

        A rank without batches follows the others with zero gradients, and all end with the model of the last rank
        that trained. Each forward with gradients needs one backward, and the loop must not contain collectives of its
        own. With several models in one ``Join``, each runs its backward before the next one's forward.

        Args:
            divide_by_initial_world_size: if True, divide gradients by the number of all ranks; else by that of ranks
                with batches.
            enable: if False, the context does nothing.
            throw_on_early_termination: make all ranks raise as soon as one has run out of batches.

        Raises:
            RuntimeError: optimizers are sharded.

        Example::

            with model.join():
                for batch, target in loader:  # ranks may have different numbers of batches
                    optimizer.zero_grad()
                    loss_fn(model(batch), target).backward()
                    optimizer.step()
        """
        if enable and self.steps_together:
            raise RuntimeError(
                "join() with sharded optimizers: a rank without batches would have to step as well. Let that rank "
                "continue with any batch under `with model.weight(0):`, so that its gradients do not count"
            )
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``torch.distributed.algorithms.Join`` calls on a rank that has run out of batches.

        Args:
            **kwargs: ``divide_by_initial_world_size`` as in `join`; default True.
        """
        return join_hook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Device on which ``Join`` runs its collectives."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Process group in which ``Join`` runs its collectives."""
        return self.process_group

    # -- devices

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Device]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Split inputs and keyword arguments along `dim` into a part for each device. A subclass may override this.

        A batch with fewer rows than devices has fewer parts. This method is called for several devices, and also for
        one device if a subclass overrides the method.

        Args:
            inputs: positional arguments of the forward.
            kwargs: keyword arguments of the forward.
            device_ids: the devices.

        Returns:
            two lists, with a tuple of inputs and a dict of keyword arguments for each part.

        Raises:
            ValueError: tensors have different numbers of rows, or one lacks the dimension `dim`.
        """
        parts = copies.scatter((inputs, kwargs), [as_device(device) for device in device_ids], self.dim)
        return [part for part, _ in parts], [part for _, part in parts]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Run each replica on its part in a thread, and return the outputs. A subclass may override this.

        Args:
            replicas: one module per part.
            inputs: a tuple of positional arguments per part.
            kwargs: a dict of keyword arguments per part.
        """
        calls = [partial(replica, *i, **k) for replica, i, k in zip(replicas, inputs, kwargs, strict=True)]
        return copies.in_threads(calls, self._devices)

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Combine the outputs of the parts along `dim`. A subclass may override this.

        Args:
            outputs: an output per part, all of the same structure.
            output_device: device of the result.

        Returns:
            an output of the same structure.

        Raises:
            ValueError: the outputs cannot be joined.
        """
        return copies.gather(outputs, as_device(output_device), self.dim)

    def to_kwargs(self, inputs: object, kwargs: object, device_id: Device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Move inputs and keyword arguments to one device. Return (inputs, kwargs), each as a tuple with one element.

        Args:
            inputs: positional arguments of the forward.
            kwargs: keyword arguments of the forward.
            device_id: device to move tensors to.
        """
        device = as_device(device_id)
        return (move_data_to_device(inputs, device),), (move_data_to_device(kwargs, device),)

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        """Run the module's forward on its devices."""
        module = self.module
        # not `isinstance`, which is a Python call for an abstract class (Joinable is one)
        call: Any = module._run_within if hasattr(type(module), "_run_within") else module
        if not self._devices:
            return call(*inputs, **kwargs)
        if len(self._devices) == 1 and type(self).scatter is DistributedDataParallel.scatter:
            device = self._devices[0]
            return call(*move_data_to_device(inputs, device), **move_data_to_device(kwargs, device))
        ids, output_device = self.device_ids, self.output_device
        assert ids is not None
        assert output_device is not None
        parts, named = self.scatter(inputs, kwargs, ids)
        if len(self._devices) == 1:
            return self.module(*parts[0], **named[0])
        replicas = copies.replicate(self.module, self._devices[: len(parts)])
        return self.gather(self.parallel_apply(replicas, parts, named), output_device)

    def _run_within(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._run(inputs, kwargs)  # an outer container calls this, and averages the gradients

    # -- copies

    def _state_to_copy(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
        self.process_group, self._reducer = group, None
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a DistributedDataParallel can be pickled only if it uses the default process group, because other "
                "groups cannot be restored. Pickle model.module, or its state dict"
            )
        return self._state_to_copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, find_group(None, None, state["_modules"]["module"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.process_group)] = self.process_group  # a communication hook's state may hold it
        made._restore(copy.deepcopy(self._state_to_copy(), memo), self.process_group)
        return made

    # -- buffers

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Return True if the next forward starts by synchronizing buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _has_buffers(self) -> bool:
        """Return True if any module has a buffer."""
        late = self._late
        # walking through all modules in each forward would be slow, so their buffer dicts are kept
        if self._holders is None or late is None or late.changed:
            self._holders = [part._buffers for part in self.module.modules()]
            if late is not None:
                late.changed = False
        return any(self._holders)

    def _await_buffers(self) -> None:
        while self._buffer_futures:
            self._buffer_futures.pop().wait()


def _detach_reducer(reducer: Reducer, process: int) -> None:
    """Detach the reducer of a garbage-collected container, unless this process was forked from ``process``."""
    # a forked child shares the parent's memory, so detaching there would break the parent's buffers
    if os.getpid() == process:
        reducer.detach()


# torch checks isinstance(container, its class): torch.distributed.checkpoint to remove "module." from names,
# PipelineStage to reduce once in a step, and others to find the module inside
TorchContainer.register(DistributedDataParallel)
