"""Collectives of a device's backend, which return when they are queued: how they are counted, and who waits in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.supervise import collective_trace
from lockstep.supervise.collective_trace import install_trace, uninstall_trace
from lockstep.supervise.hang import diverged, overdue
from lockstep.supervise.snapshot import RUNS, RankSnapshot
from lockstep.supervise.stack import Frame, Stack
from lockstep.supervise.trace_memory import LAG, Reading
from tests.launch.played import past
from tests.launch.test_hang import snapshot
from tests.tools.pool import RankPool

# -- counting


def _second(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _two_backends() -> list[tuple[str, bool, str, str]]:
    uninstall_trace()
    if "second" not in dist.Backend.backend_list:
        dist.Backend.register_backend("second", _second, devices=["cuda"])
    install_trace()
    trace = collective_trace._trace
    assert trace is not None
    group = dist.new_group(backend="cpu:gloo,cuda:second")

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        group._get_backend(torch.device("cuda")).allreduce([torch.ones(2)]).wait()

    on_device = trace.collective("all_reduce", all_reduce)
    reading = Reading(trace.memory.address)
    before = reading.count
    with FakeTensorMode():
        far = torch.empty(2, device="cuda")
    try:
        for _ in range(2):
            on_device(far, group=group)
            dist.all_reduce(torch.ones(2), group=group)
            dist.all_reduce(torch.ones(2), group=group)
        if dist.get_rank():
            dist.send(torch.ones(2), 0, group)
        else:
            dist.recv(torch.ones(2), 1, group)
        dist.all_gather_object([None, None], far.device, group=group)
        dist.all_reduce(torch.ones(2), group=group)
        on_device(far, group=group)
        return [(note.name, note.whole, note.group, note.operation) for note in reading.notes(before + 1)]
    finally:
        uninstall_trace()
        dist.destroy_process_group(group)


def test_each_backend_of_a_group_counts_by_itself(ranks: RankPool) -> None:
    """A group had one number, that of its default backend: after the first collective of another one calls were taken
    for such that had not come by the gate, and nothing was a proof any more."""
    one, other = ranks(2).run(_two_backends)
    counted = [each for each in one if each[3] not in ("send", "recv")]
    assert counted == [each for each in other if each[3] not in ("send", "recv")]
    assert all(whole for _, whole, *_ in counted)
    assert len({group for _, _, group, _ in counted}) == 2
    on_cpu = [named for named, _, group, _ in counted if "cuda" not in group]
    on_device = [named for named, _, group, _ in counted if "cuda" in group]
    assert on_device == ["all_reduce #1", "all_reduce #2", "all_reduce #3"]
    assert on_cpu == [*(f"all_reduce #{number}" for number in (1, 2, 3, 4)), "all_gather_object #5", "all_reduce #6"]


class _Apart:
    """Stands for a group whose backend counts messages apart, as NCCL does."""

    group_name, rank_in_it = "apart", 0

    def __init__(self) -> None:
        self.count = 0
        self._device_types: list[torch.device] = []

    def get_group(self) -> _Apart:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.count


def test_messages_that_a_backend_does_not_count_are_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL counts messages apart: after the first one a group's numbers were not compared any more."""
    group: Any = _Apart()
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    trace = collective_trace.CollectiveTrace()
    reading = Reading(trace.memory.address)
    before = reading.count

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        group.count += 1

    def send(tensor: torch.Tensor, dst: int, group: Any = None) -> None:
        pass

    reduce, message = trace.collective("all_reduce", all_reduce), trace.message("send", send)
    for _ in range(3):
        reduce(torch.ones(2), group=group)
        message(torch.ones(2), 1, group=group)
    notes = [note for note in reading.notes(before + 1) if note.operation == "all_reduce"]
    assert [(note.name, note.whole, note.group) for note in notes] == [
        (f"all_reduce #{number}", True, "apart") for number in (1, 2, 3)
    ]


# -- what a device is not done with


class _Event:
    """Stands for a device's event: done when it is said so."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return _Event.done


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A trace in a process whose default group has a backend for CUDA that returns at once."""
    _Event.done = False
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.init_process_group("cuda:fake", rank=0, world_size=1, store=dist.HashStore())
    uninstall_trace()
    install_trace()
    trace = collective_trace._trace
    assert trace is not None
    monkeypatch.setattr(trace._marks, "_thread", object())  # the test looks by itself
    trace._marks._new.clear()
    with FakeTensorMode():
        yield trace, torch.empty(2, device="cuda")
    uninstall_trace()
    trace._marks._new.clear()
    trace._marks._open.clear()
    trace._marks._free.clear()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["at once", "waited for"])
def test_a_collective_in_a_devices_queue_is_done_when_the_device_is(queues: Any, how: str) -> None:
    """Its call returns at once; the note was left and done then, and whoever waited for a lost rank was never seen."""
    trace, tensor = queues
    reading = Reading(trace.memory.address)
    trace._marks.check()
    if how == "at once":
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        assert not reading.newest(1)[0].queued  # nobody has waited for it
        work.wait()
    (note,) = reading.newest(1)
    assert (note.inside, note.queued, note.done) == (False, True, None)
    trace._marks.check()
    assert reading.newest(1)[0].queued
    _Event.done = True
    trace._marks.check()
    (note,) = reading.newest(1)
    assert note.done is not None
    assert not note.queued
    assert not trace._marks._open


def test_what_becomes_part_of_a_graph_gets_no_mark(queues: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, tensor = queues
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dist.all_reduce(tensor)
    assert not trace._marks._open
    assert Reading(trace.memory.address).newest(1)[0].done is not None


# -- who waits


OWN = Stack((Frame("/me/train.py", 33, "training_step"),))
ITEM = Stack((Frame("/me/train.py", 57, "training_step"),))


def _on_devices() -> list[RankSnapshot]:
    """Rank 0 stays in its own code before number 100; the others have queued four more and ask for a value."""
    found = [snapshot(0, *(past(n) for n in range(99, 84, -1)), stack=OWN, state=RUNS)]
    for rank in (1, 2):
        notes = [past(n, queued=True) if n >= 100 else past(n) for n in range(103, 88, -1)]
        found.append(snapshot(rank, *notes, stack=ITEM, state=RUNS))
    return found


def test_a_rank_that_has_not_come_to_what_others_have_queued_is_the_late_one() -> None:
    """They ask for a value in a line of the user's and turn round there: neither still nor inside a collective."""
    ranks = [each if not each.rank else _not_done(each) for each in _on_devices()]
    assert [round(each.waited, 1) for each in ranks] == [0.0, 60.0 - LAG, 60.0 - LAG]
    assert diverged(ranks) is None  # it may still come
    assert str(overdue(ranks, 30.0)) == (
        "for 58 s, rank 0 is in its own code, /me/train.py:33; ranks 1, 2 wait in all_reduce #100 (queued on their "
        "device), /me/train.py:57 (training_step)"
    )
    assert overdue(ranks, 60.0) is None


def _not_done(each: RankSnapshot) -> RankSnapshot:
    notes = tuple(replace(note, done=None) if note.number >= 100 else note for note in each.notes)
    return replace(each, notes=notes)
