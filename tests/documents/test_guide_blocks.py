"""The code blocks of the guide: none is missing, and those on strategies, clusters, data and logging run."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import LightningModule
from tests.documents import guide
from tests.loop.pieces import QUIET
from tests.tools.fresh import PYTHONPATH, ended
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(200)

OF_THE_GUIDE = """
    c47d1a498c4f06cb 1b2aac7f0005afba 58f9324117e4878e 818c47a970b0bed9 6b8685107d226bc0 137f7873d95cb135
    6a6438267bd709b9 42c55e5959ae68c7 42c55e5959ae68c7 9ef757f3178e2acb 94ae0742872e0791 f261ad2d2bc8cde1
    c980f77c4b992cb8 1e10646fe90b8e56 1a21204de5648f26 8c098b3eb19a571a baf3765fd34d2d01 d174360456dc3b82
    0da5fec16fed1db7 d118404ae22ecd68 412a030b7c758495 b1ed41f9633bff07 89cf1fff459a7d0c c7c9f0f04b721d5e
    0ad16238e4a0a6b7 b199fbf4f0c8e3c2
"""
"""`guide.digest` of every code block of the document, in its order."""


def test_every_code_block_of_the_guide_stands_here() -> None:
    expected = OF_THE_GUIDE.split()
    found = [guide.digest("".join(parts)) for parts in guide.BLOCKS]
    assert len(found) == len(expected)
    assert [number for number, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == []


def test_every_part_of_a_block_is_run_by_a_test() -> None:
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "extensions")
    tests = "".join(path.read_text() for folder in folders for path in folder.rglob("test_*_blocks.py"))
    names = [name for name, value in vars(guide).items() if name.isupper() and isinstance(value, str)]
    assert {text for block in guide.BLOCKS for text in block} == {getattr(guide, name) for name in names}
    assert [name for name in names if not re.search(rf"guide\.{name}\b", tests)] == []


class Model(LightningModule):
    """What the guide leaves out."""

    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), self.norm(6)) for _ in range(2)))
        self.train_dataset = TensorDataset(torch.randn(256, 6, generator=torch.Generator().manual_seed(1)))
        self.batch_size = 1
        self.saved = 0

    def compute_loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.layers(batch[0].to(self.layers[0][0].weight.dtype)).float().square().mean()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.compute_loss(batch)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=8 * self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def save_artifacts(self) -> None:
        self.saved += 1


class Normed(Model):
    norm = nn.BatchNorm1d


def run(block: str, most: int = 3, base: type[Model] = Model) -> list[tuple[int, Any, Any]]:
    """Run a block and then a fit by each Trainer that it makes: steps, devices asked for, the module."""
    made: list[lockstep.Trainer] = []

    def trainer(**flags: Any) -> lockstep.Trainer:
        world = dist.get_world_size() if dist.is_initialized() else 1
        changed = {"accelerator": "cpu", "devices": world, "num_nodes": 1}
        found = lockstep.Trainer(**{**QUIET, "max_steps": most, "max_epochs": 3, **flags, **changed})
        made.append(found)
        return found

    module = Model()
    names: dict[str, Any] = {"Trainer": trainer, "torch": torch, "DataLoader": DataLoader, "model": module}
    exec(textwrap.dedent(block).replace("lightning.pytorch", "lockstep"), names)
    if not made:
        trainer(strategy=names.get("strategy", "auto"))
    hooks = {name: value for name, value in names.items() if hasattr(LightningModule, name)}
    kind = type("Mine", (base,), hooks)
    results = []
    for each in made:
        module = kind()
        each.fit(module)
        results.append((each.global_step, type(each.strategy).__name__, module))
    return results


ON_RANKS = {
    "one node": (guide.SINGLE_NODE, ["DDPStrategy"]),
    "two nodes": (guide.TWO_NODES, ["DDPStrategy"]),
    "eight nodes": (guide.EIGHT_NODES_BY_HAND, ["DDPStrategy"]),
    "eight nodes of SLURM": (guide.EIGHT_NODES_OF_SLURM, ["DDPStrategy"]),
    "a cluster": (guide.CLUSTER, ["DDPStrategy"]),
    "fsdp": (guide.FSDP, ["FSDPStrategy"]),
    "fsdp configured": (guide.FSDP_CONFIGURED, ["FSDPStrategy"]),
    "fsdp's options": (guide.FSDP_OPTIONS, ["FSDPStrategy"]),
    "one first": (guide.ONE_FIRST, ["DDPStrategy"] * 3),
}


def strategies(block: str) -> list[tuple[int, str]]:
    return [(steps, kind) for steps, kind, _ in run(block)]


@pytest.mark.parametrize("name", ON_RANKS)
def test_blocks_on_strategies(ranks: RankPool, name: str) -> None:
    block, expected = ON_RANKS[name]
    for found in ranks(2).run(strategies, block, timeout=100):
        assert [kind for _, kind in found] == expected
        assert all(
            steps == (10 if "fast_dev_run" in block and number == 2 else 3) for number, (steps, _) in enumerate(found)
        )


def statistics(block: str) -> list[Tensor]:
    ((_, _, module),) = run(block, base=Normed)
    assert len({id(layer) for layer in module.modules() if isinstance(layer, nn.BatchNorm1d)}) == 2
    return [buffer.clone() for buffer in module.buffers()]


def test_the_block_on_synchronized_layers(ranks: RankPool) -> None:
    """Both ranks have the statistics over the samples of all, which are not those of rank 0's."""
    one, other = ranks(2).run(statistics, guide.SYNC_BATCHNORM, timeout=100)
    alone = ranks(2).run(statistics, guide.SINGLE_NODE, timeout=100)[0]
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(one, alone, strict=True))


def seen(block: str) -> tuple[int, int, float | None, int]:
    ((steps, _, module),) = run(block, -1)
    logged = module.trainer.callback_metrics.get("train_loss")
    return steps, module.saved, None if logged is None else float(logged), module.trainer.num_training_batches


@pytest.mark.parametrize("block", [guide.LOADER, guide.OWN_SAMPLER, guide.WORKERS])
def test_blocks_on_data(ranks: RankPool, block: str) -> None:
    """Each rank has half of the 256 samples, 4 batches an epoch, also where the sampler is the user's."""
    for steps, _, _, batches in ranks(2).run(seen, block, timeout=100):
        assert (steps, batches) == (12, 4)


def test_blocks_on_logging_and_ranks(ranks: RankPool) -> None:
    one, other = ranks(2).run(seen, guide.LOGS, timeout=100)
    assert one[2] == other[2] is not None
    completed = guide.RANKS.replace("return loss", "return self.compute_loss(batch)")
    assert [each[0] for each in ranks(2).run(seen, completed, timeout=100)] == [one[0]] * 2
    assert [each[1] for each in ranks(2).run(seen, guide.BARRIER, timeout=100)] == [3, 0]


@pytest.mark.parametrize(
    "name", ["CLIPPING", "BENCHMARK", pytest.param("TUNER", marks=pytest.mark.extension("extras"))]
)
def test_blocks_on_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`guide.CLIPPING`, `guide.BENCHMARK`, `guide.TUNER`"""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    block = getattr(guide, name)
    assert [steps for steps, _, _ in run(block)] == [3]


@pytest.mark.slow
def test_the_block_on_spawned_processes() -> None:
    names: dict[str, Any] = {}

    def trainer(**flags: Any) -> lockstep.Trainer:
        return lockstep.Trainer(**QUIET, max_steps=2, devices=2, **flags)

    exec(textwrap.dedent(guide.SPAWN), {"Trainer": trainer}, names)
    names["trainer"].fit(Model())
    assert names["trainer"].global_step == 2


TRAIN = """
from lockstep import Trainer
from tests.documents.test_guide_blocks import Model
from tests.loop.pieces import QUIET

trainer = Trainer(**QUIET, devices=1, max_steps=2)
trainer.fit(Model())
print("steps:", trainer.global_step)
"""


@pytest.mark.slow
def test_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(textwrap.dedent(guide.BATCH_SCRIPT).lstrip())
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # train.py takes its model from here
    done = ended(["bash", "job.sh"], tmp_path, 100, dict(os.environ))
    assert done.stdout.endswith("steps: 2\n"), done.stderr
