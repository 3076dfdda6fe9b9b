"""Diffusers' unconditional image example: UNet2DModel, DDPMScheduler, Accelerate and EMAModel."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=1)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
ema = EMAModel(model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config)
noise_scheduler = DDPMScheduler(num_train_timesteps=50)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.randn(96, 1, 8, 8)), batch_size=4, shuffle=True)
warmup = 2 * accelerator.num_processes
lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=warmup, num_training_steps=len(loader) * 2)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
for _epoch in range(2):
    for (images,) in loader:
        noise = torch.randn(images.shape)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(images),)).long()
        noisy = noise_scheduler.add_noise(images, noise, timesteps)
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noisy, timesteps).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
