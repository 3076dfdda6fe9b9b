"""SpikeDetection: which losses are spikes, what is written down, and that all ranks end together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule
from lockstep.callbacks import SpikeDetection, TrainingSpikeException
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.side_by_side import OURS, theirs, trainer
from tests.loop.pieces import on_ranks, quiet
from tests.tools.pool import RankPool

NAN, INF = math.nan, math.inf


def losses(kit: Any, as_dict: bool = False) -> Any:
    """A module whose loss is its batch."""

    class Losses(kit.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.w * 0 + batch.mean()
            return {"loss": loss} if as_dict else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Losses()


def told(values: list[float]) -> DataLoader[Any]:
    return DataLoader(torch.tensor(values, dtype=torch.float64), batch_size=1)  # type: ignore[arg-type]


CASES: list[tuple[list[float], dict[str, Any]]] = [
    ([1.0, 1.1, 0.9, 9.0, 1.0], {}),
    ([1.0, 1.1, 0.9, 2.5, 1.0], {}),
    ([1.0, 1.1, 0.9, 2.5, 1.0], {"rtol": 1.0}),
    ([1.0, 1.1, 0.9, 2.5, 1.0], {"rtol": None, "atol": 1.5}),
    ([1.0, 1.1, 0.9, 2.5, 1.0], {"rtol": 0.1, "atol": 5.0}),
    ([1.0, 1.1, 0.9, 2.5, 1.0], {"rtol": None, "atol": None}),
    ([5.0, 5.0, 1.0, 5.0], {"mode": "max", "rtol": 0.5}),
    ([5.0, 50.0, 0.5, 5.0], {"mode": "max"}),
    ([1.0, 90.0, 1.0, 90.0], {"warmup": 3}),
    ([1.0, 4.0, 16.0, 60.0, 200.0], {"window": 1}),
    ([1.0, 4.0, 16.0, 60.0, 200.0], {"window": 3, "rtol": 5.0}),
    ([1.0, NAN, 1.0], {}),
    ([1.0, INF, 1.0], {}),
    ([1.0, NAN, 1.0, 9.0], {"finite_only": False}),
    ([1.0, INF, 1.0, 9.0], {"finite_only": False}),
    ([1.0, -INF, 1.0, 9.0], {"finite_only": False}),
    ([NAN, 1.0, 1.0, 9.0], {}),
    ([9.0, 1.0], {"warmup": 0}),
]


@pytest.mark.everyday(9)
@pytest.mark.parametrize(("values", "settings"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_spike_is_where_lightning_finds_one(
    values: list[float], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        path = tmp_path / f"{kit.name}.json"
        spike = kit.callbacks.SpikeDetection(exclude_batches_path=path, **settings)
        error = None
        try:
            trainer(kit, callbacks=[spike], max_epochs=2).fit(losses(kit), told(values))
        except RuntimeError as raised:
            error = type(raised).__name__, str(raised)
        written = json.loads(path.read_text()) if path.exists() else None
        found.append((error, written, spike.bad_batches))
    assert found[0] == found[1]


@pytest.mark.parametrize("as_dict", [True, False])
def test_it_raises_and_writes_the_batch_and_the_one_before(tmp_path: Path, as_dict: bool) -> None:
    run = quiet(callbacks=SpikeDetection(), max_epochs=1, default_root_dir=tmp_path)
    with pytest.raises(TrainingSpikeException, match="batch 3") as caught:
        run.fit(losses(OURS, as_dict), told([1.0, 1.1, 0.9, 9.0, 1.0]))
    assert caught.value.batch_idx == 3
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [2, 3]


def test_a_folder_for_the_file_is_made(tmp_path: Path) -> None:
    spike = SpikeDetection(exclude_batches_path=tmp_path / "a" / "b")
    with pytest.raises(TrainingSpikeException):
        quiet(callbacks=spike, max_epochs=1).fit(losses(OURS), told([1.0, 9.0]))
    assert json.loads((tmp_path / "a" / "b" / "skip_batches.json").read_text()) == [0, 1]


def test_what_was_seen_goes_on_after_a_resume(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "run.ckpt")

    data = told([1.0, 1.1, 0.9, 2.5, 1.0])
    whole = SpikeDetection(rtol=1.6, exclude_batches_path=tmp_path)
    quiet(callbacks=[whole, Save()], max_epochs=1).fit(losses(OURS), data)
    resumed = SpikeDetection(exclude_batches_path=tmp_path)  # a checkpoint does not say where to write
    quiet(callbacks=resumed, max_epochs=1).fit(losses(OURS), data, ckpt_path=tmp_path / "run.ckpt")
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.rtol == 1.6
    assert resumed.state_dict()["recent"] == [1.0, 1.1, 0.9, 2.5, 1.0]


def test_a_batch_without_a_loss_is_not_judged(tmp_path: Path) -> None:
    class Skips(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.w * 0 + batch.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    spike = SpikeDetection(exclude_batches_path=tmp_path)
    with pytest.warns(UserWarning, match="nothing to check"):
        quiet(callbacks=spike, max_epochs=1).fit(Skips(), told([1.0, 90.0, 1.2]))
    assert spike.state_dict()["recent"] == [1.0, 1.2]


def spike_on_one_rank(folder: str) -> Any:
    """Rank 1 alone sees a leap, at its third batch."""
    spike = SpikeDetection(exclude_batches_path=f"{folder}/skip.json")
    values = [1.0, 1.0, 1.1, 1.1, 1.0, 30.0, 1.0, 1.0]
    try:
        on_ranks(callbacks=spike, max_epochs=1).fit(losses(OURS), told(values))
    except TrainingSpikeException as error:
        return dist.get_rank(), str(error), spike.bad_batches
    return None


def test_a_spike_on_one_rank_ends_all(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2).run(spike_on_one_rank, str(tmp_path), timeout=40)
    assert found == [(rank, "Training spike detected in batch 2", [1, 2]) for rank in range(2)]
    assert json.loads((tmp_path / "skip.json").read_text()) == [1, 2]


def test_wrong_arguments() -> None:
    with pytest.raises(MisconfigurationException, match="mode='least'"):
        SpikeDetection(mode="least")  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="window=0"):
        SpikeDetection(window=0)


def test_a_checkpoints_path_is_not_where_spikes_are_written(tmp_path: Path) -> None:
    detection = SpikeDetection(exclude_batches_path=tmp_path / "own.json")
    detection.load_state_dict({**SpikeDetection().state_dict(), "bad_batches_path": "/elsewhere.json"})
    assert detection.exclude_batches_path == str(tmp_path / "own.json")
