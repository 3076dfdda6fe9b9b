"""StochasticWeightAveraging: the weights, rates and statistics of Lightning's, resumed, and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningModule
from lockstep.callbacks import BaseFinetuning, StochasticWeightAveraging
from lockstep.utilities.exceptions import MisconfigurationException
from tests.callbacks.side_by_side import OURS, loader, model, theirs, trainer
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize(
    ("settings", "batch_norm", "scheduler"),
    [
        ({"swa_epoch_start": 2}, False, False),
        ({"swa_epoch_start": 0.5, "annealing_epochs": 2}, False, True),
        ({"swa_epoch_start": 1, "annealing_strategy": "linear", "annealing_epochs": 3}, False, True),
        ({"swa_epoch_start": 3, "annealing_epochs": 0, "device": None}, True, False),
        ({"swa_epoch_start": 0.0, "avg_fn": lambda average, now, n: 0.9 * average + 0.1 * now}, True, True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_rates_and_statistics_are_lightnings(
    settings: dict[str, Any], batch_norm: bool, scheduler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        module = model(kit, batch_norm, scheduler)
        swa = kit.callbacks.StochasticWeightAveraging(0.01, **settings)
        trainer(kit, callbacks=[swa], max_epochs=5).fit(module, loader(24, 4), loader(8, 4))
        found.append((module, swa))
    (ours, our_swa), (others, other_swa) = found
    # Lightning's pass for the statistics is an epoch of its own
    assert ours.rates == pytest.approx(others.rates[: 5 * 6], rel=1e-12)
    assert ours.validated == pytest.approx(others.validated[: 5 * 2], rel=1e-10)
    assert_close(ours.state_dict(), others.state_dict())
    assert our_swa.n_averaged == other_swa.n_averaged
    assert (our_swa.swa_start, our_swa.swa_end) == (other_swa.swa_start, other_swa.swa_end)


def test_the_average_by_hand() -> None:
    begun: list[float] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            begun.append(module.w.item())

    module = Slope(lr=0.1)
    quiet(callbacks=[Watch(), StochasticWeightAveraging(0.05, 3)], max_epochs=5).fit(module, numbers(4))
    assert module.w.item() == pytest.approx(sum(begun[2:]) / 3, rel=1e-12)
    assert begun[2] != begun[3]


def test_a_fit_that_ends_earlier_keeps_its_weights() -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 3

    plain, averaged = Slope(lr=0.1), Slope(lr=0.1)
    quiet(callbacks=Stop(), max_epochs=9).fit(plain, numbers(4))
    run = quiet(callbacks=[StochasticWeightAveraging(0.1, 2, annealing_epochs=1), Stop()], max_epochs=9)
    run.fit(averaged, numbers(4))
    assert run.current_epoch == 4
    assert averaged.w.item() == pytest.approx(plain.w.item(), rel=1e-12)


def test_without_a_limit_of_epochs_the_average_is_taken_whenever_it_ends() -> None:
    module = Slope(lr=0.1)
    quiet(callbacks=StochasticWeightAveraging(0.1, 1), max_epochs=-1, max_steps=8).fit(module, numbers(4))
    # weights 0 and -1 begin the two epochs; after the second it is -2
    assert module.w.item() == pytest.approx(-0.5)


class Saver(Callback):
    """Writes a checkpoint at one moment."""

    def __init__(self, path: Path, epoch: int, batch: int | None) -> None:
        self.path, self.epoch, self.batch = path, epoch, batch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.epoch and self.batch is None:
            trainer.save_checkpoint(self.path)


@pytest.mark.everyday
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize(("epoch", "batch"), [(0, None), (1, 2), (2, None), (3, 3), (4, None)])
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_ends_in_the_same_bits(
    epoch: int, batch: int | None, scheduler: bool, batch_norm: bool, tmp_path: Path
) -> None:
    def swa() -> StochasticWeightAveraging:
        return StochasticWeightAveraging(0.01, 3, annealing_epochs=2)

    path = tmp_path / "run.ckpt"
    whole, resumed = model(OURS, batch_norm, scheduler), model(OURS, batch_norm, scheduler)
    quiet(callbacks=[swa(), Saver(path, epoch, batch)], max_epochs=5).fit(whole, loader())
    quiet(callbacks=[swa()], max_epochs=5).fit(resumed, loader(), ckpt_path=path)
    rates = whole.rates[-len(resumed.rates) :] if resumed.rates else []
    assert resumed.rates == rates
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize(("epoch", "batch"), [(0, 3), (2, 3), (3, None)])
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_lightnings_goes_on_here(
    epoch: int, batch: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, path = theirs(monkeypatch), tmp_path / "run.ckpt"

    class Save(kit.Callback):  # type: ignore[name-defined,misc]
        on_train_batch_end = Saver.on_train_batch_end
        on_train_epoch_end = Saver.on_train_epoch_end

    save = Save()
    save.path, save.epoch, save.batch = path, epoch, batch
    models = []
    for run in (kit, OURS):
        callbacks = [
            run.callbacks.StochasticWeightAveraging(0.01, 2, annealing_epochs=3),
            run.callbacks.Timer("01:00:00:00"),
        ]
        models.append(model(run, batch_norm=True))
        trainer(run, callbacks=callbacks + [save] * (run is kit), max_epochs=5).fit(
            models[-1], loader(), loader(8), ckpt_path=None if run is kit else path
        )
    assert_close(models[1].state_dict(), models[0].state_dict())


def test_the_average_stays_what_it_is_while_the_statistics_are_refreshed() -> None:
    """Lightning's pass without validation ends with a step along the gradient of the epoch before."""
    begun: list[dict[str, Tensor]] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            begun.append({name: p.detach().clone() for name, p in module.named_parameters()})

    module = model(OURS, batch_norm=True)
    quiet(callbacks=[Watch(), StochasticWeightAveraging(0.01, 2)], max_epochs=4).fit(module, loader())
    mean = {name: torch.stack([weights[name] for weights in begun[1:]]).mean(0) for name in begun[0]}
    assert_close(dict(module.named_parameters()), mean)


def test_a_checkpoint_without_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    quiet(callbacks=Saver(path, 2, None), max_epochs=3).fit(Slope(lr=0.1), numbers(4))
    swa = StochasticWeightAveraging(0.1, 2)
    with pytest.warns(UserWarning, match="starts in epoch 3, not in epoch 1 as requested"):
        quiet(callbacks=swa, max_epochs=5).fit(Slope(lr=0.1), numbers(4), ckpt_path=path)
    assert swa.n_averaged == 2


class Normed(LightningModule):
    """BatchNorm over the data itself, whose statistics need no weights to be told by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(3).double()
        self.out = nn.Linear(3, 1).double()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        loss = self.out(self.norm(batch[0]).mean(2)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


ROWS = torch.randn(19, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 4


def statistics(batches: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Means over the batches of their means and of their unbiased variances."""
    means, variances = [b.mean((0, 2)) for b in batches], [b.var((0, 2)) for b in batches]
    return torch.stack(means).mean(0), torch.stack(variances).mean(0)


def normed_on_ranks(samples: int) -> Any:
    module = Normed()
    swa = StochasticWeightAveraging(0.005, 2)
    run = on_ranks(callbacks=swa, max_epochs=3, order="torch")
    run.fit(module, DataLoader(TensorDataset(ROWS[:samples]), batch_size=3))
    return dist.get_rank(), {name: value.clone() for name, value in module.state_dict().items()}, module.calls


@pytest.mark.parametrize("samples", [18, 19])  # the last batch of 19 has a sample for one rank only
def test_two_ranks_end_with_one_model_and_the_statistics_of_all_batches(ranks: RankPool, samples: int) -> None:
    (_, first, calls), (_, second, _) = ranks(2).run(normed_on_ranks, samples, timeout=40)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    # whichever rank has a batch of 3, every sample is in one, and all of them count alike
    total = 6 * ROWS[:18].mean((0, 2)) + (ROWS[18].mean(1) if samples == 19 else 0)
    batches = 7 if samples == 19 else 6
    torch.testing.assert_close(first["norm.running_mean"], total / batches, rtol=1e-12, atol=1e-12)
    assert first["norm.num_batches_tracked"] == batches
    assert calls == (4 + 12 if samples == 19 else 3 + 9)


def test_the_pass_for_the_statistics_leaves_no_other_trace() -> None:
    hooks: list[str] = []

    class Watch(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            hooks.append("batch")

        def on_train_epoch_start(self, *_: Any) -> None:
            hooks.append("epoch")

    module = Normed()
    run = quiet(callbacks=[StochasticWeightAveraging(0.005, 2), Watch()], max_epochs=3)
    result = run.fit(module, DataLoader(TensorDataset(ROWS[:18]), batch_size=3))
    assert hooks.count("epoch") == 3
    assert hooks.count("batch") == 3 * 6
    assert module.calls == 4 * 6
    assert (result.epochs, result.global_step) == (3, 18)
    assert module.norm.momentum == 0.1
    assert module.norm.num_batches_tracked == 6
    mean, variance = statistics(list(ROWS[:18].split(3)))
    torch.testing.assert_close(module.norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.norm.running_var, variance, rtol=1e-12, atol=1e-12)


def test_a_batch_that_is_none_went_to_training_step_in_the_pass_for_the_statistics() -> None:
    module = Normed()
    batches = [[batch] for batch in ROWS[:18].split(3)]
    swa = StochasticWeightAveraging(0.005, 2)
    quiet(callbacks=swa, max_epochs=3).fit(module, DataLoader([*batches, None], batch_size=None))  # type: ignore[list-item]
    mean, _ = statistics(list(ROWS[:18].split(3)))
    torch.testing.assert_close(module.norm.running_mean, mean, rtol=1e-12, atol=1e-12)
    assert module.calls == 4 * 6


@pytest.mark.parametrize("rates", [0.01, [0.01]])
def test_a_group_of_thawed_layers_had_no_swa_lr(rates: float | list[float]) -> None:
    class Thaws(BaseFinetuning):
        def freeze_before_training(self, pl_module: LightningModule) -> None:
            self.freeze(pl_module.norm, train_bn=False)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 2:
                self.unfreeze_and_add_param_group(pl_module.norm, optimizer)

    class Half(Normed):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.out.parameters(), lr=0.1)

    run = quiet(callbacks=[StochasticWeightAveraging(rates, 1, annealing_epochs=1), Thaws()], max_epochs=4)
    run.fit(Half(), DataLoader(TensorDataset(ROWS[:18]), batch_size=3))
    assert [group["lr"] for group in run.optimizers[0].param_groups] == pytest.approx([0.01, 0.01])


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    class Frozen(Normed):
        def on_train_start(self) -> None:
            self.norm.eval()

    module = Frozen()
    quiet(callbacks=StochasticWeightAveraging(0.005, 2), max_epochs=3).fit(
        module, DataLoader(TensorDataset(ROWS[:18]), batch_size=3)
    )
    assert torch.equal(module.norm.running_mean, torch.zeros(3, dtype=torch.float64))
    assert module.calls == 3 * 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"swa_lrs": 0.0}, "swa_lrs=0.0"),
        ({"swa_lrs": [0.1, -1.0]}, "swa_lrs="),
        ({"swa_lrs": "0.1"}, "swa_lrs="),
        ({"swa_epoch_start": 0}, "swa_epoch_start=0"),
        ({"swa_epoch_start": 1.5}, "swa_epoch_start=1.5"),
        ({"annealing_epochs": -1}, "annealing_epochs=-1"),
        ({"annealing_strategy": "steps"}, "annealing_strategy='steps'"),
        ({"avg_fn": 3}, "avg_fn=3"),
        ({"device": 3}, "device=3"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})


def test_runs_that_cannot_be() -> None:
    class Manual(Normed):
        automatic_optimization = False

    class Two(Slope):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
            return [optimizer], schedulers

    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (Slope(), StochasticWeightAveraging(0.1, 0.5), {"max_epochs": -1, "max_steps": 3}, "no limit"),
        (Two(), StochasticWeightAveraging(0.1), {"max_epochs": 2}, "returned 2"),
        (Manual(), StochasticWeightAveraging(0.1), {"max_epochs": 2}, "manual"),
        (Slope(), StochasticWeightAveraging([0.1, 0.2], 1), {"max_epochs": 2}, "1 parameter group"),
    ]
    for module, swa, flags, said in cases:
        with pytest.raises(MisconfigurationException, match=said):
            quiet(callbacks=swa, **flags).fit(module, numbers(4))


def test_a_swapped_scheduler_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Scheduled(Slope):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    with caplog.at_level("INFO", "lockstep"):
        quiet(max_epochs=2, callbacks=StochasticWeightAveraging(0.1, 0.5)).fit(Scheduled(), numbers(2))
    assert "SWALR sets the learning rate instead of StepLR" in caplog.text
