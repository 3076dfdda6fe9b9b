"""A small GAN with two optimizers, on scikit-learn's digits: generator and discriminator step in turn, by hand.

    python examples/gan.py --devices 2
    python examples/gan.py --devices 1      # the same numbers, to rounding

Noise is drawn for each image by its number and the epoch, so that it is the same however the images are shared out.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer, seed_everything

NOISE = 16


class GAN(LightningModule):
    """Two networks of two layers; each takes a step on every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # two optimizers in one step are stepped by hand
        self.generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def noise(self, numbers: Tensor) -> Tensor:
        """A row for each image: a function of its number and the epoch."""
        rows = []
        for number in numbers.tolist():
            drawn = torch.Generator().manual_seed(10_000 * self.current_epoch + number)
            rows.append(torch.randn(NOISE, generator=drawn))
        return torch.stack(rows).to(numbers.device)

    def judged(self, images: Tensor, real: bool) -> Tensor:
        """How wrong the discriminator is about images."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, numbers = batch
        optimizers: Any = self.optimizers()
        generating, judging = optimizers

        self.toggle_optimizer(judging)  # its gradients alone are wanted, and reduced
        fake = self.generator(self.noise(numbers))
        loss = (self.judged(images, True) + self.judged(fake.detach(), False)) / 2
        judging.zero_grad()
        self.manual_backward(loss)
        judging.step()
        self.untoggle_optimizer(judging)

        self.toggle_optimizer(generating)
        fooled = self.judged(self.generator(self.noise(numbers)), True)
        generating.zero_grad()
        self.manual_backward(fooled)
        generating.step()
        self.untoggle_optimizer(generating)

        losses = {"discriminator": loss, "generator": fooled}
        self.log_dict(losses, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        ]


def drawn_as_text(image: Tensor) -> str:
    """An image of 8 x 8 as characters."""
    rows = (image.clamp(0, 1) * 4.99).int().view(8, 8).tolist()
    return "\n".join("".join(" .:*#"[level] * 2 for level in row) for row in rows)


def main() -> None:
    """Train, and print losses and one image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="images in a step, over all ranks")
    args = parser.parse_args()

    seed_everything(7)
    images = torch.as_tensor(load_digits().data / 16).float()
    data = TensorDataset(images, torch.arange(len(images)))
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = GAN()
    trainer.fit(model, DataLoader(data, batch_size=args.batch // args.devices, shuffle=True))
    losses = {name: float(trainer.callback_metrics[name]) for name in ("discriminator", "generator")}
    trainer.print(f"discriminator {losses['discriminator']:.6f}, generator {losses['generator']:.6f}")
    with torch.no_grad():
        model.eval()
        trainer.print(drawn_as_text(model.generator(torch.randn(NOISE, generator=torch.Generator().manual_seed(0)))))


if __name__ == "__main__":
    main()
