"""Runs that go on in the middle of an epoch with loaders that have changed: what can be kept is, the rest is told."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

import lockstep
from lockstep.data.counting import LoaderOrder
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import SizedStream, Stream, indices, numbers
from tests.data.test_feed_elsewhere import in_all, play

Make = Callable[[], Any]


class Seen(lockstep.LightningModule):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        leaves = [batch["a"]] if isinstance(batch, dict) else [batch]
        self.seen += [index for leaf in leaves for index in indices(leaf)]
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(lockstep.Callback):
    """Saves behind a batch and ends the fit there."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.number:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(make: Make, ckpt: Path | None = None, stop: tuple[Path, int] | None = None, **flags: Any) -> list[int]:
    module = Seen()
    trainer = lockstep.Trainer(
        max_epochs=1,
        min_epochs=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[] if stop is None else [Stop(*stop)],
        **flags,
    )
    trainer.fit(module, make(), ckpt_path=ckpt)
    return module.seen


def resumed(path: Path, first: Make, second: Make, before: Any, now: Any) -> tuple[list[int], list[str]]:
    """What both attempts have seen, and what the second one was warned of."""
    lockstep.seed_everything(1)
    seen = fit(first, stop=(path, 3), **before)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen += fit(second, ckpt=path, **now)
    return seen, [str(each.message) for each in told if "resume" in str(each.message).lower()]


def shuffled(n: int = 20, **arguments: Any) -> Make:
    return lambda: DataLoader(numbers(n), 4, **({"shuffle": True} | arguments))


@pytest.mark.parametrize(
    ("first", "second", "before", "now", "change"),
    [
        (shuffled(20), shuffled(24), {}, {}, "The samples of train_dataloader are now 24 instead of 20:"),
        (
            shuffled(),
            shuffled(shuffle=False),
            {},
            {},
            "The samples of train_dataloader are now in order instead of shuffled:",
        ),
        (shuffled(), shuffled(), {"order": "torch"}, {}, "are now shuffled instead of shuffled as torch does:"),
        (shuffled(), shuffled(), {}, {"order": "torch"}, "are now shuffled as torch does instead of shuffled:"),
        (
            shuffled(),
            lambda: {"a": shuffled()(), "b": shuffled()()},
            {},
            {},
            "There are 2 training loaders, but there were 1:",
        ),
        (
            lambda: {"a": shuffled()(), "b": DataLoader(Stream(20), 4, num_workers=2)},
            lambda: {"a": shuffled()(), "b": DataLoader(Stream(20), 4)},
            {},
            {},
            "The samples of train_dataloader[1] are now read by 1 worker instead of 2:",
        ),
    ],
)
def test_a_change_of_the_order_within_an_epoch_is_named(
    tmp_path: Path, first: Make, second: Make, before: Any, now: Any, change: str
) -> None:
    told = resumed(tmp_path / "a.ckpt", first, second, before, now)[1]
    assert [change in each for each in told] == [True]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (shuffled(), shuffled()),
        (shuffled(shuffle=False), shuffled(24, shuffle=False)),  # what was seen comes first in both
        (
            shuffled(shuffle=False, sampler=RandomSampler(range(20))),
            shuffled(),
        ),
        (shuffled(), shuffled(num_workers=1)),
        (lambda: DataLoader(SizedStream(20), 4), lambda: DataLoader(SizedStream(24), 4)),
        (lambda: DataLoader(SizedStream(20), 4), lambda: DataLoader(SizedStream(20), 4, num_workers=1)),
    ],
)
def test_of_an_order_that_is_the_same_nothing_is_said(tmp_path: Path, first: Make, second: Make) -> None:
    seen, told = resumed(tmp_path / "a.ckpt", first, second, {}, {})
    assert told == []
    assert sorted(seen) == list(range(len(seen)))


def test_a_checkpoint_that_does_not_tell_of_orders_goes_on_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    lockstep.seed_everything(1)
    fit(shuffled(20), stop=(path, 3))
    saved = torch.load(path, weights_only=True)
    assert saved["lockstep"]["plan"].pop("orders") == [["shuffled", 20, 0]]
    torch.save(saved, path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(shuffled(24), ckpt=path)
    assert not any("before" in str(each.message) for each in told)


@pytest.mark.parametrize("state", [["shuffled", 20], ["shuffled", "20", 0], "shuffled"])
def test_a_checkpoint_with_orders_that_cannot_be_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="the order of a loader is"):
        LoaderOrder.load(state)


# -- a stream's workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", [Stream, SizedStream])
@pytest.mark.parametrize("workers", [(2, 0, 0), (0, 2, 3), (2, 3, 0)])
def test_a_stream_goes_on_with_other_workers(kind: Any, workers: tuple[int, ...], size: int) -> None:
    makes = [lambda count=count: DataLoader(kind(61), 4, num_workers=count) for count in workers]
    first = play(makes[0], size, stop=3)
    second = play(makes[1], size, saved=first.plan, stop=2)
    third = play(makes[2], size, saved=second.plan)
    assert in_all(first, second, third) == list(range(61))


def test_a_fit_goes_on_with_other_workers_and_says_so(tmp_path: Path) -> None:
    def make(workers: int) -> Make:
        return lambda: DataLoader(Stream(40), 4, num_workers=workers)

    seen, told = resumed(tmp_path / "a.ckpt", make(2), make(0), {}, {})
    assert sorted(seen) == list(range(40))
    assert [each.startswith("trainer.fit: the iterable data set is read by") for each in told] == [True]


def test_a_stream_that_shards_itself_over_other_workers_is_refused() -> None:
    first = play(lambda: DataLoader(Stream(61, sharded=True), 4, num_workers=2), 1, stop=3)
    told = ""
    try:
        play(lambda: DataLoader(Stream(61, sharded=True), 4, num_workers=3), 1, saved=first.plan)
    except MisconfigurationException as error:
        told = str(error)
    gc.collect()  # the error's frames held the workers
    assert "Stream shards itself over the loader's workers" in told
    assert "num_workers was changed from 2 to 3" in told
