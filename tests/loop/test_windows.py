"""What a window's gradient is: accumulation, uneven batches, weights, skipped micro-batches, empty shares, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.utilities import CombinedLoader
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, Stream, acting, heard, numbers, on_ranks, quiet
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
    late = Slope()  # the epochs before its first one are as they are
    quiet(max_epochs=2, accumulate_grad_batches={1: 2}).fit(late, numbers(2))
    assert late.gradients == [1.0, 2.0, 1.5]


@pytest.mark.parametrize("stream", [False, True])
def test_an_uneven_last_batch_weighs_by_its_samples(stream: bool) -> None:
    loader = DataLoader(Stream(5), batch_size=2) if stream else numbers(5, 2)
    module = Slope()
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, loader)
    assert module.gradients == pytest.approx([3.0], rel=1e-15)


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
    module = Skips(1.0)
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

    told: list[float] = []
    module = acting(Tokens, optimizer_step=lambda m, epoch, at, by, closure: told.append(closure().item()) or True)
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
    module = acting(training_step=lambda m, batch, at: {"loss": (m.w * batch).sum(), "weight": 0})
    quiet(max_epochs=1).fit(module, numbers(1))
    assert module.gradients == [0.0]


@pytest.mark.parametrize("weighed", [0, 1, 2])
def test_weights_for_some_micro_batches_only_are_refused(weighed: int) -> None:
    def step(module: Slope, batch: Any, at: int) -> Any:
        return {"loss": (module.w * batch).mean(), "weight": 2.0} if at == weighed else None

    with pytest.raises(MisconfigurationException, match='"weight" for some micro-batches'):
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(acting(training_step=step), numbers(4))


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
    ended: list[int] = []
    module = acting(
        on_train_batch_start=lambda m, batch, at: -1 if at == 2 else None,
        on_train_epoch_end=lambda m: ended.append(m.current_epoch),
    )
    result = quiet(max_epochs=2).fit(module, numbers(5))
    assert (module.batches, ended, result.epochs) == ([[1.0], [2.0]] * 2, [0, 1], 2)


# -- empty shares ------------------------------------------------------------------------------------------


def uneven(stream: bool) -> list[float]:
    module = Slope()
    data = DataLoader(Stream(11), batch_size=2) if stream else numbers(11, 2)
    on_ranks(max_epochs=1, accumulate_grad_batches=9).fit(module, data)
    return module.gradients


@pytest.mark.everyday
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_uneven_batches_weigh_right_on_ranks(ranks: RankPool, world: int, stream: bool) -> None:
    for gradients in ranks(world).run(uneven, stream):
        assert gradients == pytest.approx([6.0], rel=1e-14)


# -- Loaders side by side that are cut unevenly: each weighs by its own samples where training_step says which los


class Two(LightningModule):
    """A weight for each loader, whose gradient is the mean of the loader's samples."""

    def __init__(self, by_loader: bool = True) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros((), dtype=torch.float64)) for name in "ab"})
        self.by_loader = by_loader
        self.gradients: list[tuple[float, ...]] = []
        self.seen: dict[str, list[float]] = {"a": [], "b": []}
        self.shown: list[Any] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        losses: dict[str, Tensor | None] = {"a": None, "b": None}
        for name, part in batch.items():
            if part is not None:
                self.seen[name].extend(part.tolist())
                losses[name] = (self.weights[name] * part).mean()
        if self.by_loader:
            return {"loss": losses}
        return sum(loss for loss in losses.values() if loss is not None)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(outputs["loss"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.weights.values()]
        self.gradients.append(tuple(0.0 if grad is None else grad.item() for grad in grads))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loaders(mode: str, kind: str, batch_size: int, sizes: tuple[int, int]) -> Any:
    made: dict[str, Any] = {}
    for name, count in zip("ab", sizes, strict=True):
        numbers = torch.arange(1, count + 1, dtype=torch.float64)
        stream = kind == "streams" or (kind == "one stream" and name == "b")
        made[name] = DataLoader(Stream(count) if stream else numbers, batch_size)  # type: ignore[arg-type]
    return made if mode == "dict" else CombinedLoader(made, mode)  # type: ignore[arg-type]


def fitted(mode: str, kind: str, sizes: tuple[int, int], accumulate: int) -> tuple[list[Any], dict[str, list[float]]]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module = Two()
    start = on_ranks if world > 1 else quiet
    data = loaders(mode, kind, 2 // world if accumulate == 1 else 1, sizes)
    start(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, data)
    assert all(isinstance(loss, Tensor) and loss.ndim == 0 and not loss.requires_grad for loss in module.shown)
    return module.gradients, module.seen


@pytest.mark.everyday
@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (5, 2), (1, 6)])
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("indexed", mode) for mode in ("dict", "min_size", "max_size")),
        # in the other modes each rank begins a stream anew, or ends, when its own part has ended
        ("one stream", "max_size"),
        ("streams", "max_size"),
    ],
)
def test_losses_by_loader_are_those_of_one_process(
    ranks: RankPool, mode: str, kind: str, sizes: tuple[int, int]
) -> None:
    """3 and 4 samples on two ranks: the second rank was given a sample of `a` that the first had, too."""
    expected, seen = fitted(mode, "indexed", sizes, 1)
    found = ranks(2).run(fitted, mode, kind, sizes, 1, timeout=40)
    for gradients, _ in found:
        assert gradients == [pytest.approx(each, abs=1e-12) for each in expected]
    for name in "ab":
        assert sorted(value for _, theirs in found for value in theirs[name]) == sorted(seen[name])


def test_losses_by_loader_over_a_window() -> None:
    gradients, _ = fitted("max_size", "indexed", (2, 3), 3)
    assert gradients == [(1.5, 2.0)]


def named(by_loader: bool, sizes: tuple[int, int]) -> list[str]:
    fit = lambda: on_ranks(max_epochs=2).fit(Two(by_loader), loaders("dict", "indexed", 1, sizes))  # noqa: E731
    return heard(fit, "split unevenly")


def test_one_loss_for_loaders_that_are_cut_unevenly_is_named(ranks: RankPool) -> None:
    zero, one = ranks(2).run(named, False, (3, 4))
    assert (len(zero), one) == (1, [])
    assert '{"loss": {"a": loss_a, "b": loss_b}}' in zero[0]
    assert ranks(2).run(named, True, (3, 4)) == ranks(2).run(named, False, (4, 4)) == [[], []]


def test_losses_in_another_nest_than_the_batches_are_refused() -> None:
    wrong = acting(Two, training_step=lambda m, *_: {"loss": {"a": m.weights["a"] * 1.0}})
    with pytest.raises(Exception, match="one loss per loader in the structure of the batch"):
        quiet(max_epochs=1).fit(wrong, loaders("dict", "indexed", 1, (2, 2)))
