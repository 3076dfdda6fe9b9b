"""The gate: strided tensors are reduced rightly, and calls that do not fit together are named instead of made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.supervise import collective_trace, trace_memory
from lockstep.supervise.collective_trace import install_trace, set_location, uninstall_trace
from lockstep.supervise.trace_memory import Reading, own
from tests.tools.pool import RankPool


def _strided(async_op: bool) -> list[Any]:
    install_trace()
    install_trace()
    try:
        rank = dist.get_rank()
        everything = torch.full((4, 4), 1.0 + rank)
        work = dist.all_reduce(everything[:, ::2], async_op=async_op)
        if work is not None:
            work.wait()
            assert work.is_completed()
            assert work.get_future().done()
        turned = torch.arange(6.0).view(2, 3).t() * (rank + 1)
        dist.all_reduce(turned, dist.ReduceOp.MAX)
        one = torch.full((4, 4), 1.0 + rank)
        dist.reduce(one[1], 0)
        return [everything, turned, one[1]]
    finally:
        uninstall_trace()


@pytest.mark.parametrize("async_op", [False, True])
def test_strided_tensors_are_reduced_whole(ranks: RankPool, async_op: bool) -> None:
    for rank, (everything, turned, one) in enumerate(ranks(2).run(_strided, async_op)):
        right = torch.full((4, 4), 1.0 + rank)
        right[:, ::2] = 3.0
        assert torch.equal(everything, right)
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t() * 2)
        assert rank == 1 or torch.equal(one, torch.full((4,), 3.0))


def _messages_behind_the_gate() -> float:
    install_trace()
    uninstall_trace()
    value = torch.ones(1) + dist.get_rank()
    if dist.get_rank():
        dist.send(value, 0)
    else:
        dist.recv(value, 1)
    return value.item()


def test_messages_go_on_where_the_gate_was_taken_down(ranks: RankPool) -> None:
    """Methods of torch's process groups were put back as functions that are not bound: "send(): incompatible"."""
    assert ranks(2).run(_messages_behind_the_gate) == [2.0, 2.0]


# -- what is noted


@contextlib.contextmanager
def _memory_of_its_own() -> Iterator[None]:
    """A process of the pool has run other tests, whose words may have left no place."""
    uninstall_trace()
    before, trace_memory._own = trace_memory._own, None
    try:
        yield
    finally:
        os.close(int(own().address.partition(":")[0].rpartition("/")[2]))
        trace_memory._own = before


def _noted() -> list[tuple[Any, ...]]:
    with _memory_of_its_own():
        return _notes_of_each_kind()


def _notes_of_each_kind() -> list[tuple[Any, ...]]:
    from torch.distributed import irecv, isend

    install_trace()
    assert collective_trace._trace is not None
    reading, rank = Reading(collective_trace._trace.memory.address), dist.get_rank()
    before = reading.count
    set_location(lambda: ("on_validation_epoch_end", 7))
    try:
        ones, both = torch.ones(4), torch.zeros(8)
        dist.all_reduce(ones, dist.ReduceOp.MAX)
        dist.broadcast(ones, 1)
        dist.all_gather_into_tensor(both, ones)
        work = dist.all_reduce(ones, async_op=True)
        assert work is not None
        begun = reading.newest(1)[0]
        work.wait()
        dist.all_gather_object([None, None], rank)  # makes two more, which are its own
        for done in dist.batch_isend_irecv([dist.P2POp(isend, ones, 1 - rank), dist.P2POp(irecv, both[:4], 1 - rank)]):
            done.wait()
        dist.send(ones, 0) if rank else dist.recv(ones, 1)
        pair = dist.new_group([0, 1])
        dist.barrier(pair)
        with contextlib.suppress(TypeError):
            dist.all_reduce("no tensor")  # type: ignore[arg-type]
        dist.barrier()
    finally:
        set_location(None)
        uninstall_trace()
    dist.barrier()  # no more
    return [
        *[
            (
                {"recv": "send"}.get(note.operation, note.name),
                note.payload,
                note.members,
                note.whole,
                note.inside,
                bool(note.done),
                note.location,
                note.batch,
            )
            for note in reading.notes(before + 1)
        ],
        (begun.inside, begun.done),
    ]


def test_every_collective_is_noted(ranks: RankPool) -> None:
    found, other = ranks(2).run(_noted)
    assert found == other
    assert found.pop() == (False, None)  # it was begun, and nobody had waited for it
    assert [(name, payload, whole) for name, payload, _, whole, *_ in found] == [
        ("all_reduce #1", "float32 (4,) MAX", True),
        ("broadcast #2", "float32 (4,)", True),
        ("all_gather_into_tensor #3", "float32 (4,)", True),
        ("all_reduce #4", "float32 (4,) SUM", True),
        ("all_gather_object #5", "", True),
        ("send", "float32 (4,)", False),  # those in a batch are counted, and not noted
        ("barrier #1", "", True),
        ("all_reduce #6", "", True),
        ("barrier #7", "", False),  # nobody knows whether the call before it was made
    ]
    assert {members for _, _, members, *_ in found} == {(0, 1)}
    assert not any(inside for _, _, _, _, inside, *_ in found)
    assert all(done for _, _, _, _, _, done, *_ in found)
    assert all(location.startswith(f"{__file__}:") for *_, location, _ in found)
    assert {batch for *_, batch in found} == {7}


def _past_the_gate(more: bool) -> list[tuple[str, bool, str]]:
    uninstall_trace()
    before = dist.all_reduce
    install_trace()
    assert collective_trace._trace is not None
    reading = Reading(collective_trace._trace.memory.address)
    count = reading.count
    try:
        dist.all_reduce(torch.ones(2))
        before(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        if more and dist.get_rank():
            dist.all_reduce(torch.ones(2))
        before(torch.ones(2))
        if more and not dist.get_rank():
            dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        return [(note.name, note.whole, note.group) for note in reading.notes(count + 1)]
    finally:
        uninstall_trace()


def test_a_group_knows_of_calls_that_do_not_come_by(ranks: RankPool) -> None:
    """FSDP saves one file by such calls: after its first checkpoint no proof was possible any more."""
    one, other = ranks(2).run(_past_the_gate, False)
    assert one == other
    assert [(named, whole) for named, whole, _ in one] == [(f"all_reduce #{number}", True) for number in (1, 2, 3)]
    assert len({group for *_, group in one}) == 3  # numbers are compared with those by which the same has passed


def test_ranks_by_which_other_calls_have_passed_are_not_compared(ranks: RankPool) -> None:
    """Their numbers are no proof then: one rank may run a compiled graph where another does not."""
    one, other = ranks(2).run(_past_the_gate, True)
    groups = [{(group, named) for named, _, group in found} for found in (one, other)]
    assert {named for _, named in groups[0] & groups[1]} == {"all_reduce #1", "all_reduce #2"}


def _compiled() -> tuple[list[float], int, int]:
    from torch.distributed import _functional_collectives as functional

    uninstall_trace()
    install_trace()
    assert collective_trace._trace is not None
    reading = Reading(collective_trace._trace.memory.address)
    count = reading.count

    def both(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value + functional.all_reduce(value, "sum", dist.group.WORLD)  # type: ignore[arg-type]

    try:
        compiled = torch.compile(both, fullgraph=True, backend="eager")(torch.ones(2)).tolist()
        made = reading.count
        assert both(torch.ones(2)).tolist() == compiled
        return compiled, made - count, reading.count - made
    finally:
        uninstall_trace()


@pytest.mark.slow
def test_a_compiled_graph_goes_past_the_gate_whole(ranks: RankPool) -> None:
    for compiled, in_graph, eager in ranks(2).run(_compiled, timeout=120):
        assert compiled == [6.0, 6.0]
        assert (in_graph, eager) == (0, 1)  # the functional one is not noted


def test_a_forked_process_writes_into_a_trace_of_its_own() -> None:
    """It once wrote words between those of the process that it was forked from, which then were read as one another."""
    install_trace()
    try:
        assert collective_trace._trace is not None
        mine, kept = collective_trace._trace.memory, dist.all_reduce
        reading = Reading(mine.address)
        before = reading.count
        child = os.fork()
        if child == 0:
            passed = not collective_trace._replaced
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            kept(torch.ones(3))
            install_trace()
            dist.all_reduce(torch.ones(3))
            os._exit(
                0 if passed and collective_trace._trace.memory is not mine and Reading(own().address).count == 1 else 1
            )
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert collective_trace._replaced
        assert reading.count == before
    finally:
        uninstall_trace()
