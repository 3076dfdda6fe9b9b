"""The reducer: averages gradients over ranks, in buckets, while backward still runs.

Attached to parameters, not to a module: whoever runs the backward says when it begins and when it has ended.

    reducer = Reducer(model.named_parameters())
    for batch in batches:
        loss = model(batch)
        optimizer.zero_grad()
        reducer.prepare()
        loss.backward()
        reducer.finish()
        optimizer.step()

Words: a *bucket* is a flat buffer in which some gradients lie one after another; a parameter's ``.grad`` is a
*view* of it. *Marks* say which parameters were *used* (got a gradient); they travel at the buffer's end, or,
where that cannot be (a communication hook sees the buffer, sparse gradients have none), in one small message a
round. A *round* is one reduction of all buckets; a `lockstep.parallel.transport.Transport` makes it.

Bits: two ranks get those of torch's ``DistributedDataParallel``, and of one process that accumulates two
halves. For that, fresh buffers are filled with -0.0, which leaves every summand as it is (0.0 would turn -0.0
into 0.0), and gradients are multiplied by 1 / world size before they are summed. With three and more ranks gloo
sums in an order that moves with the bucket layout, so the layout (`Reducer.plan`) is part of a checkpoint; in
shared memory ranks are summed in their order, whatever the layout.

Learning: the first backwards show whether backwards nest (until then no bucket travels before its backward has
ended), and the first round in which order gradients come: buckets are laid out anew by it, as rank 0 saw it.
With ``static_graph`` they show what every later backward does, so that one autograd hook a bucket is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.parallel.bucket import (
    Bucket,
    Plan,
    SparseBucket,
    distinct,
    fit_plan,
    in_order_of_arrival,
    infos_of,
    plan_buckets,
)
from lockstep.parallel.shared_memory import SharedReduction
from lockstep.parallel.static_graph import PassingHook, Record, come_last, in_turn, turn_of
from lockstep.parallel.transport import AllReduce, Transport
from lockstep.parallel.used_parameters import Marks

MIB = 2**20

NESTED = (
    "a parameter of {names} got another gradient after its bucket was reduced: this backward ran others inside, unlike "
    "the first ones (checkpoint(use_reentrant=True)?); use_reentrant=False does not"
)

MarksGroup = Callable[[], "comm.Group | Literal[False]"]


class Reducer:
    """Averages the gradients of ``named_parameters`` over the ranks of a group.

    Before a backward `prepare`, after it `finish`: then every rank has the same gradients, those of the mean
    of the ranks' losses. A parameter that no rank used has ``.grad`` None, one that any rank used has its
    averaged gradient on all of them: unused parameters need no flag, and a rank whose loss touches no
    parameter at all holds up nobody. Shared parameters, gradient checkpointing of both kinds, several
    backwards and ``zero_grad`` of both kinds are fine. With one rank and no hook, parameters are left alone.

    Every rank must construct it, and call `finish` equally often with `sync` on. A parameter that is thawed
    later (``requires_grad`` set) is taken in at the next `prepare`.

    Args:
        named_parameters: names and parameters in order of registration, the same on every rank
            (`lockstep.parallel.ddp.check_same_module` makes sure of it). Those without ``requires_grad``
            wait.
        process_group: the ranks; ``None`` is the default group, or this process alone if there is none.
        bucket_cap_mb: size of a bucket in MiB.
        first_bucket_mb: size in MiB of the bucket that is reduced last.
        gradient_as_bucket_view: let ``.grad`` be a view of the bucket. If False, gradients are tensors of
            their own, copied in and out, at the price of a copy and of the memory.
        plan: bucket layout of an earlier run (`plan`), to get its bits with three and more ranks. It is kept
            until a parameter thaws; without it the layout follows the order in which the first gradients come.
        static_graph: every backward gives gradients to the same parameters, equally often, in the same order:
            after the first ones this costs one autograd hook a bucket, and no marks travel.
        sparse: names of parameters whose gradients are sparse.
        shared_memory: on one host, let CPU tensors be summed in memory that the ranks share, not over TCP.
        transport: what carries the buckets, in place of all-reduces.

    Attributes:
        sync: whether the next `finish` reduces. False accumulates: what this rank adds up stays here until a
            round. Set it before `prepare` to have the reduction overlap the backward.
        muted: for one backward, drop what it makes (an empty share of a batch); what was accumulated before counts.
        undefined: for one backward, look who really gets a gradient: autograd may visit parameters with none.
        divisor: what sums over the ranks are divided by: the world size, unless somebody sets it.
        stray: called, inside a backward that was not prepared, when a gradient comes; it may `prepare` then.
        finds_thawed: whether each `prepare` looks for parameters that have thawed; else somebody calls `take_in` then.
        frozen: parameters that wait, as they require no gradients.
        turn: held by what happens inside a backward: autograd has a thread for each of a module's GPUs.
        over: the group of the last round; False: its gradients stayed where they were.
        rounds: completed rounds.
        collectives: reductions of buckets and of marks so far.
        bytes: bytes that this rank handed to them (to a hook: the uncompressed ones).

    Raises:
        ValueError: for parameters of a lazy module that has not seen a batch, or a plan of another model.
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
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb}, first_bucket_mb={first_bucket_mb}: sizes above 0")
        self.sync = True
        self.muted = False
        self.undefined = False
        self.stray: Callable[[], None] | None = None
        self.finds_thawed = True
        self.rounds = 0
        self.collectives = 0
        self.bytes = 0
        self._group = process_group
        self._world = comm.world_size(process_group)
        self.divisor: float = self._world
        self._idle = self._world == 1 and transport is None
        self._views = gradient_as_bucket_view
        self._static = static_graph
        self._limits = (bucket_cap_mb * MIB, min(first_bucket_mb, bucket_cap_mb) * MIB)
        self._parameters = distinct(named_parameters)
        self.turn = turn_of(self._parameters.values())
        self._sparse = frozenset(sparse)
        self._wanted = plan
        self._buckets: list[Bucket] = []
        self._next = 0  # buckets are launched in order, alike on every rank; this one comes next
        self._armed = self._started = self._pours = False
        self._scale = 1.0
        self._hooks: list[Any] = []
        self._hidden: list[tuple[Parameter, Tensor | None]] = []
        # What the first backwards teach.
        self._overlap = self._nested = self._learned = False
        self._remade = plan is not None
        self._arrived: dict[str, int] = {}  # how often, in the order of the last time in this backward
        self._tasks: set[int] = set()
        self._untouched: set[str] = set()
        self._probes: list[Any] = []
        self._record: Record | None = None
        self._marks_group: MarksGroup = lambda: process_group
        self.over: comm.Group | Literal[False] = process_group
        self._transport = transport or self._choose_transport(shared_memory)
        self._build()

    def _choose_transport(self, shared_memory: bool) -> Transport:
        on_cpu = all(p.device.type == "cpu" for p in self._parameters.values())
        if shared_memory and on_cpu and self._world > 1:
            shared = SharedReduction.open(self._group)
            if shared is not None:
                return shared
        return AllReduce(self._group)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any], marks: MarksGroup | None = None) -> None:
        """Let ``hook`` reduce the buckets, before the first `prepare`, alike on every rank.

        Args:
            state: the hook's first argument.
            hook: ``(state, bucket) -> Future``; the bucket is a `lockstep.parallel.grad_bucket.GradBucket`, whose
                gradients are not divided by anything; the future holds what takes the buffer's place.
            marks: asked once a round for the group over which it is agreed who used which parameters: None is
                the reducer's group, False leaves it to each rank (steps that reduce nothing).

        Raises:
            RuntimeError: if there is a hook, or a backward was prepared.
        """
        if not self._transport.divides:
            raise RuntimeError("register_comm_hook: there is a hook already; a reducer takes one, and only once")
        if self._started:
            raise RuntimeError("register_comm_hook: register the hook before the first backward")
        from lockstep.parallel.hook_transport import Hooked  # with all hooks behind it: most runs have none

        self._transport.close()
        self._idle = False
        if marks is not None:
            self._marks_group = marks
        self._transport = Hooked(self._group, state, hook, lambda: self._buckets, lambda: self.over)
        self._build()

    # -- layout

    def plan(self) -> Plan:
        """The bucket layout, by parameter names: part of a checkpoint."""
        return [list(bucket) for bucket in self._plan]

    def replan(self, plan: Plan | None) -> None:
        """Take another layout, the same on every rank, between a `finish` and the next `prepare`.

        Gradients that were accumulated are kept.
        """
        assert not self._armed, "replan between prepare and finish"
        self._wanted = plan
        self._remade = plan is not None
        self._build()

    def lacks(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether these are others than those that are reduced, or one of them has thawed."""
        own = {name: id(parameter) for name, parameter in self._parameters.items()}
        if own != {name: id(parameter) for name, parameter in distinct(parameters.items()).items()}:
            return True
        return any(parameter.requires_grad for parameter in self.frozen)

    def take_in(self, named_parameters: Iterable[tuple[str, Parameter]], sparse: Collection[str] = ()) -> None:
        """Reduce these parameters from now on, alike on every rank, between a `finish` and the next `prepare`.

        Gradients that were accumulated are kept. What is new gets buckets of its own behind the others, until a round
        shows when its gradients come.
        """
        assert not self._armed, "take_in between prepare and finish"
        before, self._parameters = self._parameters, distinct(named_parameters)
        self._sparse = frozenset(sparse)
        self.turn = turn_of(self._parameters.values())
        stays = {name for name, parameter in self._parameters.items() if before.get(name) is parameter}
        plan = [[name for name in bucket if name in stays] for bucket in self._plan]
        self._wanted, self._remade = [bucket for bucket in plan if bucket], False
        self._build()

    def _build(self) -> None:
        """Lay out the buckets for the parameters that require gradients now, or did so before."""
        # switched off for a while, as in a GAN
        placed = {id(parameter) for bucket in self._buckets for parameter in bucket.parameters}
        awake = {name: p for name, p in self._parameters.items() if p.requires_grad or id(p) in placed}
        self.frozen = [p for name, p in self._parameters.items() if name not in awake]
        infos = infos_of((name, p) for name, p in awake.items() if name not in self._sparse)
        if self._wanted is None:
            self._plan = plan_buckets(infos, *self._limits)
        else:
            dense = [[name for name in bucket if name not in self._sparse] for bucket in self._wanted]
            self._plan = fit_plan(dense, infos, *self._limits, frozen=self._parameters)
        self._plan += [[name] for name in awake if name in self._sparse]
        if self._idle:
            return
        self._remove_hooks()
        self._fill_buckets(awake)
        self._record = None
        self._overlap, self._learned = False, self._nested
        self._untouched = {name for bucket in self._plan for name in bucket}
        self._add_hooks()

    def _fill_buckets(self, awake: dict[str, Parameter]) -> None:
        """Make the buckets of the plan, with memory from the transport."""
        for _ in range(2):
            self._inline = self._transport.inline_marks and not self._sparse and not self._static
            made: list[Bucket] = []
            for index, names in enumerate(self._plan):
                kind = SparseBucket if names[0] in self._sparse else Bucket
                parameters = [awake[name] for name in names]
                made.append(kind(index, names, parameters, self._inline, self._transport.alignment))
            buffers = self._transport.buffers([bucket.size for bucket in made])
            if buffers is not None:
                break
            self._transport.close()
            self._transport = AllReduce(self._group)
        assert buffers is not None
        for bucket, flat in zip(made, buffers, strict=True):
            bucket.lay_out(flat)
            bucket.waiting.clear()  # outside of prepare and finish each gradient completes: see `_complete`
        self._buckets = made

    def _add_hooks(self) -> None:
        listen = PassingHook if self._static else Parameter.register_post_accumulate_grad_hook
        for bucket in self._buckets:
            for index, (name, parameter) in enumerate(zip(bucket.names, bucket.parameters, strict=True)):
                asleep = not parameter.requires_grad  # switched off for a while: torch takes no hook then
                parameter.requires_grad_(True)
                if self._is_learning():
                    self._probes.append(listen(parameter, partial(self._probe, name)))
                self._hooks.append(listen(parameter, in_turn(self.turn, self._make_hook(bucket, index))))
                parameter.requires_grad_(not asleep)

    def detach(self) -> None:
        """Remove the autograd hooks. Gradients stay as they are; they are no longer reduced."""
        self._remove_hooks()
        self._transport.close()
        self._buckets = []
        self._idle = True

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._drop_probes()

    # -- a round

    def prepare(self) -> None:
        """Just before a backward: let its gradients fall into the buckets.

        Raises:
            RuntimeError: if the last backward did not reach `finish`.
        """
        if self._idle:
            if self.muted:
                self._hide(self._parameters.values())
            return
        if self._next:
            raise RuntimeError(
                "the last backward ended before its gradients were reduced (did it raise?): ranks no longer "
                "agree on what comes next; start again from a checkpoint"
            )
        if self.frozen and self.finds_thawed and any(parameter.requires_grad for parameter in self.frozen):
            # in buckets of their own behind the others, until a round shows when their gradients come; alike in a run
            # that got its layout from a checkpoint
            self._wanted, self._remade = self._plan, False
            self._build()
        self._armed = self._started = self._started or come_last(self._hooks)
        self._arrived.clear()
        early = self.sync and self._overlap and not self.undefined
        self._pours = early  # where gradients come once each, they can be scaled as they come
        self._scale = 1 / self.divisor if self._transport.divides else 1.0
        record = self._record
        views = self._views and not self.undefined
        self.undefined = False
        for bucket in self._buckets:
            bucket.arm(views, early and record is None)
            if early and record is None:
                bucket.skip_frozen()
        if record is not None:
            record.arm(early)
        if self.muted:
            for bucket in self._buckets:
                bucket.hide()

    def finish(self) -> None:
        """After a backward: reduce what is not yet reduced, and wait. With `sync` off, only tidy up."""
        if self._idle:
            if self.muted:
                self._show()
            self.rounds += self.sync
            return
        assert self._armed, "finish without prepare"
        self._pours = False
        if self._probes:
            self._conclude()
        anywhere: list[Sequence[Any] | None] = [None] * len(self._buckets)
        settled = False
        early = self._buckets[: self._next] if self.sync else self._buckets
        if self.sync:
            for bucket in self._buckets[self._next :]:
                self._launch(bucket)
            anywhere, settled = self._wait()
            self._next = 0
            self.rounds += 1
        if self._record is not None and not self.muted:
            for bucket in early:  # the others were just looked at
                self._record.check(bucket)
        for bucket, marks in zip(self._buckets, anywhere, strict=True):
            bucket.show()
            bucket.give_back(self._views, marks)
            bucket.waiting.clear()
        self._armed = False
        if settled:
            self._start_record(anywhere)
        elif self.sync and not self._remade:
            self._remake()
        self.muted = False

    def _wait(self) -> tuple[list[Sequence[Any] | None], bool]:
        """Wait for all buckets: who got a gradient on any rank, and whether all ranks can start a record."""
        message = None
        group = self.over if self._record is None and not self._inline else False
        if group is not False:
            self._transport.flush()
            willing = self._static and not self.muted and bool(self._arrived)
            message = Marks(self._buckets, willing, group)
            self.collectives += message.work is not None
            self.bytes += message.nbytes
        for bucket in self._buckets:
            self._transport.wait(bucket)
            bucket.work = None
        if message is not None:
            return message.wait()
        if self._record is not None:
            return list(self._record.anywhere), False
        if self._inline:
            return [bucket.used_anywhere() for bucket in self._buckets], False
        return [bytes(bucket.used) for bucket in self._buckets], False

    def missing(self) -> list[str]:
        """The parameters whose gradients the last backward left unreduced, by name; none after a `finish`."""
        if not self._armed:
            return []
        return [name for bucket in self._buckets[self._next :] for name in bucket.names]

    def _hide(self, parameters: Iterable[Parameter]) -> None:
        self._hidden = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show(self) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden = []
        self.muted = False

    # -- inside the backward

    def _make_hook(self, bucket: Bucket, index: int) -> Callable[[Parameter], None]:
        used, waiting, complete = bucket.used, bucket.waiting, self._complete

        def accumulated(parameter: Tensor) -> None:
            if not parameter.requires_grad:  # frozen since its forward: torch calls its hooks, and leaves no gradient
                return
            if bucket.kept is None:
                used[index] = 1
            else:
                parameter.grad = None  # muted: not kept longer than it takes
            waiting.discard(index)
            if not waiting:
                complete(bucket)

        if index not in bucket.big or not self._views:
            return accumulated
        view, poured = bucket.views[index], bucket.poured

        def accumulated_big(parameter: Tensor) -> None:
            if not parameter.requires_grad:
                return
            if self._pours and bucket.kept is None:
                if index in poured:
                    raise RuntimeError(NESTED.format(names=[bucket.names[index]]))
                grad = parameter.grad
                if grad is not view and grad is not None:  # None: a Function's backward, further up, gave nothing
                    torch.mul(grad.detach() if grad.requires_grad else grad, bucket.scalar(self._scale), out=view)
                    parameter.grad = view
                    poured.add(index)
                used[index] = grad is not None
            elif bucket.kept is None:
                used[index] = 1
            else:
                parameter.grad = None
            waiting.discard(index)
            if not waiting:
                complete(bucket)

        return accumulated_big

    def _complete(self, bucket: Bucket) -> None:
        if not self._armed:
            if self.stray is not None:
                self.stray()
            return
        if bucket.work is not None:
            raise RuntimeError(NESTED.format(names=bucket.names))
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        if bucket.index == 0:  # asked before the hook is called, which counts its rounds
            self.over = self._marks_group()
        record = None if self.muted else self._record
        there = record is not None and record.launch(bucket, self._pours)
        scale = bucket.collect(self._views, self._scale, there and self._views and not bucket.is_sparse)
        if record is not None and self._pours:
            record.launched(bucket)
        self._next = bucket.index + 1
        self.collectives += 1
        self.bytes += bucket.nbytes
        bucket.work = True  # until the transport puts its own there
        self._transport.start(bucket, scale)

    # -- learning. A re-entrant checkpoint runs a backward inside the backward, and a parameter that several of
    #    them use gets a gradient from each: its bucket is complete only when the outermost has ended.

    def _is_learning(self) -> bool:
        return not (self._learned and self._remade) or self._static

    def _probe(self, name: str, parameter: Tensor) -> None:
        self._arrived[name] = self._arrived.pop(name, 0) + 1
        self._tasks.add(torch._C._current_graph_task_id())

    def _conclude(self) -> None:
        """Buckets may be launched early once each was seen in a backward and none had others inside."""
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
        """After a round: lay the buckets out in the order in which gradients came on rank 0."""
        order = comm.broadcast_object(list(self._arrived), 0, self._group)
        present = {name for bucket in self._plan for name in bucket} - self._sparse
        infos = infos_of((name, p) for name, p in self._parameters.items() if name in present)
        plan = plan_buckets(in_order_of_arrival(infos, order), *self._limits)
        plan += [bucket for bucket in self._plan if bucket[0] in self._sparse]
        self._wanted, self._remade = plan, True
        if plan != self._plan:
            self._plan = plan
            self._remove_hooks()
            self._fill_buckets(self._parameters)
            self._add_hooks()
        elif not self._is_learning():
            self._drop_probes()

    def _start_record(self, anywhere: Sequence[Sequence[Any] | None]) -> None:
        """From now on, hold every backward to what this one did."""
        marks = {
            name: mark
            for bucket, found in zip(self._buckets, anywhere, strict=True)
            for name, mark in zip(bucket.names, found or (), strict=True)
        }
        if not self._remade:
            self._remake()
        self._remove_hooks()
        by_bucket = [[marks[name] for name in bucket.names] for bucket in self._buckets]
        self._record = Record(self._buckets, self._arrived, by_bucket, self._complete, self._views, self.turn)
        self._hooks = self._record.hooks
        self._overlap = True
