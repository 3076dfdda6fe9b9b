"""A generative adversarial network under manual optimization, with two optimizers that are toggled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as L


class GAN(L.LightningModule):
    """Two perceptrons against each other."""

    def __init__(self, latent: int = 8, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.register_buffer("validation_z", torch.randn(8, latent))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.generator(z)

    def adversarial_loss(self, found: torch.Tensor, real: bool) -> torch.Tensor:
        wanted = torch.full_like(found, float(real))
        return nn.functional.binary_cross_entropy_with_logits(found, wanted)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (images,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], self.hparams.latent).type_as(images)

        self.toggle_optimizer(optimizer_g)
        generated = self(z)
        g_loss = self.adversarial_loss(self.discriminator(generated), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(images), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log("sample_mean", self(self.validation_z).mean())

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def main(folder: Path, **flags: Any) -> dict[str, Any]:
    """Train for two epochs; what a test compares is returned."""
    L.seed_everything(42, workers=True, verbose=False)
    images = torch.tensor(load_digits().data / 16, dtype=torch.get_default_dtype())[:320]
    model = GAN()
    trainer = L.Trainer(max_epochs=2, default_root_dir=folder, accelerator="cpu", log_every_n_steps=4, **flags)
    loader = DataLoader(TensorDataset(images), batch_size=32, shuffle=True)
    trainer.fit(model, loader, DataLoader(TensorDataset(images[:64]), batch_size=32))
    return {
        "steps": trainer.global_step,
        "weights": sum(parameter.abs().sum().item() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    print(main(Path(".")))
