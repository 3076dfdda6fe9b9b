"""DeepSpeed: initialize() with a config, a sampler that gets the epoch, --local_rank as its launcher passes it."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": args.accumulate,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
model = Net()
engine, optimizer, loader, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), training_data=data, config=config
)
for epoch in range(2):
    loader.data_sampler.set_epoch(epoch)
    for x, y in loader:
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
