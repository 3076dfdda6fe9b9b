"""What can be wrong in the engine's benchmark without anybody noticing: statistics, texts, counting, cleaning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.engine.language import GPT, TINY, Corpus, loss_of
from benchmarks.engine.link import cable, namespace, stale
from benchmarks.engine.pairs import Interval, interval, ratios, turns
from benchmarks.engine.wire import bytes_of, counted, low_rank_bytes, tensors_in


def test_an_interval_encloses_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        found = interval([draw.gauss(0, 1) ** 3 for _ in range(41)])
        hits += found.low <= 0 <= found.high
    assert 0.89 < hits / 2000 < 0.95  # 0.917 by the binomial sum


def test_bounds_of_an_interval_are_those_of_the_tables() -> None:
    # of 20 values the 6th and 15th, of 100 the 42nd and 59th, of 210 the 93rd and 118th: 90 % tables
    assert interval(range(1, 21)) == Interval(10.5, 6, 15)
    assert interval(range(1, 101)) == Interval(50.5, 42, 59)
    assert interval([5.0, 1.0, 3.0]) == Interval(3.0, 1.0, 5.0)
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_ratios_are_of_pairs() -> None:
    slow_and_calm = [10.0, 1.0, 10.0, 1.0, 10.0, 1.0]
    assert ratios([1.1 * value for value in slow_and_calm], slow_and_calm).high == pytest.approx(1.1)
    assert f"{Interval(1.0, 0.5, 2.0):.2f}" == "1.00 (0.50 to 2.00)"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_stands_in_each_place_equally_often(count: int) -> None:
    names = list("abcd"[:count])
    rounds = list(turns(names, 2 * count))
    assert all(sorted(order) == names for order in rounds)
    for place in range(count):
        assert sorted(order[place] for order in rounds) == sorted(2 * names)
    before = sum(order.index("a") < order.index("b") for order in rounds)
    assert before == count


def test_only_namespaces_of_runs_that_are_gone_are_removed() -> None:
    names = ["blue", namespace(7, 0), namespace(7, 1), namespace(8, 0), "lockstep-bench-7-0-mine", "lockstep-bench-x-0"]
    assert stale(names, lambda process: process == 8) == [namespace(7, 0), namespace(7, 1)]
    assert stale(names, lambda process: True) == []
    assert len(cable(2**22, 1)) <= 15  # what the kernel takes; processes are numbered up to 4194304


def test_the_corpus_is_its_files_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second" * 50)
    (tmp_path / "a.py").write_bytes(b"first" * 50)
    (tmp_path / "c.txt").write_bytes(b"not Python")
    corpus = Corpus(tmp_path, limit=500)
    assert bytes(torch.cat([corpus.training, corpus.held_out]).tolist()) == (b"first" * 50 + b"second" * 50)[:500]
    assert len(corpus.held_out) == 50


def test_batches_depend_on_step_and_rank_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(bytes(range(256)) * 20)
    first, again = Corpus(tmp_path), Corpus(tmp_path)
    torch.manual_seed(1)
    batch = first.batch(3, 1, 4, 9)
    torch.manual_seed(2)
    assert torch.equal(batch, again.batch(3, 1, 4, 9))
    assert batch.shape == (4, 9)
    assert not torch.equal(batch, first.batch(3, 0, 4, 9))
    assert not torch.equal(batch, first.batch(4, 1, 4, 9))
    assert torch.equal(first.validation(2, 9), again.validation(2, 9))
    pieces = batch[:, 1:] - batch[:, :-1]
    assert bool(((pieces == 1) | (pieces == -255)).all())  # as they stand in the text


def test_the_model_learns_and_sees_no_future() -> None:
    model = GPT(TINY)
    text = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[:, 12:] = 0
    assert torch.allclose(model(text)[:, :12], model(changed)[:, :12], atol=1e-6)
    first = loss_of(model, text)
    assert first.item() == pytest.approx(5.545, abs=0.15)  # log 256: it knows nothing yet
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first.backward()
    optimizer.step()
    assert loss_of(model, text) < first


def test_bytes_of_low_rank() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(6, 5))
    # (100 + 50) 4 for the one matrix; (6 + 5) 4 > 30: the other travels as it is, as do the biases
    assert low_rank_bytes(model, 4) == 4 * (150 * 4 + 50 + 30 + 5)


def test_memory_is_counted_once() -> None:
    flat = torch.zeros(100)
    views = {"errors": [flat[:10], flat[10:]], "other": (torch.zeros(5), None, 3, "text")}
    assert bytes_of(tensors_in(views)) == 420


def test_counting_takes_a_ring_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: None)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda output, tensor: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    original = torch.distributed.all_reduce
    with counted() as found:
        torch.distributed.all_reduce(torch.zeros(10))
        torch.distributed.all_gather_into_tensor(torch.zeros(40), torch.zeros(10))
    assert found == {"calls": 2, "bytes": 40 * 2 * 3 / 4 + 40 * 3}
    assert torch.distributed.all_reduce is original
