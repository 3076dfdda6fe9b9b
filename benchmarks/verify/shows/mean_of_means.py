import torch

losses = torch.tensor([1.0, 1.0, 1.0, 5.0])  # of four tokens: rank 0 has three of them, rank 1 has one
print("one process:", losses.mean())
print("mean of two ranks:", (losses[:3].mean() + losses[3:].mean()) / 2)
