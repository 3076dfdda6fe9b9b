"""A bucket plan from sizes that are given one by one: ``bucket_cap_mb_list`` of torch's container."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import Parameter

from lockstep.parallel.buckets import Plan


def plan_by_caps(named_parameters: Sequence[tuple[str, Parameter]], caps: Sequence[float]) -> Plan:
    """Cut parameters into buckets of given sizes.

    Args:
        named_parameters: in order of registration.
        caps: bytes of the buckets, that of the first-registered parameters in front, for each dtype and device; the
            last one holds for all further ones.

    Example:
        >>> named = [(name, Parameter(torch.zeros(10))) for name in "abcd"]
        >>> plan_by_caps(named, [40, 80])
        [['d'], ['c', 'b'], ['a']]
    """
    buckets: list[list[int]] = []
    now: dict[tuple[torch.dtype, torch.device], tuple[list[int], int, float]] = {}
    seen: set[int] = set()
    for index, (_, parameter) in enumerate(named_parameters):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        kind = (parameter.dtype, parameter.device)
        bucket, number, room = now.get(kind, ([], -1, -1.0))
        if number < 0 or parameter.nbytes > room:
            bucket, number = [], number + 1
            room = caps[min(number, len(caps) - 1)]
            buckets.append(bucket)
        bucket.append(index)
        now[kind] = bucket, number, room - parameter.nbytes
    buckets.sort(key=lambda bucket: -bucket[0])
    return [[named_parameters[index][0] for index in reversed(bucket)] for bucket in buckets]
