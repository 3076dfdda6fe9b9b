"""The seams for engines, each tried by a small one: a strategy of 60 lines, and fakes that own a road."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.engines.averaging import AveragingStrategy
from tests.engines.windows import ForwardsFirst
from tests.equivalence.models import CASES, Plain, agree, agree_in, report, rows
from tests.loop.pieces import SaveAt, Slope, Validated, numbers, quiet
from tests.tools.pool import RankPool

# -- a strategy of 60 lines ----------------------------------------------------------------------------------


@pytest.mark.everyday(5)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_strategy_of_sixty_lines_trains_as_one_process(ranks: RankPool, case: str, world: int) -> None:
    agree_in(ranks(world), CASES[case], AveragingStrategy)


class SaysWhere(SingleDeviceStrategy):
    """As Ray's strategy does, by two properties of Lightning's."""

    rank = 0

    @property
    def root_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.rank}


def test_a_strategy_may_say_by_properties_where_it_is() -> None:
    """A property without a setter could not take the device, and what lockstep does anyway was refused."""
    strategy, module = SaysWhere(), Slope()
    quiet(strategy=strategy, max_epochs=1).fit(module, numbers(2))
    assert module.gradients == [1.0, 2.0]
    strategy = SaysWhere()
    strategy.rank = 3
    with pytest.raises(MisconfigurationException, match=r"SaysWhere\.distributed_sampler_kwargs"):
        quiet(strategy=strategy, max_epochs=1).fit(Slope(), numbers(2))


# -- an engine that plays whole windows ----------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case != "unused in some steps"])
def test_an_engine_may_play_whole_windows(ranks: RankPool, case: str) -> None:
    agree_in(ranks(2), CASES[case], ForwardsFirst)


def validated(path: Path) -> list[list[int]]:
    flags: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 3, "num_sanity_val_steps": 0}
    whole, again = Validated(), Validated()
    for module, callbacks, start in ((whole, [SaveAt(3, path)], None), (again, [], path)):
        trainer = quiet(strategy=ForwardsFirst(), devices=1, max_epochs=1, callbacks=callbacks, **flags)
        trainer.fit(module, numbers(8), numbers(1), ckpt_path=start)
    return [whole.validated, again.validated]


def test_a_resume_behind_a_window_of_an_engine_left_out_the_validation_that_was_due_within_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The first window of a fit is watched for its memory, and was not known as one that is played ahead."""
    assert ranks(1).run(validated, tmp_path / "at.ckpt") == [[[4, 8], [0, 4]]]


def refused() -> list[str]:
    class Closure(Slope):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class LooksAtLosses(Slope):
        def on_before_backward(self, loss: Any) -> None:
            pass

    said = []
    for module in (Closure(), LooksAtLosses()):
        with pytest.raises(MisconfigurationException) as raised:
            quiet(strategy=ForwardsFirst(), devices=1, max_epochs=1).fit(module, numbers(4))
        said.append(str(raised.value))
    return said


def test_what_cannot_go_by_windows_is_refused(ranks: RankPool) -> None:
    ((closure, losses),) = ranks(1).run(refused)
    assert "a closure cannot run them again" in closure
    assert "does not call `on_before_backward`" in losses


# -- parts of another size -----------------------------------------------------------------------------------


class Uneven(AveragingStrategy):
    """Three quarters of each global batch go to rank 0."""

    shares = (3.0, 1.0)


@pytest.mark.parametrize("case", ["even", "uneven last batch", "accumulation 3, clipped"])
def test_a_global_batch_is_shared_out_by_the_engines_shares(ranks: RankPool, case: str) -> None:
    agree_in(ranks(2), CASES[case], Uneven)


def sizes_by_shares() -> list[int]:
    sizes: list[int] = []

    class Sees(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch))
            return super().training_step(batch, batch_idx)

    quiet(strategy=Uneven(), devices=2, max_epochs=1).fit(Sees(), numbers(16, 4))
    return sizes


def test_a_rank_of_three_shares_sees_three_times_the_samples(ranks: RankPool) -> None:
    assert ranks(2).run(sizes_by_shares) == [[6, 6], [2, 2]]


# -- an engine whose ranks hold parts ------------------------------------------------------------------------


class Slices(AveragingStrategy):
    """Each rank updates its elements of each parameter, and keeps their gradients only."""

    def _mine(self, parameter: Tensor) -> Tensor:
        owner = torch.arange(parameter.numel(), device=parameter.device) % self.world.size
        return (owner == self.world.rank).reshape(parameter.shape)

    def _average(self) -> None:
        super()._average()
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * self._mine(parameter)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        with torch.no_grad():
            for parameter in self._parameters():
                parameter.copy_(comm.all_reduce(parameter * self._mine(parameter), "sum"))
        return result


class SlicesTold(Slices):
    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        for name, value, gradient in super().whole_parameters():
            yield name, value, None if gradient is None else comm.all_reduce(gradient, "sum")


def test_the_harness_compares_whole_gradients_however_they_are_held(ranks: RankPool) -> None:
    agree(ranks(2), Plain, rows(23), SlicesTold)
    for found in ranks(2).run(report, Plain, rows(23), Slices, {}, timeout=60):
        assert not found
        assert "gradient" in str(found)


class SavesParts(SlicesTold):
    saves_shards = True


def saves(folder: str) -> str:
    trainer = quiet(strategy=SavesParts(), devices=2, max_epochs=1)
    trainer.fit(Slope(), numbers(4))
    with pytest.raises(MisconfigurationException) as raised:
        trainer.save_checkpoint(f"{folder}/whole.ckpt")
    return str(raised.value)


def test_what_each_rank_has_in_part_is_not_written_as_the_whole(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(saves, str(tmp_path)):
        assert "each rank has only a part of the model" in said
    assert list(tmp_path.iterdir()) == []


def of_dtensor() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lockstep.checkpoint.io import TorchCheckpointIO

    part = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(MisconfigurationException) as raised:
        TorchCheckpointIO().save_checkpoint({"state_dict": {"w": part}}, "never.ckpt")
    return str(raised.value)


def test_a_dtensor_is_not_saved_as_if_it_were_the_whole(ranks: RankPool) -> None:
    for said in ranks(2).run(of_dtensor, timeout=60):
        assert 'checkpoint["state_dict"]["w"]' in said
        assert "DTensor, which cannot be saved" in said
