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
*view* of it. *Marks* at the buffer's end, one for each parameter, say which were *used* (got a gradient). A
*round* is one reduction of all buckets.

Bits: two ranks get those of torch's ``DistributedDataParallel``, and of one process that accumulates two
halves. For that, fresh buffers are filled with -0.0, which leaves every summand as it is (0.0 would turn -0.0
into 0.0), and gradients are divided by the world size before they are summed. With three and more ranks gloo
sums in an order that moves with the bucket layout, so the layout (`Reducer.plan`) is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedParameter

from lockstep.ground import comm
from lockstep.parallel.buckets import ParameterInfo, Plan, fit_plan, offsets, plan_buckets

MIB = 2**20


class Reducer:
    """Averages the gradients of ``named_parameters`` over the ranks of a group.

    Before a backward `prepare`, after it `finish`: then every rank has the same gradients, those of the mean
    of the ranks' losses. A parameter that no rank used has ``.grad`` None, one that any rank used has its
    averaged gradient on all of them: unused parameters need no flag, and a rank whose loss touches no
    parameter at all holds up nobody. Shared parameters, gradient checkpointing of both kinds, several
    backwards and ``zero_grad`` of both kinds are fine. With one rank, parameters are left alone.

    Every rank must call `finish` equally often with `sync` on. A parameter that is thawed later
    (``requires_grad`` set) is taken in at the next `prepare`.

    Args:
        named_parameters: names and parameters in order of registration, the same on every rank
            (`lockstep.parallel.ddp.check_same_module` makes sure of it). Those without ``requires_grad``
            wait.
        process_group: the ranks; ``None`` is the default group, or this process alone if there is none.
        bucket_cap_mb: size of a bucket in MiB.
        first_bucket_mb: size in MiB of the bucket that is reduced last.
        gradient_as_bucket_view: let ``.grad`` be a view of the bucket. If False, gradients are tensors of
            their own, copied in and out, at the price of a copy and of the memory.
        plan: bucket layout of an earlier run (`plan`), to get its bits with three and more ranks.

    Attributes:
        sync: whether the next `finish` reduces. False accumulates: what this rank adds up stays here until a
            round. Set it before `prepare` to have the reduction overlap the backward.
        muted: for one backward, drop the gradients that it makes: this rank's share of the batch is empty.
            What was accumulated before counts, and the collectives run as always.
        rounds: completed rounds.
        collectives: all_reduce calls so far.
        bytes: bytes that this rank handed to them.

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
    ) -> None:
        if bucket_cap_mb <= 0 or first_bucket_mb <= 0:
            raise ValueError(
                f"bucket_cap_mb={bucket_cap_mb}, first_bucket_mb={first_bucket_mb}: both are sizes above 0"
            )
        self.sync = True
        self.muted = False
        self.rounds = 0
        self.collectives = 0
        self.bytes = 0
        self._group = process_group
        self._world = comm.world_size(process_group)
        self._views = gradient_as_bucket_view
        self._limits = (bucket_cap_mb * MIB, min(first_bucket_mb, bucket_cap_mb) * MIB)
        self._parameters: dict[str, Parameter] = {}
        seen: set[int] = set()
        for name, parameter in named_parameters:
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} belongs to a lazy module and has no shape yet: "
                    "run one batch through the model before gradients are reduced"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self._parameters[name] = parameter
        self._wanted = plan
        self._buckets: list[_Bucket] = []
        self._next = 0  # buckets are launched in order, alike on every rank; this one comes next
        self._armed = False
        self._hooks: list[Any] = []
        self._hidden: list[tuple[Parameter, Tensor | None]] = []
        # Until backwards have shown that they do not nest, no bucket is launched before its backward has
        # ended.
        self._overlap = False
        self._nested = False
        self._tasks: set[int] = set()
        self._untouched: set[int] = set()
        self._probes: list[Any] = []
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
        self._build()

    def _build(self) -> None:
        """Lay out the buckets for the parameters that require gradients now."""
        awake = {name: p for name, p in self._parameters.items() if p.requires_grad}
        infos = [ParameterInfo(name, p.numel(), p.dtype, p.device) for name, p in awake.items()]
        self._frozen = [p for p in self._parameters.values() if not p.requires_grad]
        if self._wanted is None:
            self._plan = plan_buckets(infos, *self._limits)
        else:
            self._plan = fit_plan(self._wanted, infos, *self._limits, frozen=self._parameters)
        if self._world == 1:
            return
        self._remove_hooks()
        self._buckets = [_Bucket(i, names, [awake[n] for n in names]) for i, names in enumerate(self._plan)]
        for bucket in self._buckets:
            for index, (parameter, _) in enumerate(bucket.pairs):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, index)))
                if not self._nested:
                    probe = partial(self._probe, bucket.index)
                    self._probes.append(parameter.register_post_accumulate_grad_hook(probe))
        self._untouched = set(range(len(self._buckets)))
        self._overlap = False

    def detach(self) -> None:
        """Remove the autograd hooks. Gradients stay as they are; they are no longer reduced."""
        self._remove_hooks()
        self._buckets = []
        self._world = 1

    def _remove_hooks(self) -> None:
        for hook in self._hooks + self._probes:
            hook.remove()
        self._hooks = []
        self._probes = []

    # -- a round

    def prepare(self) -> None:
        """Just before a backward: let its gradients fall into the buckets.

        Raises:
            RuntimeError: if the last backward did not reach `finish`.
        """
        if self._world == 1:
            if self.muted:
                self._hide(self._parameters.values())
            return
        if self._next:
            raise RuntimeError(
                "the last backward ended before its gradients were reduced (did it raise?): ranks no longer "
                "agree on what comes next; start again from a checkpoint"
            )
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._build()
        self._armed = True
        early = self.sync and self._overlap
        for bucket in self._buckets:
            bucket.arm(self._views, early)
        if self.muted:
            for bucket in self._buckets:
                bucket.hide()

    def finish(self) -> None:
        """After a backward: reduce what is not yet reduced, and wait. With `sync` off, only tidy up."""
        if self._world == 1:
            if self.muted:
                self._show()
            self.rounds += self.sync
            return
        assert self._armed, "finish without prepare"
        self._armed = False
        if self._probes:
            self._conclude()
        if self.sync:
            for bucket in self._buckets[self._next :]:
                self._launch(bucket)
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
                bucket.work = None
            self._next = 0
            self.rounds += 1
        for bucket in self._buckets:
            bucket.show()
            bucket.give_back(self._views, self.sync)
        self.muted = False

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

    def _make_hook(self, bucket: _Bucket, index: int) -> Callable[[Parameter], None]:
        used, waiting, complete = bucket.used, bucket.waiting, self._complete

        def accumulated(parameter: Tensor) -> None:
            if bucket.kept is None:
                used[index] = 1
            else:
                parameter.grad = None  # muted: not kept longer than it takes
            waiting.discard(index)
            if not waiting:
                complete(bucket)

        return accumulated

    def _complete(self, bucket: _Bucket) -> None:
        if bucket.work is not None:
            raise RuntimeError(
                f"a parameter of {bucket.names} got another gradient after its bucket was reduced: this "
                "backward ran others inside, unlike the first ones (checkpoint(use_reentrant=True)?); "
                "use_reentrant=False does not"
            )
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        bucket.collect(self._views)
        bucket.flat.div_(self._world)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._next = bucket.index + 1
        self.collectives += 1
        self.bytes += bucket.flat.nbytes

    # -- do backwards nest? A re-entrant checkpoint runs a backward inside the backward, and a parameter that
    #    several of them use gets a gradient from each: its bucket is complete only when the outermost has
    #    ended.

    def _probe(self, index: int, parameter: Tensor) -> None:
        self._untouched.discard(index)
        self._tasks.add(torch._C._current_graph_task_id())

    def _conclude(self) -> None:
        """Buckets may be launched early once each was seen in a backward and none had others inside."""
        self._nested = len(self._tasks) > 1
        self._tasks.clear()
        if self._nested or not self._untouched:
            self._overlap = not self._nested
            for probe in self._probes:
                probe.remove()
            self._probes = []


class _Bucket:
    """Some parameters' gradients in one buffer, followed by their marks."""

    __slots__ = ("flat", "index", "kept", "marks", "names", "pairs", "tail", "used", "waiting", "work")

    HELD = -1
    """Stands in ``waiting`` while the bucket must not be launched from a hook."""

    def __init__(self, index: int, names: list[str], parameters: list[Parameter]) -> None:
        self.index = index
        self.names = names
        count = len(parameters)
        first = parameters[0]
        starts, end = offsets((p.numel() for p in parameters), first.element_size())
        with torch.no_grad():
            buffer = torch.zeros(end + count, dtype=first.dtype, device=first.device)
            # as real numbers, which -0.0 fills whole
            self.flat = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            self.tail = buffer[end:]
            self.pairs = [
                # strides as the parameter's (channels_last, say), for optimizers that go through both
                # together
                (p, buffer.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), start))
                for p, start in zip(parameters, starts, strict=True)
            ]
        self.used = bytearray(count)
        self.marks = torch.frombuffer(self.used, dtype=torch.uint8)
        self.waiting = {self.HELD}
        self.kept: list[Tensor | None] | None = None  # gradients from before a muted backward
        self.work: Any = None

    def arm(self, views: bool, early: bool) -> None:
        """Note which parameters have gradients by now; with ``views``, lay the others' into the buffer."""
        count = len(self.pairs)
        self.kept = None  # a muted backward that raised leaves some; its window starts again with zero_grad
        with_grad = [index for index, (parameter, _) in enumerate(self.pairs) if parameter.grad is not None]
        if not with_grad:
            self.used[:] = bytes(count)
            if views:
                self.flat.fill_(-0.0)
                for parameter, view in self.pairs:
                    parameter.grad = view
        else:
            self.used[:] = b"\1" * count if len(with_grad) == count else _marks(with_grad, count)
            if views:
                for parameter, view in self.pairs:
                    if parameter.grad is not view:
                        _fill(view, parameter.grad)
                        parameter.grad = view
        self.waiting.clear()
        if early:
            self.waiting.update(range(count))
        else:
            self.waiting.add(self.HELD)

    def hide(self) -> None:
        """Set gradients aside, so that a muted backward does not touch them."""
        self.kept = [parameter.grad for parameter, _ in self.pairs]
        for parameter, _ in self.pairs:
            parameter.grad = None

    def show(self) -> None:
        """Put back what was set aside, in place of what a muted backward made."""
        if self.kept is not None:
            for (parameter, _), grad in zip(self.pairs, self.kept, strict=True):
                parameter.grad = grad
            self.kept = None

    def collect(self, views: bool) -> None:
        """Bring into the buffer what is not there, and the marks."""
        for index, (parameter, view) in enumerate(self.pairs):
            grad = parameter.grad if self.kept is None else self.kept[index]
            if grad is not view:
                # no views; or somebody put another tensor there: backward(create_graph=True), a user's hook
                _fill(view, grad)
                self.used[index] = grad is not None
                if views:
                    parameter.grad = view
        if 0 in self.used:
            self.tail.copy_(self.marks, non_blocking=True)
        else:
            self.tail.fill_(1)

    def give_back(self, views: bool, reduced: bool) -> None:
        """Leave each parameter with its gradient, or None where there is none."""
        if 0 in self.used:
            # Only a rank that lacks gradients has to look at the marks: a GPU waits here, and seldom has to.
            anywhere = self.tail.tolist() if reduced else self.used
            for index, (parameter, view) in enumerate(self.pairs):
                if not self.used[index]:
                    self.used[index] = anywhere[index] != 0
                    parameter.grad = view if views and self.used[index] else None
        if reduced and not views:
            for index, (parameter, view) in enumerate(self.pairs):
                if not self.used[index]:
                    continue
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.detach().copy_(view)


def _marks(indices: Iterable[int], count: int) -> bytearray:
    marks = bytearray(count)
    for index in indices:
        marks[index] = 1
    return marks


def _fill(view: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        (torch.view_as_real(view) if view.is_complex() else view).fill_(-0.0)
    else:
        view.copy_(grad.detach())
