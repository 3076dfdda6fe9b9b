"""Plans as users meet them: the table, the file, a Trainer by the file, "auto", and the command."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep import Trainer
from lockstep.cli.run import main
from lockstep.extensions.balancing import plan_command
from lockstep.extensions.balancing.planner import hardware
from lockstep.extensions.balancing.planner.cost import Candidate, predict
from lockstep.extensions.balancing.planner.hardware import Hardware, described
from lockstep.extensions.balancing.planner.plan import Plan, SavedPlan, make_plan
from lockstep.extensions.balancing.plans import choice
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop import call
from lockstep.strategies import SingleDeviceStrategy
from lockstep.testing import BoringModel
from tests.extensions.balancing.planner.made_up import GB, transformer
from tests.extensions.balancing.planner.models import Model, made
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SMALL = Hardware(devices=1, memory=8 * GB, kind="cpu", overlaps=False, name="cpu", link=1e9, shared=1e9)


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(hardware, "measure_links", lambda: {"link": 1e9, "latency": 1e-4, "shared": 2e9})


def net() -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]))


BATCH = (torch.ones(8, 16), torch.ones(8, 16))

# -- the table -----------------------------------------------------------------------------------------------


def test_the_table_has_each_way_its_choice_and_its_reason() -> None:
    plan = make_plan([transformer(1.5)], described(4, 1, 24 * GB), packages=["deepspeed"])
    text = "\n".join(plan.lines(everything=True))
    assert text.count("\n* ") == 1
    for row in plan.rows:
        assert row.candidate.name in text
        assert row.fits or f"too much: {row.why}" in text
    assert text.endswith(plan.reason)


def test_nine_pipelines_were_shown_for_a_small_model() -> None:
    """What is not worth choosing is counted in one line; what gains memory, or fits where others do not, is shown."""
    small = make_plan([transformer(0.01, kept=0.01 * GB)], described(2, 1, 24 * GB), packages=["deepspeed"])
    text = str(small)
    assert "pipeline" not in text
    assert "buckets of" not in text
    assert re.search(r"^  and \d+ more that gain nothing: lockstep plan --all", text, re.MULTILINE)
    large = str(make_plan([transformer(7, kept=400 * GB, blocks=2)], described(2, 1, 24 * GB)))
    assert large.count("pipeline, ") == 1
    assert "recomputation" in large


def test_other_numbers_and_missing_packages_are_shown_and_not_chosen() -> None:
    plan = make_plan([transformer(3)], described(2, 1, 24 * GB))
    for row in plan.rows:
        candidate = row.candidate
        assert bool(row.other) is bool(candidate.hook)
        if candidate.kind == "deepspeed":
            assert row.obstacle == "needs the package deepspeed"
        if candidate.kind == "pipeline":
            assert "needs a chain of blocks" in row.obstacle
    assert plan.choice is not None
    assert plan.choice.candidate.kind not in ("deepspeed", "pipeline")
    with pytest.raises(MisconfigurationException, match=r'goal=.* pass "speed" or "memory"'):
        make_plan([transformer(1)], SMALL, goal="cheap")  # type: ignore[arg-type]


def test_schedules_that_wait_less_are_predicted_to() -> None:
    model, machine = transformer(7, kept=20 * GB), described(4, 1, 80 * GB)  # activations, not the update, decide
    ways = ("GPipe", "1F1B", "interleaved", "zero-bubble")
    all_at_once, one, between, split = (
        predict(model, Candidate("pipeline", micro_batches=8, schedule=schedule), machine) for schedule in ways
    )
    assert all_at_once.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert max(between.seconds, split.seconds) < one.seconds
    assert one.memory < between.memory < all_at_once.memory
    assert one.compute == pytest.approx(split.compute)
    assert between.split is not None
    assert [stage.device for stage in between.split.stages] == list(range(8))
    assert {row.candidate.schedule for row in make_plan([model], machine).rows} == {"", *ways}
    few = {row.candidate.schedule for row in make_plan([transformer(7, blocks=6)], machine).rows}
    assert few == {"", "GPipe", "1F1B", "zero-bubble"}


# -- a Trainer's plan, and its file --------------------------------------------------------------------------


def test_a_trainers_plan_is_saved_and_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, loader, _ = made("wide", batches=16)
    plan = quiet().plan(model, loader)
    assert plan.choice is not None
    assert plan.choice.candidate.kind == "single"
    assert plan.profile.device == "cpu"
    path = str(tmp_path / "Plan.yaml")
    plan.save(path)
    with caplog.at_level(logging.INFO, "lockstep"):
        quiet(strategy=path, max_epochs=1).fit(model, loader)
    (line,) = [record.message for record in caplog.records if "a batch takes" in record.message]
    assert line.startswith(f'Trainer(strategy="{path}"): a batch takes ')
    assert "predicted" in line
    text = Path(path).read_text()
    assert SavedPlan.read(path).text() == text
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(text)["model"] == "Model"


def test_a_step_may_call_the_index_of_its_batch_what_it_likes() -> None:
    """A plan asked for the name `batch_idx`, and a step without it ended in a TypeError."""

    class Named(type(made("wide")[0])):  # type: ignore[misc]
        def training_step(self, b: Any, i: int) -> Any:
            assert i == 0
            return super().training_step(b, i)

    model, loader, _ = made("wide")
    model.__class__ = Named
    assert quiet().plan(model, loader).choice is not None


def saved(tmp_path: Path, **changes: Any) -> str:
    plan = quiet().plan(net(), batch=BATCH)
    path = tmp_path / "plan.yaml"
    plan.save(path)
    before = SavedPlan.read(path)
    path.write_text(SavedPlan(**{**vars(before), **changes}).text())
    return str(path)


def test_a_plan_for_another_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"was made for Model, whose parameters differ .*BoringModel"):
        quiet(strategy=saved(tmp_path), max_steps=1).fit(BoringModel())


@pytest.mark.parametrize(
    ("changes", "precision", "said"),
    [
        ({"strategy": "ddp", "devices": 4, "nodes": 2}, "32-true", "made for devices=4 and num_nodes=2, and this"),
        ({}, "bf16-mixed", 'made for precision="32-true", and this Trainer has'),
        ({"memory": 1e18, "device": "H100"}, "32-true", "a device here has .*: the plan was made for H100"),
    ],
)
def test_a_plan_for_another_run_is_refused(tmp_path: Path, changes: Any, precision: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        quiet(strategy=saved(tmp_path, **changes), precision=precision, max_steps=1).fit(net(), [BATCH])


@pytest.mark.parametrize("text", ["", "model: 1\n", "strategy: ddp", "[1, 2]"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(MisconfigurationException, match="is not a plan of this release"):
        quiet(strategy=str(path))
    with pytest.raises(MisconfigurationException, match=r"lockstep plan script\.py --save"):
        quiet(strategy=str(tmp_path / "there.yml"))


def test_a_plan_without_data_says_what_to_give() -> None:
    with pytest.raises(MisconfigurationException, match="pass batch=, train_dataloaders= or datamodule="):
        quiet().plan(net())
    with pytest.raises(MisconfigurationException, match="a training DataLoader yields none"):
        quiet().plan(net(), [])


# -- strategy="auto" -----------------------------------------------------------------------------------------


def test_auto_does_not_look_at_what_clearly_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Plan:
        raise AssertionError("nothing is to be planned")

    monkeypatch.setattr(choice, "plan_for", never)
    monkeypatch.setattr(choice, "steady_memory", never)
    trainer = quiet(strategy="auto", max_steps=1)
    trainer.fit(net(), [BATCH])
    assert type(trainer.strategy) is SingleDeviceStrategy


def automatic(memory: float) -> tuple[str, str]:
    call.PLANNED_FROM = 0
    choice.steady_memory = lambda device, ranks: memory
    try:
        model, loader, _ = made("gpt", batches=4)
        trainer = quiet(strategy="auto", devices=dist.get_world_size(), max_steps=2)
        trainer.fit(model, loader)
        return type(trainer.strategy).__name__, trainer.precision
    finally:
        call.PLANNED_FROM, choice.steady_memory = BEFORE


BEFORE = call.PLANNED_FROM, choice.steady_memory


def test_auto_takes_the_plans_choice_for_a_large_model_and_ddp_for_a_small_one(ranks: RankPool) -> None:
    assert {name for name, _ in ranks(2).run(automatic, 60e6)} == {"DDPStrategy"}
    small = {name for name, _ in ranks(2).run(automatic, 24e6)}
    assert small <= {"FSDPStrategy", "DeepSpeedStrategy", "DDPStrategy"}
    assert len(small) == 1


def test_auto_goes_on_where_nothing_fits(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "PLANNED_FROM", 0)
    monkeypatch.setattr(choice, "steady_memory", lambda device, ranks: 1000.0)
    trainer = quiet(strategy="auto", max_steps=1)
    with pytest.warns(UserWarning, match=r"Nothing fits: "):
        trainer.fit(net(), [BATCH])
    assert trainer.global_step == 1


# -- the command ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch import nn
from lockstep import LightningModule, Trainer

class Net(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

if __name__ == "__main__":
    Trainer(accelerator="cpu", logger=False, max_epochs=1).fit(Net(int(sys.argv[1])), [torch.ones(4, 8)])
    raise AssertionError("a plan trains nothing")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_prints_the_table(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit = Trainer.fit
    assert main(["plan", script, "--devices", "2", "64"]) == 0
    out = capsys.readouterr().out
    assert "\n* " in out
    assert "seconds measured" in out
    assert "2 x cpu" in out
    assert Trainer.fit is fit


def test_the_command_plans_a_model_larger_than_this_machine(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, numbers = tmp_path / "plan.yaml", tmp_path / "plan.csv"
    words = [script, "--devices", "8", "--nodes", "8", "--memory", "80GB", "--link", "25GB/s"]
    assert main(["plan", "--save", str(path), "--csv", str(numbers), *words, "300000000"]) == 0
    out = capsys.readouterr().out
    assert "5.1 billion parameters" in out
    assert "8 nodes of 8 x" in out
    assert "too much" in out
    assert f'Trainer(strategy="{path}", devices=8, num_nodes=8)' in out
    assert SavedPlan.read(path).devices == 8
    with open(numbers, newline="") as file:
        ways = {row["way"]: row for row in csv.DictReader(file)}
    assert (ways["single"]["fits"], ways["single"]["devices"]) == ("False", "1")
    best = next(iter(ways.values()))  # the fastest that fits
    assert best["fits"] == "True"
    assert float(best["bytes"]) < 80e9 < float(ways["single"]["bytes"])
    assert float(best["parameters"]) > 0
    assert {"compute", "sent", "update", "gradients", "activations"} <= best.keys()


def test_what_cannot_be_written_is_said_before_the_work_begins(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "_make_plan", None)
    for option, name in (("--save", "plan.yaml"), ("--csv", "plan.csv")):
        nowhere = tmp_path / "none" / name
        assert main(["plan", script, option, str(nowhere), "64"]) == 2
        assert f"{option} {nowhere}: there is no folder" in capsys.readouterr().err


def test_the_command_ends_with_1_where_nothing_fits(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", script, "--memory", "1MB", "40000"]) == 1
    assert "Nothing fits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["there.py"], "there.py does not exist"),
        (["SCRIPT", "--devices", "two", "8"], "--devices: 'two' is not a whole number of at least 1"),
        (["SCRIPT", "--memory", "much", "8"], "--memory much: pass bytes above 0 with a unit: 80GB"),
        (["SCRIPT", "--save", "plan.txt", "8"], "--save plan.txt: pass a name that ends with .yaml"),
        (["SCRIPT", "--blocks", "middle", "8"], "has no submodule 'middle'"),
        (["--device", "2", "SCRIPT"], "--device is not an option"),
    ],
)
def test_mistakes_of_the_command(script: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(script if word == "SCRIPT" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_script_without_a_fit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('nothing')")
    assert main(["plan", str(path)]) == 2
    assert "has ended without a trainer.fit(model)" in capsys.readouterr().err
    path.write_text("raise SystemExit(3)")
    assert main(["plan", str(path)]) == 2
    assert "ended with 3 before its trainer.fit()" in capsys.readouterr().err
