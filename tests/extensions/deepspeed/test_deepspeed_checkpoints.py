"""Checkpoints of DeepSpeed's stages, in parts and in the engine's own format: any strategy goes on from them."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.checkpoint import format
from lockstep.checkpoint.io import AsyncCheckpointIO
from lockstep.checkpoint.sharded import load
from lockstep.cli.checkpoint import checkpoint
from lockstep.extensions.deepspeed.strategy import DeepSpeedStrategy
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from tests.checkpoint import test_frozen
from tests.checkpoint.adapted import ByHand
from tests.equivalence.models import Plain
from tests.loop.pieces import quiet
from tests.tools.fresh import python
from tests.tools.pool import RankFailure, RankPool

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
    later = {"stage": 3, "async_save": True}
    legs: list[tuple[Any, int]] = [("deepspeed_stage_2", 2), ("fsdp", 3), ("single_device", 1), (later, 2), ("ddp", 2)]
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
    with pytest.raises(MisconfigurationException, match=r"pickles, which can run code.*weights_only=False.*convert"):
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
    from lockstep.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    wrong = []
    for path in (first, parts):
        one = convert_zero_checkpoint_to_fp32_state_dict(path, f"{folder}/{number}.pt")["state_dict"]
        read = load(f"{folder}/{number}.pt")["state_dict"]
        wrong += [f"{path} has {name}" for name in set(one) ^ set(saved["state_dict"])]
        wrong += [
            f"{path}: {name}" for name, value in saved["state_dict"].items() if not torch.equal(read[name], value)
        ]
    with pytest.raises(MisconfigurationException, match=r"tag='other'.*can be converted"):
        convert_zero_checkpoint_to_fp32_state_dict(first, f"{folder}/{number}.pt", tag="other")
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
    weights = {name: strategy._gather(value) for name, value in strategy._module_state().items()}
    states = zero.optimizer_state(lambda part: part.whole(torch.device("cpu")))["state"]
    wrong += [f"loaded {name}" for name, value in weights.items() if not torch.equal(value, saved["state_dict"][name])]
    for key, state in saved["optimizer_states"][0]["state"].items():
        wrong += [f"loaded {key} {name}" for name, value in state.items() if not torch.equal(states[key][name], value)]
    return wrong


# -- what cannot be ------------------------------------------------------------------------------------------


def test_formats_that_do_not_go_together_are_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"checkpoint_format='ours'\): choose 'sharded', 'full', "):
        DeepSpeedStrategy(checkpoint_format="ours")
    with pytest.raises(MisconfigurationException, match=r"async_save=True, checkpoint_format='full'\): only"):
        DeepSpeedStrategy(checkpoint_format="full", async_save=True)


def by_another_writer(folder: str, arguments: dict[str, Any]) -> str:
    """What saving ends with where the user has given a CheckpointIO that writes whole checkpoints."""
    strategy = DeepSpeedStrategy(stage=3, **arguments)
    trainer = quiet(strategy=strategy, devices=2, max_steps=1, plugins=[AsyncCheckpointIO()])
    trainer.fit(Noted(), data(3))
    try:
        trainer.save_checkpoint(f"{folder}/one.ckpt")
    except MisconfigurationException as error:
        return str(error)
    return "saved"


def test_a_writer_of_whole_checkpoints_is_told_of_one_file(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(by_another_writer, str(tmp_path), {}, timeout=100):
        assert "AsyncCheckpointIO writes complete checkpoints" in said
        assert 'DeepSpeedStrategy(checkpoint_format="full")' in said
    assert ranks(2).run(by_another_writer, str(tmp_path), {"checkpoint_format": "full"}, timeout=100) == ["saved"] * 2
    found = load(str(tmp_path / "one.ckpt"))
    assert found["state_dict"]["net.0.weight"].shape == (8, 6)
    steps = [state["step"] for state in found["optimizer_states"][0]["state"].values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 1


def damaged(folder: str) -> list[str]:
    """What is said of folders of the engine's that are not whole."""
    first, said = f"{folder}/first.ckpt", []
    leg(own(2), 6, 1, first, None)
    for number, (name, change) in enumerate(DAMAGES):
        path = Path(f"{folder}/{number}.ckpt")
        shutil.copytree(first, path)
        for file in path.glob(name):
            change(file)
        try:
            load(path, weights_only=False)
        except CorruptCheckpoint as error:
            said.append(str(error))
    try:
        checkpoint(["convert", "--pickled", "--to", "file", first, f"{folder}/file.ckpt"])
        found = load(f"{folder}/file.ckpt")
        del found["lockstep"]["strategy"]
        format.save(found, f"{folder}/without.ckpt")
        checkpoint(["convert", "--to", "deepspeed", f"{folder}/without.ckpt", f"{folder}/no.ckpt"])
    except MisconfigurationException as error:
        said.append(str(error))
    return said


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


DAMAGES: list[tuple[str, Any]] = [
    ("checkpoint/*optim_states.pt", Path.unlink),
    ("checkpoint/*optim_states.pt", flip),
    ("index.json", flip),
]


def test_a_damaged_folder_of_the_engines_is_named(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks(1).run(damaged, str(tmp_path), timeout=200)
    for text, words in zip(
        said,
        ("lacks the file", "has changed since it was written", "index.json", "Resume from the checkpoint with"),
        strict=True,
    ):
        assert words in text


LIGHTNING = """
import argparse, sys, types
import lightning.pytorch as L
import lightning.pytorch.strategies.deepspeed as theirs
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from deepspeed import ops

# Lightning refuses DeepSpeed on a CPU
ops.__compatible_ops__["deepspeed_shm_comm"] = False
theirs.CUDAAccelerator = CPUAccelerator
theirs._validate_device_index_selection = lambda devices: None
theirs.argparse = types.SimpleNamespace(Namespace=lambda device_rank: argparse.Namespace(device_rank=-1))

class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 1))
        self.register_buffer("kept", torch.arange(3.0))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)

stage, path = int(sys.argv[1]), sys.argv[2]
config = {
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "train_micro_batch_size_per_gpu": 2,
}
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
strategy = theirs.DeepSpeedStrategy(config=config, process_group_backend="gloo")
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **quiet)
module = Net(3)
trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 5), batch_size=2))
trainer.save_checkpoint(path)
from deepspeed.utils import safe_get_full_fp32_param
weights = {name: safe_get_full_fp32_param(parameter) for name, parameter in module.named_parameters()}
if trainer.is_global_zero:
    torch.save(weights, path + ".weights")
"""


class Net(LightningModule):
    kept: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 1))
        self.register_buffer("kept", torch.zeros(3))


def loaded(path: str) -> list[str]:
    module = Net.load_from_checkpoint(path, weights_only=False)
    weights = torch.load(f"{path}.weights").items()
    wrong = [name for name, value in weights if not torch.equal(module.get_parameter(name), value)]
    return wrong + ([] if module.kept.tolist() == [0, 1, 2] else ["kept"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning")
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_a_deepspeed_checkpoint_of_lightnings_load(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    script, path = tmp_path / "script.py", tmp_path / "theirs.ckpt"
    script.write_text(LIGHTNING)
    done = python(script, str(stage), path, folder=tmp_path, seconds=200)
    assert done.returncode == 0, done.stderr
    assert ranks(1).run(loaded, str(path), timeout=100) == [[]]


def test_a_format_of_all_weights_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"trainable_only=True\): DeepSpeedStrategy writes all weights"):
        ranks(2).run(in_deepspeeds_format, str(tmp_path), timeout=60)


def in_deepspeeds_format(into: str) -> None:
    strategy = DeepSpeedStrategy(stage=2, checkpoint_format="deepspeed")
    quiet(strategy=strategy, devices=2, max_epochs=2, callbacks=[test_frozen.SavesBoth(into)]).fit(
        ByHand(), test_frozen.words(4)
    )
