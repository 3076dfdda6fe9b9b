"""A script for Lightning: it fits on the strategy, devices and workers that its arguments say."""

import sys

import helper
import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert helper.home() == "lockstep.callbacks.base"
        return torch.full((2,), float(index))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).pow(2).mean() / 100
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def real_lightning():
    """Files of an installed Lightning that are imported."""
    files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    return [
        file
        for file in files
        if any(f"/{name}/" in file for name in ("lightning", "pytorch_lightning")) and "/lockstep/" not in file
    ]


if __name__ == "__main__":
    strategy, devices, context = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    L.seed_everything(1, verbose=False)
    workers = {} if context == "none" else {"num_workers": 1, "multiprocessing_context": context}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[helper.Tells()],
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=2, **workers))
    if trainer.is_global_zero:
        print(f"done: Lightning {L.__version__}, {real_lightning()}", flush=True)
