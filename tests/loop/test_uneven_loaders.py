"""Loaders side by side that are cut unevenly: each weighs by its own samples where training_step says which loss is
whose, and where it does not, that is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.utilities import CombinedLoader
from tests.loop.pieces import Stream, on_ranks, quiet
from tests.tools.pool import RankPool


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


def heard(by_loader: bool, sizes: tuple[int, int]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        on_ranks(max_epochs=2).fit(Two(by_loader), loaders("dict", "indexed", 1, sizes))
    return [str(warning.message) for warning in seen if "cut unevenly" in str(warning.message)]


def test_one_loss_for_loaders_that_are_cut_unevenly_is_named(ranks: RankPool) -> None:
    zero, one = ranks(2).run(heard, False, (3, 4))
    assert (len(zero), one) == (1, [])
    assert '{"loss": {"a": loss_a, "b": loss_b}}' in zero[0]
    assert ranks(2).run(heard, True, (3, 4)) == ranks(2).run(heard, False, (4, 4)) == [[], []]


class Wrong(Two):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": {"a": self.weights["a"] * 1.0}}


def test_losses_in_another_nest_than_the_batches_are_refused() -> None:
    with pytest.raises(Exception, match="one loss for each loader, in the structure of the batch"):
        quiet(max_epochs=1).fit(Wrong(), loaders("dict", "indexed", 1, (2, 2)))
