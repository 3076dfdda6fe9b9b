"""Loaders that can be read once: which of their batches come, and what is said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lockstep import LightningModule
from tests.loop.pieces import quiet


class Seen(LightningModule):
    """Keeps what it was given to train on and to validate on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[float] = []
        self.validated: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained += batch.flatten().tolist()
        loss: Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += batch.flatten().tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Once(IterableDataset[Tensor]):
    """Gives the same iterator in each pass."""

    def __init__(self, samples: int) -> None:
        self._iterator = iter([torch.tensor([float(number)]) for number in range(samples)])

    def __iter__(self) -> Iterator[Tensor]:
        return self._iterator


def batches(count: int) -> Iterator[Tensor]:
    return (torch.tensor([[float(number)]]) for number in range(count))


def fitted(train: object, val: object = None, **flags: Any) -> tuple[Seen, str, list[str]]:
    """The module, why its fit ended, and the warnings about what can be read once."""
    module = Seen()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = quiet(**flags).fit(module, train, val)
    return (
        module,
        result.stopped,
        [text for text in map(str, (each.message for each in said)) if "restarts on each" in text],
    )


def test_a_generators_later_epochs_are_told_to_be_empty() -> None:
    module, stopped, said = fitted(batches(5), max_epochs=3)
    assert module.trained == [0, 1, 2, 3, 4]
    assert stopped == "max_epochs=3 reached"
    assert len(said) == 1
    assert said[0].startswith("train_dataloader yields no batches in this pass")


@pytest.mark.parametrize("flags", [{}, {"max_steps": 10}])
def test_a_fit_without_a_limit_of_epochs_ends_where_no_batch_comes_any_more(flags: dict[str, int]) -> None:
    module, stopped, said = fitted(batches(5), max_epochs=-1, **flags)
    assert len(module.trained) == 5
    assert "epoch 1 had no training batches" in stopped
    assert len(said) == 1


def test_a_limit_takes_the_next_batches_of_a_generator_in_each_epoch() -> None:
    module, _, said = fitted(batches(50), max_epochs=3, limit_train_batches=4)
    assert module.trained == list(range(12))
    assert not said


def test_a_data_set_that_gives_one_iterator_is_told() -> None:
    module, _, said = fitted(DataLoader(Once(6), 2), max_epochs=3)
    assert sorted(module.trained) == [0, 1, 2, 3, 4, 5]
    assert len(said) == 1


def test_a_generator_for_validation_is_told_to_go_on_behind_the_sanity_check() -> None:
    module, _, said = fitted(list(batches(4)), batches(7), max_epochs=2, num_sanity_val_steps=2)
    assert module.validated == [0, 1, 2, 3, 4, 5, 6]
    assert [text.partition(" (")[0].partition(" yields")[0] for text in said] == [
        "val_dataloader is an iterator",
        "val_dataloader",
    ]


def test_lists_and_loaders_begin_anew_and_nothing_is_said() -> None:
    module, _, said = fitted(list(batches(3)), DataLoader(torch.arange(4.0).reshape(-1, 1)), max_epochs=2)
    assert module.trained == [0, 1, 2] * 2
    assert module.validated == [0, 1] + [0, 1, 2, 3] * 2
    assert not said


class Rewound:
    """A loader that is its own iterator, and restarts with each call of ``__iter__``."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Rewound:
        self.at = 0
        return self

    def __next__(self) -> Tensor:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return torch.tensor([[self.at - 1.0]])

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2}])
def test_a_loader_that_rewinds_itself_gives_each_batch_once_in_a_pass(flags: dict[str, Any]) -> None:
    module, _, said = fitted(Rewound(4), Rewound(3), max_epochs=2, num_sanity_val_steps=1, **flags)
    assert module.trained == [0, 1, 2, 3] * 2
    assert module.validated == [0] + [0, 1, 2] * 2
    assert not said
