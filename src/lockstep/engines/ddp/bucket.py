"""Buckets of gradients that are reduced together, and the plans that assign parameters to buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_not
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedParameter

from lockstep.ground.rank import warn_once
from lockstep.ground.transfer import pinned

# -- plans ---------------------------------------------------------------------------------------------------


Plan = list[list[str]]


ALIGNMENT = 16
"""Alignment of each gradient in a buffer, in bytes; vectorized kernels need it."""


class ParameterInfo(NamedTuple):
    """Properties of a parameter from which a bucket plan is computed."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def distinct(named_parameters: Iterable[tuple[str, Any]]) -> dict[str, Parameter]:
    """Return the parameters by name; a shared parameter occurs once, by its first name.

    Raises:
        ValueError: a parameter belongs to a lazy module that has not seen a batch.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} belongs to a lazy module and has no shape yet. "
                "Run one batch through the model before training starts"
            )
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[name] = parameter
    return found


def infos_of(parameters: Iterable[tuple[str, Parameter]]) -> list[ParameterInfo]:
    """Return a `ParameterInfo` for each named parameter."""
    return [ParameterInfo(name, p.numel(), p.dtype, p.device) for name, p in parameters]


def plan_buckets(parameters: Sequence[ParameterInfo], caps: Sequence[float]) -> Plan:
    """Divide ``parameters`` into buckets, for a backward that computes gradients from the last to the first.

    A bucket contains parameters of one dtype and device, up to its size. A larger parameter has its own bucket.
    Buckets, and the parameters in them, are in reverse order of registration, which is roughly the order of their
    gradients. The bucket of the parameters registered first should be small: their gradients arrive last, so no
    computation overlaps its reduction.

    Args:
        parameters: in order of registration, with distinct names.
        caps: bytes of the buckets, starting with that of the parameters registered first, for each dtype and device;
            the last value is used for all further buckets.

    Example:
        >>> cpu = torch.device("cpu")
        >>> sizes = {"embed": 100, "layer.weight": 300, "layer.bias": 10, "head": 100}
        >>> infos = [ParameterInfo(name, numel, torch.float32, cpu) for name, numel in sizes.items()]
        >>> plan_buckets(infos, caps=[400, 1600])
        [['head'], ['layer.bias', 'layer.weight'], ['embed']]
    """
    last: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, float]] = {}  # bucket, its number, its room
    buckets: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket, number, room = last.get(kind, ([], -1, -1.0))
        if number < 0 or parameter.nbytes > room:
            bucket, number = [], number + 1
            room = caps[min(number, len(caps) - 1)]
            buckets.append(bucket)
        bucket.append(index)
        last[kind] = bucket, number, room - parameter.nbytes
    buckets.sort(key=lambda bucket: -bucket[0])  # a bucket is complete when its first registered parameter is
    return [[parameters[index].name for index in reversed(bucket)] for bucket in buckets]


def fit_plan(
    plan: Plan, parameters: Sequence[ParameterInfo], caps: Sequence[float], frozen: Iterable[str] = ()
) -> Plan:
    """Adapt ``plan`` to ``parameters``: remove frozen parameters, and add buckets for parameters that ``plan`` lacks.

    Args:
        plan: plan of another run, in which other parameters may have been frozen.
        parameters: the parameters that will get gradients.
        caps: as in `plan_buckets`, for the parameters that ``plan`` lacks.
        frozen: names of parameters that ``plan`` may contain although they get no gradients.

    Raises:
        ValueError: the plan names a parameter twice or one that does not exist, or a bucket has two dtypes or
            devices.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    may_lack = set(frozen)
    seen: set[str] = set()
    fitted: Plan = []
    for bucket in plan:
        for name in bucket:
            if name in seen:
                raise ValueError(f"plan contains parameter {name!r} twice. Remove one of the two")
            if name not in by_name and name not in may_lack:
                raise ValueError(
                    f"the model has no parameter {name!r}, which plan contains. Use a plan from the same model, "
                    "or plan=None to create a new one"
                )
            seen.add(name)
        trained = [name for name in bucket if name in by_name]
        kinds = {(by_name[name].dtype, by_name[name].device) for name in trained}
        if len(kinds) > 1:
            raise ValueError(
                f"plan puts {trained} in one bucket, but they have several dtypes or devices. Split the bucket"
            )
        if trained:
            fitted.append(trained)
    rest = [parameter for parameter in parameters if parameter.name not in seen]
    return fitted + plan_buckets(rest, caps)


def in_order_of_arrival(parameters: Sequence[ParameterInfo], arrived: Sequence[str]) -> list[ParameterInfo]:
    """Sort ``parameters`` for `plan_buckets` so that buckets follow the order in which gradients arrived.

    Args:
        parameters: in order of registration.
        arrived: parameter names in the order in which gradients arrived. An unused parameter, which is not among them,
            is placed next to its neighbor in registration.

    Returns:
        The same parameters; the parameter whose gradient arrived first is last.

    Example:
        >>> cpu = torch.device("cpu")
        >>> infos = [ParameterInfo(name, 1, torch.float32, cpu) for name in "abcd"]
        >>> [info.name for info in in_order_of_arrival(infos, ["a", "d", "b"])]
        ['b', 'c', 'd', 'a']
    """
    moment = {name: index for index, name in enumerate(arrived)}
    key = 0
    keys: dict[str, tuple[int, int]] = {}
    for place, parameter in enumerate(parameters):
        key = moment.get(parameter.name, key)
        keys[parameter.name] = (-key, place)
    return sorted(parameters, key=lambda parameter: keys[parameter.name])


def offsets(numels: Iterable[int], itemsize: int, alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Return (offsets, length): where each gradient starts in a buffer, and the buffer's length, in elements.

    Args:
        numels: number of elements of each gradient.
        itemsize: bytes of an element.
        alignment: alignment of gradients, in bytes.
    """
    step = max(1, alignment // itemsize)
    starts = []
    end = 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // step) * step
    return starts, end


# -- a bucket at work ----------------------------------------------------------------------------------------


LARGE = 2**15
"""Number of elements from which a gradient on the CPU is scaled while it is copied to the buffer.

For large gradients a pass over memory costs more than one more operation.
"""

ONLY_LISTED = max(map(getrefcount, [object()]))
"""Reference count of an object that is only in a list, measured while iterating over the list."""

ALIAS = (
    "A view of a gradient (`p.grad.detach()`, `p.grad.data`, a slice) is still in use after `p.grad` was dropped. The "
    "next backward overwrites its memory, the bucket of {name}{more}. Keep `p.grad` itself or a copy "
    "(`p.grad.clone()`), or use DDPStrategy(gradient_as_bucket_view=False)."
)
UNUSED = (
    "Parameters {names}{more} got no gradient on this rank. To find out if another rank has one, each step waits until "
    "the device has finished the backward, which slows training down. Remove parameters that no rank uses, or freeze "
    "them (requires_grad_(False))."
)


class Bucket:
    """Gradients that are reduced together in one buffer, which may end with a flag for each parameter.

    Args:
        index: position of the bucket in a gradient reduction.
        names, parameters: in the order of the buffer, all of one dtype and device.
        holds_used: True if the flags in ``used`` are sent at the end of the buffer.
        alignment: alignment of gradients, in bytes.

    Attributes:
        flat: this rank's data to send, 1-D and real.
        buffer: the same memory in the parameters' dtype.
        views: each parameter's part of the buffer, with the parameter's shape and strides. Each has its own version
            counter (``_version``).
        starts: where each view starts in ``buffer``, in elements.
        used: a flag for each parameter: 1 if the parameter had a gradient when it was last checked.
        fresh: True if no parameter had a gradient when the backward started.
        waiting: indices of the parameters whose gradients are missing before the bucket may be launched.
        saved: gradients that `hide` has set aside; None otherwise.
        work: the pending reduction; the transport that starts it also waits for it.
    """

    warns_of_aliases = False
    """Warn if other tensors use the buffer's memory. Off with communication hooks, which may leave such tensors."""

    BLOCKED = -1
    """Entry of ``waiting`` that stops hooks from launching the bucket."""

    is_sparse = False

    def __init__(
        self, index: int, names: Sequence[str], parameters: Sequence[Parameter], holds_used: bool, alignment: int
    ) -> None:
        self.index = index
        self.names = list(names)
        self.parameters = list(parameters)
        self.used = bytearray(len(self.parameters))
        self.waiting = {self.BLOCKED}
        self.saved: list[Tensor | None] | None = None
        self.work: Any = None
        self.views: list[Tensor] = []
        self.fresh = False
        self._large = [i for i, p in enumerate(self.parameters) if p.numel() >= LARGE and p.device.type == "cpu"]
        self._used_flags = torch.frombuffer(self.used, dtype=torch.uint8)
        self._everyone = range(len(self.parameters))
        self.holds_used = holds_used
        first = self.parameters[0]
        self.dtype, self.device = first.dtype, first.device
        self.starts, self.end = offsets((p.numel() for p in self.parameters), first.element_size(), alignment)

    @property
    def size(self) -> tuple[int, torch.dtype, torch.device]:
        """(length, dtype, device) of the flat buffer. A complex number counts as two real numbers."""
        length = self.end + len(self.parameters) * self.holds_used
        if self.dtype.is_complex:
            return 2 * length, self.dtype.to_real(), self.device
        return length, self.dtype, self.device

    @property
    def nbytes(self) -> int:
        """Number of bytes that this rank sends for the bucket in a gradient reduction."""
        return self.flat.nbytes

    def lay_out(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.flat = flat
            self.buffer = torch.view_as_complex(flat.view(-1, 2)) if self.dtype.is_complex else flat
            self._tail = self.buffer[self.end :]
            self.views = [self._place(index).data for index in self._everyone]
            self._places = [view.data_ptr() for view in self.views]
        self._storage = self.buffer.untyped_storage()
        self._own_uses = _users_of(self._storage)
        self._uses = -1  # number of tensors in the memory, when its views were last checked
        self._fitting: list[int] = []  # addresses of the parameters when they were last seen to fit

    def _place(self, index: int) -> Tensor:
        """Return the view of the buffer that stores one parameter's gradient.

        The view has the parameter's strides (such as channels_last), for optimizers that iterate over both together.
        The caller uses the view's ``.data`` as ``.grad``: unlike a view, ``.data`` may be detached in place, and has
        its own version counter.
        """
        parameter = self.parameters[index]
        strides = torch.empty_like(parameter, device="meta").stride()
        return self.buffer.as_strided(parameter.shape, strides, self.starts[index])

    def release(self) -> None:
        """Release the buffer's memory, after a new layout of buckets has replaced this bucket."""
        self.flat = self.buffer = self._tail = self.flat.new_empty(0)
        self._storage = self.flat.untyped_storage()
        self.views = []

    # -- a round

    def arm(self, views: bool, early: bool) -> None:
        """Prepare for a backward: record which parameters have gradients. With ``views``, copy gradients to the buffer.

        Parameters without a gradient keep ``.grad`` None: autograd then assigns its own tensor instead of adding to a
        view.
        """
        self.saved = None  # left by a backward of weight 0 that raised; its window starts again with zero_grad
        self.waiting.clear()
        if views:
            self._detach_kept_views()
            # `parameter.grad.data = ...` may have moved a view to other memory. With static_graph, which needs no used
            # flags and where each microsecond counts, the number of the buffer's users shows that: a moved view has
            # released the memory. A user that keeps the old memory (`old = p.grad.data`) hides one moved view.
            if self.holds_used:
                is_moved = list(map(Tensor.data_ptr, self.views)) != self._places
            else:
                is_moved = _users_of(self._storage) != self._uses
            if is_moved:
                self._move_back()
            if list(map(Tensor.data_ptr, self.parameters)) != self._fitting:
                self._fit()
        self._uses = _users_of(self._storage)
        if early:
            self.waiting.update(self._everyone)
        else:
            self.waiting.add(self.BLOCKED)
        self.used[:] = bytes([parameter.grad is not None for parameter in self.parameters])
        self.fresh = 1 not in self.used
        if views and self.fresh and self._uses > self._own_uses and self.warns_of_aliases:
            warn_once(ALIAS.format(name=self.names[0], more=", ..." * (len(self.names) > 1)), key=ALIAS)
        if views and not self.fresh:
            self._bring([parameter.grad for parameter in self.parameters], views)

    def _detach_kept_views(self) -> None:
        """Move views that users still reference, but that are no longer gradients, to separate memory.

        After `old = p.grad` and `zero_grad`, the user may read ``old`` after further backwards, which overwrite the
        buffer.
        """
        counts = list(map(getrefcount, self.views))
        if max(counts) == ONLY_LISTED:
            return
        for index, (parameter, count) in enumerate(zip(self.parameters, counts, strict=True)):
            kept = self.views[index]
            if count > ONLY_LISTED and parameter.grad is not kept:
                with torch.no_grad():
                    kept.data = kept.clone()
                    self.views[index] = self._place(index).data

    def _fit(self) -> None:
        """Raise torch's error if a parameter no longer has the shape, dtype or device of its view."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            grad = parameter.grad
            parameter.grad = view
            parameter.grad = grad
        self._fitting = list(map(Tensor.data_ptr, self.parameters))

    def _move_back(self) -> None:
        """Move views whose ``.data`` was assigned back into the buffer, with their values."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if view.data_ptr() != self._places[index]:
                elsewhere = view.data
                view.data = self._place(index)
                if parameter.grad is view:
                    view.copy_(elsewhere)

    def skip_frozen(self) -> None:
        """Stop waiting for parameters whose ``requires_grad`` is now False."""
        self.waiting.difference_update([i for i, p in enumerate(self.parameters) if not p.requires_grad])

    def hide(self) -> None:
        """Before a backward whose gradients are dropped, store the accumulated gradients and set ``.grad`` to None."""
        self.saved = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def show(self) -> None:
        """Restore the gradients that `hide` set aside, and drop gradients that were computed since."""
        if self.saved is not None:
            for parameter, grad in zip(self.parameters, self.saved, strict=True):
                parameter.grad = grad
            self.saved = None

    def collect(self, views: bool, scale: float) -> float:
        """Copy gradients into the buffer unless they are there already, and set the flags of parameters with gradients.

        Args:
            views: True if gradients are views of the buffer.
            scale: factor for the gradients.

        Returns:
            The factor by which the buffer must still be multiplied; 1 if gradients are scaled already.
        """
        saved = self.saved
        attached = views and saved is None
        if attached and _users_of(self._storage) != self._uses:  # moved by a user's hook in the backward
            self._move_back()
        grads = [parameter.grad for parameter in self.parameters] if saved is None else saved
        self.used[:] = bytes([grad is not None for grad in grads])
        if self._large and scale != 1:
            self._bring_scaled(grads, attached, scale)
            scale = 1
        else:
            self._bring(grads, attached)
        complete = 0 not in self.used
        if not complete:
            # -0.0 leaves the other ranks' summands as they are; 0.0 would turn a -0.0 into 0.0
            absent = [view for view, grad in zip(self.views, grads, strict=True) if grad is None]
            torch._foreach_zero_(absent)
            torch._foreach_neg_(absent)
        if self.holds_used:
            if complete:
                self._tail.fill_(1)
            else:
                # a GPU reads its source later; without pinned memory this process would wait for that
                self._tail.copy_(pinned(self._used_flags, self.device), non_blocking=True)
        return scale

    def _bring_scaled(self, grads: list[Tensor | None], views: bool, scale: float) -> None:
        """Copy gradients like :meth:`_bring` and multiply by ``scale``, in a single pass for large gradients."""
        sources, unscaled = list(grads), set(range(len(grads)))
        for index in self._large:
            grad, view = grads[index], self.views[index]
            if grad is not None and grad is not view and grad.layout is torch.strided:
                torch.mul(grad.detach(), scale, out=view)
                sources[index] = view
                unscaled.remove(index)
                if views:
                    self.parameters[index].grad = view
        self._bring(sources, views)
        if unscaled:
            torch._foreach_mul_([self.views[index] for index in unscaled], scale)

    def _bring(self, grads: list[Tensor | None], views: bool) -> None:
        """Copy gradients into the buffer together. If ``views`` is True, assign the buffer's views to ``.grad``."""
        parameters, places, sources = self.parameters, self.views, grads
        if 0 in self.used or not all(map(is_not, grads, places)):
            found = [
                one
                for one in zip(parameters, places, grads, strict=True)
                if one[2] is not None and one[2] is not one[1]
            ]
            if not found:
                return
            parameters, places, sources = map(list, zip(*found, strict=True))
        _copy(places, sources)  # type: ignore[arg-type]
        if views:
            for parameter, view in zip(parameters, places, strict=True):
                parameter.grad = view

    def used_anywhere(self) -> Sequence[Any]:
        """Return a flag for each parameter from the reduced buffer: nonzero if any rank had a gradient for it."""
        # Only a rank that lacks gradients has to read them: that makes a GPU wait, and is seldom needed.
        if 0 not in self.used:
            return self.used
        if self.device.type != "cpu":
            lacking = [name for name, used in zip(self.names, self.used, strict=True) if not used]
            warn_once(UNUSED.format(names=", ".join(lacking[:3]), more=" ..." * (len(lacking) > 3)), key=UNUSED)
        return self._tail.tolist()

    def give_back(self, views: bool, anywhere: Sequence[Any] | None) -> None:
        """Assign reduced gradients to ``.grad``, or None where no rank had a gradient.

        Args:
            views: True if gradients are views of the buffer.
            anywhere: a flag for each parameter, nonzero if any rank had a gradient for it; None if nothing was reduced.
        """
        if anywhere is None:
            return
        if 0 in self.used:
            for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
                if not self.used[index]:
                    self.used[index] = anywhere[index] != 0
                    parameter.grad = view if views and self.used[index] else None
        if not views:
            pairs = [(p, view) for p, view, used in zip(self.parameters, self.views, self.used, strict=True) if used]
            for parameter, view in pairs:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(view)
            if pairs:
                _copy([p.grad for p, _ in pairs], [view for _, view in pairs])  # type: ignore[misc]


class SparseBucket(Bucket):
    """Bucket of one parameter with sparse gradients (``Embedding(sparse=True)``), which are sent as sparse tensors."""

    is_sparse = True

    @property
    def size(self) -> tuple[int, torch.dtype, torch.device]:
        return 0, self.dtype.to_real() if self.dtype.is_complex else self.dtype, self.device

    @property
    def nbytes(self) -> int:
        """Number of bytes of this rank's gradient rows and their indices."""
        return self.flat._values().nbytes + self.flat._indices().nbytes

    def lay_out(self, flat: Tensor) -> None:
        self.flat = flat

    def release(self) -> None:
        """Do nothing, because the bucket has no buffer."""

    def arm(self, views: bool, early: bool) -> None:
        """Prepare for a backward: record whether the parameter has a gradient."""
        self.saved = None
        self.waiting.clear()
        self.waiting.add(0 if early else self.BLOCKED)
        self.used[0] = self.parameters[0].grad is not None
        self.fresh = not self.used[0]

    def collect(self, views: bool, scale: float) -> float:
        """Store the gradient in ``flat`` for sending; without a gradient, store an empty sparse tensor."""
        parameter = self.parameters[0]
        grad = parameter.grad if self.saved is None else self.saved[0]
        self.used[0] = grad is not None
        if grad is None:
            places = torch.empty((1, 0), dtype=torch.int64, device=self.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=self.dtype, device=self.device)
            grad = torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)
        if not grad.is_sparse:
            raise RuntimeError(
                f"parameter {self.names[0]!r} belongs to a layer with sparse=True, but got a dense gradient "
                "(is the weight also used elsewhere?). Build the layer with sparse=False"
            )
        self.flat = grad.detach().coalesce()
        return scale

    def used_anywhere(self) -> Sequence[Any]:
        """Raise AssertionError, because a sparse gradient's flag is not in a buffer, but sent separately."""
        raise AssertionError("the used flag of a sparse gradient is not in the bucket's buffer, but is sent separately")

    def give_back(self, views: bool, anywhere: Sequence[Any] | None) -> None:
        """Assign the reduced gradient to ``.grad``, or None if no rank had a gradient."""
        if anywhere is not None:
            self.used[0] = anywhere[0] != 0
            self.parameters[0].grad = self.flat if self.used[0] else None


def move_to_layout(before: Iterable[Bucket], buckets: Iterable[Bucket], buffers: Iterable[Tensor]) -> None:
    """Assign ``buffers`` to the new ``buckets``. Move gradients there from the previous buckets ``before``.

    A previous bucket releases its memory once it is empty, so gradients are not in memory twice if ``buffers`` yields
    buffers one by one.
    """
    owners = {id(parameter): (bucket, i) for bucket in before for i, parameter in enumerate(bucket.parameters)}
    remaining = {id(bucket): len(bucket.parameters) for bucket in before}
    for bucket, flat in zip(buckets, buffers, strict=True):
        bucket.lay_out(flat)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=False):  # a sparse bucket has no views
            old, place = owners.pop(id(parameter), (None, 0))
            if old is None:
                continue
            if old.views and parameter.grad is old.views[place]:
                view.copy_(old.views[place])
                parameter.grad = view
            remaining[id(old)] -= 1
            if not remaining[id(old)]:
                old.release()
    for bucket in before:
        bucket.release()


def _users_of(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _copy(places: list[Tensor], gradients: list[Tensor]) -> None:
    """Copy gradients to ``places``, with a single kernel on GPUs."""
    with torch.no_grad():
        try:
            torch._foreach_copy_(places, gradients)
        except RuntimeError:  # a sparse gradient, of a function outside of layers with sparse=True
            for place, gradient in zip(places, gradients, strict=True):
                place.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
