"""minGPT-ddp: a character data set, AdamW with groups, clipping, under torchrun."""

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


class CharDataset(Dataset):
    def __init__(self, text, block):
        characters = sorted(set(text))
        self.text, self.block, self.vocabulary = text, block, len(characters)
        self.stoi = {character: number for number, character in enumerate(characters)}

    def __len__(self):
        return len(self.text) - self.block

    def __getitem__(self, index):
        ids = [self.stoi[c] for c in self.text[index : index + self.block + 1]]
        return torch.tensor(ids[:-1]), torch.tensor(ids[1:])


class GPT(nn.Module):
    def __init__(self, vocabulary, block, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, dim), nn.Parameter(torch.zeros(1, block, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1))
        logits = self.head(self.blocks(self.tok(idx) + self.pos, mask=mask, is_causal=True))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


init_process_group(backend="gloo")
torch.manual_seed(3407)
data = CharDataset("the quick brown fox jumps over the lazy dog. " * 40, 16)
train, test = random_split(data, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
model = GPT(data.vocabulary, 16)
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
model = DDP(model)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, num_workers=2, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for _iteration, (source, targets) in enumerate(loader):
        _, loss = model(source, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if int(os.environ["RANK"]) == 0:
        print(f"epoch {epoch} loss {loss.item():.5f}")
destroy_process_group()
