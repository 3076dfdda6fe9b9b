"""NeuralForecast: NHITS with a Trainer of two ranks."""

import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.utils import AirPassengersDF

frames = [AirPassengersDF.assign(unique_id=str(name), y=AirPassengersDF["y"] * (1 + name)) for name in range(16)]
model = NHITS(
    h=6,
    input_size=12,
    max_steps=12,
    batch_size=4,
    windows_batch_size=32,
    mlp_units=[[16, 16]] * 3,
    devices=2,
    strategy="ddp",
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
)
NeuralForecast(models=[model], freq="ME").fit(df=pd.concat(frames, ignore_index=True))
