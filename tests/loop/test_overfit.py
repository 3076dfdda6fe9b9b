"""`overfit_batches`: the same few batches in every epoch, for training and validation."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler

from lockstep.data.combined import CombinedLoader
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Slope, Stream, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Sees(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.validation: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation.append(batch.tolist())


def data(count: int = 10) -> Any:
    return torch.arange(1, count + 1, dtype=torch.float64)


@pytest.mark.parametrize(("asked", "batches"), [(2, 2), (0.5, 2), (1, 1), (1.0, 5), (99, 5)])
def test_it_is_a_number_of_batches_or_a_part(asked: int | float, batches: int) -> None:
    module = Sees()
    trainer = quiet(overfit_batches=asked, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, numbers(10, 2), numbers(10, 2))
    expected = [[2.0 * i + 1, 2.0 * i + 2] for i in range(batches)]
    assert module.batches == module.validation == expected * 2
    assert (trainer.num_training_batches, trainer.num_val_batches) == (batches, [batches])


def test_nothing_is_shuffled_and_that_is_said() -> None:
    module, loader = Sees(), DataLoader(data(), 2, shuffle=True)
    with pytest.warns(UserWarning, match=r"overfit_batches=...\): train_dataloader shuffles.*reads them in order"):
        quiet(overfit_batches=2, max_epochs=3).fit(module, loader)
    assert module.batches == [[1.0, 2.0], [3.0, 4.0]] * 3
    assert isinstance(loader.sampler, RandomSampler)  # the user's own loader is as it was
    with pytest.warns(UserWarning, match="val_dataloader shuffles"):
        quiet(overfit_batches=2, max_epochs=1, num_sanity_val_steps=0).fit(module, numbers(4), loader)
    assert module.validation == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("order", ["lockstep", "torch"])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        {"sampler": DistributedSampler(range(10), num_replicas=1, rank=0, shuffle=True)},  # type: ignore[arg-type]
    ],
    ids=["shuffle", "sampler", "distributed"],
)
def test_any_sampler_gives_way(options: dict[str, Any], order: str) -> None:
    module = Sees()
    with pytest.warns(UserWarning, match="shuffles"):
        quiet(overfit_batches=2, max_epochs=2, order=order).fit(module, DataLoader(data(), 2, **options))
    assert module.batches == [[1.0, 2.0], [3.0, 4.0]] * 2


def test_what_chooses_batches_itself_is_left_and_named() -> None:
    class Own(BatchSampler):
        pass

    loader = DataLoader(data(), batch_sampler=Own(RandomSampler(range(10)), 2, False))
    with pytest.warns(UserWarning, match="train_dataloader has a custom batch sampler, Own"):
        quiet(overfit_batches=1, max_epochs=1).fit(Sees(), loader)


def test_streams_and_several_loaders() -> None:
    module = Sees()
    quiet(overfit_batches=2, max_epochs=2).fit(module, DataLoader(Stream(5), batch_size=1))
    assert module.batches == [[1.0], [2.0]] * 2

    seen: list[Any] = []
    module = acting(training_step=lambda m, batch, at: seen.append([p.tolist() for p in batch]) or m.w * 0)
    loaders = CombinedLoader([numbers(4), DataLoader(data(4), shuffle=True)], "min_size")
    with pytest.warns(UserWarning, match=r"train_dataloader\[1\] shuffles"):
        quiet(overfit_batches=2, max_epochs=2).fit(module, loaders)
    assert seen == [[[1.0], [1.0]], [[2.0], [2.0]]] * 2


def test_a_part_that_makes_no_batch_names_the_flag() -> None:
    with pytest.raises(MisconfigurationException, match=r"overfit_batches=0.1 of 5 batches is less than one.*0.2"):
        quiet(overfit_batches=0.1, max_epochs=1).fit(Sees(), numbers(5))
    with pytest.raises(MisconfigurationException, match=r"overfit_batches=0.3 of 3 batches"):
        quiet(overfit_batches=0.3, max_epochs=1).fit(Sees(), numbers(10), numbers(3))


@pytest.mark.parametrize("value", [-1, 1.5, "all", True])
def test_a_value_that_cannot_work(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match="overfit_batches="):
        quiet(overfit_batches=value)


def test_it_goes_before_other_limits_and_a_trial_run_as_in_lightning() -> None:
    trainer = quiet(overfit_batches=3, limit_train_batches=1, limit_val_batches=1, fast_dev_run=2)
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.limit_test_batches) == (3, 3, 2)


def on_each_rank() -> tuple[list[Any], list[Any]]:
    module = Sees()
    loader = DataLoader(data(12), 2, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(overfit_batches=2, max_epochs=2, num_sanity_val_steps=0).fit(module, loader, loader)
    return module.batches, module.validation


def test_on_two_ranks_the_batches_are_shared_out_in_order(ranks: RankPool) -> None:
    first, second = [[1.0, 2.0], [5.0, 6.0]] * 2, [[3.0, 4.0], [7.0, 8.0]] * 2
    assert ranks(2).run(on_each_rank, timeout=40) == [(first, first), (second, second)]
