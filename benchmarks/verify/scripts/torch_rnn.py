"""pytorch/examples word_language_model with DDP: an LSTM, truncated windows, exponentially decayed rates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class RNNModel(nn.Module):
    def __init__(self, words=50, size=24):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, size)
        self.rnn = nn.LSTM(size, size, 2, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(size, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens):
        output, _ = self.rnn(self.drop(self.encoder(tokens)))
        return nn.functional.log_softmax(self.decoder(self.drop(output)), dim=-1).flatten(0, 1)


dist.init_process_group("gloo")
torch.manual_seed(1111)
model = DDP(RNNModel())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
data = TensorDataset(torch.randint(50, (320, 13)))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (tokens,) in DataLoader(data, batch_size=10, sampler=sampler):
        model.zero_grad()
        loss = nn.functional.nll_loss(model(tokens[:, :-1]), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    scheduler.step()
dist.destroy_process_group()
