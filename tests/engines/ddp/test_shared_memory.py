"""Shared memory against a sum by hand in rank order: bits, layouts, fallbacks, and ranks that go missing."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.shared_memory import SMALL, SharedReduction
from lockstep.ground import comm, shared_pages
from lockstep.supervise.causes import cause_of
from tests.tools.pool import RankFailure, RankPool, run_threads

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LONG = SMALL // 2 + 37  # in elements: above the limit in every dtype

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Piece:
    """As much of a bucket as a transport looks at."""

    is_sparse = False

    def __init__(self, index: int, flat: Tensor) -> None:
        self.index, self.flat, self.work = index, flat, None


def _opened(group: Any = None) -> SharedReduction:
    opened = SharedReduction.open(group)
    assert opened is not None
    return opened


def _pieces(reduction: SharedReduction, lengths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Piece]:
    flats = reduction.buffers([(length, dtype, CPU) for length, dtype in zip(lengths, dtypes, strict=True)])
    assert flats is not None
    for flat, length, dtype in zip(flats, lengths, dtypes, strict=True):
        assert (flat.shape, flat.dtype, flat.data_ptr() % 16) == ((length,), dtype, 0)
        assert not flat.any()
    return [Piece(index, flat) for index, flat in enumerate(flats)]


def _reduce(reduction: SharedReduction, *pieces: Piece, scale: float = 1.0) -> None:
    for piece in pieces:
        reduction.start(piece, scale)  # type: ignore[arg-type]
    for piece in pieces:
        reduction.wait(piece)  # type: ignore[arg-type]


def _gradient(length: int, dtype: torch.dtype, *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed))
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def _sum(length: int, dtype: torch.dtype, world: int, scale: float, *seed: int) -> Tensor:
    """Rank by rank, every product and every sum rounded."""
    total = _gradient(length, dtype, 0, *seed) * scale
    for rank in range(1, world):
        total = total + _gradient(length, dtype, rank, *seed) * scale
    return total


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# -- numbers


@dataclass
class Case:
    """Rounds of buckets; each rank waits in its own way."""

    world: int
    lengths: list[int]
    dtypes: list[torch.dtype]
    scales: list[float]  # one a round
    patience: list[int]  # by rank: so many buckets are under way before it waits for the first


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 31, 64, 1000, LONG, 3 * LONG]), min_size=1, max_size=5))
    several = st.lists(st.sampled_from(DTYPES), min_size=len(lengths), max_size=len(lengths))
    scales = draw(st.lists(st.sampled_from([1 / world, 1.0, 0.37, -2.0]), min_size=1, max_size=4))
    return Case(world, lengths, draw(several), scales, [draw(st.integers(1, 6)) for _ in range(world)])


def _rounds(case: Case) -> list[list[Tensor]]:
    rank = dist.get_rank()
    reduction = _opened()
    pieces = _pieces(reduction, case.lengths, case.dtypes)
    found = []
    for turn, scale in enumerate(case.scales):
        waiting: list[Piece] = []
        for piece in pieces:
            piece.flat.copy_(_gradient(len(piece.flat), piece.flat.dtype, rank, turn, piece.index))
            reduction.start(piece, scale)  # type: ignore[arg-type]
            waiting.append(piece)
            if len(waiting) == case.patience[rank]:
                reduction.wait(waiting.pop(0))  # type: ignore[arg-type]
        for piece in waiting:
            reduction.wait(piece)  # type: ignore[arg-type]
        found.append([piece.flat.clone() for piece in pieces])
    reduction.close()
    return found


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_sums_are_those_in_rank_order(ranks: RankPool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(case=cases())
    def compare(case: Case) -> None:
        for found in ranks(case.world).run(_rounds, case):
            for turn, scale in enumerate(case.scales):
                for index, (length, dtype) in enumerate(zip(case.lengths, case.dtypes, strict=True)):
                    right = _sum(length, dtype, case.world, scale, turn, index)
                    assert torch.equal(_bits(found[turn][index]), _bits(right))

    compare()


def _megabytes(length: int) -> bool:
    reduction = _opened()
    (piece,) = _pieces(reduction, [length], [torch.float32])
    piece.flat.copy_(_gradient(length, torch.float32, dist.get_rank()))
    _reduce(reduction, piece, scale=1 / 3)
    reduction.close()
    return torch.equal(piece.flat, _sum(length, torch.float32, 3, 1 / 3))


def test_a_share_of_several_blocks(ranks: RankPool) -> None:
    assert ranks(3).run(_megabytes, 3 * 2**18 + 12345) == [True] * 3


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 6e-5, 6e-8, 1e-45, 65504.0, 3e38]


def _against_gloo(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every special value meets every other; and many ordinary ones."""
    left = torch.tensor(SPECIAL, dtype=torch.float64).repeat_interleave(len(SPECIAL))
    right = torch.tensor(SPECIAL, dtype=torch.float64).repeat(len(SPECIAL))
    rank = dist.get_rank()
    mine = torch.cat([(right if rank else left).to(dtype), _gradient(LONG, dtype, rank)])
    reduction = _opened()
    (piece,) = _pieces(reduction, [len(mine)], [dtype])
    piece.flat.copy_(mine)
    _reduce(reduction, piece, scale=0.5)
    reduction.close()
    mine.mul_(0.5)
    dist.all_reduce(mine)
    return piece.flat.clone(), mine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_have_the_bits_of_gloo(ranks: RankPool, dtype: torch.dtype) -> None:
    (ours, gloos), (again, _) = ranks(2).run(_against_gloo, dtype)
    assert torch.equal(ours.isnan(), gloos.isnan())  # which of its many bits a NaN has is nobody's promise
    assert torch.equal(ours.signbit() & ~ours.isnan(), gloos.signbit() & ~ours.isnan())
    assert torch.equal(_bits(ours.nan_to_num(nan=7)), _bits(gloos.nan_to_num(nan=7)))
    assert torch.equal(_bits(ours), _bits(again))
    assert bool(ours.isnan().any())
    assert bool((ours == torch.inf).any())
    assert bool((ours[ours == 0].signbit()).any())


class Net(nn.Module):
    """Enough layers for several buckets."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*(nn.Linear(40, 40, dtype=dtype) for _ in range(6)))
        self.unused = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh().sum()


def _reduced(cap: float, shared: bool, without_memory: int | None = None) -> tuple[list[Tensor], bool, str]:
    net = Net()
    rank = dist.get_rank()
    reserve = os.posix_fallocate
    if rank == without_memory:
        os.posix_fallocate = _nothing_left
    try:
        reducer = Reducer(net.named_parameters(), bucket_cap_mb=cap, first_bucket_mb=cap, shared_memory=shared)
        for step in range(3):
            net.zero_grad()
            reducer.prepare()
            net(_gradient(80, torch.float32, rank, step).view(2, 40)).backward()
            reducer.finish()
    finally:
        os.posix_fallocate = reserve
    gradients = [parameter.grad.clone() for parameter in net.layers.parameters() if parameter.grad is not None]
    kind = type(reducer._transport).__name__
    reducer.detach()
    return gradients, net.unused.weight.grad is None, kind


def _nothing_left(*arguments: int) -> None:
    if arguments[2] != 8 * 64:  # the semaphores of two ranks: these fit in
        raise OSError(28, "No space left on device")


def test_bits_do_not_depend_on_the_buckets(ranks: RankPool) -> None:
    """Gloo's sums over four ranks change up to 43 % of the bits with the layout."""
    many = ranks(4).run(_reduced, 0.004, True)
    few = ranks(4).run(_reduced, 25, True)
    for (first, unused, kind), (second, _, _) in zip(many, few, strict=True):
        assert (unused, kind, len(first)) == (True, "SharedReduction", 12)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- memory


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_moves_all_to_gloo(ranks: RankPool, rank: int) -> None:
    right = ranks(2).run(_reduced, 0.004, False)
    for (ours, _, kind), (gloos, _, _) in zip(ranks(2).run(_reduced, 0.004, True, rank), right, strict=True):
        assert kind == "AllReduce"
        assert all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True))


def _another_layout() -> tuple[list[float], list[float], bool]:
    """Tensors of the old layout live on, on this rank alone; the new one has a memory of its own."""
    rank = dist.get_rank()
    reduction = _opened()
    (old,) = _pieces(reduction, [LONG], [torch.float32])
    old.flat.fill_(rank + 1)
    _reduce(reduction, old)
    kept = old.flat[5:9]
    small, large = _pieces(reduction, [10, LONG], [torch.float64, torch.float32])
    old.flat.add_(rank)  # nobody else sees this
    for piece in (small, large):
        piece.flat.fill_(10 * (rank + 1))
    _reduce(reduction, small, large)
    refused = reduction.buffers([(4, torch.float32, CPU), (4, torch.float32, torch.device("meta"))]) is None
    reduction.close()
    del old, reduction
    return kept.tolist(), [*small.flat[:1].tolist(), *large.flat[-1:].tolist()], refused


def test_a_new_layout_has_new_memory(ranks: RankPool) -> None:
    for rank, (kept, new, refused) in enumerate(ranks(2).run(_another_layout)):
        assert kept == [3.0 + rank] * 4
        assert new == [30.0, 30.0]
        assert refused  # other devices than the CPU are not for this


def _files(process: int) -> list[str]:
    return sorted(path.name for path in Path(shared_pages.FOLDER).glob(f"lockstep-{process}-*"))


def _kind(what: str) -> tuple[bool, list[str]]:
    """Whether there is a reduction, where rank 1 is on another host, or the library has no such semaphores."""
    from lockstep.engines.ddp import shared_memory

    host, function = shared_pages.host, shared_memory._function
    if what == "host" and dist.get_rank() == 1:
        shared_pages.host = lambda: "elsewhere"
    if what == "library" and dist.get_rank() == 0:
        shared_memory._function = lambda name, *types: lambda *arguments: -1 if name == "sem_init" else 0
    try:
        opened = SharedReduction.open(None)
    finally:
        shared_pages.host, shared_memory._function = host, function
    if opened is not None:
        opened.close()
    return opened is not None, _files(os.getpid())


@pytest.mark.parametrize(("what", "there"), [("", True), ("host", False), ("library", False)])
def test_all_ranks_agree_whether_it_can_be(ranks: RankPool, what: str, there: bool) -> None:
    assert ranks(3).run(_kind, what) == [(there, [])] * 3


def test_ranks_that_are_threads_have_no_need_of_it() -> None:
    assert run_threads(2, lambda: SharedReduction.open(None) is None) == [True, True]


# -- ranks that are late, or never come


def _race(seed: int, rounds: int, longest: float) -> int:
    """Random pauses between all that a rank does; how many sums were wrong."""
    chance = random.Random(seed * 100 + dist.get_rank())
    rank, world = dist.get_rank(), dist.get_world_size()
    reduction = _opened()
    lengths = [LONG, 5, 300, 2 * LONG, 0, 64]
    pieces = _pieces(reduction, lengths, [torch.float64] * len(lengths))
    base = [_gradient(length, torch.float64, 0, seed) for length in lengths]
    wrong = 0

    def pause() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * longest)

    for turn in range(rounds):
        for piece in pieces:
            pause()
            piece.flat.copy_(base[piece.index]).mul_((rank + 1) * 2 ** (turn % 5))
            reduction.start(piece, 1.0)  # type: ignore[arg-type]
        for piece in pieces:
            pause()
            reduction.wait(piece)  # type: ignore[arg-type]
            pause()
            right = base[piece.index] * ((world + 1) * world // 2 * 2 ** (turn % 5))
            wrong += not torch.allclose(piece.flat, right, rtol=1e-14, atol=0)
    reduction.close()
    return wrong


LONGER = [(world, 600, longest) for world in (2, 3, 5) for longest in (0, 1e-5, 1e-4, 1e-3)]


@pytest.mark.parametrize(
    ("world", "rounds", "longest"),
    [(2, 60, 2e-3), (3, 60, 2e-3), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER)],
)
def test_pauses_anywhere_change_nothing(ranks: RankPool, world: int, rounds: int, longest: float) -> None:
    assert ranks(world).run(_race, world, rounds, longest, timeout=300) == [0] * world


def _kill_one(note: str, when: str) -> None:
    """Rank 1 dies by a signal, with a child (a loader's worker) that lives on."""
    rank = dist.get_rank()
    Path(note).with_name(f"process-{rank}").write_text(str(os.getpid()))
    reduction = _opened()
    pieces = _pieces(reduction, [LONG, 10], [torch.float32] * 2)
    if rank == 1:
        if when == "between":
            reduction.start(pieces[0], 1.0)  # type: ignore[arg-type]
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        time.sleep(0.1)
        Path(note).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _reduce(reduction, *pieces)
    except RuntimeError as error:
        seconds = time.monotonic() - float(Path(note).read_text())
        lost = cause_of(rank, error).lost
        raise RuntimeError(f"{'lost' if lost else 'own'}, {'soon' if seconds < 1 else seconds}: {error}") from error


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_killed_rank_is_noticed_within_a_second(ranks: RankPool, tmp_path: Path, when: str) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(3).run(_kill_one, str(tmp_path / "note"), when)
    said = str(failure.value)
    assert "killed by SIGKILL" in said
    for rank in (0, 2):  # rank 1 alone, or with the one that gave up because of it
        names = f"(rank 1|ranks {min(1, 2 - rank)}, {max(1, 2 - rank)})"
        left = rf"lost, soon: {names} left \(the process exited, .*\) while rank {rank} waited for the reduction of"
        assert re.search(left, said), said
    assert [_files(int(path.read_text())) for path in tmp_path.glob("process-*")] == [[]] * 3


def _close_early(rank_that_closes: int) -> str:
    rank = dist.get_rank()
    reduction = _opened()
    pieces = _pieces(reduction, [LONG, 10], [torch.float32] * 2)
    if rank == rank_that_closes:
        reduction.close()
        return ""
    begun = time.monotonic()
    for piece in pieces:
        reduction.start(piece, 1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as error:
        reduction.wait(pieces[0])  # type: ignore[arg-type]
    assert time.monotonic() - begun < 1
    with pytest.raises(RuntimeError, match="left"):  # and it stays so
        reduction.wait(pieces[1])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="left"):
        reduction.start(pieces[0], 1.0)  # type: ignore[arg-type]
    return str(error.value)


def test_a_rank_that_closes_early_is_named(ranks: RankPool) -> None:
    first, nobody, third = ranks(3).run(_close_early, 1)
    assert nobody == ""
    assert "rank 1" in first + third  # or one that gave up because of it
    assert all("left (the process exited, or its reducer was closed" in text for text in (first, third))


def _close_at_the_end(late: int) -> float:
    """Who has its last sum may leave while another has yet to look for its own."""
    reduction = _opened()
    pieces = _pieces(reduction, [LONG, 10, 10], [torch.float32] * 3)
    for piece in pieces:
        piece.flat.fill_(1)
        reduction.start(piece, 1.0)  # type: ignore[arg-type]
    if dist.get_rank() == late:
        time.sleep(0.3)
    for piece in pieces:
        reduction.wait(piece)  # type: ignore[arg-type]
    reduction.close()
    return float(sum(piece.flat.sum() for piece in pieces))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_ranks_may_leave_as_soon_as_they_have_theirs(ranks: RankPool, late: int) -> None:
    assert ranks(3).run(_close_at_the_end, late) == [3.0 * (LONG + 20)] * 3


def _too_late(seconds: float) -> str:
    group = dist.new_group([1, 2], timeout=timedelta(seconds=seconds))
    if dist.get_rank() == 0:
        return ""
    reduction = _opened(group)
    (piece,) = _pieces(reduction, [LONG], [torch.float32])
    if dist.get_rank() == 2:
        time.sleep(1)  # alive, and elsewhere
        reduction.close()
        return ""
    reduction.start(piece, 1.0)  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        reduction.wait(piece)  # type: ignore[arg-type]
    assert seconds <= time.monotonic() - begun < seconds + 0.5
    reduction.close()
    return str(error.value)


def test_the_timeout_names_who_did_not_come(ranks: RankPool) -> None:
    _, said, _ = ranks(3).run(_too_late, 0.3)
    assert said.startswith("rank 2 did not join the reduction of bucket 0 within 0.3 s")


def _interrupted() -> bool:
    """Ctrl-C for rank 0 while it waits."""
    reduction = _opened()
    (piece,) = _pieces(reduction, [LONG], [torch.float32])
    comm.barrier()
    if dist.get_rank() == 0:
        reduction.start(piece, 1.0)  # type: ignore[arg-type]
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        begun = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                reduction.wait(piece)  # type: ignore[arg-type]
            assert time.monotonic() - begun < 0.8
        finally:
            signal.signal(signal.SIGALRM, before)
            signal.signal(signal.SIGINT, handler)
    comm.barrier()
    reduction.close()
    return True


def test_ctrl_c_ends_a_wait(ranks: RankPool) -> None:
    assert ranks(2).run(_interrupted) == [True, True]
