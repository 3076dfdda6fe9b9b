"""Which parameters' gradients travel together: a pure function from parameters to a plan, and a plan's
layout.

A plan is a list of buckets in the order in which they are reduced, a bucket a list of parameter names in the
order in which they lie in its buffer. Plans are plain data: gloo's sums over three and more ranks change bits
with the bucket layout, so a checkpoint keeps the plan and a resumed run restores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import Parameter, UninitializedParameter

Plan = list[list[str]]

ALIGNMENT = 16
"""Bytes at whose multiples a gradient starts in its buffer: vectorised kernels want it."""


class ParameterInfo(NamedTuple):
    """What a plan needs to know of a parameter."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def distinct(named_parameters: Iterable[tuple[str, Any]]) -> dict[str, Parameter]:
    """Each parameter once, by its first name.

    Raises:
        ValueError: one belongs to a lazy module that has not seen a batch.
    """
    found: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} belongs to a lazy module and has no shape yet: "
                "run one batch through the model before gradients are reduced"
            )
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[name] = parameter
    return found


def infos_of(parameters: Iterable[tuple[str, Parameter]]) -> list[ParameterInfo]:
    """What a plan needs to know of these parameters."""
    return [ParameterInfo(name, p.numel(), p.dtype, p.device) for name, p in parameters]


def plan_buckets(parameters: Sequence[ParameterInfo], cap_bytes: float, first_bytes: float) -> Plan:
    """Cut ``parameters`` into buckets for a backward that reaches them last to first.

    A bucket holds parameters of one dtype and device, at most ``cap_bytes`` of them (a larger parameter has
    one for itself). Buckets and the parameters in them stand in reverse order of registration, which is about
    the order in which gradients come. The parameters that were registered first, whose gradients come last,
    are in a bucket of at most ``first_bytes``: nothing is left to overlap its reduction with, so it had
    better be short.

    Args:
        parameters: in order of registration, with distinct names.
        cap_bytes: the largest size of a bucket.
        first_bytes: the largest size of the bucket of the first-registered parameters, of each dtype and
            device.

    Example:
        >>> cpu = torch.device("cpu")
        >>> sizes = {"embed": 100, "layer.weight": 300, "layer.bias": 10, "head": 100}
        >>> infos = [ParameterInfo(name, numel, torch.float32, cpu) for name, numel in sizes.items()]
        >>> plan_buckets(infos, cap_bytes=1600, first_bytes=400)
        [['head'], ['layer.bias', 'layer.weight'], ['embed']]
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    room: dict[tuple[torch.dtype, torch.device], float] = {}
    buckets: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.get(kind)
        if bucket is None or parameter.nbytes > room[kind]:
            room[kind] = first_bytes if bucket is None else cap_bytes
            bucket = open_buckets[kind] = []
            buckets.append(bucket)
        bucket.append(index)
        room[kind] -= parameter.nbytes
    buckets.sort(key=lambda bucket: -bucket[0])  # a bucket is complete when its first-registered parameter is
    return [[parameters[index].name for index in reversed(bucket)] for bucket in buckets]


def fit_plan(
    plan: Plan,
    parameters: Sequence[ParameterInfo],
    cap_bytes: float,
    first_bytes: float,
    frozen: Iterable[str] = (),
) -> Plan:
    """``plan`` for ``parameters``: without what is ``frozen`` now, with buckets for what it does not name.

    Args:
        plan: as another run made it, perhaps with parameters frozen or thawed that are not so now.
        parameters: those that will get gradients.
        cap_bytes, first_bytes: of `plan_buckets`, for the parameters that ``plan`` does not name.
        frozen: names that ``plan`` may hold although they get no gradients.

    Raises:
        ValueError: if the plan names a parameter twice or one that does not exist, or puts two dtypes or
            devices into a bucket.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    asleep = set(frozen)
    seen: set[str] = set()
    fitted: Plan = []
    for bucket in plan:
        for name in bucket:
            if name in seen:
                raise ValueError(f"plan: parameter {name!r} is in it twice")
            if name not in by_name and name not in asleep:
                raise ValueError(
                    f"plan: the model has no parameter {name!r}; a plan belongs to the model that it was "
                    "made for (plan=None makes a new one)"
                )
            seen.add(name)
        awake = [name for name in bucket if name in by_name]
        kinds = {(by_name[name].dtype, by_name[name].device) for name in awake}
        if len(kinds) > 1:
            raise ValueError(f"plan: {awake} have several dtypes or devices and cannot share a bucket")
        if awake:
            fitted.append(awake)
    rest = [parameter for parameter in parameters if parameter.name not in seen]
    return fitted + plan_buckets(rest, cap_bytes, first_bytes)


def in_order_of_arrival(parameters: Sequence[ParameterInfo], arrived: Sequence[str]) -> list[ParameterInfo]:
    """``parameters`` as `plan_buckets` wants them, for a backward whose gradients came in another order.

    Args:
        parameters: in order of registration.
        arrived: names in the order in which their gradients came; a parameter that is not among them (nothing
            used it) is taken to come where its neighbour in registration comes.

    Returns:
        The same parameters: the one whose gradient came first stands last.

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
    """Where each gradient starts in its buffer, in elements, and how long they are together.

    Args:
        numels: elements of each gradient.
        itemsize: bytes of an element.
        alignment: bytes at whose multiples a gradient starts.
    """
    step = max(1, alignment // itemsize)
    starts = []
    end = 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // step) * step
    return starts, end
