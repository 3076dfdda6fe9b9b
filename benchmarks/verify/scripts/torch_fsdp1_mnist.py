"""The first FSDP tutorial: FullyShardedDataParallel with a size-based policy, losses summed over the ranks."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
sampler = DistributedSampler(data, rank=dist.get_rank(), num_replicas=dist.get_world_size(), shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)
network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10), nn.LogSoftmax(1))
policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
model = FSDP(network, auto_wrap_policy=policy, device_id=torch.device("cpu"))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(2):
    sampler.set_epoch(epoch)
    losses = torch.zeros(2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        losses += torch.tensor([loss.item(), len(x)])
    dist.all_reduce(losses)
    print(f"epoch {epoch} loss {losses[0] / losses[1]:.6f}")
    scheduler.step()
dist.destroy_process_group()
