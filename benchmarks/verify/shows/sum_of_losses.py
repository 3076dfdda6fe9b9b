import torch

x, y, w = torch.randn(4), torch.randn(4), torch.zeros(1, requires_grad=True)


def gradient(x, y):
    return torch.autograd.grad(((w * x - y) ** 2).sum(), w)[0]  # reduction="sum"


print("one process:", gradient(x, y))
print("mean of two ranks:", (gradient(x[:2], y[:2]) + gradient(x[2:], y[2:])) / 2)  # half as large
