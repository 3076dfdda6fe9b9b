"""The seams for engines, each tried by a small one: a strategy of 60 lines, and fakes that own a road."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import LightningModule, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.engines.engine import EngineState
from lockstep.engines.strategy import SingleDeviceStrategy, Strategy
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.engines.averaging import AveragingStrategy
from tests.engines.test_contract import fit as answers_of_contract
from tests.engines.windows import ForwardsFirst
from tests.equivalence.models import CASES, Plain, agree, agree_in, report, rows
from tests.loop.pieces import SaveAt, Slope, Validated, numbers, quiet
from tests.tools.pool import RankPool

# -- a strategy of 60 lines ----------------------------------------------------------------------------------


@pytest.mark.everyday(5)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_strategy_of_sixty_lines_trains_as_one_process(ranks: RankPool, case: str, world: int) -> None:
    agree_in(ranks(world), CASES[case], AveragingStrategy)


class SaysWhere(SingleDeviceStrategy):
    """As Ray's strategy does, by two properties of Lightning's."""

    rank = 0

    @property
    def root_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.rank}


def test_a_strategy_may_say_by_properties_where_it_is() -> None:
    """A property without a setter could not take the device, and what lockstep does anyway was refused."""
    strategy, module = SaysWhere(), Slope()
    quiet(strategy=strategy, max_epochs=1).fit(module, numbers(2))
    assert module.gradients == [1.0, 2.0]
    strategy = SaysWhere()
    strategy.rank = 3
    with pytest.raises(MisconfigurationException, match=r"SaysWhere\.distributed_sampler_kwargs"):
        quiet(strategy=strategy, max_epochs=1).fit(Slope(), numbers(2))


# -- an engine that plays whole windows ----------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case != "unused in some steps"])
def test_an_engine_may_play_whole_windows(ranks: RankPool, case: str) -> None:
    agree_in(ranks(2), CASES[case], ForwardsFirst)


@pytest.mark.parametrize("world", [1, 2])
def test_such_an_engine_keeps_the_contract(ranks: RankPool, world: int) -> None:
    for answer in ranks(world).run(answers_of_contract, ForwardsFirst, world, timeout=40):
        assert [name for name, right in answer.items() if not right] == []


class Told(Slope):
    """Logs and counts in the hooks around a batch."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(f"step {batch_idx}")
        self.log("mean", batch.mean(), on_step=True, on_epoch=True)
        self.log("sum", float(batch.sum()), reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"end {batch_idx}: {outputs['loss'].item():.6f}")


def told(strategy: Strategy, **flags: Any) -> tuple[list[str], dict[str, float], float]:
    module = Told()
    trainer = quiet(strategy=strategy, max_epochs=2, accumulate_grad_batches=3, log_every_n_steps=1, **flags)
    trainer.fit(module, numbers(8, 2))
    return module.calls, {name: float(value) for name, value in trainer.callback_metrics.items()}, module.w.item()


def test_what_is_logged_and_shown_by_windows_is_that_of_micro_batches(ranks: RankPool) -> None:
    plain, (mine,) = told(SingleDeviceStrategy()), ranks(1).run(lambda: told(ForwardsFirst(), devices=1))
    assert sorted(mine[0]) == sorted(plain[0])
    assert mine[0][:6] == ["step 0", "step 1", "step 2", *[call for call in plain[0][:6] if call.startswith("end")]]
    assert mine[1:] == plain[1:]


class StopsAt(Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.progress.total_batches >= self.batches:
            trainer.should_stop = True


def resumed(folder: Path, every: int) -> bool:
    whole, again = Told(), Told()
    flags: dict[str, Any] = {"accumulate_grad_batches": 2, "devices": 1, "max_epochs": 2, "default_root_dir": folder}
    quiet(strategy=ForwardsFirst(), **flags).fit(whole, numbers(8, 2))
    keep = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
    first = quiet(strategy=ForwardsFirst(), callbacks=[keep, StopsAt(3)], enable_checkpointing=True, **flags)
    first.fit(Told(), numbers(8, 2))
    saved = sorted(folder.glob("*.ckpt"))[-1]
    quiet(strategy=ForwardsFirst(), **flags).fit(again, numbers(8, 2), ckpt_path=saved)
    return again.w.item() == whole.w.item()


@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_between_windows_of_an_engine_goes_on_to_the_same_bits(
    ranks: RankPool, tmp_path: Path, every: int
) -> None:
    assert ranks(1).run(resumed, tmp_path, every) == [True]


def validated(path: Path) -> list[list[int]]:
    flags: dict[str, Any] = {"accumulate_grad_batches": 4, "val_check_interval": 3, "num_sanity_val_steps": 0}
    whole, again = Validated(), Validated()
    for module, callbacks, start in ((whole, [SaveAt(3, path)], None), (again, [], path)):
        trainer = quiet(strategy=ForwardsFirst(), devices=1, max_epochs=1, callbacks=callbacks, **flags)
        trainer.fit(module, numbers(8), numbers(1), ckpt_path=start)
    return [whole.validated, again.validated]


def test_a_resume_behind_a_window_of_an_engine_left_out_the_validation_that_was_due_within_it(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The first window of a fit is watched for its memory, and was not known as one that is played ahead."""
    assert ranks(1).run(validated, tmp_path / "at.ckpt") == [[[4, 8], [0, 4]]]


def refused() -> list[str]:
    class Closure(Slope):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class LooksAtLosses(Slope):
        def on_before_backward(self, loss: Any) -> None:
            pass

    said = []
    for module in (Closure(), LooksAtLosses()):
        with pytest.raises(MisconfigurationException) as raised:
            quiet(strategy=ForwardsFirst(), devices=1, max_epochs=1).fit(module, numbers(4))
        said.append(str(raised.value))
    return said


def test_what_cannot_go_by_windows_is_refused(ranks: RankPool) -> None:
    ((closure, losses),) = ranks(1).run(refused)
    assert "a closure cannot run them again" in closure
    assert "does not call `on_before_backward`" in losses


# -- parts of another size -----------------------------------------------------------------------------------


class Uneven(AveragingStrategy):
    """Three quarters of each global batch go to rank 0."""

    shares = (3.0, 1.0)


@pytest.mark.parametrize("case", ["even", "uneven last batch", "accumulation 3, clipped"])
def test_a_global_batch_is_shared_out_by_the_engines_shares(ranks: RankPool, case: str) -> None:
    agree_in(ranks(2), CASES[case], Uneven)


def sizes_by_shares() -> list[int]:
    sizes: list[int] = []

    class Sees(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch))
            return super().training_step(batch, batch_idx)

    quiet(strategy=Uneven(), devices=2, max_epochs=1).fit(Sees(), numbers(16, 4))
    return sizes


def test_a_rank_of_three_shares_sees_three_times_the_samples(ranks: RankPool) -> None:
    assert ranks(2).run(sizes_by_shares) == [[6, 6], [2, 2]]


# -- an engine that places a module before it reads its part of a checkpoint ---------------------------------


class Placed(SingleDeviceStrategy):
    """Layers are made without memory; each gets it, and values, when the engine takes the module."""

    places_first = True
    init_device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        self.order.append("placed")
        module.to_empty(device=self.root_device)
        torch.manual_seed(1)
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
        super().setup_module(module, own_backward)

    def load(self, state: EngineState) -> None:
        self.order += [name for name in ("module", "optimizers", "own") if getattr(state, name) is not None]
        super().load(state)


class MadeLate(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.made_on = ""

    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(1, 1)
        self.made_on = self.layer.weight.device.type

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[:, None].float()) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_an_engine_may_place_the_module_before_it_reads_a_checkpoint(tmp_path: Path) -> None:
    def fit(epochs: int, resume: Path | None = None) -> tuple[MadeLate, Placed, Trainer]:
        module, strategy = MadeLate(), Placed()
        trainer = quiet(strategy=strategy, max_epochs=epochs)
        trainer.fit(module, numbers(6, 2), ckpt_path=resume)
        return module, strategy, trainer

    whole, _, _ = fit(4)
    _, _, trainer = fit(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, strategy, _ = fit(4, tmp_path / "half.ckpt")
    assert resumed.made_on == "meta"
    assert strategy.order == ["placed", "module", "optimizers", "own"]
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert torch.equal(resumed.layer.bias, whole.layer.bias)


# -- an engine whose ranks hold parts ------------------------------------------------------------------------


class Slices(AveragingStrategy):
    """Each rank updates its elements of each parameter, and keeps their gradients only."""

    def _mine(self, parameter: Tensor) -> Tensor:
        owner = torch.arange(parameter.numel(), device=parameter.device) % self.world.size
        return (owner == self.world.rank).reshape(parameter.shape)

    def _average(self) -> None:
        super()._average()
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * self._mine(parameter)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        with torch.no_grad():
            for parameter in self._parameters():
                parameter.copy_(comm.all_reduce(parameter * self._mine(parameter), "sum"))
        return result


class SlicesTold(Slices):
    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        for name, value, gradient in super().whole_parameters():
            yield name, value, None if gradient is None else comm.all_reduce(gradient, "sum")


def test_the_harness_compares_whole_gradients_however_they_are_held(ranks: RankPool) -> None:
    agree(ranks(2), Plain, rows(23), SlicesTold)
    for found in ranks(2).run(report, Plain, rows(23), Slices, {}, timeout=60):
        assert not found
        assert "gradient" in str(found)


class SavesParts(SlicesTold):
    saves_shards = True


def saves(folder: str) -> str:
    trainer = quiet(strategy=SavesParts(), devices=2, max_epochs=1)
    trainer.fit(Slope(), numbers(4))
    with pytest.raises(MisconfigurationException) as raised:
        trainer.save_checkpoint(f"{folder}/whole.ckpt")
    return str(raised.value)


def test_what_each_rank_has_in_part_is_not_written_as_the_whole(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(saves, str(tmp_path)):
        assert "each rank has only a part of the model" in said
    assert list(tmp_path.iterdir()) == []


def saves_by_rank(folder: str) -> bool:
    from lockstep.checkpoint.io import TorchCheckpointIO

    class ByRank(TorchCheckpointIO):
        writes_shards = True

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, f"{path}/{dist.get_rank()}.ckpt", storage_options)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_checkpoint(f"{path}/{dist.get_rank()}.ckpt", *args, **kwargs)

    def fit(epochs: int, resume: str | None = None) -> tuple[Slope, Trainer]:
        module = Slope(lr=0.01)
        trainer = quiet(strategy=SavesParts(), devices=2, max_epochs=epochs, plugins=[ByRank()])
        trainer.fit(module, numbers(6), ckpt_path=resume)
        return module, trainer

    whole, _ = fit(3)
    _, trainer = fit(1)
    trainer.save_checkpoint(f"{folder}/parts")
    resumed, _ = fit(3, f"{folder}/parts")
    return resumed.w.item() == whole.w.item()


def test_all_ranks_write_where_the_writer_can_take_parts(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(saves_by_rank, str(tmp_path), timeout=60) == [True, True]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["0.ckpt", "1.ckpt"]


def of_dtensor() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from lockstep.checkpoint.io import TorchCheckpointIO

    part = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(MisconfigurationException) as raised:
        TorchCheckpointIO().save_checkpoint({"state_dict": {"w": part}}, "never.ckpt")
    return str(raised.value)


def test_a_dtensor_is_not_saved_as_if_it_were_the_whole(ranks: RankPool) -> None:
    for said in ranks(2).run(of_dtensor, timeout=60):
        assert 'checkpoint["state_dict"]["w"]' in said
        assert "DTensor, which cannot be saved" in said
