"""Checkpoints of DeepSpeed's stages: what they hold, and that any strategy goes on from them, on other ranks."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint.sharded import load
from lockstep.testing import RankPool
from tests.equivalence.models import Plain
from tests.loop.pieces import quiet

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]


class Noted(Plain):
    """Under Adam, in two groups; it notes which samples each step has seen, by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([] if self.trainer.is_padding_batch else batch[1].tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.01}, {"params": rest}], lr=0.02, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def data(batch_size: int) -> Any:
    source = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(36, 6, generator=source), torch.arange(36)), batch_size, shuffle=True)


def leg(strategy: str, batch_size: int, steps: int, path: str, start: str | None, **flags: Any) -> list[list[int]]:
    """Go on until so many steps, and save; gives the samples that this rank has seen."""
    torch.manual_seed(3)
    module = Noted()
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = quiet(strategy=strategy, devices=world, max_steps=steps, max_epochs=-1, **flags)
    trainer.fit(module, data(batch_size), ckpt_path=start)
    trainer.save_checkpoint(path)
    return module.seen


def weights(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(str(path))["state_dict"]
    return found


def compare(found: Path, expected: Path) -> None:
    mine, theirs = load(str(found)), load(str(expected))
    for name, value in theirs["state_dict"].items():
        assert (mine["state_dict"][name] - value).abs().max() <= 1e-6, name
    ours, others = mine["optimizer_states"][0], theirs["optimizer_states"][0]
    assert [{**group, "lr": round(group["lr"], 9)} for group in ours["param_groups"]] == [
        {**group, "lr": round(group["lr"], 9)} for group in others["param_groups"]
    ]
    assert ours["state"].keys() == others["state"].keys()
    for number, state in others["state"].items():
        for key, value in state.items():
            assert ours["state"][number][key].shape == value.shape
            assert torch.allclose(ours["state"][number][key], value, atol=1e-6), (number, key)


def test_a_run_goes_on_from_strategy_to_strategy_in_the_middle_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """Stage 2 on 2 ranks, fsdp on 3, one process, stage 3 on 2, ddp on 2: the samples and weights of one process."""
    legs = [("deepspeed_stage_2", 2), ("fsdp", 3), ("single_device", 1), ("deepspeed_stage_3", 2), ("ddp", 2)]
    (whole,) = ranks(1).run(leg, "single_device", 6, 10, str(tmp_path / "whole.ckpt"), None, timeout=100)
    seen: list[list[int]] = []
    start: str | None = None
    for number, (strategy, world) in enumerate(legs):
        path = str(tmp_path / f"{number}.ckpt")
        each = ranks(world).run(leg, strategy, 6 // world, 2 * (number + 1), path, start, timeout=250)
        seen += [sorted(chain.from_iterable(parts)) for parts in zip(*each, strict=True)]
        start = path
    assert seen == [sorted(step) for step in whole]
    compare(tmp_path / "4.ckpt", tmp_path / "whole.ckpt")
