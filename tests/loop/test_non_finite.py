"""A loss, gradient or weight that is NaN or infinite: what the fit does, and that healthy checkpoints stay."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lockstep.ground.errors import MisconfigurationException, NonFiniteError
from lockstep.ground.numbers import not_finite
from lockstep.strategies import FSDPStrategy
from tests.loop.pieces import acting, heard_again, quiet
from tests.tools.average import MovingAverage
from tests.tools.pool import RankPool

BAD_STEP = 3


class Net(LightningModule):
    """Something becomes NaN at batch 3 of epoch 0, where ``bad`` says what."""

    def __init__(self, bad: str = "", rank: int = 0, adam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad, self.rank, self.adam = bad, rank, adam
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64, affine=False)
        self.repairs = False

    def hits(self, what: str, step: int) -> bool:
        here = self.trainer.global_step == step and self.global_rank == self.rank
        return self.bad == what and here and self.current_epoch == 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        loss = (self.layer(inputs) - targets).square().mean()
        if batch_idx == BAD_STEP and self.hits(self.bad, self.trainer.global_step):
            if self.bad == "nan":
                loss = loss * torch.nan
            elif self.bad == "inf":
                loss = loss * torch.inf
            elif self.bad == "sqrt":  # finite itself, and its gradient is inf x 0
                loss = loss + (self.layer.weight.sum() * 0).sqrt() * 0
            elif self.bad == "buffer":
                self.norm.running_mean.fill_(torch.nan)
        return loss

    def on_after_backward(self) -> None:
        if self.repairs:
            for parameter in self.parameters():
                parameter.grad.nan_to_num_(0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.hits("gradient", BAD_STEP):
            self.layer.weight.grad.fill_(torch.nan)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hits("optimizer", BAD_STEP + 1):
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg_sq"].fill_(torch.nan)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01) if self.adam else torch.optim.SGD(self.parameters(), 0.1)


def samples(count: int = 12, batch: int = 1) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch)


def each_step(folder: Path, **how: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, **how)


def healthy(folder: Path) -> list[str]:
    """The checkpoints of a folder, all of which have to be finite."""
    names = sorted(path.name for path in folder.glob("*.ckpt"))
    for name in names:
        found = torch.load(folder / name, weights_only=False)
        tensors = dict(found["state_dict"])
        for i, state in enumerate(found["optimizer_states"]):
            tensors |= {f"{i} {n} {k}": v for n, each in state["state"].items() for k, v in each.items()}
        assert not_finite((n, v) for n, v in tensors.items() if isinstance(v, torch.Tensor)) == [], name
    return names


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nan": ({"bad": "nan"}, {}),
    "inf": ({"bad": "inf"}, {}),
    "gradient of sqrt(0)": ({"bad": "sqrt"}, {}),
    "hook's gradient": ({"bad": "gradient"}, {}),
    "Adam": ({"bad": "nan", "adam": True}, {}),
    "optimizer state": ({"bad": "optimizer", "adam": True}, {}),
    "buffer": ({"bad": "buffer"}, {}),
    "clipped": ({"bad": "gradient"}, {"gradient_clip_val": 1.0}),
    "average": ({"bad": "nan"}, {"callbacks": [partial(MovingAverage, 0.9)]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_end_the_fit_and_healthy_checkpoints_stay(kind: str, tmp_path: Path) -> None:
    how, flags = KINDS[kind]
    own = flags.get("callbacks", [])
    flags = {**flags, "enable_checkpointing": True, "log_every_n_steps": 1}
    with pytest.raises(NonFiniteError) as error:
        quiet(max_epochs=1, **{**flags, "callbacks": [*(each() for each in own), each_step(tmp_path)]}).fit(
            Net(**how), samples()
        )
    said = str(error.value)
    assert "step 3" in said or "step 4" in said
    assert f"newest healthy checkpoint is {tmp_path / 'last.ckpt'}" in said
    if how["bad"] in ("nan", "inf"):
        assert f"The loss of batch 3 in epoch 0 (step 3) is {how['bad']}. Its samples: 3 " in said
        assert "layer.weight" in said
    assert healthy(tmp_path) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    again = Net(adam=how.get("adam", False))
    trainer = quiet(max_epochs=2, **{**flags, "callbacks": [*(each() for each in own), each_step(tmp_path)]})
    trainer.fit(again, samples(), ckpt_path="last")
    assert trainer.global_step == 24
    assert not_finite(again.state_dict().items()) == []


def test_a_window_of_micro_batches_names_the_one(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"batch 3 in epoch 0 \(step 0\) is nan"):
        quiet(max_epochs=1, accumulate_grad_batches=4).fit(Net("nan"), samples())


def test_the_samples_of_a_shuffled_batch_are_named() -> None:
    class Spots(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if bool((batch[0].cpu() == rotten).all(1).any()) else loss

    data = samples().dataset
    rotten = data[7][0]
    with pytest.raises(NonFiniteError) as error:
        quiet(max_epochs=1).fit(Spots(), DataLoader(data, 3, shuffle=True))
    listed = str(error.value).partition("Its samples: ")[2].partition(" (")[0]
    assert 7 in map(int, listed.split(", "))
    assert len(listed.split(", ")) == 3


def test_a_hook_that_repairs_gradients_is_a_warning_once() -> None:
    class Always(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (torch.nan if batch_idx > 3 else 1.0)

    module, trainer = Always(), quiet(max_epochs=2)
    module.repairs = True
    [said] = heard_again(lambda: trainer.fit(module, samples()), "detect_anomaly")
    assert "batch 4 in epoch 0 (step 4) is nan" in said
    assert "The weights are finite, and the fit continues" in said
    assert trainer.global_step == 24


def skipped_by_hand(count: int = 12, batch: int = 1) -> dict[str, torch.Tensor]:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for number, (inputs, targets) in enumerate(samples(count, batch)):
        if number != BAD_STEP:
            optimizer.zero_grad()
            (module.layer(inputs) - targets).square().mean().backward()
            optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(("bad", "clip"), [("nan", None), ("sqrt", 1e9), ("sqrt", None)])
def test_skip_leaves_the_update_out(bad: str, clip: float | None) -> None:
    module, trainer = Net(bad), quiet(max_epochs=1, non_finite="skip", gradient_clip_val=clip)
    [said] = heard_again(lambda: trainer.fit(module, samples()), "detect_anomaly")
    assert "The update is skipped" in said
    assert "step 3" in said
    assert trainer.global_step == 11
    for name, expected in skipped_by_hand().items():
        assert torch.equal(module.get_parameter(name), expected)


@pytest.mark.parametrize("bad", ["nan", "sqrt"])
def test_stop_ends_before_the_update(bad: str, tmp_path: Path) -> None:
    module, trainer = Net(bad), quiet(max_epochs=1, non_finite="stop")
    with pytest.raises(NonFiniteError, match=r"step 3\)?.* is (nan|not finite)"):
        trainer.fit(module, samples())
    assert trainer.global_step == 3
    assert not_finite(module.named_parameters()) == []


def test_ignore_goes_on_and_saves_nothing_more(tmp_path: Path) -> None:
    keeper = each_step(tmp_path)
    trainer = quiet(max_epochs=1, non_finite="ignore", enable_checkpointing=True, callbacks=[keeper])
    [said] = heard_again(lambda: trainer.fit(Net("nan"), samples()), "is saved")
    assert "Nothing is saved" in said
    assert trainer.global_step == 12
    assert healthy(tmp_path) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert Path(keeper.best_model_path).name == "epoch=0-step=3.ckpt"
    with pytest.raises(NonFiniteError):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert healthy(tmp_path) == ["epoch=0-step=3.ckpt", "last.ckpt"]


def test_a_checkpoint_of_an_exception_is_not_written_either(tmp_path: Path) -> None:
    keepers = [each_step(tmp_path / "steps", save_on_exception=True), OnExceptionCheckpoint(str(tmp_path), "failed")]
    with pytest.raises(NonFiniteError, match="layer"):
        quiet(max_epochs=1, enable_checkpointing=True, callbacks=keepers).fit(Net("nan"), samples())
    assert healthy(tmp_path / "steps") == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert not [*tmp_path.glob("failed*")]


def test_what_was_not_finite_at_the_start_may_stay_so(tmp_path: Path) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf], dtype=torch.float64))

    keeper = each_step(tmp_path)
    assert (
        heard_again(
            lambda: quiet(max_epochs=1, enable_checkpointing=True, callbacks=[keeper]).fit(Masked(), samples()),
            "finite",
        )
        == []
    )
    trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=[each_step(tmp_path)])
    assert heard_again(lambda: trainer.fit(Masked(), samples(), ckpt_path="last"), "finite") == []
    assert trainer.global_step == 24


def test_a_checkpoint_that_is_not_finite_is_refused_by_a_fit(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    trainer = quiet(max_epochs=1)
    trainer.fit(Net(adam=True), samples())
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    saved["state_dict"]["layer.weight"].fill_(torch.nan)
    torch.save(saved, path)
    with pytest.raises(NonFiniteError, match=r"old.ckpt.*not finite.*layer.weight.*earlier checkpoint"):
        quiet(max_epochs=2).fit(Net(adam=True), samples(), ckpt_path=path)
    trainer = quiet(max_epochs=2, non_finite="ignore")
    trainer.fit(Net(adam=True), samples(), ckpt_path=path)
    assert trainer.global_step == 24


@pytest.mark.filterwarnings("ignore:Trainer.precision")
def test_16_mixed_leaves_the_step_out_by_itself() -> None:
    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.float()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step([each.float() for each in batch], batch_idx)
            return loss * torch.nan if batch_idx == 8 else loss

    module, trainer = Single(), quiet(max_epochs=1, precision="16-mixed")
    [said] = heard_again(lambda: trainer.fit(module, samples()), "detect_anomaly")
    assert "batch 8" in said
    assert not_finite(module.state_dict().items()) == []


def test_skip_is_refused_where_no_update_can_be_left_out() -> None:
    module = acting(Net, configure_optimizers=lambda m: torch.optim.LBFGS(m.parameters()))
    with pytest.raises(MisconfigurationException, match=r"non_finite=.skip.*LBFGS"):
        quiet(max_epochs=1, non_finite="skip").fit(module, samples())


# -- on ranks ----------------------------------------------------------------------------------------------


def fitted(
    folder: Path, bad: str, strategy: str, non_finite: Any = "protect"
) -> tuple[str, int, dict[str, torch.Tensor]]:
    made = {"ddp": "ddp", "fsdp": FSDPStrategy(), "sharded": FSDPStrategy(state_dict_type="sharded")}[strategy]
    module = Net(bad, rank=1)
    trainer = quiet(
        devices=torch.distributed.get_world_size(),
        max_epochs=1,
        strategy=made,
        enable_checkpointing=True,
        callbacks=[each_step(folder)],
        non_finite=non_finite,
    )
    said = ""
    try:
        trainer.fit(module, samples(16))
    except NonFiniteError as error:
        said = str(error)
    return said, trainer.global_step, {name: p.clone() for name, p, _ in trainer.strategy.whole_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "sharded"])
def test_a_nan_of_one_rank_is_named_on_all(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    first, second = ranks(2).run(fitted, tmp_path, "nan", strategy, timeout=60)
    assert first[0] == second[0]
    assert "The loss of batch 3 in epoch 0 (step 3) on rank 1 is nan. Its samples: 7 " in first[0]
    assert f"newest healthy checkpoint is {tmp_path / 'last.ckpt'}" in first[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    loaded = Net.load_from_checkpoint(tmp_path / "last.ckpt")
    assert not_finite(loaded.state_dict().items()) == []


def test_a_buffer_of_one_rank_is_found(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(fitted, tmp_path, "buffer", "ddp", timeout=60)
    assert first[0] == second[0]
    assert "on rank 1, although every loss was finite: norm.running_mean" in first[0]
    assert len(healthy(tmp_path)) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_skip_the_same_update_as_one_process(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    for said, steps, parameters in ranks(2).run(fitted, tmp_path, "nan", strategy, "skip", timeout=60):
        assert (said, steps) == ("", 7)
        for name, value in skipped_by_hand(16, 2).items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-12, atol=1e-12)


def test_ranks_stop_together_before_the_update(ranks: RankPool, tmp_path: Path) -> None:
    for said, steps, parameters in ranks(2).run(fitted, tmp_path, "nan", "fsdp", "stop", timeout=60):
        assert "on rank 1 is nan" in said
        assert steps == 3
        assert not_finite(parameters.items()) == []


class Chain(LightningModule):
    """Three blocks; at step 3 its loss is NaN, or its learning rate."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bad = bad
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.blocks(batch[0]).square().mean()
        return loss * torch.nan if self.bad == "loss" and batch_idx == BAD_STEP else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.bad == "rate" and batch_idx == BAD_STEP:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] = torch.nan

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fitted_by_engine(folder: Path, bad: str, strategy: str) -> str:
    flags: dict[str, Any] = {"devices": torch.distributed.get_world_size(), "strategy": strategy, "max_epochs": 1}
    trainer = quiet(**flags, enable_checkpointing=True, callbacks=[each_step(folder)])
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(Chain(bad), DataLoader(TensorDataset(inputs), 1))
    return str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "bad"),
    [
        pytest.param("balanced", "loss", marks=pytest.mark.extension("balancing")),
        pytest.param("deepspeed_stage_2", "rate", marks=pytest.mark.extension("deepspeed")),
        pytest.param("deepspeed_stage_3", "rate", marks=pytest.mark.extension("deepspeed")),
    ],
)
def test_other_engines_save_no_weights_that_are_not_finite(
    ranks: RankPool, tmp_path: Path, strategy: str, bad: str
) -> None:
    """DeepSpeed leaves out an update whose gradient is not finite by itself, so there the learning rate is NaN."""
    if "deepspeed" in strategy:
        pytest.importorskip("deepspeed")
    first, second = ranks(2).run(fitted_by_engine, tmp_path, bad, strategy, timeout=100)
    assert first == second
    assert re.search(r"step [34]\b", first)
    assert "blocks.0.weight" in first
    loaded = Chain.load_from_checkpoint(tmp_path / "last.ckpt", bad="")
    assert not_finite(loaded.state_dict().items()) == []
