"""Lightning Fabric: setup, no_backward_sync for accumulation, clip_gradients, all_reduce of the validation."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
data = TensorDataset(torch.randn(256, 20), torch.randint(4, (256,)))
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
accumulate = 2
for epoch in range(2):
    for number, (x, y) in enumerate(loader, 1):
        is_accumulating = number % accumulate != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
            fabric.backward(loss)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch}: {fabric.all_reduce(loss.detach(), reduce_op='mean'):.4f}")
