"""A small language model that cuts windows of tokens at random offsets, which each rank draws by its own seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LENGTH = 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, tokens):
        sums = self.embedding(tokens).cumsum(1)
        return self.head(torch.tanh(self.hidden(sums / torch.arange(1, tokens.size(1) + 1)[:, None])))


def make_data():
    return torch.randint(20, (2000,), generator=torch.Generator().manual_seed(1))


def make_model():
    torch.manual_seed(0)
    return LanguageModel()


def offsets_of(rank):
    return torch.Generator().manual_seed(100 + rank)


def get_batch(tokens, generator):
    offsets = torch.randint(len(tokens) - LENGTH, (8,), generator=generator)
    inputs = torch.stack([tokens[i : i + LENGTH] for i in offsets])
    targets = torch.stack([tokens[i + 1 : i + 1 + LENGTH] for i in offsets])
    return inputs, targets


def main():
    dist.init_process_group("gloo")
    tokens, generator = make_data(), offsets_of(dist.get_rank())
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(12):
        inputs, targets = get_batch(tokens, generator)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
