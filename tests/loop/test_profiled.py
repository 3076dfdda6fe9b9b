"""The actions that a profiler is told of in a run, and that they are Lightning's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Callback
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.profilers.base import PassThroughProfiler, Profiler, SimpleProfiler
from lockstep.profilers.pytorch import PyTorchProfiler
from tests.aliases.surface import lightning
from tests.loop.pieces import Slope, Validated, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Notes(Profiler):
    """Notes the actions in order, and those that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.open: list[str] = []
        self.stages: list[str] = []
        self.told: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.stages.append(f"{stage} on {local_rank}")

    def start(self, action_name: str) -> None:
        assert action_name not in self.open
        self.open.append(action_name)

    def stop(self, action_name: str) -> None:
        self.open.remove(action_name)
        self.done.append(action_name)

    def describe(self) -> None:
        self.told.append("report")
        self.teardown(None)

    def teardown(self, stage: str | None) -> None:
        self.told.append("teardown")


def profiled(profiler: Profiler, start: Any = quiet, **flags: Any) -> Any:
    trainer = start(**flags)
    trainer.profiler = profiler
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_profiled_trains_the_same(accumulate: int) -> None:
    modules = Slope(lr=0.1), Slope(lr=0.1)
    flags: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.5}
    quiet(**flags).fit(modules[0], numbers(5))
    notes = Notes()
    profiled(notes, **flags).fit(modules[1], numbers(5))
    assert torch.equal(modules[0].w, modules[1].w)
    assert modules[0].applied == modules[1].applied
    windows = 2 * -(-5 // accumulate)
    assert notes.done.count("[LightningModule]Slope.configure_gradient_clipping") == windows
    assert notes.done.count("[LightningModule]Slope.optimizer_step") == windows


def test_a_batch_has_its_parts_inside() -> None:
    notes, inside, outside = Notes(), [], []  # type: ignore[var-annotated]
    module = acting(
        training_step=lambda *_: inside.append(list(notes.open)),
        on_train_batch_start=lambda *_: outside.append(list(notes.open)),
    )
    profiled(notes, max_epochs=1).fit(module, numbers(1))
    batch = ["run_training_epoch", "run_training_batch", "[Strategy]SingleDeviceStrategy.training_step"]
    assert inside == [batch]
    assert outside == [["run_training_epoch", "[LightningModule]Acting.on_train_batch_start"]]


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_the_actions_of_an_evaluation(call: str) -> None:
    names = ("validation_step", "test_step", "predict_step")
    module = acting(**{name: lambda m, batch, *_: batch for name in names})
    notes = Notes()
    getattr(profiled(notes), call)(module, numbers(3))
    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[call]
    name = {"validate": "[_EvaluationLoop].val", "test": "[_EvaluationLoop].test"}.get(
        call, "[_PredictionLoop].predict"
    )
    counts = Counter(notes.done)
    assert counts[f"[Strategy]SingleDeviceStrategy.{step}"] == 3
    assert counts[f"{name}_next"] >= 3
    assert notes.stages == [f"{call} on None"]


def test_nothing_of_it_stays_behind() -> None:
    trainer, module = profiled(Notes(), max_epochs=1), Validated()
    trainer.fit(module, numbers(2), numbers(1))
    step = trainer.fit_loop.step
    for owner in (trainer, trainer.strategy, trainer.fit_loop, step, step.update, trainer.hooks, module):
        assert not [name for name, value in vars(owner).items() if "Instruments" in repr(value)], owner
    assert step.update.module is module


def test_a_run_that_fails_is_left_clean() -> None:
    class Fails(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise KeyError("here")
            return super().training_step(batch, batch_idx)

    notes = Notes()
    trainer = profiled(notes, max_epochs=1)
    with pytest.raises(KeyError, match="here"):
        trainer.fit(Fails(), numbers(3))
    assert (notes.open, notes.told) == ([], ["teardown"])
    trainer.fit(Slope(), numbers(3))  # the next call's actions can start
    assert notes.told == ["teardown", "report", "teardown"]


def test_without_a_profiler_nothing_is_replaced() -> None:
    def look(module: Any, *_: Any) -> None:
        replaced.append("run" in vars(trainer.strategy) or "epoch" in vars(trainer.fit_loop))

    replaced: list[bool] = []
    for profiler in (PassThroughProfiler(), Notes()):
        trainer = profiled(profiler, max_epochs=1)
        trainer.fit(acting(training_step=look), numbers(1))
    assert replaced == [False, True]


def test_pytorch_records_the_training_of_a_run(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="ops", row_limit=-1)
    trainer = profiled(profiler, max_epochs=1, num_sanity_val_steps=2)
    trainer.fit(Validated(), numbers(6), numbers(2))
    text = (tmp_path / "fit-ops.txt").read_text()
    assert "Profile stats for: training_step" in text
    assert "Profile stats for: validation_step" in text  # two steps: all are recorded
    assert "aten::mul" in text
    assert "MulBackward0" in text
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 2


def test_a_fit_of_few_max_steps_was_not_recorded(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="ops", row_limit=-1)
    trainer = profiled(profiler, max_epochs=1, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(Slope(), numbers(100))
    assert "Profile stats for: training_step" in (tmp_path / "fit-ops.txt").read_text()


def report_of_rank(folder: str) -> list[str]:
    trainer = profiled(SimpleProfiler(dirpath=folder, filename="times"), on_ranks, max_epochs=1)
    trainer.fit(Slope(), numbers(4))
    return sorted(path.name for path in Path(folder).iterdir())


def test_every_rank_writes_its_own_report(tmp_path: Path, ranks: RankPool) -> None:
    ranks(2).run(report_of_rank, str(tmp_path), timeout=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-times-0.txt", "fit-times-1.txt"]
    for path in tmp_path.iterdir():
        assert "[Strategy]DDPStrategy.training_step" in path.read_text()


# -- against Lightning ----------------------------------------------------------------------------------------

HOOKS = sorted(
    name
    for name in vars(Callback)
    if name.startswith("on_") and name not in {"on_exception", "on_load_checkpoint", "on_test_batch_end"}
)
MISSING = {
    # lockstep asks for them before there is anything to time
    "[LightningModule]Model.configure_callbacks",
    # strategies have no hooks
    *(f"[Strategy]SingleDeviceStrategy.on_{point}" for point in ("train_start", "train_end", "train_batch_start")),
    *(f"[Strategy]SingleDeviceStrategy.on_validation_{point}" for point in ("start", "end")),
}


def _takes(names: list[str]) -> dict[str, Any]:
    """Methods that do nothing, and make a class override its base's."""
    return {name: (lambda self, *args, **kwargs: None) for name in names}


def overriding(package: Any) -> tuple[Any, Any, Any]:
    """A module, a data module and a callback of a package, that override what a trainer may call."""

    def parts(base: type) -> dict[str, Any]:
        return {name: None for name in HOOKS if hasattr(base, name)}

    def loader(self: Any) -> Any:
        return numbers(3)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None: ...

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).mean()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def passed_on(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch

    moves = dict.fromkeys(("on_before_batch_transfer", "transfer_batch_to_device"), passed_on)
    module_base, data_base, callback_base = package.LightningModule, package.LightningDataModule, package.Callback
    body = _takes(list(parts(module_base))) | _takes(["setup", "teardown"]) | moves
    body |= {"on_after_batch_transfer": passed_on, "training_step": training_step, "validation_step": validation_step}
    module = type("Model", (module_base,), {**body, "configure_optimizers": configure_optimizers})()
    module.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    states = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    data_body = _takes(["setup", "teardown"]) | states | {"train_dataloader": loader, "val_dataloader": loader}
    data = type("Data", (data_base,), data_body)()
    callback = type("Calls", (callback_base,), _takes(list(parts(callback_base))) | _takes(["setup", "teardown"]))()
    return module, data, callback


@pytest.mark.filterwarnings("ignore")
def test_every_action_that_lightning_reports_is_reported(tmp_path: Path) -> None:
    pl = lightning()
    if pl is None:
        pytest.skip("lightning is not installed")
    from lightning.pytorch.callbacks import ModelCheckpoint as TheirCheckpoint
    from lightning.pytorch.profilers import SimpleProfiler as Theirs

    import lockstep

    recorded = {}
    for package, profiler, kind in ((pl, Theirs(), TheirCheckpoint), (lockstep, SimpleProfiler(), ModelCheckpoint)):
        module, data, callback = overriding(package)
        trainer = package.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path / package.__name__,
            callbacks=[callback, kind(dirpath=tmp_path / package.__name__)],
            **({"profiler": profiler} if package is pl else {}),
        )
        trainer.profiler = profiler
        trainer.fit(module, datamodule=data)
        found = {action: len(calls) for action, calls in profiler.recorded_durations.items()}
        # of the checkpoints' callback Lightning reports hooks that it does not even have
        recorded[package] = {action: count for action, count in found.items() if "ModelCheckpoint" not in action}
    assert set(recorded[pl]) - set(recorded[lockstep]) == MISSING
    unlike = {
        action: (count, recorded[lockstep][action])
        for action, count in recorded[pl].items()
        if action not in MISSING and recorded[lockstep][action] != count
    }
    evaluation = {"_batch_transfer", "batch_to_device"}  # timed in training only
    assert {action for action in unlike if not action.endswith(tuple(evaluation))} == set(), unlike


def test_a_module_reports_its_own_actions() -> None:
    class Own(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with self.trainer.profiler.profile("my part"):  # type: ignore[attr-defined]
                return super().training_step(batch, batch_idx)

    notes = Notes()
    profiled(notes, max_epochs=1).fit(Own(), numbers(2))
    assert notes.done.count("my part") == 2
    profiled(PassThroughProfiler(), max_epochs=1).fit(Own(), numbers(2))
