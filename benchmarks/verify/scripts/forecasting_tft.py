"""PyTorch Forecasting: a TemporalFusionTransformer with Lightning on two ranks."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

pl.seed_everything(42)
draw = np.random.default_rng(0)
frames = [
    pd.DataFrame(
        {"time": np.arange(60), "series": str(name), "value": np.sin(np.arange(60) / 5 + name) + draw.random(60)}
    )
    for name in range(8)
]
data = TimeSeriesDataSet(
    pd.concat(frames, ignore_index=True),
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=12,
    max_prediction_length=3,
    static_categoricals=["series"],
    time_varying_known_reals=["time"],
    time_varying_unknown_reals=["value"],
)
loader = data.to_dataloader(train=True, batch_size=16, num_workers=0)
model = TemporalFusionTransformer.from_dataset(
    data, learning_rate=0.03, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, loss=QuantileLoss()
)
trainer = pl.Trainer(
    max_epochs=2, devices=2, strategy="ddp", gradient_clip_val=0.1, enable_progress_bar=False, logger=False
)
trainer.fit(model, train_dataloaders=loader)
