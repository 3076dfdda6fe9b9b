"""What every backward does, as the first ones showed it, for models that promise never to do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import ne
from threading import RLock
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import Parameter

from lockstep.parallel.bucket import Bucket

BROKEN = (
    "Your training graph has changed in this iteration: static_graph=True, and parameter {name!r} {what}. Every "
    "backward has to give gradients to the same parameters in the same order; take static_graph=False where that does "
    "not hold"
)
EARLY, LACKING = "had no gradient yet when its bucket was complete at first", "got no gradient, which it did at first"

Turn: TypeAlias = "AbstractContextManager[Any]"


def turn_of(parameters: Iterable[Tensor]) -> Turn:
    """What the hooks of ``parameters`` hold while they run, so that buckets are launched one by one and in order.

    A module on several GPUs has a thread of autograd for each of them. With one device there is nothing to hold.
    """
    return RLock() if len({parameter.device for parameter in parameters}) > 1 else nullcontext()


def in_turn(turn: Turn, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """``hook`` as it is to be called: it holds ``turn``, where that is one to hold."""
    if isinstance(turn, nullcontext):
        return hook

    def alone(parameter: Tensor) -> None:
        with turn:
            hook(parameter)

    return alone


class PassingHook:
    """Calls ``hook(parameter)`` whenever a gradient has been added to a parameter, until it is removed.

    A tensor whose last ``register_post_accumulate_grad_hook`` was removed goes on asking for hooks, 0.25 us each time.
    This one is at the node of the graph that adds the gradient, which dies when nobody holds it any more.
    """

    def __init__(self, parameter: Parameter, hook: Callable[[Any], None]) -> None:
        self._node: Any = get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(lambda inputs, outputs: hook(parameter))

    def remove(self) -> None:
        """Hear nothing any more."""
        self._handle.remove()
        self._node = None


def come_last(hooks: Iterable[Any]) -> bool:
    """Let ``hooks`` run after what others have hooked to the parameters since, and may change gradients; gives True."""
    for hook in hooks:
        if not isinstance(hook, PassingHook):  # which runs after them in any case
            registered = hook.hooks_dict_ref()
            registered[hook.id] = registered.pop(hook.id)
    return True


class Record:
    """Which parameters get gradients, and after which one each bucket is complete.

    One autograd hook a bucket, at the parameter whose gradient came last, takes the place of one a parameter.
    Whether the others have come is seen by the counts of changes that tensors keep. The last bucket, which has no
    backward left to overlap, is looked at once, when the backward has ended; each other one twice.

    Args:
        buckets: of the layout that is used from now on.
        arrived: name -> how many gradients it got in the recorded backward, in the order of the last ones.
        anywhere: for each bucket, who got a gradient on any rank.
        complete: called with a bucket when its gradients are there.
        views: whether gradients are views of the buckets.
        turn: as of `turn_of`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        arrived: Mapping[str, int],
        anywhere: Sequence[Sequence[Any]],
        complete: Callable[[Bucket], None],
        views: bool,
        turn: Turn,
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
        self._left = [0] * len(buckets)
        self._before: list[list[Any]] = [[] for _ in buckets]
        self._at_launch: list[list[Any] | None] = [None] * len(buckets)
        for bucket in buckets:
            came = [name for name in bucket.names if name in moments]
            closing = max(came, key=moments.__getitem__) if came else None
            self._closing.append(closing)
            self._times.append(arrived[closing] if closing is not None else 0)
            if closing is not None:
                parameter = bucket.parameters[bucket.names.index(closing)]
                hook = in_turn(turn, self._make_hook(bucket))
                self.hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _make_hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        left, index, waiting, complete = self._left, bucket.index, bucket.waiting, self._complete

        def accumulated(parameter: Tensor) -> None:
            left[index] -= 1
            if left[index] == 0 and 0 in waiting:
                waiting.clear()
                complete(bucket)
            elif left[index] < 0 and not waiting:  # outside of a prepared backward
                complete(bucket)

        return accumulated

    def arm(self, early: bool) -> None:
        """Before a backward, when the buckets are armed."""
        self._left[:] = self._times
        for index, bucket in enumerate(self._buckets):
            self._at_launch[index] = None
            self._before[index] = self._states(bucket)
            if early and bucket is not self._buckets[-1]:
                bucket.waiting.clear()
                if self._closing[index] is not None:
                    bucket.waiting.add(0)

    def launch(self, bucket: Bucket, early: bool) -> bool:
        """When a bucket is to travel, ``early`` or after the backward; gives whether all of its gradients lie there.

        Raises:
            RuntimeError: if the backward has not given gradients to those to which the recorded one gave some.
        """
        now = self._states(bucket)
        if 0 not in self._expected[bucket.index] and all(map(ne, now, self._before[bucket.index])):
            bucket.used[:] = b"\1" * len(now)
            if not bucket.big:  # nothing in it is moved any more
                self._at_launch[bucket.index] = now
            return True
        self._compare(bucket, now, EARLY if early else LACKING)
        return False

    def launched(self, bucket: Bucket) -> None:
        """When a bucket's gradients have been brought into its buffer: no more may come."""
        if self._at_launch[bucket.index] is None:
            self._at_launch[bucket.index] = self._states(bucket)

    def check(self, bucket: Bucket) -> None:
        """After the backward.

        Raises:
            RuntimeError: if it was not what was recorded.
        """
        now = self._states(bucket)
        launched = self._at_launch[bucket.index]
        if launched is None:
            self._compare(bucket, now, LACKING)
        elif now != launched:
            late = next(i for i, (a, b) in enumerate(zip(now, launched, strict=True)) if a != b)
            raise RuntimeError(
                BROKEN.format(name=bucket.names[late], what="got another gradient after its bucket was reduced")
            )

    def _compare(self, bucket: Bucket, now: list[Any], lacking: str) -> None:
        expected, before = self._expected[bucket.index], self._before[bucket.index]
        for index, name in enumerate(bucket.names):
            came = now[index] != before[index]
            if self._views and not came and not bucket.is_sparse:  # backward(create_graph=True) leaves another tensor
                grad = bucket.parameters[index].grad
                came = grad is not None and grad is not bucket.views[index]
            if came:
                bucket.used[index] = 1
            if came != expected[index]:
                what = "got a gradient, which it did not at first" if came else lacking
                raise RuntimeError(BROKEN.format(name=name, what=what))

    def _states(self, bucket: Bucket) -> list[Any]:
        """What changes when a gradient comes: the number of changes of its place, or its tensor and that one's."""
        if not self._views or bucket.is_sparse:
            return [_state(parameter) for parameter in bucket.parameters]
        states: list[Any] = [view._version for view in bucket.views]
        for index in bucket.big:
            states[index] = _state(bucket.parameters[index])
        return states


def _state(parameter: Tensor) -> tuple[int, int] | None:
    grad = parameter.grad
    return None if grad is None else (id(grad), grad._version)
