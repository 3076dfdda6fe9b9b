"""Training from a notebook, executed as a front end executes it: by its kernel, cell after cell."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
if find_spec("ipykernel") is None:  # imported, it would make this process a notebook's, for whoever asks
    pytest.skip("needs ipykernel", allow_module_level=True)
nbformat = pytest.importorskip("nbformat")

DEFINED = """
    import torch
    from lockstep import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.scale = lambda x: 2 * x
        def training_step(self, batch, batch_idx):
            loss = self.scale(self.layer(batch[0])).square().mean()
            self.log("loss", loss, on_epoch=True, on_step=False, prog_bar=True)
            return loss
        def on_fit_end(self):
            self.print("printed by rank 0 at the end")
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Fails(Net):
        def setup(self, stage):
            if self.global_rank == 1:
                raise ValueError("no such column")

    torch.optim.SGD(Net().parameters(), 0.1)  # imports torch's compiler, here and not in each rank that is forked
    torch.manual_seed(3)
    data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2)
    flags = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_model_summary=False)
"""
FIT = """
    net = Net()
    before = net.layer.weight.detach().clone()
    trainer = Trainer(strategy="{}", max_epochs=2, **flags)
    result = trainer.fit(net, data)
"""
USED = """
    print(result.epochs, float(trainer.callback_metrics["loss"]) == result.metrics["loss"])
    print(result.metrics["loss"] < 2.0, torch.equal(net.layer.weight, before), float(net.scale(1)))
"""
FAILS = """Trainer(strategy="{}", max_epochs=2, **flags).fit(Fails(), data)"""
LINE = textwrap.dedent(DEFINED).strip().splitlines().index(" " * 12 + 'raise ValueError("no such column")') + 1
AGAIN = """
    again = Trainer(strategy="{}", max_epochs=1, enable_progress_bar=False, **flags).fit(net, data)
    print(again.epochs, again.metrics["loss"] < result.metrics["loss"])
"""


Executes = Callable[..., list[Any]]


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executes:
    """Execute cells in a new kernel: ``execute(cell, cell, ...)`` gives them back with their outputs."""
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

    def run(*cells: str) -> list[Any]:
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
        client = nbclient.NotebookClient(made, timeout=150, allow_errors=True, kernel_name="python3")
        client.execute(env=environ, cwd=str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == "ipykernel"]:
            del sys.modules[name]  # the client has imported it to find the kernel
        done: list[Any] = made.cells
        return done

    return run


def said(cell: Any, name: str = "stdout") -> str:
    """What stands under a cell."""
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == name)


def raised(cell: Any) -> str:
    """The error of a cell, as the kernel gives it; "" if there is none."""
    return "".join(out.evalue for out in cell.outputs if out.output_type == "error")


@pytest.mark.timeout(300)  # where others keep the processors busy; some 8 s where they do not
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_notebook", marks=pytest.mark.slow)])
def test_a_module_of_a_cell_is_trained_and_used_in_the_next_one(execute: Executes, strategy: str) -> None:
    chosen = """
        print(Trainer(**flags).strategy.launcher, Trainer(**{**flags, "devices": 1}).strategy.launcher)
        Trainer(strategy="ddp", max_epochs=1, **flags).fit(net, data)
    """
    cells = (DEFINED, FIT.format(strategy), USED, AGAIN.format("ddp_fork"), chosen, FAILS.format(strategy))
    defined, fit, used, again, choose, fails = execute(*cells)
    assert not raised(defined)
    assert not raised(fit)
    assert "Epoch 1/1: 100%" in said(fit)  # rank 0's bar and what it prints, under the cell that trained
    assert said(fit).count("printed by rank 0 at the end") == 1
    assert "16/16" not in said(fit)  # of two ranks each has half the batches
    assert said(used).splitlines() == ["2 True", "True False 2.0"]

    assert not raised(again), raised(again)
    assert "printed by rank 0 at the end" in said(again)
    assert said(again).splitlines()[-1] == "1 True"

    assert said(choose).strip() == "spawn None"
    assert "strategy='ddp_notebook'" in raised(choose)

    last = f"strategy='{strategy}': rank 1 failed first, at Cell In[1], line {LINE}: ValueError: no such column"
    assert raised(fails).strip().splitlines()[-1] == last
    assert f"Cell In[1], line {LINE}, in setup\n" in raised(fails)
    assert "ipykernel" not in raised(fails)
