"""WeightAveraging: what is averaged, who sees it, and that a resumed fit goes on bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.callbacks import StochasticWeightAveraging
from lockstep.callbacks.base import Callback
from lockstep.extensions.extras.weight_averaging import EMAWeightAveraging, WeightAveraging
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.types import TrainerFn, TrainerState
from tests.callbacks.fake_trainer import FakeTrainer
from tests.callbacks.side_by_side import OURS, loader, model, theirs, trainer
from tests.loop.pieces import Slope, numbers, quiet


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net.add_module("tied", nn.Linear(4, 3))
    net.tied.weight = net[2].weight
    return net


def change(net: nn.Module, step: int) -> None:
    """What an optimizer step does to the weights and a forward to the buffers."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]:
            tensor += torch.rand(tensor.shape, generator=generator)


def fit(average: WeightAveraging, net: nn.Module, *others: Any, **settings: Any) -> FakeTrainer:
    trainer = FakeTrainer([average, *others], **{"max_epochs": 2, "num_training_batches": 3, **settings})
    trainer.fit(net, lambda trainer, batch_idx: change(net, trainer.global_step))
    return trainer


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else copied(v) for k, v in state.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [k for k in a if not torch.equal(a[k], b[k])] == []


class Saver(Callback):
    """Writes a checkpoint after the given step, as the trainer would."""

    def __init__(self, average: WeightAveraging, step: int) -> None:
        self.average, self.step, self.checkpoint = average, step, {}

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and not self.checkpoint:
            self.save(trainer, net)

    def save(self, trainer: Any, net: Any) -> None:
        checkpoint = {"state_dict": net.state_dict()}
        self.average.on_save_checkpoint(trainer, net, checkpoint)
        self.checkpoint = {**copied(checkpoint), "callback": dict(self.average.state_dict())}


@pytest.mark.parametrize("kind", ["mean", "ema"])
def test_the_average_is_what_its_formula_says(kind: str) -> None:
    history: list[dict[str, Tensor]] = []

    class Record(Callback):
        def on_train_batch_end(self, trainer: Any, net: Any, *_: Any) -> None:
            history.append(copied(dict(net.named_parameters())))

    net = network().double()
    average = WeightAveraging() if kind == "mean" else EMAWeightAveraging(decay=0.9)
    fit(average, net, Record())
    for name, value in net.named_parameters():
        values = [state[name] for state in history]
        expected = values[0]
        for n, now in enumerate(values[1:], start=1):
            expected = (expected * n + now) / (n + 1) if kind == "mean" else 0.9 * expected + 0.1 * now
        torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=1e-12)


def test_validation_sees_the_average_and_training_goes_on_with_the_weights() -> None:
    seen: dict[str, list[dict[str, Tensor]]] = {"validation": [], "after": [], "before": []}

    class Spy(Callback):
        def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                seen["before"].append(copied(net.state_dict()))

        def on_validation_batch_start(self, trainer: Any, net: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                seen["validation"].append(copied(net.state_dict()))

        def on_train_epoch_end(self, trainer: Any, net: Any) -> None:
            seen["after"].append(copied(net.state_dict()))

    net = network()
    fit(EMAWeightAveraging(decay=0.5), net, Spy(), num_val_batches=[1])
    for before, after, validation in zip(seen["before"], seen["after"], seen["validation"], strict=True):
        assert_same(before, after)
        assert not torch.equal(validation["0.weight"], before["0.weight"])
        assert not torch.equal(validation["1.running_mean"], before["1.running_mean"])
    assert_same(copied(net.state_dict()), seen["validation"][-1])


def test_until_the_first_update_everybody_sees_the_weights() -> None:
    class Never(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return False

    net, plain = network(), network()
    average = Never()
    saver = Saver(average, 4)
    fit(average, net, saver)
    for step in range(6):
        change(plain, step)
        if step == 3:
            assert_same(saver.checkpoint["state_dict"], plain.state_dict())
    assert_same(net.state_dict(), plain.state_dict())


@pytest.mark.parametrize("loaded_first", [True, False])
@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_resumed_fit_ends_with_the_same_bits(use_buffers: bool, step: int, loaded_first: bool) -> None:
    first, whole = EMAWeightAveraging(decay=0.9, use_buffers=use_buffers, update_every_n_steps=2), network()
    saver = Saver(first, step)
    trainer = fit(first, whole, saver, num_training_batches=6, max_epochs=1)
    saved = Saver(first, 0)
    saved.save(trainer, whole)

    second, net = EMAWeightAveraging(decay=0.9, use_buffers=use_buffers, update_every_n_steps=2), network()
    change(net, 99)
    checkpoint = copied({k: v for k, v in saver.checkpoint.items() if k != "callback"})
    assert checkpoint.keys() == {"state_dict", "current_model_state", "averaging_state"}

    class Restore(Callback):
        def setup(self, trainer: Any, net: Any, stage: str) -> None:
            if loaded_first:
                net.load_state_dict(checkpoint["state_dict"])
            second.on_load_checkpoint(trainer, net, checkpoint)
            if not loaded_first:
                net.load_state_dict(checkpoint["state_dict"])
            second.load_state_dict(saver.checkpoint["callback"])

    again = FakeTrainer([second, Restore()], max_epochs=1, num_training_batches=6, global_step=step)
    again.fit(net, lambda trainer, batch_idx: change(net, trainer.global_step), first_batch=step)
    assert_same(net.state_dict(), whole.state_dict())
    end = Saver(second, 0)
    end.save(again, net)
    assert_same(end.checkpoint["current_model_state"], saved.checkpoint["current_model_state"])
    assert end.checkpoint["averaging_state"] == saved.checkpoint["averaging_state"]
    assert end.checkpoint["callback"] == saved.checkpoint["callback"]


def test_a_checkpoint_holds_the_average_and_the_weights_wherever_it_is_written() -> None:
    average, net = EMAWeightAveraging(decay=0.5), network()
    kept: list[dict[str, Any]] = []

    class Everywhere(Saver):
        def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.save(trainer, net)
                kept.append(self.checkpoint)

        def on_validation_batch_end(self, trainer: Any, net: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.save(trainer, net)
                kept.append(self.checkpoint)

        def on_train_end(self, trainer: Any, net: Any) -> None:
            self.save(trainer, net)
            kept.append(self.checkpoint)

    fit(average, net, Everywhere(average, 0), max_epochs=1, num_val_batches=[1])
    assert len(kept) == 3
    for checkpoint in kept[1:]:
        assert_same(checkpoint["state_dict"], kept[0]["state_dict"])
        assert_same(checkpoint["current_model_state"], kept[0]["current_model_state"])
    assert torch.equal(kept[0]["state_dict"]["2.weight"], kept[0]["state_dict"]["tied.weight"])
    assert not torch.equal(kept[0]["state_dict"]["2.weight"], kept[0]["current_model_state"]["2.weight"])


def test_a_resumed_fit_with_nothing_left_to_train_hands_on_the_average(tmp_path: Path) -> None:
    first = trainer(OURS, callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=1)
    first.fit(model(OURS), loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = trainer(OURS, callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=1)
    with pytest.warns(UserWarning, match="nothing"):
        second.fit(model(OURS), loader(), ckpt_path=tmp_path / "first.ckpt")
    second.save_checkpoint(tmp_path / "second.ckpt")
    before, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("first", "second"))
    for name in ("state_dict", "current_model_state", "averaging_state"):
        assert_same(before[name], after[name])
    assert not torch.equal(before["state_dict"]["net.0.weight"], before["current_model_state"]["net.0.weight"])


def test_a_checkpoint_of_somebody_without_the_callback() -> None:
    average, net = WeightAveraging(), network()
    trainer = FakeTrainer([average])
    with pytest.warns(UserWarning, match="without the callback"):
        average.on_load_checkpoint(trainer, net, {"state_dict": net.state_dict()})


def test_outside_a_fit_nothing_is_swapped() -> None:
    average, net = EMAWeightAveraging(decay=0.5), network()
    trainer = fit(average, net)
    after_fit = copied(net.state_dict())
    trainer.state = TrainerState(fn=TrainerFn.VALIDATING)
    trainer.evaluate(net, "validation", [1])
    assert_same(net.state_dict(), after_fit)
    average.on_load_checkpoint(trainer, net, {"state_dict": after_fit})
    checkpoint = {"state_dict": net.state_dict()}
    average.on_save_checkpoint(trainer, net, checkpoint)
    assert checkpoint.keys() == {"state_dict"}


def test_a_validation_that_fails_leaves_the_weights_in_the_model() -> None:
    average, net = EMAWeightAveraging(decay=0.5), network()
    weights: list[dict[str, Tensor]] = []

    class Fails(Callback):
        def on_validation_batch_start(self, trainer: Any, net: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                raise RuntimeError("no more data")

        def on_train_batch_end(self, trainer: Any, net: Any, *_: Any) -> None:
            weights.append(copied(net.state_dict()))

    trainer = FakeTrainer([average, Fails()])
    with pytest.raises(RuntimeError, match="no more data") as caught:
        trainer.fit(net, lambda trainer, batch_idx: change(net, trainer.global_step))
    average.on_exception(trainer, net, caught.value)
    assert_same(net.state_dict(), weights[-1])


def test_updates_come_once_a_step_and_at_the_ends_of_epochs() -> None:
    asked: list[tuple[int | None, int | None]] = []

    class Asks(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            asked.append((step_idx, epoch_idx))
            return True

    fit(Asks(), network(), num_training_batches=4, accumulate_grad_batches=2)
    assert asked == [(0, None), (1, None), (None, 0), (2, None), (3, None), (None, 1)]


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({}, [0, 1, 2, 3, 4, 5], []),
        ({"update_every_n_steps": 2}, [0, 2, 4], []),
        ({"update_every_n_steps": 2, "update_starting_at_step": 3}, [4], []),
        ({"update_every_n_steps": 0, "update_starting_at_epoch": 1}, [], [1, 2]),
    ],
)
def test_when_an_ema_updates(settings: dict, steps: list[int], epochs: list[int]) -> None:
    ema = EMAWeightAveraging(**settings)
    assert [step for step in range(6) if ema.should_update(step_idx=step)] == steps
    assert [epoch for epoch in range(3) if ema.should_update(epoch_idx=epoch)] == epochs


def test_buffers_of_rank_zero_are_shown_on_all_ranks() -> None:
    average, net = WeightAveraging(), network()
    trainer = FakeTrainer([average], world_size=2, global_rank=1, max_epochs=1)
    trainer.strategy.broadcast = lambda buffers: [torch.full_like(buffer, 7) for buffer in buffers]
    trainer.fit(net, lambda trainer, batch_idx: change(net, trainer.global_step))
    assert all(torch.equal(buffer, torch.full_like(buffer, 7)) for buffer in net.buffers())


def test_wrong_arguments() -> None:
    with pytest.raises(MisconfigurationException, match=r"decay=1\.5"):
        EMAWeightAveraging(decay=1.5)
    with pytest.raises(MisconfigurationException, match="update_every_n_steps=-1"):
        EMAWeightAveraging(update_every_n_steps=-1)


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("WeightAveraging", {}),
        ("WeightAveraging", {"use_buffers": False, "avg_fn": lambda average, now, n: 0.6 * average + 0.4 * now}),
        ("WeightAveraging", {"device": "cpu"}),
        ("EMAWeightAveraging", {"decay": 0.7}),
        ("EMAWeightAveraging", {"decay": 0.7, "update_every_n_steps": 3, "use_buffers": False}),
        ("EMAWeightAveraging", {"decay": 0.7, "update_every_n_steps": 0, "update_starting_at_epoch": 0}),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_the_average_and_what_validation_sees_are_lightnings(
    name: str, settings: dict[str, Any], accumulate: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        saved: dict[str, Any] = {}

        class Save(kit.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if trainer.current_epoch == 1 and batch_idx == 3:
                    path = tmp_path / f"{kit.name}.ckpt"  # noqa: B023
                    trainer.save_checkpoint(path)
                    saved.update(torch.load(path, weights_only=False))  # noqa: B023

        module, average = model(kit, batch_norm=True), getattr(kit.callbacks, name)(**settings)
        run = trainer(kit, callbacks=[average, Save()], max_epochs=2, accumulate_grad_batches=accumulate)
        run.fit(module, loader(24, 4), loader(8, 4))
        found.append((module, saved))
    (ours, our_file), (others, other_file) = found
    # an update at an epoch's end comes before its validation here, and after it there, where the next one shows it
    by_epochs = settings.get("update_every_n_steps") == 0
    mine, yours = (ours.validated[:-2], others.validated[2:]) if by_epochs else (ours.validated, others.validated)
    assert mine == pytest.approx(yours, rel=1e-9)
    for key, value in others.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-11, atol=1e-12)
    for part in ("state_dict", "current_model_state"):
        assert our_file[part].keys() == other_file[part].keys()
        for key, value in other_file[part].items():
            torch.testing.assert_close(our_file[part][key], value, rtol=1e-11, atol=1e-12)
    assert our_file["averaging_state"] == other_file["averaging_state"]


class OtherAverage(EMAWeightAveraging):
    state_key = "other"  # type: ignore[assignment]


@pytest.mark.parametrize(
    "averages",
    [
        lambda: [EMAWeightAveraging(), OtherAverage()],
        lambda: [EMAWeightAveraging(), WeightAveraging()],
        lambda: [StochasticWeightAveraging(0.1), EMAWeightAveraging()],
    ],
)
def test_two_averages_of_the_weights_are_refused(averages: Any) -> None:
    """At each validation one took the other's average for the weights, and training went on from there."""
    with pytest.raises(MisconfigurationException, match=r"callbacks=\[\w+ and \w+\].*keep one"):
        quiet(max_epochs=2, callbacks=averages()).fit(Slope(), numbers(2))
