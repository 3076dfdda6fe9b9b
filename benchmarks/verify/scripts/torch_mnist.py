"""pytorch/examples mnist with DDP: dropout, Adadelta, a sum of losses in the evaluation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(128, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout1(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


dist.init_process_group("gloo")
torch.manual_seed(1)
images, labels = torch.randn(600, 1, 12, 12), torch.randint(10, (600,))
train, test = TensorDataset(images[:480], labels[:480]), TensorDataset(images[480:], labels[480:])
sampler = DistributedSampler(train)
train_loader = DataLoader(train, batch_size=16, sampler=sampler)
test_loader = DataLoader(test, batch_size=60, sampler=DistributedSampler(test, shuffle=False))
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(1, 4):
    sampler.set_epoch(epoch)
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            sums[0] += F.nll_loss(output, target, reduction="sum").item()
            sums[1] += output.argmax(1).eq(target).sum().item()
    dist.all_reduce(sums)
    print(f"Test set: Average loss: {sums[0] / len(test):.4f}, Accuracy: {sums[1]:.0f}/{len(test)}")
    scheduler.step()
dist.destroy_process_group()
