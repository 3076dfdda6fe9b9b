"""Parts of `lockstep verify` on recordings that are written by hand: gradients, collectives, refusals, numbering."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lockstep.trainer
from lockstep.extensions.verify import settings
from lockstep.extensions.verify.calls import first_other_line
from lockstep.extensions.verify.compare import NOT_FINITE, Numbers, align, exact
from lockstep.extensions.verify.diagnose import Parts, Shares
from lockstep.extensions.verify.nudge import compares_samples
from lockstep.extensions.verify.processes import Ending
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.refusals import check_ranks, deadlock
from lockstep.extensions.verify.settings import is_user_code
from lockstep.extensions.verify.steps import strided_sums

Events = Sequence[dict[str, object]]
Own = dict[str, dict[int, Tensor]]


def rank(folder: Path, events: Events = (), own: Own | None = None, ending: str = "done") -> RankRecording:
    folder.mkdir()
    sums = {key: {at: strided_sums(value) for at, value in each.items()} for key, each in (own or {}).items()}
    for name, tensors in (("sums", sums), ("gradients", {}), ("parameters", {})):
        torch.save(tensors, folder / f"{name}-0.pt")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return RankRecording(folder, Ending(ending))


def recording(folder: Path, by_rank: Sequence[Events], ending: str = "done") -> Recording:
    return Recording(tuple(rank(folder / str(at), events, ending=ending) for at, events in enumerate(by_rank)))


@pytest.fixture
def gradients() -> list[Own]:
    """Of two ranks, each with two micro-batches, and three parameters."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(5, 7, generator=generator, dtype=torch.float64)  # noqa: E731
    return [{key: {number: draw() for number in (0, 1)} for key in ("0.0", "0.1", "0.2")} for _ in range(2)]


def test_weights_of_micro_batches_are_found(tmp_path: Path, gradients: list[Own]) -> None:
    parts = Parts(Recording(tuple(rank(tmp_path / str(n), own=own) for n, own in enumerate(gradients))), 0)
    weights = torch.tensor([[0.5, 1.0], [0.5, 0.0]], dtype=torch.float64)
    made = {key: sum(weights[r, m] * gradients[r][key][m] for r in range(2) for m in range(2)) for key in gradients[0]}
    shares = parts.shares(made)
    assert shares.fits
    assert torch.allclose(shares.weights, weights, atol=1e-9)
    assert shares.constant() is None
    assert sorted(parts.not_averaged([made, made])) == ["0.0", "0.1", "0.2"]
    mean = {key: sum(own[key][m] for own in gradients for m in (0, 1)) / 2 for key in gradients[0]}
    assert parts.shares(mean).constant() == pytest.approx(0.5)
    assert parts.not_averaged([mean, mean]) == []
    assert not parts.shares({key: value**2 for key, value in mean.items()}).fits


def test_parts_of_a_tensor_are_put_together() -> None:
    whole = torch.arange(12.0).view(4, 3)
    flat = whole.reshape(-1)
    for parts in ([whole[:2], whole[2:]], [whole[:, :1], whole[:, 1:]], [flat[:7], flat[7:]], [torch.empty(0), flat]):
        assert torch.equal(align(parts, whole)[0], whole)
    assert len(align([whole, whole], whole)) == 2
    assert len(align([None, whole], whole)) == 2, "a gradient that a rank lacks is not a part"


def call(name: str, line: int) -> dict[str, object]:
    where = f"train.py:{line}"
    event = {"kind": "collective", "name": name, "whole": True, "shape": [], "number": 1}
    return {**event, "where": where, "stack": [where]}


def batches(loader: int, number: int) -> list[dict[str, object]]:
    return [{"kind": "batch", "loader": loader, "iteration": 0} for _ in range(number)]


ITERATION = {"kind": "iteration", "loader": 0, "where": "train.py:3"}
ENDED = {"kind": "iterated", "iteration": 0}


@pytest.mark.parametrize(
    ("by_rank", "words", "line"),
    [
        (
            [[call("all_reduce", 3)], [call("barrier", 5)]],
            "rank 0: all_reduce [] at train.py:3; rank 1: barrier None at train.py:5",
            "train.py:3",
        ),
        (
            [[ITERATION, *batches(0, 3)], [ITERATION, *batches(0, 2), {**ENDED, "loader": 0, "batches": 2}]],
            "the others wait for rank 1, which has no more",
            "train.py:3",
        ),
        (  # batches of an evaluation on one rank were counted together with those of training
            [
                [*batches(0, 2), *batches(1, 3), {**ENDED, "loader": 1, "batches": 3}, call("all_reduce", 17)],
                batches(0, 2),
            ],
            "rank 0: all_reduce [] at train.py:17; rank 1: none",
            "train.py:17",
        ),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(by_rank: list[Events], words: str, line: str, tmp_path: Path) -> None:
    found = deadlock(recording(tmp_path, by_rank, "stuck"))
    assert found is not None
    assert words in str(found[0])
    assert found[1].where == line


def test_ranks_in_the_same_collectives_are_not(tmp_path: Path) -> None:
    assert deadlock(recording(tmp_path, [[call("all_reduce", 3)]] * 2)) is None


def test_weights_of_a_mean_over_samples_add_up_to_one() -> None:
    assert Shares(torch.tensor([[0.4], [0.6]]), 0.0).sum_to_one
    assert not Shares(torch.tensor([[0.5], [0.556]]), 0.0).sum_to_one


def test_lines_of_lockstep_are_not_the_users() -> None:
    """Only those of extensions were left out in a checkout, where no path has "site-packages"."""
    assert is_user_code(__file__)
    assert not any(map(is_user_code, (lockstep.trainer.__file__, settings.__file__, torch.__file__, json.__file__)))


def called(line: int, *sums: float) -> dict[str, object]:
    return {"name": "mul", "where": f"train.py:{line}", "sums": list(sums), "shape": [3]}


def test_the_first_line_that_computes_something_else_is_found() -> None:
    calls = [called(3, 1.0, 1.0), called(4, 2.0, 2.0), called(5, 3.0, 3.0)]
    assert first_other_line(calls, calls) == ""
    assert first_other_line(calls, [calls[0], called(4, 2.5, 2.5), calls[2]]) == "train.py:4"
    assert first_other_line(calls, [calls[0], called(4, 2.0 + 1e-12, 2.0), calls[2]]) == ""
    assert first_other_line(calls, calls[:2]) == "train.py:5"
    assert first_other_line([called(3, math.nan, 1.0)], [called(3, math.nan, 1.0)]) == ""


@pytest.mark.parametrize(
    ("gradient", "untrained", "vacuous"),
    [
        (None, ["still"], []),
        (torch.zeros(2), ["still"], []),
        (torch.full((2,), 1e-12), ["still"], []),
        (torch.full((2,), math.nan), [], [NOT_FINITE]),
    ],
)
def test_nan_and_missing_gradients_are_distinguished(
    gradient: Tensor | None, untrained: list[str], vacuous: list[str], tmp_path: Path
) -> None:
    """NaN was reported as zero, and a gradient below the tolerance not at all."""
    step = {"kind": "step", "optimizer": 0, "rates": [0.1], "names": {"0.0": "still", "0.1": "moves"}}
    step |= {"trainable": ["0.0", "0.1"], "unknown": []}
    one = recording(tmp_path, [[{**step, "update": update, "number": update} for update in range(2)]])
    still, folder = torch.zeros(2), one.first.folder
    torch.save({"0.0": still, "0.1": torch.zeros(40)}, folder / "first-0.pt")
    for update in range(2):
        torch.save({"0.0": gradient, "0.1": torch.ones(40)}, folder / f"gradients-{update}.pt")
        torch.save({"0.0": still, "0.1": torch.full((40,), update + 1.0)}, folder / f"parameters-{update}.pt")
    found = Numbers(one, one, exact).compare()
    assert (found.untrained, found.vacuous) == (untrained, vacuous)


def test_samples_that_depend_on_another_one_are_compared() -> None:
    rows = lambda *sums: {"sums": list(sums), "sizes": list(sums)}  # noqa: E731
    assert compares_samples([rows(1.0, 2.0)], [rows(1.0, 2.0)]) is False
    assert compares_samples([rows(1.0, 2.0)], [rows(1.0, 2.001)]) is True
    assert compares_samples([], []) is None


ARGUMENTS = "pass them after --"
USAGE = "SystemExit: usage: train.py CONFIG"
FAILED = [
    (USAGE, f"the script needs arguments ({USAGE})", ARGUMENTS),
    ("AssertionError: this needs a GPU", "the script needs a GPU at train.py:3", "let it use the CPU"),
    ("RuntimeError: can't start new thread", "ran out of memory", "fewer --devices"),
    ("exit code 3", "rank 0 ended at train.py:3 with exit code 3 (no output)", "fix the error"),
    ("KeyError: 'x'", "rank 0 failed at train.py:3: KeyError: 'x'", "pass the arguments of the script after --"),
]


@pytest.mark.parametrize(("message", "words", "way_out"), FAILED)
def test_a_failure_is_reported_with_the_way_out(message: str, words: str, way_out: str, tmp_path: Path) -> None:
    failed = RankRecording(rank(tmp_path / "0").folder, Ending("failed", message=message, where="train.py:3"))
    reason = check_ranks(Recording((failed,)))
    assert words in reason
    assert way_out in reason


def test_steps_within_join_are_compared_until_a_rank_has_no_data(tmp_path: Path) -> None:
    """A rank without data was compared, in the next epoch, with earlier steps."""
    ranks = []
    for number, lengths in enumerate([(3, 2), (2, 3)]):
        events: list[dict[str, object]] = []
        places = [(epoch, at) for epoch, length in enumerate(lengths) for at in range(length)]
        for update, (epoch, at) in enumerate(places):
            events.append({"kind": "batch", "loader": 0, "iteration": epoch, "batch": at, "grad": True})
            events.append({"kind": "step", "update": update, "optimizer": 0})
        ranks.append(rank(tmp_path / str(number), events))
        for update in range(5):
            for what in ("sums", "gradients", "parameters"):
                torch.save({"0.0": torch.tensor([100.0 * number + update])}, ranks[-1].folder / f"{what}-{update}.pt")
    whole = Recording(tuple(ranks))
    assert whole.uneven_from == 2
    assert [event["update"] for event in whole.until(2).steps] == [0, 1]
    assert Recording((ranks[0], ranks[0])).uneven_from is None
    assert [event["update"] for event in whole.until(None).steps] == [0, 1, 2, 3, 4]
