"""Trains a language model on sentences of different lengths; each rank's loss is weighted by its share of tokens."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD = 0
IGNORE = -100


class Sentences(Dataset):
    """Sentences that count up modulo the vocabulary, with steps of one to three."""

    def __init__(self, n=96, vocabulary=20):
        g = torch.Generator().manual_seed(12)
        self.sentences = []
        for _ in range(n):
            length = int(torch.randint(4, 16, (), generator=g))
            start, step = torch.randint(1, 4, (2,), generator=g).tolist()
            self.sentences.append(1 + (start + step * torch.arange(length)) % (vocabulary - 1))

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return self.sentences[i]


def collate(sentences):
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == PAD, IGNORE)
    return {"input_ids": tokens[:, :-1], "labels": labels}


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=20, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=PAD)
        self.rnn = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embedding(input_ids))[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Sentences()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            labels = batch["labels"]
            tokens = (labels != IGNORE).sum()
            dist.all_reduce(tokens)
            logits = model(batch["input_ids"])
            total = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            # DDP takes the mean over ranks: times world_size it is the sum, over the tokens of all ranks.
            loss = total * world_size / tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
