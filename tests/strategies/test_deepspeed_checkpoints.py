"""Checkpoints of DeepSpeed's stages, in parts and in the engine's own format: any strategy goes on from them."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.checkpoint.sharded import load
from lockstep.cli.checkpoint import checkpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies.deepspeed import DeepSpeedStrategy
from lockstep.testing import RankPool
from tests.equivalence.models import Plain
from tests.loop.pieces import quiet

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]


class Noted(Plain):
    """Under Adam, in two groups; it notes which samples each step has seen, by their number.

    It has a frozen parameter, one with two names, and a buffer.
    """

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("kept", torch.arange(4.0))
        self.again = self.net[0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([] if self.trainer.is_padding_batch else batch[1].tolist())
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        groups = [{"params": [self.frozen]}, {"params": [first], "lr": 0.01}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def data(batch_size: int) -> Any:
    source = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(36, 6, generator=source), torch.arange(36)), batch_size, shuffle=True)


def leg(strategy: Any, batch_size: int, steps: int, path: str, start: str | None, **flags: Any) -> list[list[int]]:
    """Go on until so many steps, and save; gives the samples that this rank has seen."""
    torch.manual_seed(3)
    module = Noted()
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    chosen = DeepSpeedStrategy(**strategy) if isinstance(strategy, dict) else strategy
    trainer = quiet(strategy=chosen, devices=world, max_steps=steps, max_epochs=-1, **flags)
    # a folder of the engine's own is read where its author is trusted
    trainer.fit(module, data(batch_size), ckpt_path=start, weights_only=None if start is None else False)
    trainer.save_checkpoint(path)
    return module.seen


def compare(found: Path, expected: Path) -> None:
    mine, theirs = load(str(found), weights_only=False), load(str(expected))
    assert list(mine["state_dict"]) == list(theirs["state_dict"])
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


def go(ranks: RankPool, folder: Path, legs: list[tuple[Any, int]]) -> None:
    """Two steps by each of the strategies on so many ranks, in the middle of epochs, are what one process makes."""
    (whole,) = ranks(1).run(leg, "single_device", 6, 2 * len(legs), str(folder / "whole.ckpt"), None, timeout=100)
    seen: list[list[int]] = []
    start: str | None = None
    for number, (strategy, world) in enumerate(legs):
        path = str(folder / f"{number}.ckpt")
        each = ranks(world).run(leg, strategy, 6 // world, 2 * (number + 1), path, start, timeout=250)
        seen += [sorted(chain.from_iterable(parts)) for parts in zip(*each, strict=True)]
        start = path
    assert seen == [sorted(step) for step in whole]
    compare(folder / f"{len(legs) - 1}.ckpt", folder / "whole.ckpt")


def test_a_run_goes_on_from_strategy_to_strategy_in_the_middle_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """Stage 2 on 2 ranks, fsdp on 3, one process, stage 3 on 2, ddp on 2: the samples and weights of one process."""
    legs = [("deepspeed_stage_2", 2), ("fsdp", 3), ("single_device", 1), ("deepspeed_stage_3", 2), ("ddp", 2)]
    go(ranks, tmp_path, legs)
    assert sorted(file.name for file in (tmp_path / "3.ckpt").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "index.json",
        "meta.pt",
        "rank_0.pt",
        "rank_1.pt",
    ]


def own(stage: int) -> dict[str, Any]:
    return {"stage": stage, "checkpoint_format": "deepspeed"}


def test_the_engines_own_format_is_written_and_read_on_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed's own script reads it, ``convert`` takes it to ours and back, and the engine reads what that makes."""
    go(ranks, tmp_path, [(own(2), 2), (own(3), 3), (own(3), 2), ("fsdp", 2), ("deepspeed_stage_1", 2)])
    with pytest.raises(MisconfigurationException, match=r"pickles of its classes.*weights_only=False.*convert"):
        load(str(tmp_path / "0.ckpt"))
    for number in (0, 1):
        for name in ranks(1).run(look, str(tmp_path), number, timeout=200)[0]:
            pytest.fail(f"checkpoint {number}: {name}")


def look(folder: str, number: int) -> list[str]:
    """What differs between a checkpoint of the engine's and what others make of it."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first, parts, back = (f"{folder}/{name}" for name in (f"{number}.ckpt", f"{number}.parts", f"{number}.back"))
    assert checkpoint(["convert", "--pickled", first, parts]) == 0
    assert checkpoint(["convert", "--to", "deepspeed", parts, back]) == 0
    assert checkpoint(["diff", "--pickled", parts, back]) == 0
    saved = load(parts)
    wrong = []
    for path in (first, back):
        made = get_fp32_state_dict_from_zero_checkpoint(path)
        wrong += [f"{path} has {name}" for name in set(made) ^ set(saved["state_dict"])]
        wrong += [name for name, value in saved["state_dict"].items() if not torch.equal(made[name], value)]
    trainer = quiet(strategy=DeepSpeedStrategy(stage=2), devices=1, max_steps=1)
    trainer.fit(Noted(), data(6))
    strategy: Any = trainer.strategy
    zero = strategy._zero
    vars(zero.engine)["module"] = strategy.module
    zero.engine.load_checkpoint(back)
    weights = {name: strategy._made_whole(value) for name, value in strategy._module_state().items()}
    states = zero.optimizer_state(lambda part: part.whole(torch.device("cpu")))["state"]
    wrong += [f"loaded {name}" for name, value in weights.items() if not torch.equal(value, saved["state_dict"][name])]
    for key, state in saved["optimizer_states"][0]["state"].items():
        wrong += [f"loaded {key} {name}" for name, value in state.items() if not torch.equal(states[key][name], value)]
    return wrong
