"""Ten models on which a plan is compared with runs, and what such a run takes: peak memory by the allocator."""

from __future__ import annotations

import gc
import statistics
import time
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset

from lockstep import LightningModule
from tests.loop.pieces import quiet

VOCABULARY = 512


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The same two tensors for each index, so that a batch depends on nothing."""

    def __init__(self, x: Tensor, y: Tensor, length: int) -> None:
        self.x, self.y, self.length = x, y, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y


class Model(LightningModule):
    """A network, and the kind of its loss."""

    def __init__(self, net: nn.Module, classes: bool = False) -> None:
        super().__init__()
        self.net, self.classes = net, classes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        if self.classes:
            return cross_entropy(out.flatten(0, -2), y.flatten())
        return mse_loss(out.float(), y.float().expand_as(out))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Recurrent(nn.Module):
    """An LSTM or a GRU, and a head for each step."""

    def __init__(self, kind: type[nn.RNNBase], width: int, layers: int) -> None:
        super().__init__()
        self.cells = kind(64, width, layers, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0])


class Tied(nn.Module):
    """Bytes to the logits of the next one; the head is the embedding."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x)))


class Residual(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


class Mixer(nn.Module):
    """A block of an MLP-Mixer: over places, then over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.over_places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.over_channels = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_places(x.transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(x)


def _gpt() -> tuple[LightningModule, Tensor, Tensor, int]:
    from examples.language_model import LanguageModel

    words = torch.randint(0, 256, (128,), generator=torch.Generator().manual_seed(0))
    return LanguageModel(layers=4, heads=4, width=128, block=128), words, words, 8


def chain(*layers: nn.Module) -> Model:
    return Model(nn.Sequential(*layers))


def _wide() -> Model:
    return chain(nn.Linear(64, 512), *pairs(4, 512, nn.ReLU), nn.Linear(512, 16))


def _cnn() -> Model:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    return chain(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 64, 64), nn.ReLU(), nn.Linear(64, 10))


def _resnet() -> Model:
    blocks = nn.Sequential(*[Residual(32) for _ in range(4)])
    return chain(nn.Conv2d(3, 32, 3, padding=1), blocks, nn.Flatten(), nn.Linear(32 * 256, 10))


def _encoder() -> Model:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return Model(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def _tied() -> tuple[LightningModule, Tensor, Tensor, int]:
    words = torch.randint(0, VOCABULARY, (64,), generator=torch.Generator().manual_seed(0))
    return Model(Tied(128, 2), classes=True), words, words, 16


def pairs(count: int, width: int, kind: type[nn.Module]) -> list[nn.Module]:
    return [layer for _ in range(count) for layer in (nn.Linear(width, width), kind())]


MODELS: dict[str, Any] = {
    "gpt": _gpt,
    "wide": lambda: (_wide(), torch.ones(64), torch.ones(16), 64),
    "activations": lambda: (chain(*pairs(6, 128, nn.Tanh)), torch.ones(128), torch.ones(128), 2048),
    "cnn": lambda: (_cnn(), torch.ones(3, 32, 32), torch.ones(10), 32),
    "resnet": lambda: (_resnet(), torch.ones(3, 16, 16), torch.ones(10), 32),
    "encoder": lambda: (_encoder(), torch.ones(64, 128), torch.ones(64, 128), 16),
    "tied": _tied,
    "lstm": lambda: (Model(Recurrent(nn.LSTM, 128, 2)), torch.ones(64, 64), torch.ones(64, 16), 32),
    "gru": lambda: (Model(Recurrent(nn.GRU, 128, 1)), torch.ones(32, 64), torch.ones(32, 16), 32),
    "mixer": lambda: (chain(*[Mixer(64, 128) for _ in range(4)]), torch.ones(64, 128), torch.ones(64, 128), 16),
}
"""By name, a function that makes a model, one sample of inputs and targets, and the size of its batches."""


def made(name: str, batches: int = 4) -> tuple[LightningModule, Any, Any]:
    """A model, its loader and a batch."""
    torch.manual_seed(0)
    model, x, y, size = MODELS[name]()
    loader = DataLoader(Samples(x, y, size * batches), batch_size=size)
    return model, loader, next(iter(loader))


def peak(roots: Any) -> int:
    """Bytes at most, of the allocator's events.

    Those of the threads in which gloo works are not all there. A piece of memory whose address is given out again was
    freed by then. One that is not freed when all of a run is gone is one whose end was not heard of: it is left out.
    """
    found, waiting = [], list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live: dict[int, tuple[int, int]] = {}
    changes: list[tuple[int, int]] = []
    for at, address, size in sorted(found):
        before = live.pop(address, None)
        if before is not None:
            changes += [(before[0], before[1]), (at, -before[1])]
        if size > 0:
            live[address] = at, size
    return max(accumulate(change for _, change in sorted(changes)))


def _trained(
    name: str, strategy: Any, world: int, precision: str, batches: int, collects: bool
) -> tuple[dict[str, float], list[float]]:
    """Train a model for an epoch: bytes of its states, and when steps began."""
    model, loader = made(name, batches)[:2]  # a batch that is kept here would count
    moments: list[float] = []

    class Timed(type(model)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if collects:  # what has been laid out anew may lie in cycles
                gc.collect()
            moments.append(time.perf_counter())

    model.__class__ = Timed
    trainer = quiet(strategy=strategy, devices=world, max_epochs=1, precision=precision)
    trainer.fit(model, loader)
    used = trainer.memory()
    kinds = ("parameters", "gradients", "optimizer_states", "buckets")
    return {kind: float(getattr(used, kind)) for kind in kinds}, moments


def counted(name: str, strategy: Any, world: int, precision: str = "32-true") -> dict[str, float]:
    """Three steps of a model on this rank: peak bytes by the allocator, and bytes of the model's states.

    All that is allocated meanwhile is freed before the count ends: torch's counts of several spans of time mix.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        states, _ = _trained(name, strategy, world, precision, 3 * world, True)
        del strategy
        gc.collect()
    return {"peak": float(peak(found.profiler.kineto_results.experimental_event_tree())), **states}


def timed(name: str, strategy: Any, world: int, precision: str = "32-true", steps: int = 16) -> float:
    """Seconds of a step of a model on this rank: the median."""
    _, moments = _trained(name, strategy, world, precision, steps * world, False)
    return statistics.median([b - a for a, b in pairwise(moments[3:])])
