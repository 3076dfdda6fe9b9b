"""Reducer that averages gradients over ranks, in buckets, during the backward.

A reducer is attached to parameters, not to a module. The caller of the backward marks its start and its end.

    reducer = Reducer(model.named_parameters())
    for batch in batches:
        loss = model(batch)
        optimizer.zero_grad()
        reducer.prepare()
        loss.backward()
        reducer.finish()
        optimizer.step()

Terms: a *bucket* is a flat buffer that contains some gradients one after another; a parameter's ``.grad`` is a
*view* of it. *Used flags* mark the parameters that got a gradient. They are sent at the end of the buffer. If that is
impossible (a communication hook sees the buffer, sparse gradients have none), they are sent in one small message per
round. A *round* is one reduction of all buckets by a `lockstep.engines.ddp.transport.Transport`.

The path of a gradient: autograd stores it in ``.grad`` (the first one as it is; later ones are added to the view that
is then there) and calls the parameter's hook, which counts (`Reducer._make_hook`). The hook of a bucket's last
parameter launches the bucket (`Reducer._launch`): all of its gradients are copied to the buffer together
(`lockstep.engines.ddp.bucket.Bucket.collect`). The transport scales the buffer and sums it over the ranks: by an
all-reduce (`lockstep.engines.ddp.transport.AllReduce`), in shared memory of one host
(`lockstep.engines.ddp.shared_memory.SharedReduction`), or by another transport (`Reducer.use_transport`).
`Reducer.finish` waits, and gives each parameter its mean (`lockstep.engines.ddp.bucket.Bucket.give_back`).

Bits: two ranks get the bits of torch's ``DistributedDataParallel``, and those of one process that accumulates two
halves. For that, a missing gradient of a rank is -0.0, which leaves every summand as it is (0.0 would turn -0.0 into
0.0), and gradients are multiplied by 1 / world size before they are summed. With three and more ranks gloo's order of
summation depends on the bucket layout, so the layout (`Reducer.plan`) is part of a checkpoint. In shared memory the
ranks are summed in their order, whatever the layout.

Learning: the first backwards show if backwards nest; until then no bucket is launched before its backward has
ended. The first round shows in which order gradients arrive, and the buckets are rebuilt in that order, as rank 0 saw
it. With ``static_graph`` the first backwards are recorded as the pattern of all later ones, which then need only one
autograd hook per bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import ne
from threading import RLock
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import Parameter

from lockstep.engines.ddp.bucket import (
    Bucket,
    Plan,
    SparseBucket,
    distinct,
    fit_plan,
    in_order_of_arrival,
    infos_of,
    move_to_layout,
    plan_buckets,
)
from lockstep.engines.ddp.shared_memory import SharedReduction
from lockstep.engines.ddp.transport import AllReduce, RoundGroup, Transport, UsedParameters
from lockstep.ground import comm
from lockstep.ground.rank import does, waits

MIB = 2**20

NESTED = (
    "a parameter among {names} got another gradient after its bucket was reduced: this backward ran other backwards "
    "inside, unlike the first ones (checkpoint(use_reentrant=True)?). Use checkpoint(use_reentrant=False)"
)


class Reducer:
    """Reducer that averages the gradients of ``named_parameters`` over the ranks of a group.

    Call `prepare` before a backward and `finish` after it. Then every rank has the same gradients: those of the mean
    of the ranks' losses. A parameter that no rank used has ``.grad`` None. One that any rank used has its averaged
    gradient on all ranks, so unused parameters need no flag, and a rank whose loss touches no parameter blocks no
    other rank. Shared parameters, both kinds of gradient checkpointing, several backwards and both kinds of
    ``zero_grad`` are supported. With one rank and no hook, parameters are left alone.

    Every rank must construct it, and call `finish` equally often with `sync` on. A parameter that is unfrozen later
    (``requires_grad`` set) is added at the next `prepare`.

    Args:
        named_parameters: names and parameters in order of registration, the same on every rank
            (`lockstep.engines.ddp.consistency.check_same_module` checks that). Those without ``requires_grad`` wait.
        process_group: process group of the ranks; None: the default group, or this process alone if there is none.
        bucket_cap_mb: size of a bucket in MiB.
        first_bucket_mb: size in MiB of the bucket that is reduced last.
        gradient_as_bucket_view: let ``.grad`` be a view of the bucket. If False, gradients are tensors of
            their own, copied in and out, which costs a copy and the memory.
        plan: bucket layout of an earlier run (`plan`), to reproduce its bits with three and more ranks. It is used
            until a parameter is unfrozen. Without it the layout follows the order of the first gradients.
        static_graph: every backward gives gradients to the same parameters, equally often, in the same order.
            After the first backwards this needs one autograd hook per bucket, and no used flags are sent.
        sparse: names of parameters with sparse gradients.
        shared_memory: on one host, sum CPU tensors in memory that the ranks share instead of over TCP.
        transport: carries the buckets, instead of all-reduces.

    Attributes:
        group: process group of the ranks.
        buckets: buckets of the current layout, in the order in which they are launched.
        is_laid_out: True if the layout is final.
        sync: True if the next `finish` reduces. If False, gradients are accumulated on this rank until a round. Set it
            before `prepare` to let the reduction overlap the backward.
        zero_weight: for one backward, drop its gradients (an empty share of a batch) but keep accumulated ones.
        divisor: divisor of the sums over the ranks: the world size, unless it is set.
        on_unprepared_grad: called if a gradient arrives in a backward that was not prepared; it may `prepare` then.
        frozen: parameters that wait, since they require no gradients.
        lock: held by hooks inside a backward: autograd has a thread for each of a module's GPUs.
        round_group: the group of the last round; False if its gradients stayed local.
        rounds: number of completed rounds.
        collectives: number of reductions of buckets and of used flags so far.
        bytes: bytes that this rank passed to them (for a hook: before compression).

    Raises:
        ValueError: a parameter belongs to a lazy module that has not seen a batch, or the plan is another model's.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        process_group: comm.Group = None,
        *,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = True,
        plan: Plan | None = None,
        static_graph: bool = False,
        sparse: Collection[str] = (),
        shared_memory: bool = True,
        transport: Transport | None = None,
    ) -> None:
        if bucket_cap_mb <= 0 or first_bucket_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} and first_bucket_mb={first_bucket_mb} must be above 0")
        self.sync = True
        self.zero_weight = False
        self.on_unprepared_grad: Callable[[], None] | None = None
        self.rounds = 0
        self.collectives = 0
        self.bytes = 0
        self.group = process_group
        self._world = comm.world_size(process_group)
        self.divisor: float = self._world
        self._idle = self._world == 1 and transport is None
        self._views = gradient_as_bucket_view
        self._static = static_graph
        self._caps = [min(first_bucket_mb, bucket_cap_mb) * MIB, bucket_cap_mb * MIB]
        self._parameters = distinct(named_parameters)
        self.lock = lock_of(self._parameters.values())
        self._sparse = frozenset(sparse)
        self._wanted = plan
        self.buckets: list[Bucket] = []
        self._next = 0  # the next bucket to launch: they are launched in the same order on every rank
        self._prepared = False  # between `prepare` and `finish`
        self._started = False  # a backward has been prepared before
        self._early = False  # buckets are launched during this backward, as soon as they are complete
        self._scale = 1.0
        self._hooks: list[Any] = []
        self._hidden: list[tuple[Parameter, Tensor | None]] = []
        # Learned from the first backwards.
        self._nested = False  # a backward ran others inside
        self._learned = False  # it is known for each bucket whether backwards nest
        self._overlap = False  # buckets may be launched before the backward has ended
        self.is_laid_out = plan is not None  # else the buckets are rebuilt after the first round
        self._arrived: dict[str, int] = {}  # gradients of each parameter in this backward, in order of the last one
        self._tasks: set[int] = set()  # their graph tasks
        self._untouched: set[str] = set()  # parameters that no backward has reached in this layout
        self._probes: list[Any] = []  # autograd hooks that record all this
        self._recorded: StaticGraph | None = None
        self._group_of_round: RoundGroup = lambda: process_group
        self.round_group: comm.Group | Literal[False] = process_group
        self._transport = transport or choose_transport(self._parameters.values(), process_group, shared_memory)
        self._build()

    def use_transport(self, transport: Transport, round_group: RoundGroup | None = None) -> None:
        """Use ``transport``, for example that of a communication hook, to reduce buckets instead of all-reduces.

        Call it on every rank with the same kind of transport.

        Args:
            transport: carries the buckets; called even at world size 1.
            round_group: called once per round; returns the group whose ranks agree on used parameters. None is the
                reducer's group; False means that each rank keeps its own gradients.

        Raises:
            RuntimeError: the reducer has a hook already, or a backward was prepared.
        """
        if not self._transport.divides:
            raise RuntimeError("a communication hook is registered already, and only one hook can be registered")
        if self._started:
            raise RuntimeError("register_comm_hook must be called before the first backward")
        self._transport.close()
        self._idle = False
        if round_group is not None:
            self._group_of_round = round_group
        self._transport = transport
        self._build()

    # -- layout

    def plan(self) -> Plan:
        """Return the bucket layout for a checkpoint: a list of parameter names for each bucket."""
        return [list(bucket) for bucket in self._plan]

    def memory(self) -> list[Tensor]:
        """Return the buffers of this rank's buckets."""
        return [bucket.flat for bucket in self.buckets]

    def replan(self, plan: Plan | None) -> None:
        """Change the bucket layout to ``plan``, the same on all ranks. Call between `finish` and the next `prepare`.

        Accumulated gradients do not change.
        """
        assert not self._prepared, "replan between prepare and finish"
        self._wanted = plan
        self.is_laid_out = plan is not None
        self._build()

    def _build(self) -> None:
        """Build the buckets for parameters that require gradients now, or required them earlier."""
        # parameters may be frozen only for a while, as in a GAN
        placed = {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad or id(p) in placed}
        self.frozen = [p for name, p in self._parameters.items() if name not in trained]
        infos = infos_of((name, p) for name, p in trained.items() if name not in self._sparse)
        if self._wanted is None:
            dense = plan_buckets(infos, self._caps)
        else:
            wanted = [[name for name in bucket if name not in self._sparse] for bucket in self._wanted]
            dense = fit_plan(wanted, infos, self._caps, frozen=self._parameters)
        # sparse gradients are sent one by one
        self._plan = dense + [[name] for name in trained if name in self._sparse]
        if self._idle:
            return
        self._remove_hooks()
        self._fill_buckets(trained)
        self._recorded = None
        self._overlap, self._learned = False, self._nested
        self._untouched = {name for bucket in self._plan for name in bucket}
        self._add_hooks()

    def _fill_buckets(self, trained: dict[str, Parameter]) -> None:
        """Create the buckets of the plan, with buffers from the transport."""
        for _ in range(2):  # again with all-reduces if the host has too little shared memory
            self._inline = self._transport.inline_used and not self._sparse and not self._static
            made: list[Bucket] = []
            for index, names in enumerate(self._plan):
                kind = SparseBucket if names[0] in self._sparse else Bucket
                parameters = [trained[name] for name in names]
                made.append(kind(index, names, parameters, self._inline, self._transport.alignment))
            buffers = self._transport.buffers([bucket.size for bucket in made])
            if buffers is not None:
                break
            self._transport.close()
            self._transport = AllReduce(self.group)
        assert buffers is not None
        before, self.buckets = self.buckets, made
        move_to_layout(before, made, buffers)
        for bucket in made:
            bucket.waiting.clear()  # outside of prepare and finish each gradient completes its bucket: see `_complete`
            bucket.warns_of_aliases = self._transport.divides  # False for hooks

    def _add_hooks(self) -> None:
        listen = PassingHook if self._static else Parameter.register_post_accumulate_grad_hook
        for bucket in self.buckets:
            for index, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
                is_frozen = not parameter.requires_grad  # for a while: torch then accepts no hook
                parameter.requires_grad_(True)
                if self._is_learning():
                    self._probes.append(listen(parameter, partial(self._probe, name)))
                self._hooks.append(listen(parameter, under_lock(self.lock, self._make_hook(bucket, index))))
                parameter.requires_grad_(not is_frozen)

    def detach(self) -> None:
        """Remove the autograd hooks, so that later gradients are not reduced. Existing gradients do not change."""
        self._remove_hooks()
        self._transport.close()
        self.buckets = []
        self._idle = True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._drop_probes()

    # -- a round

    def prepare(self) -> None:
        """Prepare the buckets for the gradients of the next backward.

        Raises:
            RuntimeError: the last backward did not reach `finish`.
        """
        if self._idle:
            if self.zero_weight:
                self._hide(self._parameters.values())
            return
        if self._next:
            raise RuntimeError(
                "the last backward ended before its gradients were reduced (did it raise?), and the ranks may now be "
                "at different points of training. Restart from a checkpoint"
            )
        if self.frozen and any(parameter.requires_grad for parameter in self.frozen):
            # in buckets of their own after the others, until a round shows when their gradients arrive; the same in a
            # run whose layout is from a checkpoint
            self._wanted, self.is_laid_out = self._plan, False
            self._build()
        self._prepared = self._started = self._started or move_last(self._hooks)
        self._arrived.clear()
        early = self._early = self.sync and self._overlap
        self._scale = 1 / self.divisor if self._transport.divides else 1.0
        record = self._recorded
        if record is None:
            for bucket in self.buckets:
                bucket.arm(self._views, early)
                if early:
                    bucket.skip_frozen()
        else:
            for bucket in self.buckets:
                bucket.arm(self._views, False)
            record.arm(early)
        if self.zero_weight:
            for bucket in self.buckets:
                bucket.hide()

    @waits("reducing gradients in backward")
    def finish(self) -> None:
        """Reduce remaining gradients after a backward, and wait for all reductions. Without `sync`, only clean up."""
        if self._idle:
            if self.zero_weight:
                self._show()
            self.rounds += self.sync
            return
        assert self._prepared, "finish without prepare"
        self._early = False
        if self._probes:
            self._conclude()
        anywhere: list[Sequence[Any] | None] = [None] * len(self.buckets)
        settled = False
        early = self.buckets[: self._next] if self.sync else self.buckets
        if self.sync:
            for bucket in self.buckets[self._next :]:
                self._launch(bucket)
            anywhere, settled = self._wait()
            self._next = 0
            self.rounds += 1
        if self._recorded is not None and not self.zero_weight:
            for bucket in early:  # the others were just checked
                self._recorded.check(bucket)
        for bucket, used in zip(self.buckets, anywhere, strict=True):
            bucket.show()
            bucket.give_back(self._views, used)
            bucket.waiting.clear()
        self._prepared = False
        if settled:
            self._record_graph(anywhere)
        elif self.sync and not self.is_laid_out:
            self._remake()
        self.zero_weight = False

    def _wait(self) -> tuple[list[Sequence[Any] | None], bool]:
        """Wait for all buckets. Return (flags of used parameters, True if all ranks can record a static graph)."""
        message = None
        group = self.round_group if self._recorded is None and not self._inline else False
        if group is not False:
            self._transport.flush()
            willing = self._static and not self.zero_weight and bool(self._arrived)
            message = UsedParameters(self.buckets, willing, group, self._arrived, self.buckets[0].device)
            self.collectives += message.work is not None
            self.bytes += message.nbytes
        for bucket in self.buckets:
            self._transport.wait(bucket)
            bucket.work = None
        if message is not None:
            return message.wait()
        if self._recorded is not None:
            return list(self._recorded.anywhere), False
        if self._inline:
            return [bucket.used_anywhere() for bucket in self.buckets], False
        return [bytes(bucket.used) for bucket in self.buckets], False

    def missing(self) -> list[str]:
        """Return the names of parameters whose gradients the last backward did not reduce, or [] after `finish`."""
        if not self._prepared:
            return []
        return [name for bucket in self.buckets[self._next :] for name in bucket.names]

    def _hide(self, parameters: Iterable[Parameter]) -> None:
        self._hidden = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []
        self.zero_weight = False

    # -- inside the backward

    def _make_hook(self, bucket: Bucket, index: int) -> Callable[[Parameter], None]:
        waiting, complete = bucket.waiting, self._complete

        def accumulated(parameter: Tensor) -> None:
            if not parameter.requires_grad:  # frozen since its forward: torch calls its hooks without a gradient
                return
            if bucket.saved is not None:
                parameter.grad = None  # zero_weight: freed at once
            waiting.discard(index)
            if not waiting:
                complete(bucket)

        return accumulated

    def _complete(self, bucket: Bucket) -> None:
        if not self._prepared:
            if self.on_unprepared_grad is not None:
                self.on_unprepared_grad()
            return
        if bucket.work is not None:
            raise RuntimeError(NESTED.format(names=bucket.names))
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        if bucket.index == 0:  # before the hook is called, which counts its rounds
            self.round_group = self._group_of_round()
        record = None if self.zero_weight else self._recorded
        scale = bucket.collect(self._views, self._scale)
        if record is not None:
            record.launched(bucket, self._early)
        self._next = bucket.index + 1
        self.collectives += 1
        self.bytes += bucket.nbytes
        bucket.work = True  # until the transport sets its own
        self._transport.start(bucket, scale)

    # -- learning. A re-entrant checkpoint runs a backward inside the backward. A parameter that several of them use
    #    gets a gradient from each: its bucket is complete only when the outermost backward has ended.

    def _is_learning(self) -> bool:
        return not (self._learned and self.is_laid_out) or self._static

    def _probe(self, name: str, parameter: Tensor) -> None:
        self._tasks.add(torch._C._current_graph_task_id())
        if parameter.requires_grad:  # else frozen since its forward: see `_make_hook`
            self._arrived[name] = self._arrived.pop(name, 0) + 1

    @does("reducing gradients in backward")
    def _conclude(self) -> None:
        """Let reductions start during backwards if every bucket has received a gradient and no backwards are nested."""
        self._nested = self._nested or len(self._tasks) > 1
        self._tasks.clear()
        self._untouched.difference_update(self._arrived)
        self._learned = self._nested or not any(self._untouched.issuperset(names) for names in self._plan)
        self._overlap = self._learned and not self._nested
        if not self._is_learning():
            self._drop_probes()

    def _drop_probes(self) -> None:
        for probe in self._probes:
            probe.remove()
        self._probes = []

    def _remake(self) -> None:
        """Rebuild the buckets in the order in which gradients arrived on rank 0."""
        order = comm.broadcast_object(list(self._arrived), 0, self.group)
        present = {name for bucket in self._plan for name in bucket} - self._sparse
        infos = infos_of((name, p) for name, p in self._parameters.items() if name in present)
        plan = plan_buckets(in_order_of_arrival(infos, order), self._caps)
        plan += [bucket for bucket in self._plan if bucket[0] in self._sparse]
        self._wanted, self.is_laid_out = plan, True
        if plan != self._plan:
            self._plan = plan
            self._remove_hooks()
            self._fill_buckets(self._parameters)
            self._add_hooks()
        elif not self._is_learning():
            self._drop_probes()

    def _record_graph(self, anywhere: Sequence[Sequence[Any] | None]) -> None:
        """Record which gradients arrived in this backward as the pattern of all later backwards."""
        # without gradients of earlier backwards in the window: a parameter that was frozen since then, or replaced by
        # another, has one in this round only
        used = {
            name: flag == UsedParameters.ARRIVED
            for bucket, found in zip(self.buckets, anywhere, strict=True)
            for name, flag in zip(bucket.names, found or (), strict=True)
        }
        if not self.is_laid_out:
            self._remake()
        self._remove_hooks()
        by_bucket = [[used[name] for name in bucket.names] for bucket in self.buckets]
        self._recorded = StaticGraph(self.buckets, self._arrived, by_bucket, self._complete, self._views, self.lock)
        self._hooks = self._recorded.hooks
        self._overlap = True


def choose_transport(parameters: Iterable[Tensor], group: comm.Group, shared_memory: bool) -> Transport:
    """Return the transport that sums gradients over ``group``: all-reduces, or shared memory.

    Args:
        parameters: the parameters whose gradients are summed.
        group: process group of the ranks; all of them call this function.
        shared_memory: use shared memory if all ranks are on one host and all parameters on the CPU.
    """
    if shared_memory and comm.world_size(group) > 1 and all(p.device.type == "cpu" for p in parameters):
        shared = SharedReduction.open(group)
        if shared is not None:
            return shared
    return AllReduce(group)


class BackwardEnds:
    """Scheduler that calls ``ended`` once at the end of each backward in which `schedule` was called."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._task = -1  # the latest graph task

    def schedule(self) -> None:
        """Make autograd call ``ended`` once at the end of the running backward."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._ended)


# -- static graphs -------------------------------------------------------------------------------------------


BROKEN = (
    "Your training graph has changed in this iteration: with static_graph=True, parameter {name!r} {what}. Every "
    "backward must compute gradients of the same parameters in the same order; otherwise use static_graph=False"
)
EARLY = "had no gradient yet when its bucket was about to be reduced, unlike in the first backwards"
LACKING = "got no gradient, unlike in the first backwards"

Lock: TypeAlias = "AbstractContextManager[Any]"


def lock_of(parameters: Iterable[Tensor]) -> Lock:
    """Return the lock under which hooks of ``parameters`` run, so that buckets are launched one by one and in order.

    Autograd has a thread for each GPU of a module. With one device no lock is needed.
    """
    return RLock() if len({parameter.device for parameter in parameters}) > 1 else nullcontext()


def under_lock(lock: Lock, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``hook`` so that it runs under ``lock``; return it unchanged if ``lock`` is a ``nullcontext``."""
    if isinstance(lock, nullcontext):
        return hook

    def alone(parameter: Tensor) -> None:
        with lock:
            hook(parameter)

    return alone


class PassingHook:
    """Removable hook that autograd calls each time it has accumulated a gradient into a parameter's ``.grad``.

    After the last ``register_post_accumulate_grad_hook`` was removed, a tensor still looks for hooks (0.25 us each).
    This hook is on the graph node that adds the gradient, which is deleted with its last reference.
    """

    def __init__(self, parameter: Parameter, hook: Callable[[Any], None]) -> None:
        self._node: Any = get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(lambda inputs, outputs: hook(parameter))

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


def move_last(hooks: Iterable[Any]) -> bool:
    """Move ``hooks`` after all hooks that were registered later, because these may change gradients. Return True."""
    for hook in hooks:
        if not isinstance(hook, PassingHook):  # it runs after them anyway
            registered = hook.hooks_dict_ref()
            registered[hook.id] = registered.pop(hook.id)
    return True


class StaticGraph:
    """Recorded pattern of a static graph: which parameters get gradients, and which gradient completes each bucket.

    One autograd hook per bucket, on the parameter whose gradient arrived last, replaces one hook per parameter. The
    version counters of tensors show whether the other gradients have arrived. The last bucket, with no backward left to
    overlap, is checked once, after the backward; each other bucket is checked twice.

    Args:
        buckets: buckets of the final layout.
        arrived: parameter name -> number of gradients in the recorded backward, sorted by the last arrival.
        anywhere: for each bucket, flags of the parameters that got a gradient on any rank in the recorded backward.
        complete: called with a bucket when its gradients are complete.
        views: True if gradients are views of the buckets.
        lock: result of `lock_of`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        arrived: Mapping[str, int],
        anywhere: Sequence[Sequence[Any]],
        complete: Callable[[Bucket], None],
        views: bool,
        lock: Lock,
    ) -> None:
        self.anywhere = anywhere
        self.hooks: list[Any] = []
        self._buckets = buckets
        self._complete = complete
        self._views = views
        self._expected = [bytes(name in arrived for name in bucket.names) for bucket in buckets]
        moments = {name: moment for moment, name in enumerate(arrived)}
        self._closing: list[str | None] = []
        self._times: list[int] = []
        self._remaining = [0] * len(buckets)
        self._before: list[list[Any] | None] = [None for _ in buckets]  # None: no gradients
        self._at_launch: list[list[Any] | None] = [None] * len(buckets)
        for bucket in buckets:
            arriving = [name for name in bucket.names if name in moments]
            closing = max(arriving, key=moments.__getitem__) if arriving else None
            self._closing.append(closing)
            self._times.append(arrived[closing] if closing is not None else 0)
            if closing is not None:
                parameter = bucket.parameters[bucket.names.index(closing)]
                hook = under_lock(lock, self._make_hook(bucket))
                is_frozen = not parameter.requires_grad  # since the backward: torch then accepts no hook
                parameter.requires_grad_(True)
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(not is_frozen)

    def _make_hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        remaining, index, waiting, complete = self._remaining, bucket.index, bucket.waiting, self._complete

        def accumulated(parameter: Tensor) -> None:
            remaining[index] -= 1
            if remaining[index] == 0 and 0 in waiting:
                waiting.clear()
                complete(bucket)
            elif remaining[index] < 0 and not waiting:  # outside of a prepared backward
                complete(bucket)

        return accumulated

    def arm(self, early: bool) -> None:
        """Reset the counts of gradients that have yet to arrive, for a backward whose buckets are prepared."""
        self._remaining[:] = self._times
        for index, bucket in enumerate(self._buckets):
            self._at_launch[index] = None
            self._before[index] = None if bucket.fresh else self._states(bucket)
            if early and bucket is not self._buckets[-1]:
                bucket.waiting.clear()
                if self._closing[index] is not None:
                    bucket.waiting.add(0)

    def launched(self, bucket: Bucket, early: bool) -> None:
        """Check that all gradients of a bucket have arrived when it is launched (``early``: during the backward).

        Raises:
            RuntimeError: the parameters with gradients are not those of the recorded backward.
        """
        self._compare(bucket, EARLY if early else LACKING)
        self._at_launch[bucket.index] = self._places(bucket)

    def check(self, bucket: Bucket) -> None:
        """Check after the backward that a bucket got the recorded gradients, and none after its launch.

        Raises:
            RuntimeError: the backward differs from the recorded one.
        """
        launched = self._at_launch[bucket.index]
        if launched is None:
            bucket.used[:] = bytes([parameter.grad is not None for parameter in bucket.parameters])
            self._compare(bucket, LACKING)
            return
        now = self._places(bucket)
        if now != launched:
            late = next(i for i, (a, b) in enumerate(zip(now, launched, strict=True)) if a != b)
            raise RuntimeError(
                BROKEN.format(name=bucket.names[late], what="got another gradient after its bucket was reduced")
            )

    def _compare(self, bucket: Bucket, lacking: str) -> None:
        expected, before = self._expected[bucket.index], self._before[bucket.index]
        arrived = bytes(bucket.used) if before is None else bytes(map(ne, self._states(bucket), before))
        if arrived != expected:
            index = next(i for i, (a, b) in enumerate(zip(arrived, expected, strict=True)) if a != b)
            what = "got a gradient, unlike in the first backwards" if arrived[index] else lacking
            raise RuntimeError(BROKEN.format(name=bucket.names[index], what=what))

    def _states(self, bucket: Bucket) -> list[Any]:
        """Return the identity and version of each gradient, which change when a gradient arrives."""
        return [_state(parameter) for parameter in bucket.parameters]

    def _places(self, bucket: Bucket) -> list[Any]:
        """Return values that change whenever a gradient of ``bucket`` changes, in the buffer or in ``.grad``."""
        return [v._version for v in bucket.views] if self._views and bucket.views else self._states(bucket)


def _state(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)
