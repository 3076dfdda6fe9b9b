"""Writes the checkpoint beside this file with Lightning 2.6.6: a fit of 2 epochs of 3 batches, saved after the first.

python tests/loop/data/make_lightning_checkpoint.py     # where Lightning is installed
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    """The module of the same name in test_lightning_checkpoint.py."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(-0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main() -> None:
    here = Path(__file__).parent
    data = DataLoader(torch.arange(12, dtype=torch.float64).reshape(6, 2) / 10, batch_size=2)
    flags: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_epochs": 2}
    module = Regression(lr=0.2)
    saves = lightning.callbacks.ModelCheckpoint(here, "lightning-{epoch}", save_top_k=-1)
    lightning.Trainer(callbacks=[saves], **flags).fit(module, data)
    checkpoint = torch.load(here / "lightning-epoch=0.ckpt", weights_only=True)
    checkpoint["callbacks"] = {}  # they name folders of the machine
    torch.save(checkpoint, here / "lightning-2.6.6.ckpt")
    for path in here.glob("lightning-epoch=*.ckpt"):
        path.unlink()
    print(module.layer.weight.tolist(), module.layer.bias.tolist())


if __name__ == "__main__":
    main()
