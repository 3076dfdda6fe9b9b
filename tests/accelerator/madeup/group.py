"""The process group of the made-up device: its collectives return when they are queued, as NCCL's.

Gloo carries the twins of the tensors, in threads. A collective waits for what its device's current stream holds at the
call; `Work.wait` puts what comes later on the stream behind it, and lets the host go on. Only a barrier stops the host.
Messages from rank to rank have lanes of their own, one for each peer and direction. A collective that fails is told
where the host waits next; one whose peer is gone never ends (`Settings.lost_ranks_end`), unless the group is aborted.

Alone (``"madeupccl"``) the group carries tensors of the device only; in ``"cpu:gloo,madeup:madeupccl"`` it hands those
of the CPU to a gloo of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tests.accelerator.madeup.kernels import mapped, tensors
from tests.accelerator.madeup.memory import on_host, on_it
from tests.accelerator.madeup.queues import Lane, Mark, count_wait, current, lane_of
from tests.accelerator.madeup.settings import BACKEND, NAME, settings

_Work: Any = c10d.Work


class QueuedWork(_Work):  # type: ignore[misc]
    """A collective that is on its way."""

    def __init__(self, result: Any, blocks: bool) -> None:
        super().__init__()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._result, self._blocks = result, blocks

    def through(self) -> None:
        """Stop the calling thread until the collective is done; raises what failed in it."""
        while not self.done.wait(0.5):
            pass
        if self.error is not None:
            raise self.error

    def wait(self, timeout: Any = None) -> bool:
        if self._blocks:
            count_wait("barrier")
            self.through()
        elif self.done.is_set() and self.error is None:
            return True
        else:
            found = tensors([self._result])
            lane_of(found[0].device.index if found else current.device).put(self.through)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        """Done at once, as CUDA's: what uses the values is queued behind the collective."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Group(dist.ProcessGroup):
    """A process group of the device."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._made = store, timeout
        self._gloos: dict[str, Any] = {each: self._gloo(each) for each in ("collectives", "cpu")}
        self._lanes = {"collectives": Lane("collectives")}
        self._begun = 0
        self._aborted = threading.Event()
        self._name = self._desc = ""

    def _gloo(self, name: str) -> Any:
        store, timeout = self._made
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), self._rank, self._size, timeout)

    # -- what is queued --------------------------------------------------------------------------

    def _host(self) -> Any:
        """The group of the CPU's tensors."""
        takes = settings.takes_cpu
        if not (takes if takes >= 0 else any(each.type == "cpu" for each in self._device_types)):
            raise RuntimeError("No backend type associated with device type cpu")
        return self._gloos["cpu"]

    def _do(self, name: str, *args: Any, result: Any = None) -> Any:
        """Queue a collective, or let gloo do it for tensors of the CPU."""
        found = tensors(args)
        if any(not on_it(each) for each in found):
            if any(on_it(each) for each in found):
                raise RuntimeError(f"{name}: tensors of the CPU and of {NAME} in one collective")
            return getattr(self._host(), name)(*args)
        self._begun += 1
        gloo, near = self._gloos["collectives"], mapped(args, on_host)
        index = found[0].device.index if found else current.device
        return self._queue("collectives", index, lambda: getattr(gloo, name)(*near).wait(), result, name == "barrier")

    def _queue(
        self, lane: str, index: int, call: Callable[[], object], result: Any, blocks: bool = False
    ) -> QueuedWork:
        work = QueuedWork(result, blocks)
        stream = lane_of(index)
        stream.check()
        before = Mark.behind(stream) if stream.busy else None

        def do() -> None:
            try:
                if before is not None:
                    before.wait()
                stream.check()
                call()
            except BaseException as error:  # it is raised where the host waits next
                if _is_of_lost_rank(error) and not settings.lost_ranks_end:
                    self._aborted.wait()
                work.error = error
            work.done.set()

        self._lanes.setdefault(lane, Lane(lane)).put(do)
        return work

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
        return [single(out, mine, *opts) for out, mine in zip(outs, ins, strict=True)][-1]

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
        if any(not on_it(each) for each in values):
            return getattr(self._host(), name)(values, peer, tag)
        near, gloo = mapped(values, on_host), self._gloos["collectives"]
        return self._queue(
            f"{name} {peer}", values[0].device.index, lambda: getattr(gloo, name)(near, peer, tag).wait(), values
        )

    # -- what torch asks of a group ----------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = dist.distributed_c10d._world.pg_backend_config.get(self, NAME)
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
        return BACKEND

    name = _get_backend_name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def shutdown(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def abort(self) -> None:
        self._aborted.set()
        for gloo in self._gloos.values():
            gloo.abort()


def _is_of_lost_rank(error: BaseException) -> bool:
    text = str(error)
    return any(each in text for each in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def _make(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(store, rank, size, timeout)


def register() -> None:
    """Make the backend known."""
    dist.Backend.register_backend(BACKEND, _make, devices=[NAME])
