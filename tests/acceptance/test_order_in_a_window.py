"""The order of calls within an accumulation window where `optimizer_step` is overridden, and validations in between."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ORDER = (
    "start 0, step 0, end 0, validation, start 1, optimizer, step 1, end 1, validation, "
    "start 2, step 2, end 2, validation, start 3, optimizer, step 3, end 3, validation"
)


def played(package: str) -> str:
    """What a fit of four batches calls, two in each window, with a validation behind each."""
    library: Any = import_module(package)
    calls: list[str] = []

    class Net(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            calls.append(f"start {batch_idx}")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            calls.append(f"step {batch_idx}")
            loss: Tensor = self.layer(batch).mean()
            return loss

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            calls.append("optimizer")
            optimizer.step(closure=optimizer_closure)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            calls.append(f"end {batch_idx}")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            calls.append("validation")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader: Any = DataLoader(torch.randn(4, 1))  # type: ignore[arg-type]
    trainer = library.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, loader)
    return ", ".join(calls)


def test_the_order_is_lightnings() -> None:
    """The last micro-batch is played by the closure, and what came before it is not."""
    assert played("lockstep") == ORDER


@pytest.mark.slow  # to import it takes seconds
@pytest.mark.filterwarnings("ignore")
def test_lightnings_order_is_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    pytest.importorskip("lightning.pytorch")
    assert played("lightning.pytorch") == ORDER
