"""The temporal fusion transformer of pytorch-forecasting on series that are made up."""

import sys
import warnings

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss

warnings.filterwarnings("ignore")


def main(devices):
    pl.seed_everything(42, verbose=False)
    steps = np.arange(40)
    data = pd.concat(
        pd.DataFrame(
            {
                "series": str(k),
                "time_idx": steps,
                "value": 5 + np.sin(steps / (2 + k)),
                "month": (steps % 12).astype(str),
            }
        )
        for k in range(4)
    ).reset_index(drop=True)
    training = TimeSeriesDataSet(
        data[data.time_idx < 34],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=4,
        static_categoricals=["series"],
        time_varying_known_categoricals=["month"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, predict=True, stop_randomization=True)
    train_loader = training.to_dataloader(train=False, batch_size=16, num_workers=0)
    val_loader = validation.to_dataloader(train=False, batch_size=4, num_workers=0)
    model = TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=4,
        attention_head_size=1,
        dropout=0.0,
        hidden_continuous_size=4,
        loss=QuantileLoss(),
        log_interval=-1,
        reduce_on_plateau_patience=4,
    )
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        gradient_clip_val=0.1,
        limit_train_batches=5,
        callbacks=[EarlyStopping("val_loss", patience=5), LearningRateMonitor()],
        logger=pl.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader, val_loader)
    if trainer.is_global_zero:
        print("val_loss: {:.4e}".format(trainer.callback_metrics["val_loss"].item()))
        best = TemporalFusionTransformer.load_from_checkpoint(
            trainer.checkpoint_callback.best_model_path, weights_only=False
        )
        predicted = best(next(iter(val_loader))[0])["prediction"].mean(-1)  # by hand: on ranks, this is but one
        if devices == 1:
            predicted = best.predict(val_loader, trainer_kwargs={"accelerator": "cpu", "logger": False})
        print("predicted:", tuple(predicted.shape), bool(torch.isfinite(predicted).all()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
