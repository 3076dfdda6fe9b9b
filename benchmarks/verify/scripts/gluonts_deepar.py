"""GluonTS: DeepAREstimator with trainer_kwargs for two ranks."""

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator

draw = np.random.default_rng(0)
data = ListDataset(
    [{"start": pd.Period("2020-01-01", freq="D"), "target": draw.random(100).astype(np.float32)} for _ in range(16)],
    freq="D",
)
estimator = DeepAREstimator(
    freq="D",
    prediction_length=5,
    context_length=10,
    num_layers=1,
    hidden_size=8,
    batch_size=8,
    num_batches_per_epoch=8,
    trainer_kwargs={"max_epochs": 2, "devices": 2, "strategy": "ddp", "enable_progress_bar": False, "logger": False},
)
estimator.train(data)
