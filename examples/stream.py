"""Lines of text from an iterable data set: every line once, on any number of processes, and across a resume.

    python examples/stream.py --devices 2
    python examples/stream.py --devices 2 --stop-after 20     # ends in mid-epoch, with a checkpoint
    python examples/stream.py --devices 1 --resume            # goes on with the lines that are left

A small network reads the lines of Python's standard library and tells from its characters whether a line is a comment.
The stream knows nothing of ranks or workers: lockstep deals its samples out.
"""

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, IterableDataset

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint

WIDTH = 40  # characters of a line


class Lines(IterableDataset[tuple[Tensor, Tensor, int]]):
    """The lines of some files, one after the other: characters, whether it is a comment, and a number of the line."""

    def __init__(self, files: list[Path], count: int) -> None:
        self.files, self.count = files, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        left = self.count
        for path in self.files:
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
                text = line.strip()
                if not text:
                    continue
                if not left:
                    return
                left -= 1
                characters = [min(ord(character), 127) for character in text.removeprefix("#")[:WIDTH].ljust(WIDTH)]
                key = zlib.crc32(f"{path.name}:{number}".encode())
                yield torch.tensor(characters), torch.tensor(float(text.startswith("#"))), key


class Comments(LightningModule):
    """An embedding of characters and two layers. ``seen`` adds up the numbers of the lines that were trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(128, 8), nn.Flatten(), nn.Linear(8 * WIDTH, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        characters, labels, keys = batch
        logits = self.head(self.net(characters)).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, labels)
        right = ((logits > 0) == labels.bool()).float().mean()
        self.log_dict({"loss": loss, "accuracy": right}, on_step=False, on_epoch=True, prog_bar=True)
        self.log("lines", float(len(keys)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("keys", keys.double().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train one epoch, and print what it has seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
    parser.add_argument("--lines", type=int, default=20_001)
    parser.add_argument("--batch", type=int, default=128, help="lines in a step, over all ranks")
    parser.add_argument("--stop-after", type=int, default=-1, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--out", type=Path, default=Path("stream"))
    args = parser.parse_args()

    seed_everything(3)
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    loader = DataLoader(Lines(files, args.lines), batch_size=args.batch // args.devices, num_workers=args.workers)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=1,
        max_steps=args.stop_after,
        logger=False,
        default_root_dir=args.out,
        callbacks=ModelCheckpoint(dirpath=args.out, every_n_train_steps=20, save_last=True),
    )
    result = trainer.fit(Comments(), loader, ckpt_path="last" if args.resume else None)
    if "lines" in result.metrics:
        told = {name: float(trainer.callback_metrics[name]) for name in ("lines", "keys", "accuracy", "loss")}
        trainer.print(f"lines {told['lines']:.0f}, sum of their keys {told['keys']:.0f}")
        trainer.print(f"accuracy {told['accuracy']:.4f}, loss {told['loss']:.6f}")


if __name__ == "__main__":
    main()
