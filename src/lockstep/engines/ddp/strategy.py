"""Data parallel training over processes: each rank has the whole module. Gradients are averaged during the backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.io import CheckpointIO
from lockstep.engines.collectives import gather_on_zero
from lockstep.engines.copies import LocalSteps
from lockstep.engines.ddp.bucket import infos_of, plan_buckets
from lockstep.engines.ddp.consistency import (
    DesyncCheck,
    broadcast_module_state,
    check_alike,
    check_same_module,
    described,
    sparse_names,
    sync_buffers,
)
from lockstep.engines.ddp.late_parameters import LateRefusal
from lockstep.engines.ddp.reducer import MIB, BackwardEnds, Reducer
from lockstep.engines.engine import EngineState
from lockstep.engines.ranks import (
    HALF_AN_HOUR,
    NO_EFFECT,
    RankedStrategy,
    check_others,
    check_switches,
    checked_cap,
    checked_caps,
)
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import load
from lockstep.ground.methods import kept
from lockstep.ground.optimizers import by_parts
from lockstep.ground.rank import does, log
from lockstep.ground.tree import tensors_in
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.recompute import Layers, Policy, Save
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.engines.ddp.owned_optimizer import OwnedOptimizers

SHARDED = "DDPStrategy(shard_optimizer=True)"
RAW_BACKWARD = (
    "{strategy}(static_graph=True) does not support `loss.backward()` in manual optimization. Call "
    "self.manual_backward(loss) instead, or omit static_graph."
)


class CountedLocalSteps(LocalSteps, Protocol):
    """Interface of local steps: the strategy calls it to count steps, average weights, and save and load the state."""

    def round(self) -> None:
        """Count a gradient reduction that starts now."""

    def step(self) -> None:
        """Count an optimizer step, and average the weights if an average is due. Collective in that case."""

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the state that is the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""

    def rank_state(self) -> dict[str, Any]:
        """Return the part of the state that differs between ranks."""

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Load this rank's entry of ``states``, a list of all ranks' `rank_state` results. The list may be empty.

        Args:
            states: one state per rank, in the order of the ranks.
        """


class AttachableHook(Protocol):
    """Interface of the communication hooks that an extension creates from the strategy's arguments.

    Attributes:
        state: the hook's state.
        is_local: True if ranks run local steps with this hook.
    """

    state: Any
    is_local: bool

    def attach(
        self, reducer: Reducer, module: nn.Module, optimizers: list[Optimizer], node_rank: int, **of_steps: Any
    ) -> CountedLocalSteps | None:
        """Make ``reducer`` reduce its buckets with this hook. Return the fit's local steps, if any. Collective.

        Args:
            reducer: reducer of the gradients.
            module: module of the fit.
            optimizers: optimizers of the fit.
            node_rank: index of this process's node, from 0.
            of_steps: ``scaler``, the loss scaler or None, and ``take_buffers``, which synchronizes buffers, or None.
        """

    def detach(self) -> None:
        """Detach the hook at the end of a fit."""

    def rank_states(self, local: CountedLocalSteps | None, alone: bool) -> list[dict[str, Any]]:
        """On rank 0, return a list with the hook's state on each rank. Collective, unless ``alone``.

        Args:
            local: local steps of the fit; None if there are none.
            alone: True: return this rank's state without communication.
        """

    def load_rank_states(
        self, local: CountedLocalSteps | None, states: Sequence[dict[str, Any]], device: torch.device
    ) -> None:
        """Load the hook's state on this rank from ``states``, a list with one entry per rank.

        Args:
            local: local steps of the fit; None if there are none.
            states: one state per rank, in the order of the ranks.
            device: device of the gradients.
        """


class DDPStrategy(RankedStrategy):
    """Data parallel strategy with one process per device. Gradients are averaged by lockstep's own reducer.

    The arguments are those of Lightning's strategy and of torch's ``DistributedDataParallel``, with the same names.
    Unsupported arguments raise an error with the reason. See `docs/ddp-options.md`.

    Args:
        accelerator, parallel_devices: must be None; choose devices with ``Trainer(accelerator=..., devices=...)``.
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        ddp_comm_hook: communication hook ``hook(state, bucket) -> Future``: one of lockstep's
            (`lockstep.engines.ddp.hooks`) or torch's. It works on the CPU too.
        ddp_comm_state: the hook's first argument. It is saved and resumed.
        ddp_comm_wrapper: applied to the hook (``fp16_compress_wrapper``).
        model_averaging_period: under post-local SGD, the steps between two averages of the parameters; the first
            average follows the first local step. Or a mapping of periods to numbers of ranks.
        outer_optimizer: let an outer optimizer step at each average (local SGD, DiLoCo): a dict of arguments
            of `lockstep.engines.ddp.averaging.OuterOptimizer`, ``{}`` for DiLoCo's.
        process_group_backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; default: the last on CUDA, gloo on CPUs.
        timeout: time that a collective waits for the other ranks, a ``datetime.timedelta``; None: 30 minutes.
        start_method: "popen" (this script once per rank), "spawn" (the call, in fresh processes) or "fork" (the call,
            in copies of this process, which start at once and share its memory).
        nccl: NCCL's variables, with or without ``NCCL_``. They are set before the group is made, unless the shell or
            the cluster has set them: ``{"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2}``.
        shared_memory: if all ranks are on one host, sum CPU gradients in memory that they share, not over TCP.
        bucket_cap_mb: size of a gradient bucket, in MiB; None: 25.
        bucket_cap_mb_list: sizes of the first buckets, in MiB, starting with that of the parameters registered first;
            the last one is used for all others. Such a layout is kept; otherwise it follows the gradients of the first
            step.
        broadcast_buffers: overwrite buffers (such as BatchNorm statistics) with rank 0's before each window.
        forward_sync_buffers: name of ``broadcast_buffers`` since torch 2.13.
        init_sync: compare the ranks' modules, and overwrite weights and buffers with rank 0's at the start. If False,
            the caller ensures that they are equal.
        gradient_as_bucket_view: let ``.grad`` be views of the buckets, which saves a copy of the gradients.
        static_graph: every step gives gradients to the same parameters in the same order: fewer autograd hooks.
        check_reduction: after each reduction, compare checksums of the gradients over the ranks, and name the first
            parameter that differs. It costs a message per step.
        find_unused_parameters: accepted; unused parameters need no flag here.
        shard_optimizer: divide the optimizers' work and states: each parameter has one owner, which alone updates it
            (ZeRO stage 1).
        activation_checkpointing: recompute activations in the backward instead of keeping them: True (in the
            repeated blocks), or classes of layers.
        activation_checkpointing_policy: classes or a policy function that select the layers to recompute.
        activation_checkpointing_save: activations of these layers to keep instead of recomputing them: "matmuls",
            torch operators, or a policy function of ``torch.utils.checkpoint``.
        **others: further arguments of torch's class: accepted if they have no effect here, otherwise refused with
            the reason.

    Raises:
        MisconfigurationException: an argument is unsupported or unknown.

    Example::

        Trainer(devices=4, strategy=DDPStrategy(shard_optimizer=True))
    """

    def __init__(
        self,
        accelerator: object = None,
        parallel_devices: object = None,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | Mapping[int, int] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        start_method: str = "popen",
        *,
        outer_optimizer: Mapping[str, Any] | None = None,
        nccl: Mapping[str, Any] | None = None,
        shared_memory: bool = True,
        bucket_cap_mb: float | None = 25,
        bucket_cap_mb_list: Sequence[float] | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        check_reduction: bool = False,
        find_unused_parameters: bool = False,
        shard_optimizer: bool = False,
        activation_checkpointing: Layers | Literal[False] | None = None,
        activation_checkpointing_policy: Policy | None = None,
        activation_checkpointing_save: Save = None,
        **others: Any,
    ) -> None:
        known = inspect.signature(DDPStrategy).parameters
        others = {"accelerator": accelerator, "parallel_devices": parallel_devices, **others}
        check_others("DDPStrategy", others, known, NO_EFFECT)
        check_switches(
            shared_memory=shared_memory,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            init_sync=init_sync,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            check_reduction=check_reduction,
            shard_optimizer=shard_optimizer,
        )
        super().__init__(
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
            nccl,
        )
        self._recompute(activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        self._shared_memory = shared_memory
        self._caps = [cap * MIB for cap in checked_caps("bucket_cap_mb_list", bucket_cap_mb_list, 25)]
        self._bucket_cap_mb = max(self._caps) / MIB if self._caps else checked_cap("bucket_cap_mb", bucket_cap_mb, 25)
        self._broadcast_buffers = next((b for b in (forward_sync_buffers, broadcast_buffers) if b is not None), True)
        self._init_sync = init_sync
        self._views = gradient_as_bucket_view
        self._static_graph = static_graph
        self._check_reduction = check_reduction
        self._checks: DesyncCheck | None = None
        self._shard_optimizer = shard_optimizer
        self._hook: AttachableHook | None = None
        of_hook = ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper, model_averaging_period, outer_optimizer
        if any(given is not None for given in of_hook):
            self._hook = load("services", "communication hooks")(*of_hook)
        self.undoes_steps = self._hook is None and not shard_optimizer  # hooks keep errors, owners keep states
        if shard_optimizer and self._hook is not None and self._hook.is_local:
            raise MisconfigurationException(
                f"{SHARDED} cannot be used with local steps (post-local SGD, model_averaging_period, outer_optimizer): "
                "with local steps each rank has its own weights, but with shard_optimizer the rank that updates a "
                "parameter overwrites the parameter on all ranks. Use one or the other."
            )
        self._owned: OwnedOptimizers | None = None
        self._reducer: Reducer | None = None
        self._late: LateRefusal | None = None
        self._plan: Any = None

    @does("taking rank 0's weights")
    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Set up the module, then overwrite its weights and buffers with rank 0's. Collective.

        Raises:
            ValueError: on every rank, the ranks' modules differ; the message has the first difference.
        """
        if module is not self.module:
            self._plan = None  # it belongs to an earlier fit's module
        super().setup_module(module, own_backward)
        self.copies.local_steps = None
        if self._init_sync:
            check_same_module(module, None)
            broadcast_module_state(module, None)
        self._watch_buffers()
        if self._late is not None:
            self._late.close()
        self._late = LateRefusal(module, self.world.rank) if self.world.size > 1 else None

    def _watch_buffers(self) -> None:
        self.copies.watch_buffers(self.module, self._broadcast_buffers and self.world.size > 1)

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Attach the reducer to the parameters, and synchronize BatchNorm if requested.

        Args:
            optimizers: optimizers of the fit.
            configs: schedulers of the fit, with the interval and frequency of their steps.

        Raises:
            MisconfigurationException: ``shard_optimizer`` is used with sparse gradients, or with an optimizer that
                cannot be divided.
        """
        if self._reducer is not None:  # its optimizers are replaced before the first step
            self._detach_reducer(self._reducer)
        super().setup_optimizers(optimizers, configs)
        if self._late is not None:
            # tensors that were added since the module was set up, such as in `configure_optimizers`
            late = self._late.new(optimizers)
            check_alike(type(self.module).__name__, [described("late", name, tensor) for name, tensor in late.items()])
            if self._init_sync:
                comm.broadcast_tensors([tensor.detach() for tensor in late.values()])
        self._watch_buffers()
        self.copies.synchronize_norms(self.module, self.sync_batchnorm, self._timeout, self.replicas)
        named = self.named_parameters()
        self._checks = DesyncCheck(None, self.module) if self._check_reduction and self.world.size > 1 else None
        if self._checks is not None:
            self._checks.renew(named.items())
        if self._caps and self._plan is None:
            trained = [(name, p) for name, p in named.items() if p.requires_grad]
            self._plan = plan_buckets(infos_of(trained), self._caps)
        sparse = sorted(sparse_names(self.module))
        if self._shard_optimizer:
            # imported here: few runs need it
            from lockstep.engines.ddp.owned_optimizer import OwnedOptimizers

            if sparse:
                raise MisconfigurationException(
                    f"{SHARDED} does not support the sparse gradients of {', '.join(sparse)}. Build the layers "
                    "with sparse=False, or omit shard_optimizer."
                )
            try:
                self._owned = OwnedOptimizers(optimizers)
            except ValueError as error:
                raise MisconfigurationException(f"{SHARDED}: {error}.") from None
        self._reducer = Reducer(
            named.items(),  # with frozen ones: the reducer notices when they are unfrozen
            bucket_cap_mb=self._bucket_cap_mb,
            gradient_as_bucket_view=self._views,
            plan=self._plan,
            static_graph=self._static_graph,
            sparse=sparse,
            shared_memory=self._shared_memory and self._hook is None,
        )
        self._listen(self._reducer)
        self.traffic = 0, 0
        self.waits_in = [(self._reducer, "_wait")]  # for sums in shared memory
        if self._hook is not None:
            self.copies.local_steps = self._hook.attach(
                self._reducer,
                self.module,
                optimizers,
                self.world.node_rank,
                scaler=self.precision.scaler,
                take_buffers=None if self.copies.buffers is None else partial(sync_buffers, self.module, None),
            )

    def _listen(self, reducer: Reducer) -> None:
        """Also reduce gradients after a ``loss.backward()`` that users call instead of ``manual_backward``."""
        if self.module.automatic_optimization or self.world.size == 1:
            return

        def reduce_at_end() -> None:
            share = 1.0 if self.by_hand is None else self.by_hand.share
            if share != 1.0:
                # Gradients that an earlier backward has reduced are the same on all ranks, and the shares add up to
                # the number of ranks: the mean leaves them as they are.
                grads = [p.grad for p in self.named_parameters().values() if p.grad is not None and p.requires_grad]
                with torch.no_grad():
                    torch._foreach_mul_(grads, float(share))
            self._begin_round(reducer, False)
            self._end_round(reducer)

        ends = BackwardEnds(reduce_at_end)

        def unprepared() -> None:
            if self.by_hand is not None and self.sync_gradients:
                if self._static_graph:
                    raise MisconfigurationException(RAW_BACKWARD.format(strategy=type(self).__name__))
                ends.schedule()

        reducer.on_unprepared_grad = unprepared

    def check_trained(self, replaced: bool = False) -> None:
        """Raise if a trained parameter is not reduced, even one that bypassed torch's registration hooks. Collective.

        Raises:
            MisconfigurationException: a parameter is not reduced, or optimizers were replaced under
                ``shard_optimizer``.
        """
        if replaced and self._shard_optimizer and self.world.size > 1:
            raise MisconfigurationException(
                f"The optimizers were replaced during a fit, which {type(self).__name__}(shard_optimizer=True) does "
                "not support, because optimizer states are divided among the ranks. Change the optimizers' "
                "param_groups instead, or omit shard_optimizer."
            )
        if self._late is not None:
            self._late.check_thoroughly(self.optimizers)

    @property
    def _local(self) -> CountedLocalSteps | None:
        """Object that counts this fit's local steps and averages the weights; None if the fit runs no local steps."""
        return self.copies.local_steps  # type: ignore[return-value]  # only `AttachableHook.attach` sets it

    def teardown(self) -> None:
        """Detach the reducer from the parameters. The optimizers can still be saved, by all ranks together."""
        super().teardown()
        self.copies.close()
        if self._reducer is not None:
            self._detach_reducer(self._reducer)
        if self._late is not None:
            self._late.close()
            self._late = None
        if self._hook is not None:
            self._hook.detach()

    def _detach_reducer(self, reducer: Reducer) -> None:
        self._plan = reducer.plan()
        reducer.detach()
        self._reducer, self.waits_in = None, []

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call the step method ``fn``. The first training forward of a window starts with rank 0's buffers."""
        if self._late is not None and torch.is_grad_enabled():
            self._late.check()
        if self.copies.buffers is not None and torch.is_grad_enabled():
            self.copies.forward_begins()
        if self.context is None:
            return fn(*args)
        with self.context():
            return fn(*args)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the backward, and reduce the buckets as they fill."""
        reducer = self._reducer
        assert reducer is not None
        self._begin_round(reducer, self.drops_gradients)
        if self._own_backward is not None:
            self._own_backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._end_round(reducer)

    def skip(self, absent: bool = False) -> None:
        """Skip this rank's backward of a micro-batch. If the window ends, still take part in the gradient reduction."""
        assert self._reducer is not None
        if self.sync_gradients:
            self._begin_round(self._reducer, absent)
            self._end_round(self._reducer)

    def _begin_round(self, reducer: Reducer, drops: bool) -> None:
        """Prepare the reducer for a backward. Only the last backward of an accumulation window reduces gradients."""
        reducer.sync, reducer.zero_weight = self.sync_gradients, drops
        if self.sync_gradients:
            if self._late is not None:
                self._late.check(reducer.frozen)
            if self._local is not None:
                self._local.round()
        reducer.prepare()

    def _end_round(self, reducer: Reducer) -> None:
        reducer.finish()
        if self.copies.buffers is not None:
            self.copies.backward_ends(self.sync_gradients)
        if self.sync_gradients:
            self.rounds, self.traffic = reducer.rounds, (reducer.collectives, reducer.bytes)
            if self._checks is not None and not self.copies.have_diverged:
                self._checks.remember()
                self._checks.compare("backward", [], None if self.by_hand is None else self.by_hand.number)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
        """Update the parameters of one optimizer; under local steps, average weights over the ranks if due."""
        result = super().step(optimizer, closure, **options)
        if self._local is not None:
            self._local.step()
        return result

    def held(self) -> dict[str, list[Tensor]]:
        """Return the model's tensors, the reducer's buckets and the hook's state, as lists of tensors by kind.

        Returns:
            the tensors themselves, of any shapes and dtypes, not copies.
        """
        held = super().held()
        held["buckets"] = [] if self._reducer is None else self._reducer.memory()
        held["hook_state"] = [] if self._hook is None else list(tensors_in(self._hook.state, 8))
        return held

    def __getstate__(self) -> dict[str, Any]:
        # a process group, and everything that uses it, belongs to its process
        state = kept(self, "_late", "_owned", "_reducer")
        return {**state, "waits_in": []}

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """Save the module, the optimizers and the state of the engine. Collective, unless ``alone``.

        If weights have diverged, the saved module is their mean over the ranks. The state of the engine consists of
        the bucket plan, on which sums over three and more ranks depend; the counter of averages and the outer
        optimizer; and each rank's state of the communication hook and, under local steps, its weights.
        """
        apart = self.copies.have_diverged and not alone
        with self.copies.one_model() if apart else contextlib.nullcontext():
            state = self._saved(alone, weights_only)
            if apart:  # these weights are dropped when the context ends
                module = state.module or {}
                state.module = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in module.items()}
        if weights_only:
            return state
        state.own = dict(state.own or {})
        plan = self._plan if self._reducer is None else self._reducer.plan()
        if plan is not None:
            state.own["plan"] = plan
        if self._local is not None:
            state.own["local steps"] = self._local.state_dict()
        state.by_rank = [] if self._hook is None else self._hook.rank_states(self._local, alone)
        return state

    def _saved(self, alone: bool, weights_only: bool) -> EngineState:
        if self._owned is None or self.world.size == 1 or weights_only:
            return super().save(alone, weights_only)
        from lockstep.engines.owners import union

        states: list[dict[str, Any] | None] | None = None
        if alone:
            log.warning(
                "This checkpoint, saved by one rank alone, contains weights but no optimizer states, because those are "
                "divided among the ranks (shard_optimizer=True). A fit can start with it, but cannot resume from it."
            )
        else:
            # rank 0 alone writes, and gets the ordinary states: any strategy and number of ranks can read them
            part_of = self._owned.part_of
            states = [by_parts(each, lambda part: union(gather_on_zero(part_of(part)))) for each in self.optimizers]
        return EngineState(self.module.state_dict(), states, self._other_parameters())

    def load(self, state: EngineState) -> None:
        """Restore the module, the optimizers, the bucket layout and this rank's state from a saved ``state``."""
        super().load(state)
        if state.own is None:
            return
        self._plan = state.own.get("plan")
        if self._reducer is not None and self._plan is not None:
            self._reducer.replan(self._plan)
        if self._local is not None and "local steps" in state.own:
            self._local.load_state_dict(state.own["local steps"])
        if self._hook is not None:
            self._hook.load_rank_states(self._local, state.by_rank, self.root_device)
