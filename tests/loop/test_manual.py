"""Manual optimization: the training step does it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import DDPStrategy, SingleDeviceStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import SaveAt, Slope, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Duel(LightningModule):
    """Two players, each with an optimizer of its own, as in a GAN."""

    def __init__(self, sync_first: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.b = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.sync_first = sync_first
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        needed = (self.a.requires_grad, self.b.requires_grad)
        first.zero_grad()
        self.manual_backward((self.a * self.b * batch).mean())
        gradient = self.a.grad.item()  # type: ignore[union-attr]
        first.step()
        self.untoggle_optimizer(first)
        with second.toggle_model(sync_grad=self.sync_first):
            second.zero_grad()
            self.manual_backward((self.b * batch).mean())
            other = self.b.grad.item()  # type: ignore[union-attr]
            second.step()
        self.seen.append((needed, gradient, other, self.a.requires_grad and self.b.requires_grad))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a], lr=0.0), torch.optim.SGD([self.b], lr=0.0)


def test_two_optimizers_take_turns() -> None:
    module = Duel()
    trainer = quiet(max_epochs=1)
    result = trainer.fit(module, numbers(2))
    assert module.seen == [((True, False), 1.0, 1.0, True), ((True, False), 2.0, 2.0, True)]
    assert result.global_step == trainer.global_step == 4


def test_max_steps_counts_the_steps_of_all_optimizers() -> None:
    module = Duel()
    assert quiet(max_steps=4).fit(module, numbers(9)).global_step == 4
    assert len(module.seen) == 2


class Blocks(Duel):
    """Two backwards, of which the first is not reduced."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers()[0].zero_grad()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward((self.a * batch).mean())
        own = self.a.grad.item()  # type: ignore[union-attr]
        self.manual_backward((self.a * batch).mean())
        self.seen.append((batch_idx, own, self.a.grad.item()))  # type: ignore[union-attr]


def duel(samples: int, sync: bool = True, batch_size: int = 1, kind: type[Duel] = Duel) -> list[Any]:
    module = kind(sync)
    on_ranks(max_epochs=1).fit(module, numbers(samples, batch_size))
    return [step[1:3] for step in module.seen]


def test_manual_backwards_are_reduced_unless_the_user_says_no(ranks: RankPool) -> None:
    assert ranks(2).run(duel, 4, True) == [[(1.5, 1.5), (3.5, 3.5)]] * 2
    assert ranks(2).run(duel, 4, False) == [[(1.5, 1.0), (3.5, 3.0)], [(1.5, 2.0), (3.5, 4.0)]]
    # blocked from the strategy, as in Lightning
    assert ranks(2).run(duel, 4, True, 1, Blocks) == [[(1.0, 3.0), (3.0, 7.0)], [(2.0, 3.0), (4.0, 7.0)]]


def test_an_empty_share_is_muted_in_all_backwards_of_a_step(ranks: RankPool) -> None:
    """Only the first was, and the rank's sample was counted as one sample in the place of two as well.

    What the second rank noted of the step that it had no sample for is gone.
    """
    assert ranks(2).run(duel, 3) == [[(1.5, 1.5), (3.0, 3.0)], [(1.5, 1.5)]]
    assert ranks(2).run(duel, 3, True, 2) == [[(2.0, 2.0)]] * 2  # uneven batches weigh by their samples


class ClippedDuel(Duel):
    """Each player's gradient is clipped by value."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, player in zip(self.optimizers(), (self.a, self.b), strict=True):
            optimizer.zero_grad()
            self.manual_backward((player * batch).mean())
            self.clip_gradients(optimizer, 0.5, "value")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.a], lr=1.0), torch.optim.SGD([self.b], lr=1.0)


def clipped_duel(shard: bool) -> list[float]:
    module = ClippedDuel()
    quiet(strategy=DDPStrategy(shard_optimizer=shard), devices=2, max_epochs=1).fit(module, numbers(4))
    return [module.a.item(), module.b.item()]


@pytest.mark.parametrize("shard", [False, True])
def test_clipping_by_value_where_a_rank_has_no_part_of_an_optimizer(ranks: RankPool, shard: bool) -> None:
    """torch's function refuses to clip nothing: that rank raised, and the others waited for it."""
    assert ranks(2).run(clipped_duel, shard) == [[0.0, 0.0]] * 2


class ByHand(Slope):
    """Steps at every second batch."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = (self.w * batch).mean()
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=3.0, gradient_clip_algorithm="value")
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_accumulation_and_clipping_by_hand() -> None:
    module = ByHand()
    result = quiet(max_epochs=1).fit(module, numbers(4))
    assert module.gradients == [1.5, 3.0]
    assert (module.w.item(), result.global_step) == (-4.5, 2)


def test_a_closure_is_run_by_the_optimizer() -> None:
    class Closes(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()

            def closure() -> Any:
                optimizer.zero_grad()
                loss = (self.w * batch).mean()
                self.manual_backward(loss)
                return loss

            returned.append(optimizer.step(closure=closure).item())

    returned: list[float] = []
    module = Closes()
    quiet(max_epochs=1).fit(module, numbers(3))
    assert (returned, module.gradients, module.w.item()) == ([0.0, -2.0, -9.0], [1.0, 2.0, 3.0], -6.0)


def test_a_training_step_may_return_nothing_or_a_dict() -> None:
    class Returns(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return [None, {"loss": batch.sum(), "more": 1}, batch.sum()][batch_idx]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(outputs)

    seen: list[Any] = []
    quiet(max_epochs=1).fit(Returns(), numbers(3))
    assert seen == [{}, {"loss": torch.tensor(2.0), "more": 1}, {"loss": torch.tensor(3.0)}]


def test_plain_optimizers_are_given_on_request() -> None:
    def ask(module: Any, *_: Any) -> None:
        plain, wrapped = module.optimizers(use_pl_optimizer=False), module.optimizers()
        assert type(plain) is torch.optim.SGD
        assert wrapped.optimizer is plain
        assert wrapped.param_groups is plain.param_groups

    quiet(max_epochs=1).fit(acting(ByHand, on_train_batch_start=ask), numbers(1))


@pytest.mark.parametrize("flags", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_what_only_automatic_optimization_does_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match=rf"for manual optimization.*{next(iter(flags))}="):
        quiet(max_epochs=1, **flags).fit(ByHand(), numbers(2))


def test_manual_backward_is_refused_under_automatic_optimization() -> None:
    module = acting(training_step=lambda m, batch, at: m.manual_backward((m.w * batch).mean()))
    with pytest.raises(MisconfigurationException, match=r"self.automatic_optimization = False"):
        quiet(max_epochs=1).fit(module, numbers(1))


class Big(LightningModule):
    """Gradients that are the same on all ranks once they are reduced, and one that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.layer, self.own = nn.Linear(200, 200), nn.Linear(10, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward((self.layer(batch.float().expand(200)) ** 2).mean())
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.own(batch.float().expand(10)).sum())
        if batch_idx % 2 == 1:
            self.seen.append((self.layer.weight.grad.clone(), self.own.weight.grad.clone()))  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def save_amid(path: Path) -> Any:
    """Whether a resume has the same gradients."""
    whole, rest, samples = Big(), Big(), 4 * torch.distributed.get_world_size()
    on_ranks(max_epochs=1, callbacks=[SaveAt(2, path)]).fit(whole, numbers(samples))
    on_ranks(max_epochs=1).fit(rest, numbers(samples), ckpt_path=path)
    return [torch.equal(a, b) for a, b in zip(whole.seen[-1], rest.seen[-1], strict=True)]


def test_reduced_gradients_are_saved_once_in_the_middle_of_a_window(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks' were in the file: 26 MB at 8 ranks for a model of 2.9 MB."""
    assert ranks(3).run(save_amid, tmp_path / "cut.ckpt") == [[True, True]] * 3
    model = sum(parameter.nbytes for parameter in Big().parameters())
    assert (tmp_path / "cut.ckpt").stat().st_size < 2.5 * model  # weights and gradients


# -- loss.backward() in the place of manual_backward ---------------------------------------------------------------


class Raw(LightningModule):
    """Two layers, each with an optimizer; of a batch's backwards some are torch's own.

    Args:
        how: which.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.automatic_optimization = False
        self.how = how
        self.first, self.second = nn.Linear(3, 4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64)

    def losses(self, batch: Any) -> tuple[Any, Any]:
        out = self.second(self.first(batch).tanh())
        return out.square().mean(), (out - 1).exp().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        one, other = self.losses(batch)
        first.zero_grad()
        second.zero_grad()
        if self.how == "alone":
            one.backward()
        elif self.how == "after":
            self.manual_backward(one, retain_graph=True)
            other.backward()
        elif self.how == "before":
            one.backward(retain_graph=True)
            self.clip_gradients(first, 0.05, "norm")
            self.manual_backward(other)
        elif self.how == "by turns":
            self.toggle_optimizer(first)
            self.losses(batch)[0].backward()
            first.step()
            self.untoggle_optimizer(first)
            first.zero_grad()
            self.losses(batch)[1].backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.first.parameters(), lr=0.5, momentum=0.9),
            torch.optim.Adam(self.second.parameters(), lr=0.1),
        )


def raw(how: str, count: int, batch_size: int, options: dict[str, Any] | None = None) -> list[float]:
    module = Raw(how)
    data = torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    ranks = {} if options is None else {"strategy": DDPStrategy(**options), "devices": 2}
    quiet(max_epochs=2, **ranks).fit(module, DataLoader(data, batch_size=batch_size))  # type: ignore[arg-type]
    return [value for parameter in module.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("count", [24, 22, 17], ids=["even", "uneven", "a rank without samples"])
@pytest.mark.parametrize("how", ["alone", "after", "before", "by turns"])
def test_torchs_own_backward_is_reduced_as_manual_backward_is(ranks: RankPool, how: str, count: int) -> None:
    """Its gradients stayed on their rank, and the ranks' weights parted in silence."""
    right = raw(how, count, 8)
    assert ranks(2).run(raw, how, count, 4, {}) == [pytest.approx(right, rel=1e-10)] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"shared_memory": False},
        {"gradient_as_bucket_view": False},
        {"shard_optimizer": True},
        {"check_reduction": True},
    ],
    ids=str,
)
def test_torchs_own_backward_is_reduced_with_options(ranks: RankPool, options: dict[str, Any]) -> None:
    right = raw("after", 22, 8)
    assert ranks(2).run(raw, "after", 22, 4, options) == [pytest.approx(right, rel=1e-10)] * 2


def refused() -> str:
    with pytest.raises(MisconfigurationException) as raised:
        raw("alone", 24, 4, {"static_graph": True})
    return str(raised.value)


def test_torchs_own_backward_is_refused_where_graphs_are_recorded(ranks: RankPool) -> None:
    assert all("self.manual_backward(loss)" in text for text in ranks(2).run(refused))


class Probes(Duel):
    """Backwards that are not to be reduced: blocked ones, and one of rank 0 alone outside of the training step."""

    def on_train_start(self) -> None:
        if self.trainer.is_global_zero:
            self.a.square().backward()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers()[0].zero_grad()
        with self.trainer.strategy.block_backward_sync():
            (self.a * batch).mean().backward()
        self.seen.append((batch_idx, self.a.grad.item()))  # type: ignore[union-attr]


def test_backwards_that_are_not_to_be_reduced_stay_on_their_rank(ranks: RankPool) -> None:
    assert ranks(2).run(duel, 4, True, 1, Probes) == [[(1.0,), (3.0,)], [(2.0,), (4.0,)]]


class LeavesOut(Duel):
    """Leaves out its second batch on rank 0, its third one on rank 1: as many backwards on both."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 + self.global_rank:
            super().training_step(batch, batch_idx)


def left_out() -> str:
    with pytest.raises(RuntimeError) as raised:
        quiet(strategy=DDPStrategy(check_reduction=True), devices=2, max_epochs=1).fit(LeavesOut(), numbers(8))
    return str(raised.value)


def test_ranks_that_reduce_different_batches_are_named(ranks: RankPool) -> None:
    """The rounds paired up, and each rank trained with a mean over two batches, in silence."""
    for text in ranks(2).run(left_out):
        assert "rank 0 in 2, rank 1 in 1" in text
        assert "manual_backward(0 * loss)" in text


# -- What counts as a step: one past the wrapper does, one that 16-mixed left out does not -----------------------


class Around(torch.optim.SGD):
    """Holds another optimizer, whose step is a part of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)

    def second_step(self) -> None:
        self.base_optimizer.step()


class Steps(LightningModule):
    """Steps its optimizer in the way that it is told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.w, self.how = nn.Parameter(torch.zeros((), dtype=torch.float64)), how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.how != "raw")
        optimizer.zero_grad()
        self.manual_backward((self.w * batch).mean())
        if self.how == "own":
            self.own.step()
        elif self.how == "inner":
            optimizer.optimizer.step()
        elif self.how == "second step":
            optimizer.second_step()
        else:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        kind = Around if self.how in ("second step", "around") else torch.optim.SGD
        self.own = kind(self.parameters(), lr=1.0)
        return self.own


HOW = ["wrapped", "raw", "inner", "own", "second step", "around"]


@pytest.mark.parametrize("how", HOW)
def test_each_step_counts_whoever_makes_it(how: str, tmp_path: Path) -> None:
    """`max_steps` ended nothing and no checkpoint was written, without a word."""
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = quiet(max_steps=5, max_epochs=-1, enable_checkpointing=True, callbacks=[keep])
    module = Steps(how)
    assert trainer.fit(module, numbers(4)).global_step == 5
    assert module.w.item() == -11.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    assert not module.own._optimizer_step_post_hooks  # type: ignore[attr-defined]  # nothing is left behind


def test_an_optimizer_that_the_trainer_does_not_know_is_told_in_the_first_epoch() -> None:
    class Hides(Steps):
        def configure_optimizers(self) -> Any:
            super().configure_optimizers()

    with pytest.warns(UserWarning, match=r"no optimizer that .* was stepped: .* stays 0.*configure_optimizers"):
        quiet(max_epochs=2).fit(Hides("own"), numbers(2))


# -- 16-mixed


class Overflows(LightningModule):
    """The loss of the batches that it is told is infinite."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches, self.rates, self.counted = batches, [], []  # type: ignore[var-annotated]
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch.float()[:, None]).float().mean() / 64
        return loss * torch.inf if batch_idx in self.batches else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counted.append(self.trainer.global_step)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": halved, "interval": "step"}]


def scheduled(ranks: bool, **flags: Any) -> tuple[list[int], list[float]]:
    module = Overflows({0, 1, 3})
    (on_ranks if ranks else quiet)(precision="16-mixed", max_epochs=1, **flags).fit(module, numbers(12, 2))
    return module.counted, module.rates


def test_schedules_and_global_step_wait_for_steps_that_were_left_out(ranks: RankPool) -> None:
    found = [0, 0, 1, 1, 2, 3], [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]
    assert scheduled(False) == found
    assert ranks(2).run(scheduled, True) == [([0, 0, 1], [1.0, 1.0, 0.5])] * 2


def test_accumulated() -> None:
    assert scheduled(False, accumulate_grad_batches=2) == ([0, 0, 0, 0, 0, 1], [1.0] * 5 + [0.5])


class Leaves(SingleDeviceStrategy):
    """An engine with a loss scale of its own, as DeepSpeed's: it leaves its first two steps out."""

    made = 0

    def step(self, optimizer: Any, closure: Any = None, **options: Any) -> Any:
        self.made += 1
        self.left_out = self.made < 3
        return None if self.left_out else super().step(optimizer, closure, **options)


def test_an_engine_that_leaves_steps_out_itself() -> None:
    module = Overflows(())
    quiet(strategy=Leaves(), max_epochs=1).fit(module, numbers(8, 2))
    assert (module.counted, module.rates) == ([0, 0, 1, 2], [1.0, 1.0, 0.5, 0.25])


def test_a_loss_that_is_never_finite_ends_the_fit() -> None:
    """With `max_steps` alone it would go on for ever, and change nothing."""
    with pytest.raises(MisconfigurationException, match=r"16-mixed.*last 100 steps were skipped.*detect_anomaly"):
        quiet(precision="16-mixed", max_steps=3, max_epochs=-1).fit(Overflows(range(10)), numbers(10))
