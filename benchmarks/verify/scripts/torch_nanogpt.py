"""nanoGPT: get_batch from a memory-mapped file, gradients accumulated over micro-batches, cosine rates."""

import contextlib
import math
import os

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, batch_size, gradient_accumulation_steps = 16, 8, 4
ddp = int(os.environ.get("RANK", -1)) != -1
seed_offset = 0
if ddp:
    init_process_group(backend="gloo")
    seed_offset, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
master = seed_offset == 0
np.random.default_rng(0).integers(0, 64, 20000).astype(np.uint16).tofile("train.bin")
torch.manual_seed(1337 + seed_offset)


def get_batch():
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Model(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.wte, self.head = nn.Embedding(64, dim), nn.Linear(dim, 64, bias=False)
        self.block = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, idx, targets):
        logits = self.head(self.wte(idx) + self.block(self.wte(idx)))
        return logits, F.cross_entropy(logits.view(-1, 64), targets.view(-1))


def get_lr(it, warmup=2, decay=20, lr=1e-3, least=1e-4):
    if it < warmup:
        return lr * (it + 1) / (warmup + 1)
    return least + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * (lr - least)


model = Model()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
if ddp:
    model = DDP(model)
X, Y = get_batch()
for iteration in range(8):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with contextlib.nullcontext():
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master:
        print(f"iter {iteration}: loss {loss.item() * gradient_accumulation_steps:.4f}")
if ddp:
    destroy_process_group()
