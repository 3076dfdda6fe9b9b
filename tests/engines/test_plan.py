"""The bucket plan of a run: whose it is, and that a resumed run with three ranks has the bits of one that went on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SMALL = {"shared_memory": False, "bucket_cap_mb": 0.004}


class Net(LightningModule):
    """Layers that are registered in another order than they are used, so that the first step moves the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(32, 1), nn.Linear(8, 32), nn.Linear(32, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.last(self.middle(self.first(x).tanh()).tanh()), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def data() -> Any:
    source = torch.Generator().manual_seed(5)
    x = torch.randn(60, 8, generator=source)
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 2, shuffle=True)


def fit(options: dict[str, Any], steps: int, folder: str, ckpt_path: str | None) -> tuple[list[Tensor], Any]:
    torch.manual_seed(3 if ckpt_path is None else 4)
    callback = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    flags = {"enable_checkpointing": True, "callbacks": [callback], "accumulate_grad_batches": 2}
    trainer = quiet(strategy=DDPStrategy(**SMALL, **options), devices=3, max_epochs=-1, max_steps=steps, **flags)
    trainer.seed = 1
    module = Net()
    trainer.fit(module, data(), ckpt_path=ckpt_path)
    return [parameter.detach().clone() for parameter in module.parameters()], trainer.strategy.state_dict()["plan"]


def interrupted(options: dict[str, Any], folder: str) -> tuple[list[Tensor], list[Tensor], Any, Any]:
    whole, plan = fit(options, 8, folder, None)
    rest, again = fit(options, 8, folder, f"{folder}/step=2.ckpt")
    return whole, rest, plan, again


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static graph"])
def test_a_resumed_run_of_three_ranks_over_tcp_has_its_bits(
    ranks: RankPool, options: dict[str, Any], tmp_path: Any
) -> None:
    """Gloo's sums change with the layout of buckets, and without the plan of the checkpoint it would be another."""
    whole, rest, plan, again = ranks(3).run(interrupted, options, str(tmp_path), timeout=50)[0]
    assert plan == again
    assert plan[0][0] == "last.bias"  # as gradients come, and not as layers are registered
    assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=True))


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 2)
        self.more = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.more(self.last(self.first(x))), y)


def two_modules(options: dict[str, Any]) -> list[Any]:
    trainer = quiet(strategy=DDPStrategy(**options), devices=2, max_epochs=-1, max_steps=1)
    plans = []
    for module in (Other(), Net()):
        trainer.fit(module, data())
        plans.append(trainer.strategy.state_dict()["plan"])
        trainer.fit_loop.max_steps += 1
    return plans


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb_list": [0.001, 0.004]}], ids=["learned", "by sizes"])
def test_another_module_gets_buckets_of_its_own(ranks: RankPool, options: dict[str, Any]) -> None:
    """A Trainer's second fit, of another module, was refused: its plan belonged to the first one's."""
    for first, second in ranks(2).run(two_modules, options):
        assert {name for bucket in first for name in bucket} == {name for name, _ in Other().named_parameters()}
        assert {name for bucket in second for name in bucket} == {name for name, _ in Net().named_parameters()}


def laid_out(options: dict[str, Any]) -> tuple[Any, int, float]:
    """The plan, in how many pieces of memory the gradients lie, and the group's timeout in seconds."""
    trainer = quiet(strategy=DDPStrategy(**options), devices=2, max_epochs=-1, max_steps=1)
    module = Net()
    trainer.fit(module, data())
    pieces = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    return trainer.strategy.state_dict()["plan"], len(pieces), backend.options._timeout.total_seconds()


def test_options_of_buckets_and_group_reach_them(ranks: RankPool) -> None:
    """Nothing else noticed when they were lost between the strategy and the reducer: the numbers are the same."""

    def look() -> list[tuple[Any, int, float]]:
        found = [laid_out({"timeout": timedelta(seconds=77)})]
        found += [laid_out({"bucket_cap_mb": 0.0045}), laid_out({"bucket_cap_mb_list": [0.001, 0.004]})]
        return [*found, laid_out({"gradient_as_bucket_view": False}), laid_out({"shared_memory": False})]

    first, second = ranks(2).run(look, group=False, timeout=40)
    assert [plan for plan, _, _ in first] == [plan for plan, _, _ in second]
    (plan, pieces, timeout), (small, _, _), (sizes, _, _), (_, apart, _), (_, over_tcp, _) = first
    assert (len(plan), pieces, timeout) == (1, 1, 77.0)
    assert small == [["last.bias", "last.weight", "middle.bias", "middle.weight"], ["first.bias", "first.weight"]]
    assert sizes == [
        ["middle.bias"],
        ["middle.weight"],
        ["first.bias", "first.weight"],
        ["last.bias", "last.weight"],
    ]
    assert (apart, over_tcp) == (6, 1)
