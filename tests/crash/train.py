"""A small training with all that has a memory of its own: it resumes where it was killed, to the same bits.

python tests/crash/train.py FOLDER --devices 2 --kill rank=1,step=9
"""

from __future__ import annotations

import argparse

from torch.utils.data import DataLoader

from lockstep import Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint
from tests.tools.average import MovingAverage
from tests.tools.crash import Kill, KillAt, report
from tests.tools.crash_training import Net, Noisy

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batches", type=int, default=25, help="micro-batches of an epoch, on each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--keep", choices=("all", "one", "link", "last"), default="all", help="which checkpoints")
    parser.add_argument("--kill", type=Kill.parse)
    args = parser.parse_args()

    seed_everything(7, workers=True, verbose=False)
    # The last global batch is half full: two samples a rank.
    dataset = Noisy(BATCH * args.devices * args.batches - 2 * args.devices)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=2)
    model = Net(steps=100)
    checkpoint = ModelCheckpoint(
        dirpath=args.folder,
        every_n_train_steps=7,
        save_last="link" if args.keep == "link" else True,
        save_top_k={"one": 1, "last": 0}.get(args.keep, -1),
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="auto" if args.devices == 1 else "ddp",
        max_epochs=args.epochs,
        accumulate_grad_batches=3,
        callbacks=[MovingAverage(0.9), checkpoint, *([KillAt(args.kill)] if args.kill else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    result = trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        # The weights are the average now; the optimizer's state tells of the current ones.
        report(
            weights=model.state_dict(),
            optimizer=trainer.optimizers[0].state_dict(),
            metrics=(result.metrics, result.epochs, result.global_step),
        )


if __name__ == "__main__":
    main()
