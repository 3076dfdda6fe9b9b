"""Losses that are means over labels, of which samples have different numbers: a fit says so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.loop.step import has_uneven_targets
from tests.loop.pieces import quiet

PADDED = [[1, 2, 3], [4, -100, -100]]
MASKED = [[1, -100, 3], [-100, 2, 3]]
WHOLE = [[1, 2, 3], [4, 5, 6]]


class Labels(LightningModule):
    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.words, self.weighs = nn.Embedding(8, 8), weighs

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"]
        loss = nn.functional.cross_entropy(self.words(labels.clamp(min=0)).flatten(0, 1), labels.flatten())
        return {"loss": loss, "weight": (labels != -100).sum()} if self.weighs else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("rows", "weighs", "accumulate", "warns"),
    [
        (PADDED, False, 2, True),
        (PADDED, True, 2, False),
        (PADDED, False, 1, False),  # one process, one batch a step: there is no other way to cut it
        (MASKED, False, 2, False),
        (WHOLE, False, 2, False),
    ],
)
def test_a_mean_over_labels_that_is_not_weighed_by_them_is_named(
    rows: list[list[int]], weighs: bool, accumulate: int, warns: bool
) -> None:
    loader: Any = DataLoader([{"labels": torch.tensor(row)} for row in rows * 4], 2)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(max_epochs=2, accumulate_grad_batches=accumulate).fit(Labels(weighs), loader)
    said = [str(each.message) for each in caught if "labels that are not -100" in str(each.message)]
    assert len(said) == warns


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([[-100, 2, 3]])}, True),  # the next batch may have another number
        ({"labels": torch.tensor([1, -100])}, False),  # one a sample
        ({"labels": torch.tensor([[0.5, -100.0]])}, False),
        ({"labels": torch.zeros(0, 3, dtype=torch.long)}, False),
        ({"targets": torch.tensor(PADDED)}, False),
        (torch.tensor(PADDED), False),
        (None, False),
    ],
)
def test_which_batches_have_uneven_targets(batch: object, expected: bool) -> None:
    assert has_uneven_targets(batch) is expected
