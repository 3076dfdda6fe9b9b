"""Runs whose shares follow the ranks' speed: what they resume to, what they refuse, what they cost."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from tests.accelerator.left_out import strategies
from tests.extensions.balancing.balanced import Takes, made_up_clock, slow_rank
from tests.guards.test_step_cost import CALLS, ENGINE, Looks, calls_a_step, over_budget
from tests.loop.pieces import Slope, Stream, numbers, on_ranks, quiet
from tests.loop.test_elastic import Cut, Rows, by_step, compare, life, play
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


# -- a run that goes on


def balanced(
    make: Any, flags: dict[str, Any], load: Path | None = None, cut: Cut | None = None, slow: int = 0
) -> dict[str, Any]:
    """A life of a run on ranks of which one is slow."""
    with made_up_clock() as clock:
        takes = Takes(clock, slow_rank(slow))
        found = life(make, {"balance": True, **flags, "callbacks": [takes]}, load, cut)
    return {**found, "parts": takes.parts}


def play_balanced(ranks: RankPool, world: int, *args: Any) -> dict[str, Any]:
    """The same on so many ranks: rank 0's, with what all have seen, and their parts of each step."""
    found = ranks(world).run(balanced, *args, timeout=50)
    parts = {step: [each["parts"].get(step, 0) for each in found] for step in found[0]["parts"]}
    return {**found[0], "seen": [sample for each in found for sample in each["seen"]], "parts": parts}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_balanced_run_is_stopped_and_goes_on_with_other_shares_and_other_ranks(
    ranks: RankPool, workers: int, tmp_path: Path
) -> None:
    """Each sample once, the same samples in each step, and the weights of a run that nothing has disturbed."""
    make, flags = Rows(223, 4, num_workers=workers), {"max_epochs": 2}
    expected = life(make, {**flags, "accumulate_grad_batches": 2})
    cuts = [Cut(20, tmp_path / "first.ckpt"), Cut(18, tmp_path / "second.ckpt")]
    first = play_balanced(ranks, 2, make, flags, None, cuts[0], 0)
    assert first["parts"][0] == [4, 4]
    assert first["parts"][19] == [2, 6]
    second = play_balanced(ranks, 3, make, flags, cuts[0].path, cuts[1], 1)
    assert sum(second["parts"][20]) == 8
    compare([first, second, play_balanced(ranks, 2, make, flags, cuts[1].path, None, 1)], expected, 223)
    assert by_step(first["seen"]).items() <= by_step(expected["seen"]).items()


@pytest.mark.parametrize(("balance", "parts"), [(True, [6, 18]), (False, [12, 12])])
def test_a_resume_goes_on_with_the_shares_that_there_were(
    ranks: RankPool, tmp_path: Path, balance: bool, parts: list[int]
) -> None:
    """The window under way ends as it was cut, on ranks of which another is slow now. Without balance, the next one
    has equal shares."""
    make, flags = Rows(223, 4), {"max_epochs": 2, "accumulate_grad_batches": 3}
    expected, cut = life(make, {**flags, "accumulate_grad_batches": 6}), Cut(35, tmp_path / "cut.ckpt")
    first = play_balanced(ranks, 2, make, flags, None, cut, 0)
    (saved,) = torch.load(cut.path, weights_only=True)["lockstep"]["shares"]["shares"][-1:]
    assert saved[1] == [2, 6]
    second = play_balanced(ranks, 2, make, {**flags, "balance": balance}, cut.path, None, 1)
    step = min(second["parts"])
    assert [second["parts"][step + number] for number in (0, 1)] == [[4, 12], parts]
    compare([first, second], expected, 223)
    if not balance:
        alone = play(ranks, 1, make, flags, cut.path)
        assert by_step(alone["seen"]).items() <= by_step(expected["seen"]).items()


# -- what counts


class Validates(Slope):
    """Validation takes ten seconds on one rank, and a step takes all ranks alike."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 0.1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 10.0 * self.trainer.global_rank


def validating() -> tuple[float, ...]:
    with made_up_clock() as clock:
        trainer = on_ranks(max_epochs=1, balance=True, val_check_interval=1, num_sanity_val_steps=0)
        trainer.fit(Validates(clock), numbers(160, 4), numbers(2))
    return tuple(trainer.fit_loop.feed.shares)


def test_what_validations_take_is_nobodys_slowness(ranks: RankPool) -> None:
    assert ranks(2).run(validating) == [(), ()]


def with_memory(free: int) -> tuple[float, ...]:
    """The shares of a run whose rank 1 is slow, and whose rank 0 has so many bytes left."""
    rank = torch.distributed.get_rank()
    bytes_of_activations = 8  # a sample's
    with (
        made_up_clock() as clock,
        patch(
            "lockstep.extensions.balancing.balance.balance.free_memory",
            lambda device, ranks: free if rank == 0 else 2**40,
        ),
        patch("lockstep.memory.meter.Activations.total", property(lambda self: 8 * bytes_of_activations)),
    ):
        trainer = on_ranks(max_epochs=1, balance=True, callbacks=[Takes(clock, slow_rank(1))])
        trainer.fit(Slope(), numbers(400, 8))
    return tuple(trainer.fit_loop.feed.shares)


def test_a_rank_takes_no_more_than_its_memory_has_room_for(ranks: RankPool) -> None:
    """A sample needs its activations twice; four fifths of what is free may be filled."""
    assert ranks(2).run(with_memory, 2**40) == [(12, 4)] * 2
    assert ranks(2).run(with_memory, 200) == [(10, 6)] * 2
    assert ranks(2).run(with_memory, 1) == [()] * 2  # what it has had goes on being allowed


# -- what is said and refused


def test_one_device_is_told_that_there_is_nothing_to_balance(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstep"):
        quiet(max_epochs=1, balance=True).fit(Slope(), numbers(4))
    assert "Trainer(balance=True) has no effect on one device" in caplog.text


@pytest.mark.parametrize("strategy", strategies("deepspeed_stage_2", "model_parallel"))
def test_strategies_without_unequal_shares_are_refused_at_once(strategy: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"Trainer\(balance=True\): \w+Strategy cannot.*ddp.*remove"):
        quiet(balance=True, strategy=strategy, devices=2)


def test_another_value_than_a_switch_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Trainer\(balance='yes'\) is not valid: pass True or False"):
        quiet(balance="yes")


def refused(is_stream: bool) -> None:
    """A data set that is dealt out sample by sample, or a loader that is not cut."""
    loader: Any = DataLoader(Stream(16), 4) if is_stream else numbers(16, 4)
    words = r"Trainer\(balance=True\): train_dataloader yields ready-made batches.*omit `balance`"
    with pytest.raises(MisconfigurationException, match=words):
        on_ranks(max_epochs=1, balance=True, use_distributed_sampler=is_stream).fit(Slope(), loader)


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_cannot_be_shared_out_by_weight_is_refused_by_name(ranks: RankPool, is_stream: bool) -> None:
    ranks(2).run(refused, is_stream)


class Normed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch.float()[:, None]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def normed(sync_batchnorm: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on_ranks(max_epochs=1, balance=True, sync_batchnorm=sync_batchnorm).fit(Normed(), numbers(16, 4))
    return [str(each.message) for each in warned if "balance" in str(each.message)]


def test_batch_norm_without_synchronization_is_warned_of_once(ranks: RankPool) -> None:
    (warning,), others = ranks(2).run(normed, False)
    assert "BatchNorm1d 'net.1' computes its statistics over one rank's samples" in warning
    assert "sync_batchnorm=True" in warning
    assert others == []
    assert ranks(2).run(normed, True) == [[], []]


def single() -> str:
    with patch("lockstep.extensions.balancing.balance.balance.rank_zero_info") as info:
        on_ranks(max_epochs=1, balance=True).fit(Slope(), numbers(16, 1))
    return " ".join(str(call.args[0]) for call in info.call_args_list)


def test_a_global_batch_without_a_sample_to_spare_is_reported(ranks: RankPool) -> None:
    assert "a global batch has 2 samples for 2 ranks" in ranks(2).run(single)[0]


# -- what it costs


def balanced_path() -> list[str]:
    module = Looks()
    on_ranks(max_epochs=1, balance=True).fit(module, numbers(8, 2))
    return module.path


def balanced_calls() -> list[str]:
    return [call for call in calls_a_step(on_ranks, balance=True) if not call.startswith(ENGINE)]


def test_a_step_that_is_measured_has_one_frame_and_few_calls_more(ranks: RankPool) -> None:
    """A frame of the file that measures; four timed calls and two of the window's end, and two that draw one by one."""
    for path in ranks(2).run(balanced_path):
        assert over_budget([file for file in path if file != "extensions/balancing/balance/step_times.py"]) == [], path
        assert path.count("extensions/balancing/balance/step_times.py") == 1
    for called in ranks(2).run(balanced_calls):
        assert 4 * CALLS < len(called) <= 4 * (CALLS + 8), "\n".join(called)
