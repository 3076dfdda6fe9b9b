"""What is around DeepSpeed's engine: callbacks, profilers, failures, hangs, its launcher, what it leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import callbacks as all_callbacks
from lockstep.callbacks.base import Callback
from lockstep.extensions.deepspeed.strategy import DeepSpeedStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Normed, Plain, rows
from tests.extensions.deepspeed.test_deepspeed import Deep, errors
from tests.loop.pieces import quiet
from tests.tools.fresh import ended, python
from tests.tools.pool import RankPool

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]

# -- callbacks and the like ------------------------------------------------------------------------------------


class Clamped(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class Validated(Deep):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.losses(batch[0]).mean())


def trained(kind: Callable[[], Plain], callbacks: list[Callable[[], Callback]], strategy: str) -> list[torch.Tensor]:
    """The weights after a fit, and what was validated last."""
    world = 1 if strategy == "auto" else 2
    trainer = quiet(strategy=strategy, devices=world, max_epochs=4, callbacks=[make() for make in callbacks])
    trainer.seed = 5
    torch.manual_seed(1)
    trainer.fit(kind(), rows(12)(4 // world), rows(12)(4 // world) if kind is Validated else None)
    whole = [value.clone() for _, value, _ in trainer.strategy.whole_parameters()]
    return [*whole, *trainer.callback_metrics.values()]


def of_extras(name: str, *arguments: Any, **options: Any) -> Callback:
    return getattr(all_callbacks, name)(*arguments, **options)  # type: ignore[no-any-return]


AVERAGES: list[list[Callable[[], Callback]]] = [
    [partial(of_extras, "StochasticWeightAveraging", 0.01, swa_epoch_start=1)],
    [partial(of_extras, "WeightAveraging", avg_fn=lambda average, new, count: 0.9 * average + 0.1 * new)],
    [partial(of_extras, "EMAWeightAveraging")],
]
NEEDS_EXTRAS = pytest.mark.extension("extras")
CHANGES = [
    pytest.param(Clamped, [], id="clamp"),
    *(
        pytest.param(Validated, average, id=name, marks=NEEDS_EXTRAS)
        for name, average in zip(("swa", "average", "ema"), AVERAGES, strict=True)
    ),
]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("kind", "callbacks"), CHANGES)
def test_what_is_done_to_parameters_in_place_counts(ranks: RankPool, kind: Any, callbacks: Any) -> None:
    """The engine's own float32 weights took the place of what was done, with the next step and in checkpoints."""
    (expected,) = ranks(1).run(trained, kind, callbacks, "auto", group=False)
    for found in ranks(2).run(trained, kind, callbacks, "deepspeed_stage_2", timeout=100):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Saves(Deep):
    folder = ""

    def on_train_epoch_end(self) -> None:
        if self.folder and self.current_epoch == 1:
            self.trainer.save_checkpoint(f"{self.folder}/half.ckpt")


def resumed(folder: str) -> list[list[torch.Tensor]]:
    """The weights of a fit with an average, and of one that goes on from its middle."""
    made = []
    for start in (None, f"{folder}/half.ckpt"):
        trainer = quiet(
            strategy="deepspeed_stage_2", devices=2, max_epochs=4, callbacks=[of_extras("EMAWeightAveraging")]
        )
        trainer.seed = 5
        torch.manual_seed(1)
        module = Saves()
        module.folder = "" if start else folder
        trainer.fit(module, rows(12)(2), ckpt_path=start)
        made.append([value.clone() for _, value, _ in trainer.strategy.whole_parameters()])
    return made


@NEEDS_EXTRAS
def test_an_average_goes_on_from_a_checkpoint_in_parts(ranks: RankPool, tmp_path: Path) -> None:
    for whole, half in ranks(2).run(resumed, str(tmp_path), timeout=100):
        for mine, theirs in zip(half, whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@NEEDS_EXTRAS
def test_callbacks_that_change_parameters_are_refused_where_those_are_not_trained(ranks: RankPool) -> None:
    for arguments, precision, reason in (
        ({"stage": 3}, "32-true", "in stage 3"),
        ({"stage": 2}, "bf16-true", "precision='bf16-true'"),
    ):
        flags = [{"precision": precision, "callbacks": [make() for make in average]} for average in AVERAGES]
        (said,) = ranks(1).run(errors, [(Deep, arguments, each) for each in flags], timeout=100)
        for text, name in zip(said, ("StochasticWeight", "Weight", "EMAWeight"), strict=True):
            assert f"DeepSpeedStrategy with {name}Averaging, which changes parameters: " in text
            assert reason in text
    pruning = of_extras("ModelPruning", "l1_unstructured", amount=0.5)
    ((text,),) = ranks(1).run(errors, [(Deep, {"stage": 2}, {"callbacks": [pruning]})], timeout=100)
    assert "DeepSpeedStrategy with ModelPruning: the callback replaces the parameters" in text


def synchronized(stage: int, length: int) -> EquivalenceReport:
    # in 32 bits the deviations of two samples take away digits
    flags = {"precision": "32-true", "tolerance": 1e-5, "sync_batchnorm": True, "devices": 2, "batch_size": 2}
    return check_equivalence(Normed, rows(length), strategy=DeepSpeedStrategy(stage=stage), **flags)


@pytest.mark.parametrize("stage", [2, 3])
def test_synchronized_batchnorm_is_that_of_one_process(ranks: RankPool, stage: int) -> None:
    """With shares that are uneven or empty."""
    for report in ranks(2).run(synchronized, stage, 25, timeout=100):
        assert report, report


# -- a module that stage 3 has left in parts -------------------------------------------------------------------


def left_in_parts() -> list[str]:
    module, said = Deep(), []
    trained_by = quiet(strategy="deepspeed_stage_3", devices=2, max_steps=1)
    trained_by.fit(module, rows(8)(2))
    for strategy in ("ddp", "fsdp", "deepspeed_stage_2"):
        try:
            quiet(strategy=strategy, devices=2, max_steps=1).fit(module, rows(8)(2))
        except MisconfigurationException as error:
            said.append(str(error))
    quiet(strategy="deepspeed_stage_3", devices=2, max_steps=1).fit(module, rows(8)(2))
    return said


def test_a_module_that_stage_3_has_left_in_parts_is_not_given_to_another_engine(ranks: RankPool) -> None:
    for said in ranks(2).run(left_in_parts, timeout=100):
        for text, name in zip(said, ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy"), strict=True):
            assert f"Deep is still partitioned after a fit with DeepSpeed's stage 3, but {name} needs full" in text
            assert 'continue with strategy="deepspeed_stage_3"' in text


# -- failures and hangs ----------------------------------------------------------------------------------------


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
import lockstep

class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    def training_step(self, batch, batch_idx):
        odd = self.trainer.global_rank == 1 and batch_idx == 1
        if odd and WHAT == "raise":
            raise ValueError("of rank 1")
        if not odd and WHAT == "gather":
            self.all_gather(torch.zeros(1))
        for layer in self.layers[: 2 if odd and WHAT == "skip" else 3]:
            batch = layer(batch)
        return batch.mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

STRATEGY, WHAT = sys.argv[1:3]
flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lockstep.Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=STRATEGY, **flags)
trainer.fit(Module(), DataLoader(torch.randn(16, 8), batch_size=2))
print(f"rank {trainer.global_rank} of {trainer.world_size} has made {trainer.global_step} steps\\n", end="", flush=True)
"""


ENDS = [
    ("deepspeed_stage_2", "raise", "lockstep: rank 1 failed first, at ", "ValueError: of rank 1"),
    ("deepspeed_stage_2", "skip", "lockstep: the ranks' calls do not match: ", "all_reduce"),
    ("deepspeed_stage_3", "skip", "lockstep: the ranks' calls do not match: ", "(training_step, batch 1)"),
    ("deepspeed_stage_3", "gather", "lockstep: the ranks", "(training_step, batch 1)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "what", "first", "holds"), ENDS)
def test_the_last_line_is_the_cause(tmp_path: Path, strategy: str, what: str, first: str, holds: str) -> None:
    """A rank that raises, that skips a layer, that leaves out a collective."""
    (tmp_path / "train.py").write_text(SCRIPT)
    written = python("train.py", strategy, what, folder=tmp_path, seconds=200).stderr.rstrip("\n")
    last = written.split("\n")[-1]
    assert last.startswith(first), written
    assert holds in last
    assert str(tmp_path / "train.py") in last


@pytest.mark.slow
def test_deepspeeds_own_launcher_starts_a_script(tmp_path: Path) -> None:
    """It gives each rank --local_rank=N."""
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("sys.argv[1:3]", "(word for word in sys.argv[1:] if word[0] != '-')")
    )
    launcher = Path(sys.executable).parent / "deepspeed"
    words = ["--num_accelerators", "2", "train.py", "deepspeed_stage_2", "nothing"]
    done = ended([launcher, *words], tmp_path, 200, {**os.environ, "OMP_NUM_THREADS": "1"})
    for rank in (0, 1):
        assert f"rank {rank} of 2 has made 4 steps" in done.stdout, done.stderr
