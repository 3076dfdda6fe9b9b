"""MONAI's distributed training tutorial: UNet, DiceLoss, its DistributedSampler, DDP."""

import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset, DistributedSampler
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.utils import set_determinism
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
set_determinism(seed=0)
generator = torch.Generator().manual_seed(0)
images = torch.randn(80, 1, 16, 16, generator=generator)
data = Dataset([{"image": image, "label": (image > 0.5).float()} for image in images])
sampler = DistributedSampler(data, even_divisible=True, shuffle=True)
loader = DataLoader(data, batch_size=4, shuffle=False, sampler=sampler)
model = DistributedDataParallel(
    UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
)
loss_function = DiceLoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_function(model(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
