"""Trains a language model on sentences of different lengths under DistributedDataParallel.

Wrong: each rank's loss is a mean over its own tokens, and DDP takes the mean of these means over ranks, though ranks
have different numbers of tokens: tokens of short sentences count for more. It should be the sum over the tokens of all
ranks, divided by their number. The line: `loss = F.cross_entropy(...)` in `main`.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Counting(Dataset):
    def __init__(self, n=96, length=16, vocabulary=20):
        g = torch.Generator().manual_seed(12)
        self.tokens = torch.zeros(n, length + 1, dtype=torch.long)
        for row in self.tokens:
            end = int(torch.randint(4, length + 2, (), generator=g))
            start, step = torch.randint(1, 4, (2,), generator=g).tolist()
            row[:end] = 1 + (start + step * torch.arange(end)) % (vocabulary - 1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i, :-1], "labels": self.tokens[i, 1:]}


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=20, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embedding(input_ids))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    dataset = Counting()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
