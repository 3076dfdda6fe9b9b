"""A process group for tensors of a device, by way of the host: gloo carries copies of them.

It has every collective, and messages from rank to rank, where gloo by itself takes CUDA tensors in all-reduce and
broadcast alone, and ends the process in others. Nothing is won by it: it lets several ranks of a test share one card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

BACKEND = "by_host"
"""Its name among the backends of process groups."""

BACKENDS = f"cpu:gloo,cuda:{BACKEND}"
"""What a group is made with that carries tensors of the CPU and of CUDA devices."""

_Work: Any = c10d.Work
_Group: Any = dist.ProcessGroup


def register() -> None:
    """Make the backend known to torch, once."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, HostGroup, devices=["cuda"])


def tensors(values: Sequence[Any]) -> list[Tensor]:
    """All tensors of nested lists and tuples."""
    found: list[Tensor] = []
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += tensors(each)
    return found


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested lists and tuples with other tensors in them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(each, change) for each in value])
    return value


class GroupWork(_Work):
    """A collective of a group that is written in Python; whoever derives from it says how it is waited for.

    Args:
        result: what the collective gives.
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
        """Done at once: the results are on the device's current stream."""
        self.wait()
        devices = {each.device for each in tensors([self._result]) if each.device.type != "cpu"}
        future: Any = torch.futures.Future(devices=sorted(devices, key=str))
        future.set_result(self._result)
        return future


class HostWork(GroupWork):
    """A collective of gloo's whose results go to the device when it is waited for.

    Args:
        work: gloo's.
        copies: tensors of the device that get a result, each with the one on the host.
        result: what the collective gives.
        divisor: of the results, where a mean is asked for, which gloo does not have.
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
    """The group. Tensors of the CPU that are given to it go to a gloo of their own."""

    backend_name = BACKEND
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._made = store, timeout
        self._gloos: dict[str, Any] = {each: self._gloo(each) for each in ("collectives", "cpu")}
        self._begun = 0
        self._name = self._desc = ""

    def _gloo(self, name: str) -> Any:
        store, timeout = self._made
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), self._rank, self._size, timeout)

    def _host(self) -> Any:
        """The group of the CPU's tensors."""
        return self._gloos["cpu"]

    def _do(self, name: str, *args: Any, result: Any = None) -> Any:
        """Begin a collective.

        Args:
            name: of gloo's method.
            *args: of it, with tensors of the device.
            result: those of them that get a result.
        """
        found = tensors(args)
        if all(each.device.type == "cpu" for each in found):
            return getattr(self._host(), name)(*args)
        self._begun += 1
        copies = {id(each): each.detach().cpu() for each in found}
        divisor = self._size if _takes_mean(args[-1]) else 1
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
        begun = [single(out, mine, *opts) for out, mine in zip(outs, ins, strict=True)]
        return _Works(begun, list(outs))

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

    # -- what torch asks of a group ----------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = dist.distributed_c10d._world.pg_backend_config.get(self, "cuda")
        return [torch.device(each.partition(":")[0]) for each in kinds.split(",")]

    def _get_backend(self, device: Any) -> Any:
        return self._host() if torch.device(device).type == "cpu" else self

    # the base keeps a name at its backends, of which this group has none

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, text: str) -> None:
        self._desc = text

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._desc)

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_backend_name(self) -> str:
        return self.backend_name

    name = _get_backend_name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def shutdown(self) -> None: ...

    def abort(self) -> None:
        for gloo in self._gloos.values():
            gloo.abort()


class _Works(GroupWork):
    """Several collectives as one."""

    def __init__(self, works: list[Any], result: Any) -> None:
        super().__init__(result)
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(each.wait() for each in self._works)  # each raises where it failed

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)


def _takes_mean(opts: Any) -> bool:
    """Whether a collective averages; from here on it adds up."""
    if getattr(opts, "reduceOp", None) != dist.ReduceOp.AVG:
        return False
    opts.reduceOp = dist.ReduceOp.SUM
    return True
