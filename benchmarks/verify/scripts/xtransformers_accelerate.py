"""x-transformers with Accelerate: the enwik8 loop (random windows, accumulated losses, clipping)."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from x_transformers import Decoder, TransformerWrapper
from x_transformers.autoregressive_wrapper import AutoregressiveWrapper

ACCUMULATE, LENGTH = 2, 16


class Windows(Dataset):
    def __init__(self, text):
        self.text = text

    def __getitem__(self, index):
        start = int(torch.randint(len(self.text) - LENGTH - 1, (1,)))
        return self.text[start : start + LENGTH + 1].long()

    def __len__(self):
        return len(self.text) // LENGTH


def cycle(loader):
    while True:
        yield from loader


# no seed: data sets draw their windows, which the same seed would make equal on all ranks
accelerator = Accelerator()
model = TransformerWrapper(
    num_tokens=64, max_seq_len=LENGTH, attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
)
model = AutoregressiveWrapper(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
loader = DataLoader(Windows(torch.randint(64, (4000,))), batch_size=4, drop_last=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = cycle(loader)
for _step in range(10):
    model.train()
    for _ in range(ACCUMULATE):
        loss = model(next(batches))
        accelerator.backward(loss / ACCUMULATE)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
