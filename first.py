import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything


class Sine(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    seed_everything(0)
    x = torch.linspace(-3, 3, 1000).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=20, log_every_n_steps=10)
    result = trainer.fit(
        Sine(),
        train_dataloaders=DataLoader(data, batch_size=32, shuffle=True),
        val_dataloaders=DataLoader(data, batch_size=100),
    )
    loss = result.metrics.get("val_loss")  # None where Ctrl-C came before the first validation
    trainer.print(f"{result.stopped}; validation loss: {loss}")
    trainer.print(f"checkpoint: {result.best_model_path}")
