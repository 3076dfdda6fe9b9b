import torch

gradients, size = torch.tensor([1.0, 1.0, 1.0]), 2  # of three micro-batches, in windows of two
for window in gradients.split(size):
    print("mean of the window:", window.mean().item(), "divided by the full size:", (window / size).sum().item())
