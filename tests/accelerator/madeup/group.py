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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.testing.host_group import GroupWork, HostGroup, mapped, tensors
from tests.accelerator.madeup.memory import on_host, on_it
from tests.accelerator.madeup.queues import Lane, Mark, count_wait, current, lane_of
from tests.accelerator.madeup.settings import BACKEND, NAME, settings


class QueuedWork(GroupWork):
    """A collective that is on its way."""

    def __init__(self, result: Any, blocks: bool) -> None:
        super().__init__(result)
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._blocks = blocks

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

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def get_future(self) -> Any:
        """Done at once, as CUDA's: what uses the values is queued behind the collective."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class Group(HostGroup):
    """A process group of the device."""

    backend_name = BACKEND

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(store, rank, size, timeout)
        self._lanes = {"collectives": Lane("collectives")}
        self._aborted = threading.Event()

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
        self._started += 1
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

    # -- messages --------------------------------------------------------------------------------

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

    def shutdown(self) -> None:
        for lane in self._lanes.values():
            lane.drain()

    def abort(self) -> None:
        self._aborted.set()
        super().abort()


def _is_of_lost_rank(error: BaseException) -> bool:
    text = str(error)
    return any(each in text for each in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def _make(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(store, rank, size, timeout)


def register() -> None:
    """Make the backend known."""
    dist.Backend.register_backend(BACKEND, _make, devices=[NAME])
