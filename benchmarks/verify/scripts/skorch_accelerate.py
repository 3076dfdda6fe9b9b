"""skorch: NeuralNetClassifier with AccelerateMixin."""

import numpy as np
import torch
from accelerate import Accelerator
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.net(x)


class Net(AccelerateMixin, NeuralNetClassifier):
    """Net that trains on the ranks of an Accelerator."""


draw = np.random.default_rng(0)
X = draw.normal(size=(320, 20)).astype(np.float32)
y = (X.sum(1) > 0).astype(np.int64)
torch.manual_seed(0)
net = Net(
    Module,
    accelerator=Accelerator(),
    criterion=nn.CrossEntropyLoss,
    max_epochs=2,
    lr=0.1,
    batch_size=16,
    train_split=None,
    iterator_train__shuffle=True,
)
net.fit(X, y)
