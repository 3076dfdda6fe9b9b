# python deepspeed_order.py: a loader that deepspeed.initialize made gives each epoch the same order
from unittest.mock import patch

import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader

with patch("torch.distributed.is_initialized", return_value=True):
    loader = DeepSpeedDataLoader(
        torch.arange(8), 2, False, 0, None, num_local_io_workers=0, data_parallel_world_size=2, data_parallel_rank=0
    )
print([batch.tolist() for batch in loader], [batch.tolist() for batch in loader])
