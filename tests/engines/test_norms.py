"""`Trainer(sync_batchnorm=True)`: BatchNorm over all ranks for the length of a fit, and what it was after it."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.ddp.sync_batchnorm import SyncBatchNorm
from tests.equivalence.models import refusal, report
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def rows(length: int) -> Any:
    """``make_data`` over ``length`` samples."""

    def make(batch_size: int) -> DataLoader[Any]:
        x = torch.randn(length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(x), batch_size, shuffle=True)

    return make


class Normed(LightningModule):
    """Two BatchNorm layers; notes of the layers what each hook finds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0)
        )
        self.kinds: dict[str, list[str]] = {}
        self.statistics: list[Tensor] = []

    def note(self, when: str) -> None:
        self.kinds[when] = [type(layer).__name__ for layer in self.net if "BatchNorm" in type(layer).__name__]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training")
        return (self.net(batch[0]) - batch[0].sum(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation")
        self.log("loss", (self.net(batch[0]) - batch[0].sum(1)).square().mean())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.statistics.append(torch.cat([buffer.flatten().double() for buffer in self.buffers()]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


# -- the numbers of one process


def test_without_the_flag_they_are_not(ranks: RankPool) -> None:
    """With it they are: tests/equivalence/test_engines.py."""
    assert not ranks(2).run(report, Normed, rows(24), "ddp", {}, timeout=40)[0]


def fit(module: Any, length: int, batch_size: int = 4, **flags: Any) -> tuple[Any, Any]:
    flags = {"strategy": "ddp", "max_epochs": 2, "num_sanity_val_steps": 0, **flags}
    flags.setdefault("devices", dist.get_world_size() if dist.is_initialized() else 1)
    trainer = quiet(**flags)
    trainer.seed = 3
    trainer.fit(module, rows(length)(batch_size), rows(7)(batch_size))
    return trainer, module


def seeded(kind: Any = Normed) -> Any:
    torch.manual_seed(6)
    return kind().double()


def running_statistics(length: int) -> list[Tensor]:
    return fit(seeded(), length, sync_batchnorm=True)[1].statistics  # type: ignore[no-any-return]


@pytest.mark.parametrize(("world", "length"), [(2, 19), (3, 14)])
def test_running_statistics_are_those_of_one_process(ranks: RankPool, world: int, length: int) -> None:
    """Those of a rank without samples in the last step, too."""
    module = fit(seeded(), length, 4 * world, strategy="auto")[1]
    expected = torch.stack(module.statistics)
    every = [torch.stack(found) for found in ranks(world).run(running_statistics, length, timeout=40)]
    for found in every:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert torch.equal(found, every[0])


# -- there and back


def conversions() -> dict[str, Any]:
    module = seeded()
    before = dict(module.state_dict(keep_vars=True))
    trainer, _ = fit(module, 16, sync_batchnorm=True)
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    module.note("fit again")
    after = module.state_dict(keep_vars=True)
    groups = len(dist.distributed_c10d._world.pg_map)
    trainer.fit_loop.progress.epoch = 0
    trainer.fit(module, rows(16)(4))
    return {
        **module.kinds,
        "same tensors": all(after[name] is tensor for name, tensor in before.items()) and list(after) == list(before),
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
        "left": [name for layer in module.net for name in ("sync_group", "zero_weight") if name in vars(layer)],
        "keys": list(torch.load(io.BytesIO(saved.getvalue()))),
    }


def test_a_fit_converts_the_layers_and_converts_them_back(ranks: RankPool) -> None:
    synchronized, plain = ["SyncBatchNorm1d"] * 2, ["BatchNorm1d"] * 2
    for found in ranks(2).run(conversions, timeout=40):
        assert found["training"] == found["validation"] == synchronized
        assert found["fit again"] == plain
        assert found["same tensors"]
        assert found["groups"] == 0, "a second fit goes on with the group of the first"
        assert found["left"] == []
        assert found["keys"] == list(Normed().state_dict())


def fails() -> list[str]:
    class Raises(Normed):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("mine")

    module = seeded(Raises)
    with pytest.raises(KeyError, match="mine"):
        fit(module, 8, sync_batchnorm=True)
    module.note("after")
    return module.kinds["after"]  # type: ignore[no-any-return]


def test_a_fit_that_fails_converts_back(ranks: RankPool) -> None:
    assert ranks(2).run(fails, timeout=40) == [["BatchNorm1d"] * 2] * 2


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_on_one_rank_nothing_is_converted(strategy: str) -> None:
    module = Normed().double()
    trainer = quiet(devices=1, strategy=strategy, sync_batchnorm=True, max_epochs=1)
    trainer.fit(module, rows(8)(4), rows(8)(4))
    assert module.kinds["training"] == ["BatchNorm1d"] * 2
    if dist.is_initialized():
        dist.destroy_process_group()


class Own(Normed):
    """With a layer that its author synchronized, and no flag."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0], self.net[2] = SyncBatchNorm(4), nn.LayerNorm(6)


def of_ones_own() -> list[Any]:
    module = fit(seeded(Own), 14)[1]
    module.note("after")
    return [module.kinds["training"], module.kinds["after"], module.net[0].sync_group, module.statistics[-1]]


def test_a_layer_that_the_user_synchronized_meets_without_ranks_that_have_no_samples_and_stays(ranks: RankPool) -> None:
    """Its statistics were once those of 14 samples and one that another rank had already seen."""
    every = ranks(3).run(of_ones_own, timeout=40)
    module = fit(seeded(Own), 14, 12, strategy="auto")[1]
    for training, after, group, statistics in every:
        assert training == after == ["SyncBatchNorm"]
        assert group is None
        torch.testing.assert_close(statistics, module.statistics[-1], rtol=0, atol=1e-12)


class Selective(Normed):
    """Each rank uses another branch behind a BatchNorm: one fills the next bucket before that layer's message."""

    def __init__(self) -> None:
        super().__init__()
        net = self.net
        del self.net  # parameters that are registered later are sent earlier
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        branch = self.left if (self.global_rank + batch_idx) % 2 else self.right
        return (self.net(branch(self.first(batch[0]))) - batch[0].sum(1)).square().mean()


def selective() -> list[Tensor]:
    strategy = DDPStrategy(bucket_cap_mb=1e-4)  # a bucket for each parameter, sent from inside the backward
    module = fit(seeded(Selective), 64, strategy=strategy, sync_batchnorm=True, limit_val_batches=0)[1]
    return [parameter.detach() for parameter in module.parameters()]


def test_ranks_that_use_different_parameters_do_not_mix_up_messages(ranks: RankPool) -> None:
    """In one group a rank's gradients met the other's statistics, and both waited or took them for their own."""
    zero, one = ranks(2).run(selective, timeout=20)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(zero, one, strict=True))
    assert all(parameter.isfinite().all() for parameter in zero)


# -- what is refused


class Skips(Normed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def test_a_step_without_a_loss_is_an_error_and_not_a_wait(ranks: RankPool) -> None:
    for rank, said in enumerate(
        ranks(2).run(partial(refusal, partial(seeded, Skips), "ddp", rows(16)(4), sync_batchnorm=True))
    ):
        assert f"returned None on rank {rank}" in said
        assert "0.0 * loss" in said
