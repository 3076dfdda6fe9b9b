"""DistributedDataParallel for hand-written loops: a container over the reducer, in the place of torch's."""

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
    hear_steps,
    is_in_context,
    waiting_for_steps,
)
from lockstep.extensions.parallel.dp import replicas as copies
from lockstep.extensions.parallel.dp.replicas import Device, as_device, as_id, choose_devices
from lockstep.extensions.parallel.join import JoinState, Weight, check_weight, join_hook, meet
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

MADE_ANEW = (
    *("process_group", "_reducer", "_make_reducer", "_watch", "_checks", "_late", "_release", "_world", "_holders"),
)
"""Attributes that a copy of a container does not take over."""
WHOLE = (
    "{name} is compiled as a whole: its gradients come all at once, when its backward has ended, so no reduction "
    "overlaps the computation. Compile its blocks instead: for block in model.blocks: block.compile()"
)
ALIKE = (
    *("bucket_cap_mb", "bucket_bytes_cap_list", "static_graph", "check_reduction", "shared_memory"),
    *("skip_all_reduce_unused_params", "forward_sync_buffers"),
)
"""Attributes that have to be the same on all ranks, as they decide what is sent."""
FORWARD = "DistributedDataParallel.forward"
"""A forward's range in a profile, by torch's name."""


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Trains ``module`` on every rank of a group, each with its own part of the batch, as one.

    Takes the place of ``torch.nn.parallel.DistributedDataParallel`` when the import is changed; ``docs/ddp.md`` lists
    what differs. At construction every rank takes rank 0's parameters and buffers. A backward leaves every rank with
    the mean of the ranks' gradients, averaged while it runs. Parameters that no rank uses in a step need no flag.

    Construction, a forward with gradients and its backward are points where ranks meet: all must come there equally
    often. A rank whose loss depends on none of the outputs calls `skip_backward`; if it goes on to its optimizer's
    step without, it takes part just before it, and is warned.

    Args:
        module: on the device where it is to run; at least one parameter requires a gradient.
        device_ids: ``None`` leaves inputs and module where they are; ``[device]`` moves tensors among the inputs
            there; several devices (CPUs too: ``["cpu", "cpu"]``) or ``"all"`` cut the batch up among them, with a
            replica on each (`lockstep.DataParallel`) and the module on the first.
        output_device: where outputs of several devices are put together; default: the first of them.
        dim: along which a batch is cut up.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: compare the ranks' modules, then give all of them rank 0's parameters and buffers.
        process_group: the ranks; ``None`` is the default group.
        bucket_cap_mb: size in MiB of the buckets in which gradients travel; default 25.
        find_unused_parameters, batched_grad_copy, lazy_bucket_allocation: taken and not needed: unused parameters are
            found whatever this says, gradients of a bucket are copied together, and lie in it.
        check_reduction: at each forward and backward, make sure that all ranks are at the same point, that the last
            backward reduced everything, and that it left the same gradients everywhere. For finding faults: slow.
        gradient_as_bucket_view: let ``.grad`` be views of the buckets, which saves a copy and their memory.
        static_graph: every backward gives gradients to the same parameters in the same order: costs less.
        delay_all_reduce_named_params, param_to_hook_all_reduce: taken, both or none; buckets travel when they are
            full, so there is nothing to delay.
        mixed_precision: None; forwards in low precision run under ``torch.autocast``.
        device_mesh: a mesh of one dimension whose ranks are the group.
        skip_all_reduce_unused_params: leave out the buckets that no rank uses in the first backward; none of their
            parameters may be used later.
        bucket_cap_mb_list: sizes in MiB of the buckets one by one, that of the parameters defined first in front;
            the last one holds for all that come after.
        forward_sync_buffers: before a forward that follows a synchronised one, take rank 0's buffers (BatchNorm's
            running statistics); default True.
        shared_memory: on one host, let CPU gradients be summed in memory that the ranks share, not over TCP.

    Attributes:
        module: the module.
        reducer: the `lockstep.engines.ddp.reducer.Reducer`.
        device_ids, output_device, dim, process_group: as given; a GPU by its number.
        require_backward_grad_sync: whether the next forward's backward is synchronised (`no_sync`).

    Raises:
        ValueError: on every rank, if the ranks' modules differ; if nothing in ``module`` requires a gradient, or
            parameters have no values, or share memory with themselves; if this rank is in no process group.

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
        protect_forks()  # of loader workers, beside the group's threads
        settle_at_exit()
        with raise_on_all(self.process_group):
            if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
                raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce: give both, or none")
            if mixed_precision is not None:
                raise MisconfigurationException(
                    f"{mixed_precision=}: leave it out, and run the forward under torch.autocast"
                )
            self.parameters_to_ignore = set(getattr(module, IGNORED, ()))
            problem = find_unusable(module, self.parameters_to_ignore, self.process_group)
            if problem is not None:
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}")
            self.module = module
            self.steps_together = False  # whether a rank waits in each step for the others: their states are shared out
            self.dim = dim
            self._take_devices(device_ids, output_device)
            self.forward_sync_buffers = buffers_in_forwards(forward_sync_buffers, broadcast_buffers)
            self.find_unused_parameters = find_unused_parameters
            self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
            self.batched_grad_copy, self.lazy_bucket_allocation = batched_grad_copy, lazy_bucket_allocation
            self.gradient_as_bucket_view = gradient_as_bucket_view
            self.static_graph = static_graph
            self.check_reduction = check_reduction
            self.shared_memory = shared_memory
            self._take_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
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
        self._attach()

    def _take_devices(self, device_ids: Sequence[Device] | str | None, output_device: Device | None) -> None:
        """Where the module is, and where its replicas and outputs are to be."""
        module = self.module
        self.device = next(p for n, p in module.named_parameters() if n not in self.parameters_to_ignore).device
        self.device_type = self.device.type
        self._devices, out = choose_devices(device_ids, output_device, self.device)
        if len(self._devices) > 1 and isinstance(module, DistributedDataParallel):
            raise MisconfigurationException(
                f"device_ids={device_ids!r}: the module is a DistributedDataParallel already, which has no "
                "replicas: wrap the model inside of it (model.module)"
            )
        self.device_ids = [as_id(device) for device in self._devices] or None
        self.output_device = None if out is None else as_id(out)

    def _take_bucket_sizes(self, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
        """How large buckets may be, all or one by one; under torch's names, too."""
        caps = list(bucket_cap_mb_list or ())
        self.bucket_cap_mb = max(caps) if caps else 25 if bucket_cap_mb is None else bucket_cap_mb
        if min([self.bucket_cap_mb, *caps]) <= 0:
            raise ValueError(f"{bucket_cap_mb=}, {bucket_cap_mb_list=}: sizes above 0")
        self.bucket_bytes_cap = int(self.bucket_cap_mb * MIB)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in caps]

    # -- the reducer

    _make_reducer: Callable[..., Reducer] = Reducer
    _holders: list[dict[str, Tensor | None]] | None = None
    broadcast_bucket_size = 250 * 2**20  # read by torch's libraries

    def _attach(self) -> None:
        """Make the reducer and what tells it when; on all ranks at the same time."""
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
        reducer.prepare_for_backward = self._watch.reduce_next  # type: ignore[attr-defined]  # torch's PipelineStage asks
        self._release = weakref.finalize(self, _let_go, reducer, os.getpid())
        self._release.atexit = False
        self._late = LateParameters(self.module, self.parameters_to_ignore) if self._world > 1 else None
        if self._world > 1:
            hear_steps()
            waiting_for_steps[id(self)] = self

    def _detach(self) -> None:
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
                return self._run_again(inputs, kwargs, grad)
            alone = self._world == 1 and self._comm_hook is None
            if alone and self._weight is None and not self._join_config.enable:
                return self._run(inputs, kwargs)
            return self._run_together(inputs, kwargs, grad)
        except Exception as error:
            self._report_failure(error)
            raise
        finally:
            if profiled:
                profiled.__exit__(None, None, None)

    def _run_together(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Any:
        """A forward before and after which ranks meet, and whose backward is watched."""
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
            empty = weight is not None and weight.weight == 0
            self._watch.outputs(outputs, sync, empty, expected=sync and self.training)
        return outputs

    def _run_again(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], grad: bool) -> Any:
        """A forward that a checkpoint repeats: ranks have met for it already."""
        outputs = self._run(inputs, kwargs)
        if grad and self._world > 1:
            self._watch.outputs(outputs, self.require_backward_grad_sync, expected=False)
        return outputs

    def _report_failure(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this one, why a forward has failed."""
        if self._reducer is not None and self._world > 1:
            report_failure(self.process_group, self._reducer.rounds + 1, error)

    def _prepare_forward(self, grad: bool, sync: bool) -> Weight | None:
        """Meet the other ranks before a forward."""
        self._watch.forward_begins()
        self._await_buffers()
        if torch.compiler.is_compiling():
            warn_once(WHOLE.format(name=type(self.module).__name__))
        if sync:
            problem = IN_CONTEXT if is_in_context() else find_changed(self._frozen, self._late)
            if problem is not None:
                raise MisconfigurationException(f"rank {self._distributed_rank}: {problem}")
        buffers = self._buffers_at(_BufferCommHookLocation.PRE_FORWARD)
        if self._join_config.enable:
            if self._weight is not None:
                raise MisconfigurationException(
                    "weight() inside of join(): a rank without batches has no weight to give; use one of them"
                )
            Join.notify_join_context(self)
            meet(self, sync, buffers)
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
        """With check_reduction: whether all ranks are at the same point, and how the last backward ended."""
        if self._checks is not None:
            with self._named_failure("comparing the ranks' places"):
                self._checks.compare(stage, self.reducer.missing() if stage == "forward" else [])

    def _backward_begins(self) -> None:
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
        """Where a collective fails in the block: say which rank was not there, and why."""
        return named_failure(self.process_group, doing, self.reducer.rounds + 1)

    def skip_backward(self) -> None:
        """In place of a backward, where this rank's loss depends on no output: let the others go on.

        Their gradients arrive here, averaged with what this rank has accumulated, or with nothing.
        """
        self._watch.forget()
        if self._world == 1 and self._comm_hook is None:
            return
        self._backward_begins()
        reducer = self.reducer
        reducer.sync, reducer.zero_weight = True, False
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

    def compile(self, *args: object, **kwargs: object) -> None:
        """As of any module; it is said that nothing overlaps then."""
        warn_once(WHOLE.format(name=type(self.module).__name__))
        super().compile(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DistributedDataParallel:
        kinds = [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]
        super()._apply(fn, recurse)
        if kinds != [(parameter.dtype, parameter.device) for parameter in self.module.parameters()]:
            self._detach()  # its buffers are of the old kind
            self.device = next(self.module.parameters()).device
        return self

    # -- uneven numbers of batches

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Context around a training loop in which ranks have different numbers of batches.

        A rank that has run out follows the others with nothing to add, and all end with the model of the last one
        that trained. One backward to each forward with gradients; no collectives of your own in the loop. Of several
        models in one ``Join``, each runs its backward before the next one's forward.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks; else by those that still have batches.
            enable: False to train without.
            throw_on_early_termination: have all ranks raise as soon as one has run out.

        Raises:
            RuntimeError: optimizers are sharded.
        """
        if enable and self.steps_together:
            raise RuntimeError(
                "join() with sharded optimizers: a rank that has run out of batches would have to step, too; let it go "
                "on with any batch that does not count, under `with model.weight(0):`"
            )
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``torch.distributed.algorithms.Join`` calls on a rank that has run out.

        Args:
            divide_by_initial_world_size: as of `join`; default True.
        """
        return join_hook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` communicates from."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that ``Join`` asks."""
        return self.process_group

    # -- devices

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Device]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Inputs and keyword arguments, each as one part for each device, cut along `dim`; to be overridden.

        A batch of fewer rows than devices has fewer parts. Called with several devices, and with one if overridden.
        """
        parts = copies.scatter((inputs, kwargs), [as_device(device) for device in device_ids], self.dim)
        return [part for part, _ in parts], [part for _, part in parts]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Outputs of the replicas, each in a thread for its part; to be overridden."""
        calls = [partial(replica, *i, **k) for replica, i, k in zip(replicas, inputs, kwargs, strict=True)]
        return copies.in_threads(calls, self._devices)

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Outputs of the parts as one, along `dim`; to be overridden."""
        return copies.gather(outputs, as_device(output_device), self.dim)

    def to_kwargs(self, inputs: object, kwargs: object, device_id: Device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs and keyword arguments moved to one device, each as the only part."""
        device = as_device(device_id)
        return (move_data_to_device(inputs, device),), (move_data_to_device(kwargs, device),)

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        """The module's forward on its devices."""
        module = self.module
        # another container, by its class's attribute: `isinstance` asks an abstract class in Python
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
        return self._run(inputs, kwargs)  # inside of another container's forward, which averages in this one's place

    # -- copies

    def _kept(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in MADE_ANEW}

    def _restore(self, state: dict[str, Any], group: dist.ProcessGroup) -> None:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        memo[id(self.process_group)] = self.process_group  # a communication hook's state may hold it
        made._restore(copy.deepcopy(self._kept(), memo), self.process_group)
        return made

    # -- buffers

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are taken from rank 0 before a forward: the older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward takes buffers first."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _has_buffers(self) -> bool:
        """Whether any module has a buffer, without walking through the modules each time."""
        late = self._late
        if self._holders is None or late is None or late.changed:
            self._holders = [part._buffers for part in self.module.modules()]
            if late is not None:
                late.changed = False
        return any(self._holders)

    def _await_buffers(self) -> None:
        while self._buffer_futures:
            self._buffer_futures.pop().wait()


def _let_go(reducer: Reducer, process: int) -> None:
    """Detach the reducer of a container that is gone; not in a forked child, which shares the memory."""
    if os.getpid() == process:
        reducer.detach()


def _tell_if_whole(module: nn.Module) -> None:
    """Warn, once, where a module is compiled as a whole."""
    dynamo = sys.modules.get("torch._dynamo")  # torch imports it when something is compiled
    whole = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    if whole or module._compiled_call_impl is not None:
        warn_once(WHOLE.format(name=type(getattr(module, "_orig_mod", module)).__name__))


# isinstance(container, torch's class) holds: by it torch.distributed.checkpoint takes "module." off names, its
# PipelineStage reduces once a step, and others find the module inside.
TorchContainer.register(DistributedDataParallel)
