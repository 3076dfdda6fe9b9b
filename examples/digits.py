"""Handwritten digits: a small CNN on scikit-learn's 1,797 real images, on one process or on several.

    python examples/digits.py --devices 2
    python examples/digits.py --devices 1 --accumulate 2     # the same steps on one process: the same bits

A random fifth of the images, the same share of each class, is held out; the accuracy is the one on those.
"""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything


class Digits(LightningDataModule):
    """Images as (batch, 1, 8, 8) in [0, 1], and their labels; batches of 32 on each device."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        images, labels = load_digits(return_X_y=True)
        split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=seed)
        train_images, val_images, train_labels, val_labels = (torch.as_tensor(part) for part in split)
        self.train = TensorDataset(train_images.float().view(-1, 1, 8, 8), train_labels)
        self.val = TensorDataset(val_images.float().view(-1, 1, 8, 8), val_labels)

    def train_dataloader(self) -> DataLoader[Any]:
        # drop_last: every step has as many images, however many processes share them.
        return DataLoader(self.train, batch_size=32, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=32)


class Classifier(LightningModule):
    """Two convolutions and two linear layers; no dropout or BatchNorm, which depend on the sharing."""

    def __init__(self, epochs: int, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        features: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        features += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        self.net = nn.Sequential(*features, nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def on_fit_start(self) -> None:
        # Threads share out the sums of a convolution, and the order of a sum decides its last bits.
        torch.set_num_threads(1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        accuracy = (logits.argmax(dim=1) == labels).to(logits.dtype).mean()
        metrics = {"val_loss": cross_entropy(logits, labels), "val_accuracy": accuracy}
        self.log_dict(metrics, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["epochs"])]


class Report(Callback):
    """One line of JSON an epoch, with every digit of the metrics."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            with self.path.open("a" if trainer.current_epoch else "w") as file:
                file.write(json.dumps({"epoch": trainer.current_epoch, **metrics}) + "\n")


def main() -> None:
    """Train, then print the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--devices", type=int, default=1, help="how many processes, or GPUs")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--strategy", default="auto", help="auto, ddp or ddp_spawn")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in one step of a device")
    parser.add_argument("--precision", default="32-true", help="32-true, 64-true, bf16-mixed or 16-mixed")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for checkpoints and epochs.jsonl; nothing is kept without")
    args = parser.parse_args()

    seed_everything(args.seed, workers=True)
    model = Classifier(args.epochs)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        accumulate_grad_batches=args.accumulate,
        precision=args.precision,
        max_epochs=args.epochs,
        default_root_dir=args.out,
        logger=False,
        enable_checkpointing=args.out is not None,
        callbacks=[Report(args.out / "epochs.jsonl")] if args.out else None,
    )
    trainer.fit(model, datamodule=Digits(args.seed))

    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
    trainer.print(f"steps                 {trainer.global_step} on {trainer.world_size} process(es)")
    if "val_accuracy" in trainer.callback_metrics:  # not where Ctrl-C came before the first validation
        trainer.print(f"accuracy, held out    {trainer.callback_metrics['val_accuracy']:.4f}")
    trainer.print(f"sha256 of the weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
