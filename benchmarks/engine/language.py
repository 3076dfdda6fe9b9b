"""A byte-level GPT and text for it: Python's own standard library, so nothing is downloaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

BYTES = 256


class Size(NamedTuple):
    """Width, depth and context of a GPT; how many tokens it knows, and whether embedding and head are one matrix."""

    width: int
    layers: int
    heads: int = 4
    context: int = 64
    tokens: int = BYTES
    tied: bool = False


TINY = Size(64, 2)
"""0.14 million parameters, for losses of many steps."""
SMALL = Size(128, 4)
"""0.9 million."""
MIDDLE = Size(256, 6)
"""5 million."""
LARGE = Size(512, 8, heads=8)
"""25 million."""
GPT2 = Size(768, 12, heads=12, context=1024, tokens=50304, tied=True)
"""124 million: GPT-2, whose 50,257 tokens are padded to a multiple of 64 because other widths multiply slowly."""


class Block(nn.Module):
    """Attention to what came before, and a layer for each position; 12 parameter tensors."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
        self.norm_hidden = nn.LayerNorm(size.width)
        self.hidden = nn.Linear(size.width, 4 * size.width)
        self.output = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        pieces = self.attention(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = pieces.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.output(nn.functional.gelu(self.hidden(self.norm_hidden(x))))


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        size: its measures. Initial values are drawn under ``seed`` and need no state of torch's generator.
        seed: of the initial values.
    """

    def __init__(self, size: Size, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.bytes = nn.Embedding(size.tokens, size.width)
            self.places = nn.Embedding(size.context, size.width)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm = nn.LayerNorm(size.width)
            self.head = nn.Linear(size.width, size.tokens, bias=not size.tied)
            if size.tied:
                self.head.weight = self.bytes.weight
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    deep = name.endswith(("projection.weight", "output.weight"))
                    nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if deep else 0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(parameter)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, time, tokens) for tokens, which are bytes as a rule (batch, time)."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean cross-entropy, in nats a byte, of each byte of ``text`` (batch, time + 1) given those before it."""
    logits = model(text[:, :-1])
    return cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class Corpus:
    """The sources of the standard library's modules, one after another in the order of their names.

    It depends on nothing but the release of Python. The last tenth is kept for validation.

    Args:
        folder: where the ``.py`` files are; that of this Python's standard library if None.
        limit: bytes to keep at most.
    """

    def __init__(self, folder: Path | None = None, limit: int = 4_000_000) -> None:
        folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        kept = bytearray()
        for path in sorted(folder.glob("*.py")):
            kept += path.read_bytes()
            if len(kept) >= limit:
                break
        text = torch.frombuffer(kept[:limit], dtype=torch.uint8)
        cut = len(text) - len(text) // 10
        self.training, self.held_out = text[:cut], text[cut:]

    def batch(self, step: int, rank: int, count: int, length: int) -> Tensor:
        """``count`` pieces of ``length`` bytes at random places, which depend on step and rank alone; int64."""
        return self._pieces(self.training, 1 + step * 1024 + rank, count, length)

    def validation(self, count: int, length: int) -> Tensor:
        """The same ``count`` pieces of the held-out text at every call."""
        return self._pieces(self.held_out, 0, count, length)

    @staticmethod
    def _pieces(text: Tensor, seed: int, count: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - length, (count, 1), generator=generator)
        return text[starts + torch.arange(length)].long()
