"""A process group for device tensors that communicates through copies on the CPU, with gloo.

It lets several ranks of a test share one card, and is slow. It has every collective and messages between ranks. gloo
itself supports CUDA tensors only in all-reduce and broadcast, and aborts the process in other collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

BACKEND = "by_host"
"""Name under which the backend is registered in torch."""

BACKENDS = f"cpu:gloo,cuda:{BACKEND}"
"""Backends for ``init_process_group``: gloo for CPU tensors, this one for CUDA tensors."""

_Work: Any = c10d.Work
_Group: Any = dist.ProcessGroup


def register() -> None:
    """Register this module's backend in torch, unless it is registered already."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, HostGroup, devices=["cuda"])


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return a list of all tensors in nested lists and tuples."""
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors(each)
    return found


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested lists and tuples in which each tensor is replaced by ``change(tensor)``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(each, change) for each in value])
    return value


class GroupWork(_Work):
    """Base class of handles of collectives in a process group written in Python. Subclasses implement ``wait``.

    Args:
        result: result of the collective.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """Wait for the collective, and return a completed future. The results are on the device's current stream."""
        self.wait()
        # A future without its devices refuses results on them.
        devices = {each.device for each in tensors([self._result]) if each.device.type != "cpu"}
        future: Any = torch.futures.Future(devices=sorted(devices, key=str))
        future.set_result(self._result)
        return future


class HostWork(GroupWork):
    """Handle of a gloo collective, whose results are copied to the device in ``wait``.

    Args:
        work: gloo's work.
        copies: pairs of a tensor of the device that receives a result, and the tensor's copy on the host.
        result: result of the collective.
        divisor: number by which the results are divided, for means, which gloo does not have.
    """

    def __init__(self, work: Any, copies: list[tuple[Tensor, Tensor]], result: Any, divisor: int = 1) -> None:
        super().__init__(result)
        self._work, self._copies, self._divisor = work, copies, divisor
        self._done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._work.wait()
            self._done = True
            with torch.no_grad():
                for out, copy in self._copies:
                    out.copy_(copy.div_(self._divisor) if self._divisor > 1 else copy)
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._done

    def exception(self) -> None:
        return None


class HostGroup(_Group):
    """A process group that communicates CUDA tensors through copies on the CPU, with gloo.

    CPU tensors are communicated by a separate gloo group.
    """

    backend_name = BACKEND
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        # Two groups: collectives of the CPU and of the device must not be matched with each other.
        self._gloos: dict[str, Any] = {
            name: dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("collectives", "cpu")
        }
        self._started = 0
        self._name = self._desc = ""

    def _host(self) -> Any:
        """Return the gloo group for CPU tensors."""
        return self._gloos["cpu"]

    def _do(self, name: str, *args: Any, result: Any = None) -> Any:
        """Start a gloo collective on copies of the arguments that are device tensors.

        Args:
            name: name of gloo's method.
            *args: the method's arguments, which contain tensors of the device.
            result: those arguments that receive a result.
        """
        found = tensors(args)
        if all(each.device.type == "cpu" for each in found):
            return getattr(self._host(), name)(*args)
        self._started += 1
        copies = {id(each): each.detach().cpu() for each in found}
        divisor = 1
        if getattr(args[-1], "reduceOp", None) == dist.ReduceOp.AVG:  # gloo has no mean
            args[-1].reduceOp, divisor = dist.ReduceOp.SUM, self._size
        work = getattr(self._gloos["collectives"], name)(*mapped(args, lambda each: copies[id(each)]))
        return HostWork(work, [(out, copies[id(out)]) for out in tensors([result])], result, divisor)

    # -- collectives -----------------------------------------------------------------------------

    def allreduce(self, values: list[Tensor], opts: Any = None) -> Any:
        return self._do("allreduce", values, opts or c10d.AllreduceOptions(), result=values)

    def allreduce_coalesced(self, values: list[Tensor], opts: Any = None) -> Any:
        return self._do("allreduce_coalesced", values, opts or c10d.AllreduceCoalescedOptions(), result=values)

    def broadcast(self, values: list[Tensor], opts: Any = None) -> Any:
        return self._do("broadcast", values, opts or c10d.BroadcastOptions(), result=values)

    def reduce(self, values: list[Tensor], opts: Any) -> Any:
        return self._do("reduce", values, opts, result=values)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("allgather", outs, ins, opts or c10d.AllgatherOptions(), result=outs)

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("allgather_coalesced", outs, ins, opts or c10d.AllgatherOptions(), result=outs)

    def all_gather_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self._do("_allgather_base", out, mine, opts or c10d.AllgatherOptions(), result=out)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        return self._do("reduce_scatter", outs, ins, opts, result=outs)

    def reduce_scatter_single(self, out: Tensor, mine: Tensor, opts: Any = None) -> Any:
        return self._do("_reduce_scatter_base", out, mine, opts or c10d.ReduceScatterOptions(), result=out)

    def gather(self, outs: Any, ins: Any, opts: Any) -> Any:
        return self._do("gather", outs, ins, opts, result=outs)

    def scatter(self, outs: Any, ins: Any, opts: Any) -> Any:
        return self._do("scatter", outs, ins, opts, result=outs)

    def all_to_all_single(self, out: Tensor, mine: Tensor, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("alltoall_base", out, mine, outs, ins, opts or c10d.AllToAllOptions(), result=out)

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._do("alltoall", outs, ins, opts or c10d.AllToAllOptions(), result=outs)

    def barrier(self, opts: Any = None) -> Any:
        return self._do("barrier", opts or c10d.BarrierOptions())

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _each(self, single: Callable[..., Any], outs: Sequence[Tensor], ins: Sequence[Tensor], *opts: Any) -> Any:
        works = [single(out, mine, *opts) for out, mine in zip(outs, ins, strict=True)]
        return _Works(works, list(outs))

    def all_gather_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._each(self.all_gather_single, outs, ins)

    def reduce_scatter_single_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._each(self.reduce_scatter_single, outs, ins, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- messages --------------------------------------------------------------------------------

    def send(self, values: list[Tensor], to: int, tag: int) -> Any:
        return self._message("send", values, to, tag)

    def recv(self, values: list[Tensor], source: int, tag: int) -> Any:
        return self._message("recv", values, source, tag)

    def _message(self, name: str, values: list[Tensor], peer: int, tag: int) -> Any:
        return self._do(name, values, peer, tag, result=values if name == "recv" else [])

    # -- properties that torch reads ---------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = dist.distributed_c10d._world.pg_backend_config.get(self, "cuda")
        return [torch.device(each.partition(":")[0]) for each in kinds.split(",")]

    def _get_backend(self, device: Any) -> Any:
        return self._host() if torch.device(device).type == "cpu" else self

    # The base class stores names in its backends, and this group has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    def _set_sequence_number_for_group(self) -> None: ...

    def name(self) -> str:
        return self.backend_name

    _get_backend_name = name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def shutdown(self) -> None: ...

    def abort(self) -> None:
        for gloo in self._gloos.values():
            gloo.abort()


class _Works(GroupWork):
    """Handle of several collectives, whose ``wait`` waits for all of them."""

    def __init__(self, works: list[Any], result: Any) -> None:
        super().__init__(result)
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(each.wait() for each in self._works)  # each raises its own error

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)
