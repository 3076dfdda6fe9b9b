"""lockstep on the made-up device: no wait in a step, the numbers of one CPU process, the same bits after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.ground.accelerators import TorchAccelerator
from lockstep.precision.formats import make_precision
from lockstep.strategies import DDPStrategy
from lockstep.testing import check_equivalence
from tests.accelerator.madeup import NAME
from tests.accelerator.on_device import on_device
from tests.accelerator.test_steady_steps import Watch
from tests.tools.pool import RankPool

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Small(LightningModule):
    """A net with what a net has: normalization, dropout, logged values."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4), nn.Linear(4, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def rows(count: int = 48, batch_size: int = 4) -> DataLoader[Any]:
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(values, values.sum(1, keepdim=True).sin()), batch_size)


def _steady(flags: dict[str, Any]) -> list[tuple[str, str]]:
    watch = Watch(validation=False)
    Trainer(accelerator=NAME, devices=1, max_epochs=1, callbacks=[watch], **{**QUIET, **flags}).fit(Small(), rows(80))
    return watch.waits


STEADY: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("flags", STEADY.values(), ids=STEADY)
def test_a_steady_step_waits_for_nothing(madeup: RankPool, flags: dict[str, Any]) -> None:
    assert madeup(1).run(_steady, flags, group=False) == [[]]


def test_a_step_in_float16_waits_once(madeup: RankPool) -> None:
    (found,) = madeup(1).run(_steady, {"precision": "16-mixed"}, group=False)
    assert len(found) == 4, found


def test_a_row_of_logged_values_is_one_wait(madeup: RankPool) -> None:
    (found,) = madeup(1).run(_steady, {"log_every_n_steps": 1}, group=False)
    assert len(found) == 4, found


# -- the numbers of one CPU process


class Plain(Small):
    """What ranks can train as one process does: no normalization over a rank's samples, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Normalized(Small):
    """The same with normalization over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__(0.0)

    configure_optimizers = Plain.configure_optimizers


def _uneven(batch_size: int) -> DataLoader[Any]:
    return rows(42, batch_size)


def _equal(kind: type[Small], flags: dict[str, Any]) -> str:
    strategy = flags.pop("strategy", "ddp")
    if flags.pop("shard_optimizer", False):
        strategy = DDPStrategy(shard_optimizer=True)
    report = check_equivalence(kind, _uneven, strategy=strategy, devices=2, steps=8, **flags)
    return "" if report else str(report)


EQUAL: dict[str, tuple[type[Small], dict[str, Any]]] = {
    "ddp": (Plain, {}),
    "clipped": (Plain, {"gradient_clip_val": 0.05}),
    "accumulated": (Plain, {"accumulate": 3}),
    "sharded optimizer": (Plain, {"shard_optimizer": True, "gradient_clip_val": 0.05}),
    "fsdp": (Plain, {"strategy": "fsdp", "gradient_clip_val": 0.05}),
    "fsdp, accumulated": (Plain, {"strategy": "fsdp", "accumulate": 2}),
    "batch norm": (Normalized, {"sync_batchnorm": True}),
}


@pytest.mark.everyday(3)
@pytest.mark.parametrize(("kind", "flags"), EQUAL.values(), ids=EQUAL)
def test_two_ranks_are_one_process_of_the_cpu(madeup: RankPool, kind: type[Small], flags: dict[str, Any]) -> None:
    assert madeup(2).run(_equal, kind, flags, group=False) == ["", ""]


# -- the same bits after a resume


def _weights(module: LightningModule) -> list[Tensor]:
    return [value.detach().cpu().clone() for value in module.state_dict().values()]


class Numbered(TorchAccelerator):
    """Ranks with devices of these numbers, as ranks have that a cluster gives others to."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(NAME)
        self.numbers = numbers

    def get_parallel_devices(self, devices: Any) -> list[torch.device]:
        return [torch.device(NAME, number) for number in self.numbers]


def _fitted(folder: str, devices: list[int], steps: int, begin: int | None = None) -> list[Tensor]:
    seed_everything(11, verbose=False)
    trainer = Trainer(
        accelerator=Numbered(devices),
        devices=len(devices),
        strategy="ddp",
        max_steps=steps,
        **{**QUIET, "default_root_dir": folder},
    )
    module = Small(0.5)
    if begin is None:
        torch.rand(3, device=trainer.strategy.root_device)  # each device has drawn, and another number of times
    trainer.fit(module, rows(), ckpt_path=None if begin is None else f"{folder}/at_{begin}.ckpt")
    trainer.save_checkpoint(f"{folder}/at_{steps}.ckpt")
    return _weights(module)


def test_a_resume_with_dropout_gives_the_same_bits_on_devices_of_any_numbers(madeup: RankPool, tmp_path: Path) -> None:
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    expected = madeup(2).run(_fitted, whole, [0, 1], 6, group=False)
    madeup(2).run(_fitted, part, [0, 1], 3, group=False)
    for devices in ([0, 1], [3, 1]):
        found = madeup(2).run(_fitted, part, devices, 6, 3, group=False)
        for mine, its in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine, its)), devices


class Words(LightningModule):
    """A table of words, which is looked up by what the batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(batch)).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def profiled_on(device: str) -> Any:
    from lockstep.extensions.balancing.plans.planning import profile_module

    precision = make_precision("32-true", device)
    where = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
    return profile_module(Words().to(where), torch.arange(48).view(4, 12).to(where), precision, device=where)


@pytest.mark.extension("balancing")
@on_device()
def test_a_step_on_the_device_is_profiled_as_one_on_the_cpu() -> None:
    """Its parameters were traced as the CPU's, beside a batch of the device: a plan on a GPU ended in an error."""
    assert profiled_on(NAME).parameters == profiled_on("cpu").parameters
