"""MMEngine: Runner with launcher="pytorch"."""

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x, y, mode="tensor"):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, y)} if mode == "loss" else (logits, y)


draw = torch.Generator().manual_seed(0)
data = [(torch.randn(20, generator=draw), int(torch.randint(4, (), generator=draw))) for _ in range(256)]
runner = Runner(
    model=Model(),
    work_dir="work",
    train_dataloader={
        "dataset": data,
        "batch_size": 8,
        "num_workers": 0,
        "sampler": {"type": "DefaultSampler", "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    },
    train_cfg={"by_epoch": True, "max_epochs": 2},
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}},
    launcher="pytorch",
    env_cfg={"dist_cfg": {"backend": "gloo"}},
    randomness={"seed": 0},
)
runner.train()
