"""fastai: a Learner in distrib_ctx."""

import fastai.callback.schedule
import fastai.distributed  # noqa: F401, adds distrib_ctx
import torch
from fastai.basics import DataLoader, DataLoaders, Learner, accuracy
from torch import nn

torch.manual_seed(0)
x = torch.randn(320, 20)
y = (x.sum(1) > 0).long()
samples = list(zip(x, y, strict=True))
dls = DataLoaders(DataLoader(samples[:256], bs=16, shuffle=True), DataLoader(samples[256:], bs=16), device="cpu")
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
with learn.distrib_ctx(in_notebook=False):
    learn.fit_one_cycle(2, 1e-2)
