"""A fit that is cut off and goes on from a checkpoint ends in the bits of one that was never cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import Callback, LightningModule, Trainer
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from lockstep.strategies import ModelParallelStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Cut, Killed, Recorder, SaveAt, Slope, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Noisy(Dataset[Any]):
    """Rows with fresh noise at each access."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), index / 22) + torch.rand(3)


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([torch.full((3,), index / 22) for index in range(22)])


class Net(LightningModule):
    """Whatever a resume may lose: dropout, buffers, Adam's moments, schedulers, metrics half-way through an epoch."""

    def __init__(self, by_plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.by_plateau = by_plateau
        self.history: list[Any] = []

    def loss(self, batch: Any) -> Any:
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        self.history.append(("epoch", self.current_epoch, self.global_step))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.history.append(("validation", self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.by_plateau:
            plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Weighed(Net):
    """Returns weights of its own; steps the optimizer itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": 1.0 + batch_idx % 3}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class ByHand(Net):
    """Accumulates over three batches by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.trainer.fit_loop.progress.total_batches % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def data(stream: bool = False) -> tuple[Any, Any]:
    train: Any = DataLoader(NoisyStream(), batch_size=4) if stream else DataLoader(Noisy(), batch_size=4, shuffle=True)
    return train, DataLoader([torch.full((3,), float(index)) for index in range(4)], batch_size=2)  # type: ignore[arg-type]


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def facts(module: Net, trainer: Trainer, result: Any) -> dict[str, Any]:
    return {
        "weights": {name: whole_tensor(value).tolist() for name, value in module.state_dict().items()},
        "metrics": result.metrics,
        "result": (result.epochs, result.global_step, result.stopped),
        "windows": trainer.fit_loop.progress.windows,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "random": torch.rand(1).item(),
    }


Make = Callable[[], Net]


def whole(make: Make, flags: dict[str, Any], stream: bool = False, start: Any = quiet) -> dict[str, Any]:
    torch.manual_seed(1)
    module, trainer = make(), start(**flags)
    return {**facts(module, trainer, trainer.fit(module, *data(stream))), "history": module.history}


def in_two(make: Make, flags: dict[str, Any], cut: Cut, stream: bool = False, start: Any = quiet) -> dict[str, Any]:
    torch.manual_seed(1)
    module = make()
    with pytest.raises(Killed):
        start(**flags, callbacks=[cut]).fit(module, *data(stream))
    before = module.history
    torch.manual_seed(99)
    module, trainer = make(), start(**flags)
    result = trainer.fit(module, *data(stream), ckpt_path=cut.path)
    return {**facts(module, trainer, result), "history": before + module.history}


FLAGS: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 4, "val_check_interval": 3}

CUTS = [
    ("on_train_batch_end", 4),  # at a boundary, in mid-epoch
    ("on_train_batch_end", 2),  # inside a window
    ("on_train_batch_end", 3),  # inside a window, a validation still to come
    ("on_train_batch_end", 6),  # an epoch's last batch, a validation still to come
    ("on_train_batch_end", 11),
    ("on_validation_end", 1),  # inside a window
    ("on_validation_end", 2),  # at an epoch's end
    ("on_train_epoch_end", 1),
    ("on_train_epoch_start", 2),
    ("on_validation_start", 3),
]


@pytest.mark.everyday
@pytest.mark.parametrize(("hook", "nth"), CUTS)
def test_a_resume_is_bitwise(hook: str, nth: int, tmp_path: Path) -> None:
    expected = whole(Net, FLAGS)
    found = in_two(Net, FLAGS, Cut(hook, nth, tmp_path / "cut.ckpt"))
    assert found == expected


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("hook", "nth"), [("on_train_batch_end", 2), ("on_train_batch_end", 5), ("on_validation_end", 2)]
)
@pytest.mark.parametrize("make", [Weighed, ByHand])
def test_a_resume_inside_a_window_keeps_weights_and_gradients(make: Make, hook: str, nth: int, tmp_path: Path) -> None:
    """The weights were forgotten; the closure road and manual optimization had dropped the gradients."""
    flags = FLAGS if make is Weighed else {**FLAGS, "accumulate_grad_batches": 1}
    found = in_two(make, flags, Cut(hook, nth, tmp_path / "cut.ckpt"))
    assert found == whole(make, flags)


@pytest.mark.parametrize(
    ("hook", "nth"),
    [("on_train_batch_end", 4), ("on_train_batch_end", 6), ("on_validation_end", 1), ("on_train_epoch_end", 1)],
)
def test_a_resume_over_a_stream_without_a_length(hook: str, nth: int, tmp_path: Path) -> None:
    """At its last batch the epoch ended without its validation and its schedulers."""
    flags = {"max_epochs": 2, "accumulate_grad_batches": 2}
    found = in_two(Net, flags, Cut(hook, nth, tmp_path / "cut.ckpt"), stream=True)
    assert found == whole(Net, flags, stream=True)


@pytest.mark.parametrize(
    ("hook", "nth"), [("on_train_batch_end", 8), ("on_train_epoch_end", 1), ("on_validation_end", 2)]
)
def test_a_resume_keeps_what_a_plateau_has_seen(hook: str, nth: int, tmp_path: Path) -> None:
    def make() -> Net:
        return Net(by_plateau=True)

    flags = {"max_epochs": 5}
    expected = whole(make, flags)
    assert expected["rates"][0] < 0.05
    assert in_two(make, flags, Cut(hook, nth, tmp_path / "cut.ckpt")) == expected


class Changed(Net):
    """Freezes a layer, thaws another, and puts one into eval mode when the second epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight.requires_grad = False

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(False)
            self.layers[3].weight.requires_grad = True
            self.layers[1].eval()
        self.history.append([part.training for part in self.modules()])


CHANGED = [
    ("on_train_batch_end", 8),
    ("on_train_batch_end", 9),  # inside a window
    ("on_validation_end", 3),  # while all is in eval mode
    ("on_train_epoch_end", 2),
    ("on_train_epoch_start", 3),
]


@pytest.mark.parametrize(("hook", "nth"), CHANGED)
def test_a_resume_trains_what_hooks_of_earlier_epochs_have_left(hook: str, nth: int, tmp_path: Path) -> None:
    """Silently, the resumed run trained what was frozen, and the reverse."""
    expected = whole(Changed, FLAGS)
    assert in_two(Changed, FLAGS, Cut(hook, nth, tmp_path / "cut.ckpt")) == expected
    assert expected["weights"] != whole(Net, FLAGS)["weights"]


def test_what_is_frozen_behind_a_fit_is_trained_by_one_that_goes_on(tmp_path: Path) -> None:
    """A module that is made ready for predictions, and saved, is no module whose training has changed."""
    expected = whole(Net, {"max_epochs": 2})
    torch.manual_seed(1)
    module, trainer = Net(), quiet(max_epochs=1)
    trainer.fit(module, *data())
    module.freeze()
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    module, trainer = Net(), quiet(max_epochs=2)
    trainer.fit(module, *data(), ckpt_path=tmp_path / "end.ckpt")
    assert {name: value.tolist() for name, value in module.state_dict().items()} == expected["weights"]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"max_epochs": 1}, {"max_epochs": 3}),
        ({"max_steps": 2}, {"max_steps": 5}),
        ({"max_steps": 3}, {"max_steps": 5}),
        ({"max_steps": 1}, {"max_epochs": 2}),
    ],
)
def test_a_fit_that_ended_goes_on_for_longer(first: dict[str, Any], then: dict[str, Any], tmp_path: Path) -> None:
    """After `max_steps` in mid-epoch the last window's end was played twice."""
    flags = {"accumulate_grad_batches": 2, "val_check_interval": 2, "logger": (recorder := Recorder())}
    expected = whole(Net, {**flags, **then})
    sent = [step for step, metrics in recorder.sent if "train_epoch" not in metrics]
    torch.manual_seed(1)
    trainer, module = quiet(**flags, **first), Net()
    trainer.fit(module, *data())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    recorder.sent.clear()
    module, trainer = Net(), quiet(**flags, **then)
    found = facts(module, trainer, trainer.fit(module, *data(), ckpt_path=tmp_path / "end.ckpt"))
    # the epoch's mean is over what came after the stop, which had ended the epoch for who listens
    del expected["history"]
    for these in (expected, found):
        these["metrics"] = {name: value for name, value in these["metrics"].items() if name == "val"}
    assert found == expected
    now = [step for step, metrics in recorder.sent if "train_epoch" not in metrics]
    assert now == sent[len(sent) - len(now) :]


def test_a_checkpoint_of_weights_alone_is_no_place_to_resume_from(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Net(), *data())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(MisconfigurationException, match=r"weights only.*load_from_checkpoint") as refused:
        quiet(max_epochs=2).fit(Net(), *data(), ckpt_path=tmp_path / "weights.ckpt")
    assert isinstance(refused.value, KeyError)  # as Lightning's
    assert quiet().validate(Net(), data()[1], ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    other = acting(Net, configure_optimizers=lambda m: torch.optim.AdamW(m.parameters()))
    with pytest.raises(MisconfigurationException, match="1 lr schedulers, but `configure_optimizers` returned 0"):
        quiet(max_epochs=2).fit(other, *data(), ckpt_path=tmp_path / "net.ckpt")


# -- ranks -------------------------------------------------------------------------------------------------


def on_two(path: Path, hook: str, nth: int) -> tuple[Any, Any]:
    expected = whole(Net, FLAGS, start=on_ranks)
    return expected, in_two(Net, FLAGS, Cut(hook, nth, path), start=on_ranks)


class CutByHand(Changed):
    """Its layers are cut along both dimensions of a mesh."""

    def configure_model(self) -> None:
        if isinstance(self.layers[0].weight, DTensor):
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for layer, way in (
            (0, ColwiseParallel(output_layouts=Replicate())),
            (3, RowwiseParallel(input_layouts=Replicate())),
        ):
            parallelize_module(self.layers[layer], tensor, way)
            fully_shard(self.layers[layer], mesh=data)
        fully_shard(self.layers, mesh=data)


def changed_on_ranks(path: Path, strategy: str) -> tuple[Any, Any]:
    def start(**flags: Any) -> Trainer:
        chosen = ModelParallelStrategy(1, 2) if strategy == "2-d" else strategy
        return quiet(strategy=chosen, devices=2, **flags)

    kind = CutByHand if strategy == "2-d" else Changed
    expected = whole(kind, FLAGS, start=start)
    return expected, in_two(kind, FLAGS, Cut("on_train_batch_end", 5, path), start=start)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "2-d"])
def test_a_resume_on_ranks_trains_what_hooks_have_left(ranks: RankPool, strategy: str, tmp_path: Path) -> None:
    for expected, found in ranks(2).run(changed_on_ranks, tmp_path / "cut.ckpt", strategy):
        assert found == expected


@pytest.mark.parametrize(("hook", "nth"), [("on_train_batch_end", 2), ("on_validation_end", 1)])
def test_a_resume_on_ranks_is_bitwise(ranks: RankPool, hook: str, nth: int, tmp_path: Path) -> None:
    for expected, found in ranks(2).run(on_two, tmp_path / "cut.ckpt", hook, nth):
        assert found == expected


class Reads(Slope):
    """Notes every sample that it is given."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.extend(batch.tolist())
        return (self.w * batch).mean()


def samples() -> DataLoader[Any]:
    return DataLoader(torch.arange(24, dtype=torch.float64), batch_size=2, shuffle=True)  # type: ignore[arg-type]


def read(flags: dict[str, Any], save: Path | None, load: Path | None, start: Any = on_ranks) -> list[float]:
    module, trainer = Reads(), start(**flags)
    trainer.fit(module, samples(), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.batches


@pytest.mark.parametrize("shrinks", [True, False])
def test_another_number_of_ranks_goes_on_where_the_first_stopped(
    ranks: RankPool, shrinks: bool, tmp_path: Path
) -> None:
    """Each went on at its own batch count, and samples were read twice or never."""
    path = tmp_path / "cut.ckpt"
    first: dict[str, Any] = {"max_steps": 2 if shrinks else 4}
    if shrinks:
        early = [sample for part in ranks(2).run(read, first, path, None) for sample in part]
        late = read({"max_epochs": 1}, None, path, quiet)
    else:
        early = read(first, path, None, quiet)
        late = [sample for part in ranks(2).run(read, {"max_epochs": 1}, None, path) for sample in part]
    assert len(early) == 8
    assert sorted(early + late) == list(range(24))


def go_on_from_last(folder: Path) -> tuple[int, int]:
    """Rank 1 looks where there is nothing, as on a node that does not see the other's files yet."""
    keep = {"enable_checkpointing": True}
    on_ranks(max_epochs=1, callbacks=[ModelCheckpoint(folder, save_last=True)], **keep).fit(Slope(), numbers(8))
    own = folder if torch.distributed.get_rank() == 0 else folder / "empty"
    trainer = on_ranks(max_epochs=2, callbacks=[ModelCheckpoint(own, save_last=True)], **keep)
    return trainer.fit(Slope(), numbers(8), ckpt_path="last").epochs, trainer.global_step


def test_all_ranks_resume_from_the_last_checkpoint_that_rank_0_finds(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that found none began anew, and the others went on without it."""
    assert ranks(2).run(go_on_from_last, tmp_path, timeout=40) == [(2, 8), (2, 8)]


def test_hpc_is_the_newest_file_that_a_requeued_job_of_lightnings_left(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r'ckpt_path="hpc"\).*no hpc_ckpt_N\.ckpt'):
        quiet(max_epochs=1, default_root_dir=tmp_path).fit(Slope(), numbers(2), ckpt_path="hpc")
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Slope(), numbers(2))
    for number in (2, 10):
        trainer.save_checkpoint(tmp_path / f"hpc_ckpt_{number}.ckpt")
    (tmp_path / "hpc_ckpt_x.ckpt").write_text("")
    again = quiet(max_epochs=2, default_root_dir=tmp_path)
    again.fit(Slope(), numbers(2), ckpt_path="hpc")
    assert (again.global_step, again.ckpt_path) == (4, str(tmp_path / "hpc_ckpt_10.ckpt"))


# -- A checkpoint that Lightning 2.6.6 wrote (data/make_lightning_checkpoint.py made it) loads, and training goes


WRITTEN = Path(__file__).parent / "data" / "lightning-2.6.6.ckpt"
# what Lightning's own fit went on to, as make_lightning_checkpoint.py prints it
FINAL = [0.68685314726108, 0.7239603083617661, 0.2087269985413818]


class Regression(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_it_loads_with_its_hyperparameters() -> None:
    module = Regression.load_from_checkpoint(WRITTEN)
    assert module.hparams == {"lr": 0.2}
    assert not torch.equal(module.layer.weight, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert Regression.load_from_checkpoint(WRITTEN, lr=0.3).hparams == {"lr": 0.3}


def test_training_goes_on_from_it_as_lightnings_did() -> None:
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)  # type: ignore[arg-type]
    module = Regression(lr=0.2)
    trainer = quiet(max_epochs=2)
    result = trainer.fit(module, data, ckpt_path=WRITTEN)
    assert (module.steps, result.epochs, result.global_step) == (3, 2, 6)
    found = [*module.layer.weight.flatten().tolist(), module.layer.bias.item()]
    assert found == pytest.approx(FINAL, rel=1e-14)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


class Monitored(Regression):
    """Logs a loss of each stage; a scheduler may watch one."""

    def __init__(self, monitor: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer.reset_parameters()
        self.monitor = monitor
        self.validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations += batch_idx == 0
        self.log("val", (self.layer(batch) - 1).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if self.monitor is None:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def counted(ready: int, completed: int, processed: int, last: bool, total: int | None = None) -> dict[str, Any]:
    current = {"ready": ready, "completed": completed, "started": processed, "processed": processed}
    all_of = current if total is None else dict.fromkeys(current, total)
    return {"current": current, "total": all_of, "is_last_batch": last}


# What Lightning 2.6.6 counts of an epoch's last batch of three, and of a validation of three: in which hook it saved.
LAST_BATCH = {
    "on_train_batch_end": (counted(3, 2, 3, True), counted(0, 0, 0, False), True),
    "on_train_batch_end, later": (counted(3, 2, 3, True), counted(3, 3, 3, True, total=0), True),
    "on_validation_start": (counted(3, 3, 3, True), counted(0, 0, 0, False), True),
    "on_validation_batch_end": (counted(3, 3, 3, True), counted(1, 0, 1, False), True),
    "on_validation_end": (counted(3, 3, 3, True), counted(3, 3, 3, True), False),
}
WATCHING: dict[str, tuple[str | None, Any]] = {
    "EarlyStopping of validation": (None, lambda folder: EarlyStopping("val")),
    "ReduceLROnPlateau of validation": ("val", lambda folder: Callback()),
    "ModelCheckpoint of training": (
        None,
        lambda folder: ModelCheckpoint(folder, monitor="train", save_on_train_epoch_end=True),
    ),
}


@pytest.mark.everyday
@pytest.mark.parametrize("watching", WATCHING)
@pytest.mark.parametrize("hook", LAST_BATCH)
def test_a_checkpoint_of_an_epochs_last_batch_goes_on_beside_what_watches_a_metric(
    hook: str, watching: str, tmp_path: Path
) -> None:
    """What the epoch has logged is not in Lightning's file: EarlyStopping raised. The validation was left out, too."""
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)  # type: ignore[arg-type]
    path, (monitor, make) = tmp_path / "last.ckpt", WATCHING[watching]
    whole = Monitored(monitor)

    flags: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    quiet(**flags, callbacks=[SaveAt(2, path), make(tmp_path / "whole")], default_root_dir=tmp_path).fit(
        whole, data, data
    )
    batches, validation, is_due = LAST_BATCH[hook]
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lockstep"]
    checkpoint["loops"]["fit_loop"] |= {
        "epoch_loop.batch_progress": batches,
        "epoch_loop.val_loop.batch_progress": validation,
        "epoch_progress": {"current": {"ready": 1, "completed": 0, "started": 1, "processed": 0}},
    }
    torch.save(checkpoint, path)
    module, trainer = Monitored(monitor), quiet(**flags, callbacks=[make(tmp_path / "on")], default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match="after 3 batches of epoch 0, without the values that they logged"):
        result = trainer.fit(module, data, data, ckpt_path=path)
    assert (result.epochs, result.global_step, module.validations) == (2, 6, 1 + is_due)
    assert module.layer.weight.tolist() == whole.layer.weight.tolist()
