"""What a gradient is made of, and what of two runs is compared with what."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lockstep.extensions.verify.calls import first_other_line
from lockstep.extensions.verify.compare import NOT_FINITE, Numbers, aligned, exactly
from lockstep.extensions.verify.diagnose import Parts, Shares
from lockstep.extensions.verify.nudge import compares_samples
from lockstep.extensions.verify.processes import Ending
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.refusals import deadlock, of_memory, of_ranks, short_window
from lockstep.extensions.verify.steps import strided_sums


def rank(folder: Path, own: dict[str, dict[int, torch.Tensor]], events: list[dict[str, object]]) -> RankRecording:
    folder.mkdir()
    sums = {key: {number: strided_sums(value) for number, value in each.items()} for key, each in own.items()}
    torch.save(sums, folder / "sums-0.pt")
    torch.save({}, folder / "gradients-0.pt")
    torch.save({}, folder / "parameters-0.pt")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return RankRecording(folder, Ending("done", 1))


@pytest.fixture
def gradients() -> list[dict[str, dict[int, torch.Tensor]]]:
    """Of two ranks, each with two micro-batches, and three parameters."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            key: {number: torch.randn(5, 7, generator=generator, dtype=torch.float64) for number in (0, 1)}
            for key in ("0.0", "0.1", "0.2")
        }
        for _ in range(2)
    ]


def test_weights_of_micro_batches_are_found(
    tmp_path: Path, gradients: list[dict[str, dict[int, torch.Tensor]]]
) -> None:
    recording = Recording(tuple(rank(tmp_path / str(n), own, []) for n, own in enumerate(gradients)))
    parts = Parts(recording, 0)
    weights = torch.tensor([[0.5, 1.0], [0.5, 0.0]], dtype=torch.float64)
    made = {key: sum(weights[r, m] * gradients[r][key][m] for r in range(2) for m in range(2)) for key in gradients[0]}
    shares = parts.shares(made)
    assert shares.fits
    assert torch.allclose(shares.weights, weights, atol=1e-9)
    assert shares.constant() is None
    assert sorted(parts.not_averaged([made, made])) == ["0.0", "0.1", "0.2"]


def test_a_mean_is_a_mean_and_what_is_none_does_not_fit(
    tmp_path: Path, gradients: list[dict[str, dict[int, torch.Tensor]]]
) -> None:
    recording = Recording(tuple(rank(tmp_path / str(n), own, []) for n, own in enumerate(gradients)))
    parts = Parts(recording, 0)
    mean = {key: sum(own[key][m] for own in gradients for m in (0, 1)) / 2 for key in gradients[0]}
    assert parts.shares(mean).constant() == pytest.approx(0.5)
    assert parts.not_averaged([mean, mean]) == []
    other = {key: value**2 for key, value in mean.items()}
    assert not parts.shares(other).fits


def test_parts_of_a_tensor_are_put_together() -> None:
    whole = torch.arange(12.0).view(4, 3)
    assert torch.equal(aligned([whole[:2], whole[2:]], whole)[0], whole)
    assert torch.equal(aligned([whole[:, :1], whole[:, 1:]], whole)[0], whole)
    assert torch.equal(aligned([whole.reshape(-1)[:7], whole.reshape(-1)[7:]], whole)[0], whole)
    assert len(aligned([whole, whole], whole)) == 2
    assert torch.equal(aligned([torch.empty(0), whole.reshape(-1)], whole)[0], whole)


def test_a_gradient_that_a_rank_lacks_is_no_part() -> None:
    whole = torch.arange(12.0).view(4, 3)
    assert len(aligned([None, whole], whole)) == 2


def backward(update: int, divisor: float) -> dict[str, object]:
    return {"kind": "backward", "update": update, "divisor": divisor, "where": "train.py:9"}


def test_a_short_window_that_is_divided_by_the_full_number_is_found(tmp_path: Path) -> None:
    step = {"kind": "step", "update": 1, "number": 1, "names": {"0.0": "weight"}}
    events = [*(backward(0, 2.0) for _ in range(2)), {**step, "update": 0, "number": 0}, backward(1, 2.0), step]
    one = rank(tmp_path / "0", {}, events)
    torch.save({}, one.folder / "parameters-1.pt")
    found = short_window(Recording((one,)))
    assert found is not None
    assert found[0].step == 1
    assert "divided by the full number 2" in str(found[1])
    assert found[1].where == "train.py:9"


def test_a_window_that_is_divided_by_its_own_number_is_none(tmp_path: Path) -> None:
    step = {"kind": "step", "update": 1, "number": 1, "names": {"0.0": "weight"}}
    events = [*(backward(0, 2.0) for _ in range(2)), {**step, "update": 0, "number": 0}, backward(1, 1.0), step]
    one = rank(tmp_path / "0", {}, events)
    torch.save({}, one.folder / "parameters-1.pt")
    assert short_window(Recording((one,))) is None


def call(name: str, line: int) -> dict[str, object]:
    where = f"train.py:{line}"
    return {"kind": "collective", "name": name, "whole": True, "shape": [], "where": where, "number": 1}


def test_ranks_in_other_collectives_are_named_with_both_lines(tmp_path: Path) -> None:
    ranks = [rank(tmp_path / str(n), {}, [call(*each)]) for n, each in enumerate([("all_reduce", 3), ("barrier", 5)])]
    stuck = tuple(RankRecording(each.folder, Ending("stuck")) for each in ranks)
    found = deadlock(Recording(stuck))
    assert found is not None
    assert "rank 0 calls all_reduce [] at train.py:3; rank 1 calls barrier None at train.py:5" in str(found[0])


def test_ranks_in_the_same_collectives_are_not(tmp_path: Path) -> None:
    ranks = [rank(tmp_path / str(n), {}, [call("all_reduce", 3)]) for n in range(2)]
    assert deadlock(Recording(tuple(ranks))) is None


def batches(loader: int, number: int) -> list[dict[str, object]]:
    return [{"kind": "batch", "loader": loader, "iteration": 0} for _ in range(number)]


def stuck(folder: Path, by_rank: list[list[dict[str, object]]]) -> Recording:
    ranks = [rank(folder / str(number), {}, events) for number, events in enumerate(by_rank)]
    return Recording(tuple(RankRecording(each.folder, Ending("stuck")) for each in ranks))


def test_a_rank_without_batches_for_which_others_wait_is_named(tmp_path: Path) -> None:
    iteration = {"kind": "iteration", "loader": 0, "where": "train.py:3"}
    ended = {"kind": "iterated", "loader": 0, "iteration": 0, "batches": 2}
    found = deadlock(stuck(tmp_path, [[iteration, *batches(0, 3)], [iteration, *batches(0, 2), ended]]))
    assert found is not None
    assert "the others wait for rank 1, which has no more" in str(found[0])
    assert found[1].where == "train.py:3"


def test_a_rank_that_evaluates_alone_has_no_more_batches_than_others(tmp_path: Path) -> None:
    """Its batches were counted together with those of training."""
    ended = {"kind": "iterated", "loader": 1, "iteration": 0, "batches": 3}
    found = deadlock(stuck(tmp_path, [[*batches(0, 2), *batches(1, 3), ended, call("all_reduce", 17)], batches(0, 2)]))
    assert found is not None
    assert "rank 0 calls all_reduce [] at train.py:17; rank 1 makes none" in str(found[0])


def test_weights_of_a_mean_over_samples_add_up_to_one() -> None:
    assert Shares(torch.tensor([[0.4], [0.6]]), 0.0).sum_to_one
    assert not Shares(torch.tensor([[0.5], [0.556]]), 0.0).sum_to_one


def called(line: int, *sums: float) -> dict[str, object]:
    return {"name": "mul", "where": f"train.py:{line}", "sums": list(sums), "shape": [3]}


def test_the_first_line_that_computes_something_else_is_found() -> None:
    calls = [called(3, 1.0, 1.0), called(4, 2.0, 2.0), called(5, 3.0, 3.0)]
    assert first_other_line(calls, calls) == ""
    assert first_other_line(calls, [calls[0], called(4, 2.5, 2.5), calls[2]]) == "train.py:4"
    assert first_other_line(calls, [calls[0], called(4, 2.0 + 1e-12, 2.0), calls[2]]) == ""
    assert first_other_line(calls, calls[:2]) == "train.py:5"
    assert first_other_line([called(3, math.nan, 1.0)], [called(3, math.nan, 1.0)]) == ""


def trained(folder: Path, gradients: list[torch.Tensor | None]) -> RankRecording:
    """A rank with a parameter that has these gradients, and one that moves."""
    one = rank(folder, {}, [])
    names = {"0.0": "still", "0.1": "moves"}
    events = []
    torch.save({"0.0": torch.zeros(2), "0.1": torch.zeros(40)}, folder / "first-0.pt")
    for update, gradient in enumerate(gradients):
        torch.save({"0.0": gradient, "0.1": torch.ones(40)}, folder / f"gradients-{update}.pt")
        torch.save({"0.0": torch.zeros(2), "0.1": torch.full((40,), update + 1.0)}, folder / f"parameters-{update}.pt")
        step = {"kind": "step", "update": update, "number": update, "optimizer": 0, "rates": [0.1], "names": names}
        events.append({**step, "trainable": ["0.0", "0.1"], "unknown": []})
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return one


@pytest.mark.parametrize(
    ("gradient", "untouched", "zero", "vacuous"),
    [
        (None, ["still"], [], []),
        (torch.zeros(2), [], ["still"], []),
        (torch.full((2,), 1e-12), [], ["still"], []),
        (torch.full((2,), math.nan), [], [], [NOT_FINITE]),
    ],
)
def test_no_gradient_a_zero_one_and_one_that_is_no_number_are_told_apart(
    gradient: torch.Tensor | None, untouched: list[str], zero: list[str], vacuous: list[str], tmp_path: Path
) -> None:
    """NaN was called zero, a zero one missing, and of one that no tolerance sees nothing was said."""
    recording = Recording((trained(tmp_path / "0", [gradient, gradient]),))
    found = Numbers(recording, recording, exactly).compare()
    assert (found.untouched, found.zero, found.vacuous) == (untouched, zero, vacuous)


def rows(*sums: float) -> dict[str, object]:
    return {"sums": list(sums), "sizes": [abs(each) for each in sums]}


def test_samples_that_follow_another_one_are_compared() -> None:
    assert compares_samples([rows(1.0, 2.0)], [rows(1.0, 2.0)]) is False
    assert compares_samples([rows(1.0, 2.0)], [rows(1.0, 2.001)]) is True
    assert compares_samples([], []) is None


ARGUMENTS = "give them behind --"
FAILED = [
    (
        "SystemExit: usage: train.py CONFIG",
        "the script needs arguments (SystemExit: usage: train.py CONFIG)",
        ARGUMENTS,
    ),
    ("IndexError: list index out of range of sys.argv", "the script needs arguments", ARGUMENTS),
    ("AssertionError: this needs a GPU", "the script needs a GPU at train.py:3", "let it take the CPU"),
    ("RuntimeError: can't start new thread", "ran out of memory", "fewer --devices"),
    ("exit code 3", "rank 0 ended at train.py:3 with exit code 3 (nothing was said)", "mend what fails"),
    (
        "KeyError: 'x'",
        "rank 0 failed at train.py:3: KeyError: 'x'",
        "the arguments with which the script trains behind --",
    ),
]


@pytest.mark.parametrize(("message", "told", "way_out"), FAILED)
def test_a_failure_is_told_with_the_way_out(message: str, told: str, way_out: str, tmp_path: Path) -> None:
    one = rank(tmp_path / "0", {}, [])
    failed = RankRecording(one.folder, Ending("failed", message=message, where="train.py:3"))
    reason = of_ranks(Recording((failed,)), 5)
    assert told in reason
    assert way_out in reason


def test_a_comparison_without_memory_is_told_with_the_way_out() -> None:
    """It was a traceback."""
    for error in (MemoryError(), RuntimeError("unable to mmap 536872448 bytes: Cannot allocate memory (12)")):
        assert "fewer --devices" in of_memory(error)
    assert not of_memory(RuntimeError("shapes do not match"))


def test_updates_within_join_are_numbered_as_one_process_makes_them(tmp_path: Path) -> None:
    """A rank that had run out was compared, in the next epoch, with steps that came before."""
    ranks = []
    for number, lengths in enumerate([(3, 2), (2, 3)]):
        places = [(epoch, at) for epoch, length in enumerate(lengths) for at in range(length)]
        events: list[dict[str, object]] = []
        for update, (epoch, at) in enumerate(places):
            events.append({"kind": "batch", "loader": 0, "iteration": epoch, "batch": at, "grad": True})
            events.append({"kind": "step", "update": update, "optimizer": 0})
        ranks.append(rank(tmp_path / str(number), {}, events))
        for update in range(len(places)):
            for what in ("sums", "gradients", "parameters"):
                torch.save({"0.0": torch.tensor([100.0 * number + update])}, ranks[-1].folder / f"{what}-{update}.pt")
    joined = Recording(tuple(ranks)).joined()
    assert [each.numbers for each in joined.ranks] == [(0, 1, 2, 3, 4), (0, 1, 3, 4, 5)]
    assert [event["update"] for event in joined.steps] == [0, 1, 2, 3, 4, 5]
    assert joined.uneven_from == 2
    assert [each.get("0.0") for each in joined.whole("gradients", 2)] == [torch.tensor([2.0]), None]
    assert [each["0.0"] for each in joined.whole("gradients", 3)] == [torch.tensor([3.0]), torch.tensor([102.0])]
