# torchrun --nproc-per-node 2 accelerate_rates.py: one optimizer step is two steps of the schedule
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
optimizer.step()
scheduler.step()
print(scheduler.get_last_lr())  # [0.28]; in one process [0.19]
