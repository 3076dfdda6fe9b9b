"""Small modules as users write them, each with its data, in float64: language models, adapters, GANs, and what else."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

from lockstep import LightningModule

SAMPLES, WIDTH, WORDS = 10, 6, 12


def rows(seed: int = 3, count: int = SAMPLES) -> list[Tensor]:
    """Samples of six numbers."""
    return list(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def texts() -> list[dict[str, Tensor]]:
    """Samples of a language model: words, and those that follow."""
    words = torch.randint(0, WORDS, (SAMPLES, 5), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": line[:-1], "labels": line[1:]} for line in words]


def plain_loader(batch_size: int) -> Any:
    return DataLoader(rows(), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]


def text_loader(batch_size: int) -> Any:
    return DataLoader(texts(), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]


class Pet(LightningModule):
    """What most of them share: a loss that is a mean over samples, and SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.build()
        self.double()

    def build(self) -> None:
        """Make the layers."""
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.02, momentum=0.9)


# -- language models ----------------------------------------------------------------------------------------------


@dataclass
class Config:
    """As models of a hub have one."""

    vocab_size: int = WORDS
    hidden_size: int = 8
    tie_word_embeddings: bool = False
    num_layers: int = 2


class Output(OrderedDict[str, Any]):
    """What a model returns: a dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        return (hidden + torch.tanh(self.mix(self.norm(hidden))),)


class Model(nn.Module):
    """A language model with a config, called by keywords."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config.hidden_size) for _ in range(config.num_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight

    def resize_token_embeddings(self, size: int) -> None:
        old = self.embed
        self.embed = nn.Embedding(size, self.config.hidden_size, dtype=old.weight.dtype)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[: old.num_embeddings] = old.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            (hidden,) = layer(hidden)
        logits = self.lm_head(hidden)
        out = Output(logits=logits, hidden_states=hidden)
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


class Language(Pet):
    config = Config()

    def build(self) -> None:
        self.model = Model(self.config)

    def loss(self, batch: Any) -> Any:
        return self.model(**batch).loss


class TiedLanguage(Language):
    config = Config(tie_word_embeddings=True)


class Resized(Language):
    """Words are added before training begins."""

    def setup(self, stage: str) -> None:
        if self.model.embed.num_embeddings == WORDS:
            self.model.resize_token_embeddings(WORDS + 3)


class Adapter(nn.Module):
    """A frozen layer, and a product of two small ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapted(Language):
    """LoRA: adapters learn, all else is frozen."""

    def build(self) -> None:
        super().build()
        self.model.requires_grad_(False)
        for layer in self.model.layers:
            layer.mix = Adapter(layer.mix)


class Sparse(Language):
    """An embedding whose gradients are sparse."""

    def build(self) -> None:
        super().build()
        self.model.embed = nn.Embedding(WORDS, self.config.hidden_size, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Transformer(Language):
    """torch's own layers."""

    def build(self) -> None:
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.encoder(self.embed(batch["input_ids"])))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Recurrent(Transformer):
    """An LSTM."""

    def build(self) -> None:
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def encoder(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.lstm(x)[0]


# -- optimization by hand -----------------------------------------------------------------------------------------


class Gan(Pet):
    """Two nets with an optimizer each."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        return F.softplus(-self.judge(self.maker(batch.flip(-1)))).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()  # type: ignore[misc, attr-defined]
        self.toggle_optimizer(makes)
        made = self.loss(batch)
        makes.zero_grad()
        self.manual_backward(made)
        makes.step()
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        false = self.maker(batch.flip(-1)).detach()
        judged = F.softplus(-self.judge(batch)).mean() + F.softplus(self.judge(false)).mean()
        judges.zero_grad()
        self.manual_backward(judged)
        judges.step()
        self.untoggle_optimizer(judges)
        self.log_dict({"made": made, "judged": judged}, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.maker, self.judge)]


class Sharpness(Pet):
    """SAM: the gradient at the top of the slope around the weights."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        moved = [(p, p.grad * 0.05) for p in self.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, way in moved:
                parameter.add_(way)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, way in moved:
                parameter.sub_(way)
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)


class ClippedByHand(Pet):
    """Clips between backward and step."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, on_step=False, on_epoch=True)


class LineSearch(Pet):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


# -- shapes of modules --------------------------------------------------------------------------------------------


class Lazy(Pet):
    """Layers that learn their shapes from the first batch."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))


class Tied(Pet):
    """An autoencoder whose decoder is the encoder, transposed."""

    def build(self) -> None:
        self.code, self.bias = nn.Linear(WIDTH, 4), nn.Parameter(torch.zeros(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        back = F.linear(torch.tanh(self.code(batch)), self.code.weight.t(), self.bias)
        return (back - batch).square().mean()


class Twice(Pet):
    """A layer that is called twice, and lies in two places."""

    def build(self) -> None:
        self.first, self.mix, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.again = self.mix

    def net(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.last(torch.tanh(self.again(torch.tanh(self.mix(torch.tanh(self.first(x)))))))


class Computed(Pet):
    """Layers that are computed again in the backward."""

    reentrant = False

    def build(self) -> None:
        self.first, self.mix, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def net(self, x: Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.first(x))
        again = checkpoint(lambda t: torch.tanh(self.mix(t)), hidden, use_reentrant=self.reentrant)
        return self.last(again)


class Reentrant(Computed):
    reentrant = True


class FrozenLater(Pet):
    """A layer stops to learn in the second epoch."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 0)


class ThawedLater(Pet):
    """A layer begins to learn in the second epoch; a run that goes on says anew what learns."""

    def on_train_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Target(Pet):
    """A slow copy of the net, which its predictions are held against."""

    def build(self) -> None:
        super().build()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            told = self.slow(batch.flip(-1))
        return super().loss(batch) + (self.net(batch) - told).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class TargetInStep(Target):
    """The same, moved between forward and backward: under fsdp what was written there was lost."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_train_batch_end(None, None, 0)

    def on_before_backward(self, loss: Tensor) -> None:
        super().on_train_batch_end(None, None, 0)


class Experts(Pet):
    """Each sample goes to one expert, so that some have nothing to learn from a batch."""

    def build(self) -> None:
        self.experts = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(4)])

    def net(self, x: Tensor) -> Tensor:  # type: ignore[override]
        chosen = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.5).long()
        out = x.new_zeros(len(x), 1)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            if here.any():
                out[here] = expert(x[here])
        return out


class Unused(Pet):
    """A layer that no step uses."""

    def build(self) -> None:
        super().build()
        self.idle = nn.Linear(3, 3)


class Waves(Pet):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def loss(self, batch: Any) -> Tensor:
        hidden = torch.view_as_real(self.net[0](batch) * self.waves).sum(-1)
        return (self.net[2](hidden).squeeze(-1) - batch.sum(-1)).square().mean()


class WeightNorm(Pet):
    def build(self) -> None:
        super().build()
        parametrizations.weight_norm(self.net[0])


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * grad * weight, (2 * grad * x).sum(0)


class OwnFunction(Pet):
    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def loss(self, batch: Any) -> Tensor:
        return (self.net(Doubled.apply(batch, self.scale)).squeeze(-1) - batch.sum(-1)).square().mean()


class Penalized(Pet):
    """The gradient of the output by the input is in the loss."""

    def loss(self, batch: Any) -> Tensor:
        with torch.enable_grad():
            x = batch.detach().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out.squeeze(-1) - batch.sum(-1)).square().mean() + 0.1 * slope.square().mean()


class Raw(Pet):
    """Parameters in lists and dicts, and no layers."""

    def build(self) -> None:
        self.steps = nn.ParameterList([torch.randn(8, WIDTH) * 0.3, torch.randn(1, 8) * 0.3])
        self.named = nn.ParameterDict({"bias": torch.zeros(8), "scale": torch.tensor(1.0)})

    def net(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(torch.tanh(F.linear(x, self.steps[0], self.named["bias"])), self.steps[1]) * self.named["scale"]


class Normed(Pet):
    """BatchNorm, whose statistics ranks take together."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Picture(Pet):
    """Convolutions with norms over groups."""

    def build(self) -> None:
        self.conv, self.norm, self.last = nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(16, 1)

    def net(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.last(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))


class Hooked(Pet):
    """A forward hook takes part in the computation."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.net[0].register_forward_hook(lambda layer, given, out: out * self.scale)


# -- steps, batches, metrics ---------------------------------------------------------------------------------------


class SeveralLosses(Pet):
    """Heads with a loss each, logged by name."""

    def build(self) -> None:
        self.body = nn.Linear(WIDTH, 8)
        self.heads = nn.ModuleDict({"sum": nn.Linear(8, 1), "first": nn.Linear(8, 1)})

    def loss(self, batch: Any) -> Tensor:
        hidden, told = torch.tanh(self.body(batch)), {"sum": batch.sum(-1), "first": batch[:, 0]}
        each = {name: (head(hidden).squeeze(-1) - told[name]).square().mean() for name, head in self.heads.items()}
        self.log_dict({f"loss/{name}": value for name, value in each.items()}, on_step=False, on_epoch=True)
        return torch.stack(list(each.values())).sum()


class ListOfMetrics(Pet):
    """torchmetrics objects in a list, a dict and a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([MeanMetric(), MaxMetric()])
        self.named = nn.ModuleDict({"sum": SumMetric()})
        self.together = MetricCollection({"low": MeanMetric(), "high": MaxMetric()}, prefix="all/")

    def loss(self, batch: Any) -> Tensor:
        each = (self.net(batch).squeeze(-1) - batch.sum(-1)).square()
        if self.trainer.training:
            for place, metric in enumerate([*self.listed, self.named["sum"]]):
                metric.update(each.detach())
                self.log(f"metric{place}", metric, on_step=False, on_epoch=True)
            self.together.update(each.detach())
            self.log_dict(self.together, on_step=False, on_epoch=True)
        return each.mean()


class Groups(Pet):
    """Two groups, chosen by shape; a rate that follows the number of steps to come."""

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.dim() > 1]
        flat = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OwnWeight(Pet):
    """Some samples do not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = (self.net(batch).squeeze(-1) - batch.sum(-1)).square()
        counts = (batch[:, 0] > -0.3).to(each.dtype)
        loss = (each * counts).sum() / counts.sum().clamp(min=1)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=int(counts.sum()))
        return {"loss": loss, "weight": float(counts.sum())}


@dataclass
class Batch:
    """A batch of a class of the user's."""

    x: Tensor
    y: Tensor
    names: list[str] = field(default_factory=list)


def as_batch(parts: list[Tensor]) -> Batch:
    x = torch.stack(parts)
    return Batch(x, x.sum(-1), [f"sample {len(parts)}"])


class DataclassBatches(Pet):
    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch.x).squeeze(-1) - batch.y).square().mean()


class NestedBatches(Pet):
    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch["in"]["x"]).squeeze(-1) - batch["out"][0]).square().mean()


def nested(parts: list[Tensor]) -> dict[str, Any]:
    x = torch.stack(parts)
    return {"in": {"x": x, "note": "text"}, "out": [x.sum(-1), None]}


class SeveralLoaders(Pet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["a"]) + self.loss(batch["b"])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


class Stream(IterableDataset[Tensor]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows())


class Functional(Pet):
    """The module's own forward is what steps call."""

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return (self(batch).squeeze(-1) - batch.sum(-1)).square().mean()


# -- the zoo ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One of them.

    Attributes:
        kind: its class.
        loader: makes its loader of a batch size.
        refused: words of the error, by the engine that refuses it.
        flags: of the Trainer.
        digits: to which logged values agree; None: as usual. torchmetrics adds up in float32.
    """

    kind: type[LightningModule]
    loader: Callable[[int], Any] = plain_loader
    refused: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    digits: int | None = None


def _loader(**settings: Any) -> Callable[[int], Any]:
    return lambda batch_size: DataLoader(rows(), batch_size=batch_size, **settings)  # type: ignore[arg-type]


def _two_loaders(batch_size: int) -> Any:
    return {"a": plain_loader(batch_size), "b": DataLoader(rows(5), batch_size=batch_size)}  # type: ignore[arg-type]


MEMBERS: dict[str, Member] = {
    "a net": Member(Pet, flags={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "a forward": Member(Functional),
    "a language model": Member(Language, text_loader),
    "tied words": Member(TiedLanguage, text_loader),
    "a resized embedding": Member(Resized, text_loader),
    "adapters": Member(Adapted, text_loader),
    "a sparse embedding": Member(Sparse, text_loader, {"fsdp": "(?i)sparse"}),
    "a transformer": Member(Transformer, text_loader),
    "an LSTM": Member(Recurrent, text_loader),
    "a GAN": Member(Gan),
    "SAM": Member(Sharpness),
    "clipping by hand": Member(ClippedByHand),
    "LBFGS": Member(LineSearch, refused={"fsdp": "LBFGS"}),
    "lazy layers": Member(Lazy, refused={"ddp": "lazy layer", "fsdp": "lazy layer"}),
    "tied weights": Member(Tied),
    "a layer called twice": Member(Twice),
    "computed again": Member(Computed),
    "re-entrant": Member(Reentrant),
    "frozen later": Member(FrozenLater),
    "thawed later": Member(ThawedLater),
    "a target net": Member(Target),
    "a target net in a step": Member(TargetInStep),
    "experts": Member(Experts),
    "an unused layer": Member(Unused),
    "complex weights": Member(Waves),
    "weight norm": Member(WeightNorm),
    "a function's own backward": Member(OwnFunction),
    "a gradient penalty": Member(Penalized),
    "raw parameters": Member(Raw),
    "BatchNorm": Member(Normed, flags={"sync_batchnorm": True}),
    "convolutions": Member(Picture),
    "a forward hook": Member(Hooked),
    "several losses": Member(SeveralLosses),
    "metrics in a list": Member(ListOfMetrics, digits=5),
    "groups by shape": Member(Groups),
    "own weights": Member(OwnWeight),
    "dataclass batches": Member(DataclassBatches, _loader(collate_fn=as_batch)),
    "nested batches": Member(NestedBatches, _loader(collate_fn=nested)),
    "several loaders": Member(SeveralLoaders, _two_loaders),
    "a stream": Member(Pet, lambda batch_size: DataLoader(Stream(), batch_size=batch_size)),
}
