"""The boring models and data sets: what every rank holds is the same, and the steps give losses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lockstep.testing import (
    BoringDataModule,
    BoringDataModuleNoLen,
    RandomDataset,
)
from tests.tools.pool import RankPool


def test_every_rank_holds_the_same_rows(ranks: RankPool) -> None:
    def rows() -> torch.Tensor:
        assert dist.get_world_size() == 2
        return torch.stack(list(DataLoader(RandomDataset(3, 5))))

    first, second = ranks(2).run(rows)
    assert torch.equal(first, second)
    assert not torch.equal(RandomDataset(3, 5, seed=1).data, RandomDataset(3, 5).data)


def test_data_modules_give_each_stage_its_own_quarter() -> None:
    for data in (BoringDataModule(), BoringDataModuleNoLen()):
        for stage in ("fit", "validate", "test", "predict"):
            data.setup(stage)
        loaders = (data.train_dataloader, data.val_dataloader, data.test_dataloader, data.predict_dataloader)
        rows = [tuple(row.flatten().tolist()) for loader in loaders for row in loader()]
        assert len(rows) == len(set(rows)) == 256
