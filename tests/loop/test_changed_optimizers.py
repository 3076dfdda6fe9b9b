"""Optimizers that take the place of others in the middle of a fit step from there on, on one process and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import DDPStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import QUIET, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankFailure, RankPool

WAYS = ["trainer.optimizers", "strategy.optimizers", "an item"]
WHEN = ["on_train_epoch_start", "on_train_batch_start"]


def put(module: Any, optimizer: Any, way: str) -> None:
    if way == "trainer.optimizers":
        module.trainer.optimizers = [optimizer]
    elif way == "an item":
        module.trainer.optimizers[0] = optimizer
    else:
        module.trainer.strategy.optimizers = [optimizer]


class Changes(LightningModule):
    """Steps by Adam; in the second epoch it gets SGD, and in one process a layer."""

    def __init__(self, way: str, when: str, manual: bool = False, grows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.automatic_optimization = not manual
        self.way, self.when, self.grows, self.changed = way, when, grows, False

    def change(self, hook: str) -> None:
        if self.changed or hook != self.when or self.current_epoch == 0:
            return
        self.changed = True
        if self.grows:
            torch.manual_seed(7)
            self.net.append(nn.Linear(1, 1).double().to(self.device))
        put(self, torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9), self.way)

    def on_train_epoch_start(self) -> None:
        self.change("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change("on_train_batch_start" if batch_idx == 1 else "")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader(world: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6 // world)


def changed(way: str, when: str, manual: bool, grows: bool = False) -> list[torch.Tensor]:
    module = Changes(way, when, manual, grows)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = quiet(max_epochs=3) if world == 1 else on_ranks(max_epochs=3)
    trainer.fit(module, loader(world))
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert trainer.optimizers[0].state, "it never stepped"
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_optimizers_that_were_replaced_within_a_fit_never_stepped(ranks: RankPool, when: str, manual: bool) -> None:
    """The old ones went on, without a word."""
    expected = changed(WAYS[0], when, manual)
    for found in ranks(2).run(changed, WAYS[1], when, manual, timeout=40):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_replace_them_is_taken(way: str) -> None:
    found, expected = (changed(one, WHEN[0], False, grows=True) for one in (way, WAYS[1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_lightning_takes_them_too(lightning: Any, tmp_path: Any) -> None:
    theirs = type("Theirs", (lightning.LightningModule,), {k: v for k, v in vars(Changes).items() if k[:2] != "__"})
    module = theirs()  # `Changes.__init__` would call another class's
    torch.manual_seed(1)
    module.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    module.way, module.when, module.grows, module.changed = WAYS[0], WHEN[0], True, False
    trainer = lightning.Trainer(**QUIET, max_epochs=3, precision="64-true", default_root_dir=tmp_path)
    trainer.fit(module, loader(1))
    ours = changed(WAYS[0], WHEN[0], False, grows=True)
    torch.testing.assert_close([p.detach() for p in module.parameters()], ours, rtol=0, atol=1e-12)


def sharded() -> None:
    trainer = quiet(max_epochs=2, devices=2, strategy=DDPStrategy(shard_optimizer=True))
    trainer.fit(Changes(WAYS[0], WHEN[0]), loader(2))


def on_rank_0_alone() -> None:
    class Alone(Changes):
        def change(self, hook: str) -> None:
            if self.global_rank == 0:
                super().change(hook)

    on_ranks(max_epochs=2).fit(Alone(WAYS[0], WHEN[0]), loader(2))


def test_what_cannot_be_replaced_is_refused_by_name(ranks: RankPool) -> None:
    with pytest.raises(Exception, match=r"shard_optimizer=True\): other optimizers were put in the place of those"):
        ranks(2).run(sharded, timeout=40)
    with pytest.raises(RankFailure, match=r"parameter 'net\.3\.weight' came after set-up"):
        ranks(2).run(changed, WAYS[0], WHEN[0], False, True, timeout=40)
    with pytest.raises(
        RankFailure, match=r"What is trained is not the same on every rank: rank 0 has SGD of net\.0\.weight"
    ):
        ranks(2).run(on_rank_0_alone, timeout=40)

    class Searches(Changes):
        def change(self, hook: str) -> None:
            if self.current_epoch:
                put(self, torch.optim.LBFGS(self.parameters()), WAYS[0])

    with pytest.raises(MisconfigurationException, match="LBFGS, which needs a closure, cannot replace Adam"):
        quiet(max_epochs=2).fit(Searches(WAYS[0], WHEN[0]), loader(1))


def by_flag(foreach: bool | None) -> Any:
    """Its optimizer says how parameters are updated, or leaves that to torch."""
    return acting(configure_optimizers=lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=foreach))


@pytest.mark.parametrize(("before", "after"), [(None, False), (None, True), (False, None)])
def test_how_torch_updates_parameters_may_be_chosen_between_two_runs(before: Any, after: Any, tmp_path: Any) -> None:
    """A checkpoint where torch had chosen was taken for a malformed one: so was each of `fsdp` on a device."""
    trainer = quiet(max_steps=1)
    trainer.fit(by_flag(before), numbers(4))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = quiet(max_steps=2)
    resumed.fit(by_flag(after), numbers(4), ckpt_path=tmp_path / "one.ckpt")
    assert resumed.global_step == 2
