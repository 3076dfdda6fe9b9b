"""In a steady step of several ranks the host waits for nothing that is on the device."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import Callback, LightningModule
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

FIRST, STEPS = 4, 4


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (torch.full((8,), float(index)) for index in range(64))


class Net(LightningModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=self.what == "sync_dist")
        self.log("least", loss.detach() / 2, reduce_fx="min")
        if self.what == "weight":
            return {"loss": loss, "weight": torch.full((), 3.0, device=loss.device)}
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("v", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Watch(Callback):
    """Notes the waits of some steps, or batches of the validation."""

    def __init__(self, validation: bool) -> None:
        self.validation = validation
        self.waits: list[tuple[str, str]] = []
        self._inside = ExitStack()

    def _at(self, batch_idx: int) -> None:
        from tests.accelerator.madeup import queues

        if batch_idx == FIRST:
            self.waits = self._inside.enter_context(queues.watched_waits())
        if batch_idx == FIRST + STEPS:
            self._inside.close()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.validation:
            self._at(batch_idx)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.validation:
            self._at(batch_idx)


def _waits(what: str, folder: str = "") -> list[tuple[str, str]]:
    watch = Watch(what.endswith("validation"))
    module = Net(what)
    train = DataLoader(Stream() if what == "iterable" else Samples(), 2)
    flags: dict[str, Any] = {"gradient_clip_val": 1.0} if "clip" in what else {}
    if "hashes" in what:
        flags |= {"record": "hashes", "default_root_dir": folder}
    trainer = quiet(
        strategy="fsdp" if what.startswith("fsdp") else "ddp",
        devices=2,
        max_epochs=1,
        callbacks=[watch],
        num_sanity_val_steps=0,
        limit_train_batches=1 if watch.validation else None,
        limit_val_batches=None if watch.validation else 0,
        log_every_n_steps=1000,
        **flags,
    )
    trainer.fit(module, train, DataLoader(Samples(), 2))
    return watch.waits


def _unused() -> tuple[list[str], int]:
    class Part(Net):
        def __init__(self) -> None:
            super().__init__("plain")
            self.never = nn.Linear(2, 2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(strategy="ddp", devices=2, max_steps=3, num_sanity_val_steps=0, limit_val_batches=0).fit(
            Part(), DataLoader(Samples(), 2)
        )
    return [str(each.message) for each in caught if "got no gradient" in str(each.message)], dist.get_rank()


def test_parameters_for_which_a_rank_waits_in_each_step_are_named_once(madeup: RankPool) -> None:
    for said, rank in madeup(2).run(_unused):
        assert len(said) == (rank == 0)
        assert all("never.weight, never.bias" in each or "never.bias, never.weight" in each for each in said)


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    "what",
    [
        *("plain", "clip", "iterable", "weight", "sync_dist", "fsdp", "fsdp, clip", "validation", "fsdp validation"),
        pytest.param("hashes", marks=pytest.mark.extension("replay")),
        pytest.param("fsdp, hashes", marks=pytest.mark.extension("replay")),
    ],
)
def test_nobody_waits_for_the_device(madeup: RankPool, what: str, tmp_path: Path) -> None:
    """Each of them was a copy up, a collective and a copy down, behind all that the device had yet to do."""
    waits = madeup(2).run(_waits, what, str(tmp_path))
    assert waits == [[], []]


class Plain(LightningModule):
    """Notes from which batch to which other its step asks torch's module for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.watched = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.watched = FIRST <= batch_idx < FIRST + STEPS
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def asked(precision: str) -> list[str]:
    """The functions of the device's module that plain steps call, whoever does."""
    device, module, found = torch.get_device_module("madeup"), Plain(), []

    def noting(name: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if module.watched:
                found.append(name)
            return function(*args, **kwargs)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name, function in vars(type(device)).copy().items():
            if isinstance(function, FunctionType):
                patch.setattr(type(device), name, noting(name, function))
        quiet(precision=precision, max_epochs=1).fit(module, DataLoader(Samples(), 4))
        module.watched = True
        device.current_device()
    return found


@pytest.mark.parametrize(("precision", "own"), [("32-true", []), ("bf16-mixed", ["get_amp_supported_dtype"] * STEPS)])
def test_a_plain_step_asks_the_device_nothing(madeup: RankPool, precision: str, own: list[str]) -> None:
    """Each such question takes the host some microseconds, which a GPU that waits for its next kernel is idle.

    ``torch.autocast`` asks out-of-tree devices for their dtypes, CUDA not.
    """
    assert madeup(1).run(asked, precision, group=False) == [[*own, "current_device"]]
