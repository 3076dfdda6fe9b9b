"""Ray Train: TorchTrainer, which starts its own workers."""

import ray.train.torch
import torch
from ray.train import ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_loop():
    model = ray.train.torch.prepare_model(nn.Linear(8, 1))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


ray.train.torch.TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2)).fit()
