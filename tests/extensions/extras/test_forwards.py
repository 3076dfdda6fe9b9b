"""The pass over the training batches that trains nothing: what it runs, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule
from lockstep.extensions.extras.stochastic_weight_avg import run_forwards
from tests.loop.pieces import Recorder, Slope, Stream, numbers, quiet


class Pass(Callback):
    """Makes the pass when training has ended."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.metrics = dict(trainer.callback_metrics)
        self.batches = len(module.batches)
        self.counted = run_forwards(trainer)


class Logs(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.grad_enabled = torch.is_grad_enabled()
        self.log("batch", batch.mean() + 100 * len(self.batches), on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("loader", [numbers(7, batch_size=2), DataLoader(Stream(7), batch_size=2)])
@pytest.mark.filterwarnings("ignore")
def test_every_batch_is_run_once_and_nothing_is_trained_or_logged(loader: Any) -> None:
    seen, logger, module = Pass(), Recorder(), Logs(lr=0.1)
    run = quiet(callbacks=seen, logger=logger, max_epochs=2, log_every_n_steps=1, accumulate_grad_batches=2)
    result = run.fit(module, loader)
    assert seen.counted == 4
    assert module.batches[seen.batches :] == [[1, 2], [3, 4], [5, 6], [7]]
    assert not module.grad_enabled
    assert len(module.gradients) == result.global_step == 4
    assert dict(run.callback_metrics) == seen.metrics
    assert len([sent for sent in logger.sent if "batch_step" in sent[1]]) == 4


def test_a_training_step_of_one_argument_and_hooks_of_the_transfer() -> None:
    class One(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.batches: list[Any] = []

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch * 10

        def training_step(self, batch: Any) -> Any:
            self.batches.append(batch.item())
            return self.w * batch.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    seen, module = Pass(), One()
    quiet(callbacks=seen, max_epochs=1).fit(module, numbers(2))
    assert module.batches == [10, 20, 10, 20]
