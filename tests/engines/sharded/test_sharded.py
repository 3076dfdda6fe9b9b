"""``DDPStrategy(shard_optimizer=True)``: equivalence, gradients as users see them, checkpoints, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule, Trainer
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.models import RandomDataset
from tests.equivalence.models import agree, same
from tests.loop.pieces import QUIET
from tests.tools.average import MovingAverage
from tests.tools.pool import RankFailure, RankPool

SMALL = 0.002  # MiB: several buckets


def sharded(**options: Any) -> DDPStrategy:
    return DDPStrategy(shard_optimizer=True, **{"bucket_cap_mb": SMALL, **options})


class Net(LightningModule):
    """Two layers in groups with and without weight decay, and a weight that the step uses by itself."""

    def __init__(self, optimizer: str = "adamw", manual: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 2))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.optimizer, self.manual = optimizer, manual
        self.automatic_optimization = not manual
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.body(batch) * self.scale).square().mean()
        if not self.manual:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)  # each reduces, and adds to what was there
        if batch_idx % self.manual == self.manual - 1:
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in self.parameters() if p.dim() < 2]}]
        if self.optimizer == "adafactor":
            optimizer: torch.optim.Optimizer = torch.optim.Adafactor(groups, 0.1)
        elif self.optimizer == "muon":  # of the matrices, the others stay as they are
            optimizer = torch.optim.Muon(decay, 0.1)
        else:
            optimizer = torch.optim.AdamW(groups, 0.01, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(batch_size: int) -> Any:
    return DataLoader(RandomDataset(32, 23), batch_size, shuffle=True)


# -- the numbers of one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_optimizers_that_need_whole_matrices_are_those_of_one_process(ranks: RankPool, optimizer: str) -> None:
    """Other optimizers are in tests/equivalence, and in tests/extensions/parallel/test_owned_optimizer.py."""
    given = {"batch_size": 3, "accumulate": 2, "gradient_clip_val": 0.3}
    agree(ranks(2), partial(Net, optimizer), data, sharded, **given)


# -- bits, checkpoints ---------------------------------------------------------------------------------------


def _fit(strategy: Any, folder: str | None = None, steps: int = 6, resume: str | None = None, **net: Any) -> Any:
    """Weights and optimizer state after ``steps``; a checkpoint is kept after step 3, or written at the end."""
    torch.manual_seed(0)
    module = Net(**net)
    flags = dict(QUIET)
    if folder is not None:
        flags |= {
            "enable_checkpointing": True,
            "callbacks": [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)],
        }
    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer = Trainer(max_steps=steps, max_epochs=-1, strategy=strategy, **{**flags, "devices": world})
    trainer.fit(module, data(4), ckpt_path=resume)
    states = trainer.strategy.save().optimizers
    return {name: p.detach().clone() for name, p in module.named_parameters()}, states


def _plain_and_sharded(folder: str) -> Any:
    plain = _fit(DDPStrategy(shared_memory=False, bucket_cap_mb=SMALL), f"{folder}/plain")
    mine = _fit(sharded(), f"{folder}/sharded")
    return plain, mine


def test_two_ranks_have_the_bits_and_the_checkpoints_of_unsharded_ranks(ranks: RankPool, tmp_path: Path) -> None:
    plain, mine = ranks(2).run(_plain_and_sharded, str(tmp_path))[0]
    assert same(plain, mine)
    theirs, ours = (
        torch.load(next((tmp_path / name).glob("*step=3.ckpt")), weights_only=True) for name in ("plain", "sharded")
    )
    assert same(theirs["state_dict"], ours["state_dict"])
    assert same(theirs["optimizer_states"], ours["optimizer_states"])
    assert same(theirs["lr_schedulers"], ours["lr_schedulers"])


def _resumed(folder: str, manual: int) -> Any:
    whole = _fit(sharded(), folder, steps=6, manual=manual)
    path = str(next(Path(folder).glob("*step=3.ckpt")))
    return whole, [
        _fit(strategy, None, 6, path, manual=manual) for strategy in (sharded(), DDPStrategy(bucket_cap_mb=SMALL))
    ]


@pytest.mark.parametrize("manual", [0, 2])
def test_a_resumed_fit_has_the_same_bits_sharded_or_not(ranks: RankPool, tmp_path: Path, manual: int) -> None:
    whole, (again, unsharded) = ranks(2).run(_resumed, str(tmp_path), manual)[0]
    assert same(whole, again)
    assert same(whole, unsharded)


class Watched(Net):
    """Looks at gradients and at state in its hooks, and saves in the middle of a manual window."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path
        self.seen: list[str] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(f"{self.body[0].weight.grad.norm().item():.5f}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.path and self.trainer.fit_loop.progress.total_batches == 4:
            self.trainer.save_checkpoint(self.path)


def _resumed_inside_a_window(path: str) -> bool:
    found = []
    for resume in (None, path):
        torch.manual_seed(0)
        module = Watched("" if resume else path, manual=2)
        trainer = Trainer(max_epochs=3, strategy=sharded(), **{**QUIET, "devices": 2})
        trainer.fit(module, data(4), ckpt_path=resume)
        found.append(({n: p.detach().clone() for n, p in module.named_parameters()}, module.seen[-2:]))
    return same(*found)


def test_a_manual_window_that_was_saved_half_way_is_resumed_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    assert ranks(2).run(_resumed_inside_a_window, str(path)) == [True, True]


def _same_optimizer_twice(sharding: bool) -> Any:
    """Two fits with one optimizer object, an average of the weights, and a checkpoint when all is over."""
    torch.manual_seed(0)
    module = Net()
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured  # type: ignore[method-assign]
    strategy = sharded() if sharding else DDPStrategy(shared_memory=False, bucket_cap_mb=SMALL)
    trainer = Trainer(max_epochs=1, strategy=strategy, callbacks=[MovingAverage(0.999)], **{**QUIET, "devices": 2})
    trainer.fit(module, data(4))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(4))
    states = strategy.save().optimizers
    return {name: p.detach().clone() for name, p in module.named_parameters()}, states


def _twice() -> bool:
    return same(_same_optimizer_twice(True), _same_optimizer_twice(False)) or dist.get_rank() > 0


def test_an_optimizer_goes_from_fit_to_fit(ranks: RankPool) -> None:
    assert ranks(2).run(_twice) == [True, True]


def _alone(path: str) -> str:
    from lockstep.loop import state

    torch.manual_seed(0)
    trainer = Trainer(max_steps=2, strategy=sharded(), **{**QUIET, "devices": 2})
    trainer.fit(Net(), data(4))
    if dist.get_rank() == 1:
        state.save_alone(trainer.session, path)
    dist.barrier()
    trainer = Trainer(max_steps=3, strategy=sharded(), **{**QUIET, "devices": 2})
    with pytest.raises(MisconfigurationException, match="has weights only"):
        trainer.fit(Net(), data(4), ckpt_path=path)
    return "refused"


def test_a_rank_that_saves_alone_saves_weights(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(_alone, str(tmp_path / "alone.ckpt")) == ["refused"] * 2


class Failing(Net):
    """Fails on one rank."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            raise OSError("disk full")


def _failing() -> None:
    Trainer(max_steps=4, strategy=sharded(), **{**QUIET, "devices": 2}).fit(Failing(), data(4))


def test_a_rank_that_fails_between_steps_hangs_nobody(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="disk full"):
        ranks(2).run(_failing, timeout=30)


# -- refusals ------------------------------------------------------------------------------------------------


class Refused(Net):
    """With an optimizer, or a layer, whose work cannot be shared out."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        if sparse:
            self.table = nn.Embedding(3, 2, sparse=True)
        self.sparse = sparse

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1) if self.sparse else torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("sparse", "text"),
    [
        (False, "states of LBFGS cannot be sharded, because its line search"),
        (True, "sparse gradients of table.weight"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_on_one_process_too(sparse: bool, text: str) -> None:
    trainer = Trainer(max_steps=1, strategy=sharded(), **{**QUIET, "devices": 1})
    try:
        with pytest.raises(MisconfigurationException, match=text):
            trainer.fit(Refused(sparse), data(4))
    finally:
        dist.destroy_process_group()
