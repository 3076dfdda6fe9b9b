"""What a window's gradient is: accumulation, uneven batches, weights, skipped micro-batches, empty shares, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.strategies import DDPStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, Stream, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


def test_a_partial_window_has_its_gradient_at_full_size() -> None:
    """5 batches at accumulation 4: Lightning 2.6.6 gives the last window a quarter of its gradient."""
    module = Slope()
    result = quiet(max_epochs=1, accumulate_grad_batches=4).fit(module, numbers(5))
    assert module.gradients == [2.5, 5.0]
    assert result.global_step == 2


def test_accumulation_follows_its_table_of_epochs() -> None:
    module = Slope()
    result = quiet(max_epochs=6, accumulate_grad_batches={0: 8, 5: 4}).fit(module, numbers(8))
    assert module.gradients == [4.5] * 5 + [2.5, 6.5]
    assert result.global_step == 7


def test_a_table_that_begins_late_leaves_the_epochs_before_as_they_are() -> None:
    module = Slope()
    quiet(max_epochs=2, accumulate_grad_batches={1: 2}).fit(module, numbers(2))
    assert module.gradients == [1.0, 2.0, 1.5]


@pytest.mark.parametrize("stream", [False, True])
def test_an_uneven_last_batch_weighs_by_its_samples(stream: bool) -> None:
    loader = DataLoader(Stream(5), batch_size=2) if stream else numbers(5, 2)
    module = Slope()
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, loader)
    assert module.gradients == pytest.approx([3.0], rel=1e-15)


def test_a_share_of_one_costs_no_multiplication() -> None:
    class Same(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses.append(super().training_step(batch, batch_idx))
            return losses[-1]

        def on_before_backward(self, loss: Tensor) -> None:
            assert loss is losses[-1]

    losses: list[Tensor] = []
    quiet(max_epochs=1).fit(Same(), numbers(3, 2))
    assert len(losses) == 2


@pytest.mark.parametrize(
    ("algorithm", "applied"), [("norm", [[0.6, 0.8], [0.3, 0.4]]), ("value", [[1.0, 1.0], [0.3, 0.4]])]
)
def test_gradients_are_clipped_once_a_window(algorithm: str, applied: list[list[float]]) -> None:
    class Pair(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.w * batch).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.w.grad is not None
            seen.append(self.w.grad.tolist())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.w.grad is not None
            clipped.append(self.w.grad.tolist())

    seen: list[list[float]] = []
    clipped: list[list[float]] = []
    data = [torch.tensor(pair, dtype=torch.float64) for pair in ([3.0, 4.0], [0.3, 0.4])]
    quiet(max_epochs=1, gradient_clip_val=1.0, gradient_clip_algorithm=algorithm).fit(Pair(), data)
    assert seen == [[3.0, 4.0], [0.3, 0.4]]
    assert clipped == [pytest.approx(pair, rel=1e-6) for pair in applied]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_window_without_a_loss_has_nothing_to_clip(algorithm: str) -> None:
    """By value it ended in torch's "Expected !nested_tensorlist[0].empty()"."""

    class Skips(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    module = Skips()
    quiet(max_epochs=1, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm).fit(module, numbers(2))
    assert (module.gradients, module.applied) == ([2.0], [pytest.approx(0.5, rel=1e-6)])


def test_a_module_may_clip_in_its_own_way() -> None:
    class Halves(Slope):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            given.append((gradient_clip_val, gradient_clip_algorithm))
            self.w.grad /= 2  # type: ignore[operator]

    given: list[Any] = []
    module = Halves()
    quiet(max_epochs=1, gradient_clip_val=9.0, gradient_clip_algorithm="value").fit(module, numbers(2))
    assert (given, module.applied) == ([(9.0, "value")] * 2, [0.5, 1.0])


# -- weights that training steps return --------------------------------------------------------------------


class Tokens(Slope):
    """Sums over the tokens of rows of different lengths (a 0 is padding): only the number of tokens weighs right."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = (batch != 0).sum()
        self.batches.append(batch.tolist())
        return {"loss": (self.w * batch).sum() / tokens, "weight": tokens}


ROWS = [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [5.0, 6.0, 0.0], [7.0, 0.0, 0.0], [8.0, 9.0, 1.0]]


def rows(batch_size: int = 1) -> DataLoader[Any]:
    return DataLoader(torch.tensor(ROWS, dtype=torch.float64), batch_size=batch_size)  # type: ignore[arg-type]


def mean_over_tokens(*lines: list[float]) -> float:
    tokens = [token for line in lines for token in line if token]
    return sum(tokens) / len(tokens)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(5, 1), (1, 5), (2, 3), (1, 9)])
def test_returned_weights_make_the_mean_over_tokens(batch_size: int, accumulate: int) -> None:
    module = Tokens()
    quiet(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, rows(batch_size))
    assert module.gradients == pytest.approx([mean_over_tokens(*ROWS)], rel=1e-14)


def test_a_closure_tells_the_loss_that_its_gradient_is_of() -> None:
    """It told the sum over the tokens, where the gradient was of their mean."""

    class Tells(Tokens):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            told.append(optimizer_closure().item())

    told: list[float] = []
    module = Tells()
    with torch.no_grad():
        module.w.fill_(1.0)
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, rows(2))
    assert told == pytest.approx([mean_over_tokens(*ROWS)], rel=1e-14)
    assert module.gradients == pytest.approx(told, rel=1e-14)


def tokens_on_ranks(accumulate: int) -> list[float]:
    module = Tokens()
    on_ranks(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, rows())
    return module.gradients


@pytest.mark.parametrize("world", [2, 3])
def test_returned_weights_are_summed_over_the_ranks(ranks: RankPool, world: int) -> None:
    expected = [mean_over_tokens(*ROWS[start : start + world]) for start in range(0, 5, world)]
    for gradients in ranks(world).run(tokens_on_ranks, 1):
        assert gradients == pytest.approx(expected, rel=1e-14)
    for gradients in ranks(world).run(tokens_on_ranks, 5):
        assert gradients == pytest.approx([mean_over_tokens(*ROWS)], rel=1e-14)


def test_a_window_without_weight_has_no_gradient() -> None:
    class Nothing(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).sum(), "weight": 0}

    module = Nothing()
    quiet(max_epochs=1).fit(module, numbers(1))
    assert module.gradients == [0.0]


@pytest.mark.parametrize("weighed", [0, 1, 2])
def test_weights_for_some_micro_batches_only_are_refused(weighed: int) -> None:
    class Sometimes(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.w * batch).mean()
            return {"loss": loss, "weight": 2.0} if batch_idx == weighed else loss

    with pytest.raises(MisconfigurationException, match='"weight" for some micro-batches'):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(Sometimes(), numbers(4))


# -- skipped micro-batches ---------------------------------------------------------------------------------


class Skips(Slope):
    """Returns None for the numbers of ``skipped``."""

    def __init__(self, *skipped: float, weigh: bool = False) -> None:
        super().__init__(lr=1.0)
        self.skipped = skipped
        self.weigh = weigh

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch.item() in self.skipped:
            return None
        loss = (self.w * batch).mean()
        return {"loss": loss, "weight": 1.0} if self.weigh else loss


@pytest.mark.filterwarnings("ignore")
def test_none_skips_a_micro_batch() -> None:
    module = Skips(2.0)
    result = quiet(max_epochs=1).fit(module, numbers(3))
    assert (module.gradients, module.w.item(), result.global_step) == ([1.0, 3.0], -4.0, 3)


def skip_on_ranks(weigh: bool, skipped: tuple[float, ...]) -> tuple[list[float], float]:
    module = Skips(*skipped, weigh=weigh)
    on_ranks(max_epochs=1).fit(module, numbers(6))
    return module.gradients, module.w.item()


@pytest.mark.parametrize(("weigh", "expected"), [(False, [0.5, 1.5, 5.5]), (True, [1.0, 3.0, 5.5])])
def test_none_on_one_rank_does_not_stop_the_others(ranks: RankPool, weigh: bool, expected: list[float]) -> None:
    """A rank that returned None in the place of a weight left the others waiting for its weight."""
    results = ranks(2).run(skip_on_ranks, weigh, (2.0, 4.0), timeout=30)
    assert results == [(expected, -sum(expected))] * 2


def test_none_on_all_ranks_leaves_the_weights_as_they_are(ranks: RankPool) -> None:
    assert ranks(2).run(skip_on_ranks, True, (1.0, 2.0, 5.0, 6.0), timeout=30) == [([3.5], -3.5)] * 2


def test_minus_one_from_on_train_batch_start_ends_the_epoch() -> None:
    class Short(Slope):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

        def on_train_epoch_end(self) -> None:
            ended.append(self.current_epoch)

    module, ended = Short(), []  # type: ignore[var-annotated]
    result = quiet(max_epochs=2).fit(module, numbers(5))
    assert (module.batches, ended, result.epochs) == ([[1.0], [2.0]] * 2, [0, 1], 2)


# -- empty shares ------------------------------------------------------------------------------------------


class Remembers(Slope):
    """Has everything that a borrowed sample could leave a trace in."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.metric = MeanMetric()
        self.draws: list[bool] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = torch.random.get_rng_state()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.draws.append(not torch.equal(self.before, torch.random.get_rng_state()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.sum()
        self.metric(batch.mean())
        torch.rand(1)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log("mean", batch.mean(), on_step=False, on_epoch=True)
        self.log("sum", batch.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return (self.w * batch).mean()

    def on_train_epoch_end(self) -> None:
        self.log("each rank counts once", float(self.global_rank))


def borrow(samples: int) -> dict[str, Any]:
    module = Remembers()
    # rank 0's buffers would come to all ranks
    trainer = quiet(strategy=DDPStrategy(broadcast_buffers=False), devices=2, max_epochs=1)
    trainer.fit(module, numbers(samples))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"gradients": module.gradients, "seen": module.seen.item(), "metrics": metrics, "draws": module.draws}


def test_a_borrowed_sample_leaves_no_trace(ranks: RankPool) -> None:
    """3 samples on 2 ranks: rank 1 has none for the second window."""
    zero, one = ranks(2).run(borrow, 3)
    assert zero["gradients"] == one["gradients"] == [1.5, 3.0]
    assert (zero["seen"], one["seen"]) == (4.0, 2.0)
    assert (zero["draws"], one["draws"]) == ([True, True], [True])
    for found in (zero["metrics"], one["metrics"]):
        assert found["mean"] == pytest.approx(2.0)
        assert found["sum"] == pytest.approx(6.0)
        assert found["metric_epoch"] == pytest.approx(2.0)
        assert found["each rank counts once"] == 0.5


def test_a_rank_that_only_borrows_has_its_metrics_too(ranks: RankPool) -> None:
    """It had not logged the metric, and the others were told that it is missing there."""
    for found in ranks(2).run(borrow, 1):
        assert found["gradients"] == [1.0]
        assert found["metrics"]["metric_epoch"] == 1.0
        assert found["metrics"]["mean"] == 1.0


def uneven(make: Callable[[], Any], accumulate: int) -> list[float]:
    module = Slope()
    on_ranks(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, make())
    return module.gradients


@pytest.mark.everyday
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_uneven_batches_weigh_right_on_ranks(ranks: RankPool, world: int, stream: bool) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Stream(11), batch_size=2) if stream else numbers(11, 2)

    for gradients in ranks(world).run(uneven, make, 9):
        assert gradients == pytest.approx([6.0], rel=1e-14)
