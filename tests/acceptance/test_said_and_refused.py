"""What was taken in silence and is refused, or told, by name; and what annotations show to those who read them."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lockstep import Trainer
from lockstep import callbacks as callbacks_module
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, numbers, quiet
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool


class ReturnsANumber(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 5


def test_a_number_from_a_step_by_hand_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`training_step` returned 5 \(int\)"):
        quiet(max_epochs=1).fit(ReturnsANumber(), numbers(2))


@pytest.mark.parametrize("kind", [Trainer, *(getattr(callbacks_module, name) for name in callbacks_module.__all__)])
def test_annotations_are_objects(kind: Any) -> None:
    """Texts were of no use to jsonargparse and to makers of configurations."""
    for name, parameter in inspect.signature(kind).parameters.items():
        assert not isinstance(parameter.annotation, str), name


# -- streams that shard themselves ---------------------------------------------------------------------------


class OfRank(IterableDataset[int]):
    """Each rank reads its own part, as webdataset's split_by_node gives it."""

    def __iter__(self) -> Any:
        return iter(float(number) for number in range(dist.get_rank(), 23, dist.get_world_size()))


def trained_on(use_distributed_sampler: bool) -> list[float]:
    module = Slope()
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1, use_distributed_sampler=use_distributed_sampler)
    trainer.fit(module, DataLoader(OfRank(), batch_size=4))
    return [number for batch in module.batches for number in batch]


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_each_sample_of_a_stream_that_shards_itself_is_seen_once(
    ranks: RankPool, use_distributed_sampler: bool
) -> None:
    """Half of them were seen."""
    found = ranks(2).run(trained_on, use_distributed_sampler)
    assert sorted(number for numbers in found for number in numbers) == list(range(23))


# -- a job of one task ---------------------------------------------------------------------------------------

JOB = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from lockstep import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(
    accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(Net(), DataLoader(torch.ones(8, 1), batch_size=1))
print("ended at step", trainer.global_step)
"""


def test_a_batch_script_of_one_task_without_srun_is_not_killed_by_its_signal(ranks: RankPool, tmp_path: Path) -> None:
    """``#SBATCH --signal=B:USR1@120`` and ``exec python train.py``: the run was killed, and nothing was saved."""
    names = ("JOB_ID", "NTASKS", "PROCID", "LOCALID", "NODEID", "JOB_NAME")
    slurm = {f"SLURM_{name}": value for name, value in zip(names, ("38", "1", "0", "0", "0", "train"), strict=True)}
    (tmp_path / "train.py").write_text(JOB)
    environ = {**slurm, "PATH": ""}  # no scontrol: it cannot be requeued
    (run,) = run_script(ranks, tmp_path / "train.py", folder=tmp_path, environ=environ)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "ended at step 8"
    assert f"{signal.SIGUSR1.name}: " in run.stderr
