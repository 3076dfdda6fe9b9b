"""The models that `scripts/gpu` trains, in plain torch: a residual network and a transformer of Llama's shape.

The GPT is that of `benchmarks.engine.language`, the tower of small layers that of `benchmarks.engine.race`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention, silu

# -- residual networks ---------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.middle, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.wide, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.narrow(x)))
        y = relu(self.norm2(self.middle(y)))
        return relu(self.norm3(self.wide(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of bottlenecks; by default ResNet-50, version 1.5.

    Args:
        depths: bottlenecks of each stage.
        width: of the first stage; it doubles from stage to stage.
        classes: of images.
    """

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        stages, inputs = [], width
        for number, depth in enumerate(depths):
            for place in range(depth):
                stages.append(Bottleneck(inputs, width << number, 2 if number and not place else 1))
                inputs = 4 * (width << number)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(relu(self.norm(self.first(x))), 3, 2, 1)
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits


def resnet50() -> nn.Module:
    """torchvision's, where it is installed, else the same in this file."""
    if find_spec("torchvision") is None:
        return ResNet()
    made: nn.Module = importlib.import_module("torchvision.models").resnet50()
    return made


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return cross_entropy(model(images), labels)


# -- Llama's shape -------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Measures of a `Llama`."""

    width: int = 2048
    layers: int = 16
    heads: int = 32
    keys: int = 8
    hidden: int = 8192
    tokens: int = 128_256
    context: int = 2048


class LlamaBlock(nn.Module):
    """Grouped attention with rotated positions, and a gated layer for each position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.keys, self.size = shape.heads, shape.keys, shape.width // shape.heads
        self.norm_attention, self.norm_hidden = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        wide = (shape.heads + 2 * shape.keys) * self.size
        self.attention = nn.Linear(shape.width, wide, bias=False)
        self.projection = nn.Linear(shape.width, shape.width, bias=False)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, time, width = x.shape
        every = self.attention(self.norm_attention(x)).view(batch, time, -1, self.size).transpose(1, 2)
        query, key, value = every.split([self.heads, self.keys, self.keys], 1)
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, time, width))
        y = self.norm_hidden(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Each pair of halves, turned by the angle of its position."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Llama(nn.Module):
    """A language model of Llama's shape; by default 1.24 billion parameters, those of Llama 3.2 1B."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape = Shape()) -> None:  # noqa: B008
        super().__init__()
        self.embedding = nn.Embedding(shape.tokens, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        half = shape.width // shape.heads // 2
        angles = torch.outer(torch.arange(shape.context), 500_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        cosine, sine = self.cosine[:time], self.sine[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def language_loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy of what follows each token."""
    return cross_entropy(model(tokens).flatten(0, 1).float(), following.flatten())
