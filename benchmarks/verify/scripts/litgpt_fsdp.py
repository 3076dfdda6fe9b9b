"""LitGPT: a GPT of litgpt in the loop of its pretraining command, with Fabric, FSDP and accumulation."""

import lightning as L
import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy, get_default_supported_precision, num_parameters
from torch.utils.data import DataLoader, TensorDataset

fabric = L.Fabric(devices=2, strategy="fsdp", precision=get_default_supported_precision(training=False))
fabric.launch()
fabric.seed_everything(42)
config = Config(block_size=16, vocab_size=60, padded_vocab_size=64, n_layer=2, n_head=4, n_embd=32)
model = GPT(config)
fabric.print(f"parameters: {num_parameters(model)}")
model = fabric.setup(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1))
data = TensorDataset(torch.randint(60, (256, 17)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
accumulate = 2
for number, (tokens,) in enumerate(loader, 1):
    is_accumulating = number % accumulate != 0
    with fabric.no_backward_sync(model, enabled=is_accumulating):
        logits = model(tokens[:, :-1])
        loss = chunked_cross_entropy(logits, tokens[:, 1:], chunk_size=0)
        fabric.backward(loss / accumulate)
    if not is_accumulating:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
