"""One program for each extra, which needs it and nothing else; run by an interpreter that has only what is required.

    python extras.py ROWS

ROWS is JSON: [extra, folder of its packages or null] for each program. Each runs in a fork and a folder of its own, and
what came of it is printed as JSON: "" or the error's text, by extra.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer

QUIET: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "logger": False}


class Line(LightningModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = 0.1
        self.layer = torch.nn.Linear(1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        x = torch.linspace(-1, 1, 8).unsqueeze(1)
        return DataLoader(TensorDataset(x, 2 * x), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate)


def fitted(**flags: Any) -> Trainer:
    trainer = Trainer(**{"log_every_n_steps": 1, "enable_model_summary": False, **QUIET, **flags})
    trainer.fit(Line())
    return trainer


def rich() -> None:
    from lockstep.callbacks import RichModelSummary, RichProgressBar

    flags = {"enable_progress_bar": True, "enable_model_summary": True}
    fitted(callbacks=[RichProgressBar(), RichModelSummary()], **flags)


def tensorboard() -> None:
    from lockstep.loggers import TensorBoardLogger

    fitted(logger=TensorBoardLogger("logs"))
    assert list(Path("logs").rglob("events*"))
    assert isinstance(fitted(logger=True).logger, TensorBoardLogger)


def wandb() -> None:
    from lockstep.loggers import WandbLogger

    WandbLogger(offline=True, save_dir=".")


def mlflow() -> None:
    from lockstep.loggers import MLFlowLogger

    fitted(logger=MLFlowLogger(save_dir="runs"))
    assert Path("runs", "mlflow.db").is_file()


def deepspeed() -> None:
    fitted(strategy="deepspeed", devices=1)


def metrics() -> None:
    from torchmetrics import MeanMetric

    class Measured(Line):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss.detach())
            self.log("mean", self.mean, on_epoch=True, on_step=False)
            return loss

    trainer = Trainer(**QUIET)
    trainer.fit(Measured())
    assert "mean" in trainer.callback_metrics


def cli() -> None:
    from lockstep.cli import LightningCLI

    words = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.logger=false", "--model.width=1"]
    LightningCLI(Line, args=["fit", *words])


def optuna() -> None:
    from lockstep import HyperOptArgumentParser

    parser = HyperOptArgumentParser(strategy="optuna")
    parser.opt_range("--rate", default=0.1, type=float, tunable=True, low=0.01, high=1.0)
    assert 0.01 <= parser.parse_args([]).draw(0, Path("search")).rate <= 1.0


def plot() -> None:
    from lockstep.tuner import Tuner

    finder = Tuner(Trainer(**QUIET)).lr_find(Line(), num_training=8)
    assert finder is not None
    figure = finder.plot(suggest=True)
    assert figure is not None
    figure.savefig("rates.png")


def yaml() -> None:
    Path("hparams.yaml").write_text("width: 1\n")
    trainer = fitted()
    trainer.save_checkpoint("line.ckpt")
    assert Line.load_from_checkpoint("line.ckpt", hparams_file="hparams.yaml").layer.out_features == 1


def onnx() -> None:
    Line().to_onnx("line.onnx", torch.zeros(1, 1))
    assert Path("line.onnx").is_file()


def psutil() -> None:
    from lockstep.callbacks import DeviceStatsMonitor
    from lockstep.loggers import CSVLogger

    fitted(callbacks=DeviceStatsMonitor(cpu_stats=True), logger=CSVLogger("logs"))


def safetensors() -> None:
    from lockstep.cli.checkpoint import checkpoint

    fitted().save_checkpoint("line.ckpt")
    assert checkpoint(["convert", "line.ckpt", "line.safetensors"]) == 0
    assert Path("line.safetensors").is_file()


def transformers() -> None:
    import lockstep
    from lockstep.ground.errors import MisconfigurationException

    with contextlib.suppress(MisconfigurationException):
        lockstep.load_pretrained(torch.nn.Linear(1, 1), "nowhere")
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    whole = GPT2LMHeadModel(GPT2Config(**sizes))
    save_file({name: each for name, each in whole.state_dict().items() if name != "lm_head.weight"}, "one.safetensors")
    other = GPT2LMHeadModel(GPT2Config(**sizes))
    lockstep.load_pretrained(other, ".")
    assert torch.equal(other.lm_head.weight, whole.lm_head.weight)


PROGRAMS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        *(rich, tensorboard, wandb, mlflow, deepspeed, metrics, cli, optuna, plot, yaml, onnx, psutil, safetensors),
        transformers,
    )
}


def _outcome(extra: str, packages: str | None) -> str:
    """Run one program in this process."""
    if packages is not None:
        sys.path.append(packages)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            PROGRAMS[extra]()
        except BaseException as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return ""


def main(rows: list[tuple[str, str | None]]) -> None:
    """Run the programs and print what came of them."""
    outcomes = {}
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # imports torch's compiler, once for all forks
    for extra, packages in rows:
        ours, theirs = os.pipe()
        if os.fork() == 0:
            os.close(ours)
            os.write(theirs, _outcome(extra, packages).encode()[:4000])
            os.dup2(2, 1)  # what others print at the end
            os._exit(0)
        os.close(theirs)
        with open(ours) as pipe:
            outcomes[extra] = pipe.read()
        os.wait()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
