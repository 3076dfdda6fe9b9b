"""Darts: NBEATSModel with pl_trainer_kwargs for two ranks."""

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

series = TimeSeries.from_values(np.sin(np.arange(300) / 7).astype(np.float32))
model = NBEATSModel(
    input_chunk_length=24,
    output_chunk_length=6,
    num_stacks=2,
    num_blocks=1,
    num_layers=2,
    layer_widths=16,
    n_epochs=2,
    batch_size=16,
    random_state=0,
    pl_trainer_kwargs={"accelerator": "cpu", "devices": 2, "strategy": "ddp", "enable_progress_bar": False},
)
model.fit(series)
