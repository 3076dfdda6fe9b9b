"""A small UNet of monai, with its loss, metric, transforms, cache and loader."""

import sys

import monai
import numpy as np
import pytorch_lightning as pl
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureChannelFirstd, EnsureTyped, ScaleIntensityd

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self._model = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,))
        self.loss_function = DiceLoss(to_onehot_y=True, softmax=True)
        self.post_pred = Compose([AsDiscrete(argmax=True, to_onehot=2)])
        self.post_label = Compose([AsDiscrete(to_onehot=2)])
        self.dice_metric = DiceMetric(include_background=False, reduction="mean")

    def forward(self, x):
        return self._model(x)

    def prepare_data(self):
        steps = [EnsureChannelFirstd(["image", "label"], channel_dim="no_channel"), ScaleIntensityd(["image"])]
        transform = Compose([*steps, EnsureTyped(["image", "label"])])
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(16):
            label = np.zeros((16, 16), dtype=np.float32)
            label[4:12, 4:12] = 1
            rows.append({"image": label + rng.normal(0, 0.3, (16, 16)).astype(np.float32), "label": label})
        self.train_ds = CacheDataset(rows[:12], transform, num_workers=0, progress=False)
        self.val_ds = CacheDataset(rows[12:], transform, num_workers=0, progress=False)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=2, shuffle=False, num_workers=0)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=1, num_workers=0)

    def configure_optimizers(self):
        return torch.optim.Adam(self._model.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        loss = self.loss_function(self.forward(batch["image"]), batch["label"])
        self.log("train_loss", loss.item(), on_epoch=True, on_step=False)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        outputs = sliding_window_inference(images, (16, 16), 4, self.forward)
        outputs = [self.post_pred(each) for each in decollate_batch(outputs)]
        labels = [self.post_label(each) for each in decollate_batch(labels)]
        self.dice_metric(y_pred=outputs, y=labels)

    def on_validation_epoch_end(self):
        mean = self.dice_metric.aggregate().item()
        self.dice_metric.reset()
        self.log("val_dice", mean, sync_dist=True)


def main(devices):
    pl.seed_everything(0, verbose=False)
    monai.utils.set_determinism(0)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_spawn" if devices > 1 else "auto",
        **QUIET,
    )
    net = Net()
    if devices > 1:
        net.prepare_data()
    trainer.fit(net)
    for name in ("train_loss", "val_dice"):
        print(f"{name}: {float(trainer.callback_metrics[name]):.4e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
