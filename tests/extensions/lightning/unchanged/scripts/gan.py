"""A generative adversarial network under manual optimization, with two optimizers that are toggled."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(pl.LightningModule):
    def __init__(self, latent=4, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.register_buffer("validation_z", torch.randn(8, latent))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, found, real):
        return nn.functional.binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = torch.Generator().manual_seed(self.trainer.global_step)
        z = torch.randn(real.shape[0], self.hparams.latent, generator=noise)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), True)
        self.log("g_loss", g_loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), True)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True, on_epoch=True, sync_dist=True)
        self.manual_backward(d_loss)
        self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        for schedule in self.lr_schedulers():
            schedule.step()

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        self.log("sample_mean", self(self.validation_z).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def main(devices):
    pl.seed_everything(7)
    data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)).cumsum(1))
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        log_every_n_steps=2,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    model = GAN()
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
    if trainer.is_global_zero:
        found = {name: value.item() for name, value in trainer.callback_metrics.items()}
        found |= {"step": trainer.global_step, "lr": trainer.optimizers[1].param_groups[0]["lr"]}
        found |= {"weights": sum(parameter.abs().sum().item() for parameter in model.parameters())}
        for name, value in sorted(found.items()):
            print("found", name, repr(value))


if __name__ == "__main__":
    main(int(sys.argv[1]))
