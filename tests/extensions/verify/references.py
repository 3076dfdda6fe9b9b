"""What each script means to train: one process, written by hand, that sees in each step the batches of all ranks.

A reference is a generator of whole parameters, a list after each optimizer step, in the order of the optimizer's. It
takes the script's model and data, and neither its loop nor a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, default_collate

Parameters = list[Tensor]
Reference = Callable[[ModuleType, int, list[list[Tensor]]], Iterator[Parameters]]
"""By the script, the number of ranks, and the inputs that each rank saw."""


def windows(data: Any, ranks: int, batch_size: int, epochs: int, accumulate: int = 1, **sampler: Any) -> Iterator[list]:
    """The samples of each step, of all ranks together, as DistributedSampler deals them out."""
    for epoch in range(epochs):
        orders = []
        for rank in range(ranks):
            dealer = DistributedSampler(data, ranks, rank, **sampler)
            dealer.set_epoch(epoch)
            orders.append(list(dealer))
        share = batch_size * accumulate
        for start in range(0, len(orders[0]), share):
            yield [data[i] for order in orders for i in order[start : start + share]]


def current(optimizer: torch.optim.Optimizer) -> Parameters:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def train(
    optimizer: torch.optim.Optimizer,
    batches: Iterator[list],
    loss: Callable[[Any], Tensor],
    before_step: Callable[[int], object] = lambda step: None,
) -> Iterator[Parameters]:
    for step, samples in enumerate(batches):
        optimizer.zero_grad()
        loss(default_collate(samples)).backward()
        before_step(step)
        optimizer.step()
        yield current(optimizer)


def of(model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], Tensor]:
    """The loss of a pair of inputs and targets."""
    return lambda batch: criterion(model(batch[0]), batch[1])


def clipped(model: nn.Module, norm: float) -> Callable[[int], object]:
    return lambda step: nn.utils.clip_grad_norm_(model.parameters(), norm)


def plain(
    model: str | Callable[[ModuleType], nn.Module],
    data: str,
    criterion: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    arguments: tuple[int, ...] = (),
    seed: int = 0,
    batch_size: int = 8,
    epochs: int = 3,
    accumulate: int = 1,
    norm: float = math.inf,
    sampler_seed: int = 0,
) -> Reference:
    """A reference of the script's functions that make a model and, from ``arguments``, data; and what else it sets."""

    def reference(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
        torch.manual_seed(seed)
        made = getattr(script, model)() if isinstance(model, str) else model(script)
        before_step = clipped(made, norm) if norm < math.inf else lambda step: None
        steps = windows(getattr(script, data)(*arguments), ranks, batch_size, epochs, accumulate, seed=sampler_seed)
        return train(optimizer(made.parameters()), steps, of(made, criterion), before_step)

    return reference


SGD, MOMENTUM = partial(partial, torch.optim.SGD), partial(partial, torch.optim.SGD, momentum=0.9)
ADAM, ADAMW = partial(partial, torch.optim.Adam), partial(partial, torch.optim.AdamW)

ddp_plain = plain("make_model", "make_dataset", F.cross_entropy, MOMENTUM(lr=0.1))
ddp_accumulation = plain("Net", "Sines", F.mse_loss, ADAMW(lr=3e-3), seed=42, batch_size=4, accumulate=4)
fsdp2_accumulation = plain(
    "get_model", "get_dataset", F.mse_loss, MOMENTUM(lr=0.02), batch_size=4, accumulate=3, norm=0.5
)
fsdp2 = plain(
    "Transformer",
    "make_dataset",
    lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    ADAMW(lr=3e-3),
    seed=7,
    sampler_seed=7,
)
deep_net = lambda script: script.DeepNet(use_checkpoint=False)  # noqa: E731
gradient_checkpointing = plain(deep_net, "build_dataset", F.smooth_l1_loss, ADAMW(lr=1e-3, weight_decay=0.1), seed=100)
ema = plain("make_model", "make_data", F.binary_cross_entropy_with_logits, SGD(lr=0.3), arguments=(96, 0))
bug = partial(plain, "make_model", "make_dataset", F.mse_loss, SGD(lr=0.05))
last_window, doubled_gradients, no_sync_everywhere = bug(accumulate=4), bug(accumulate=3), bug(accumulate=2)
clip_local_norm = clip_sqrt_ranks = bug(norm=0.1)
padded_metrics = no_set_epoch = bug(epochs=6)
resume_first_order = plain("make_model", "make_dataset", F.mse_loss, MOMENTUM(lr=0.05), epochs=6)
rank_in_model = plain(lambda script: nn.Sequential(*script.make_model()), "make_dataset", F.mse_loss, SGD(lr=0.05))
sync_off = different_seeds = loss_reduced = rank_augmentation = bug()


def ddp_join(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    data, model = script.make_dataset(), script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    share = 8 * ranks
    steps = ([data[i] for i in range(start, min(start + share, 104))] for start in range(0, 104, share))
    return train(optimizer, steps, of(model, F.mse_loss))


def lightning_automatic(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(1234)
    net = script.Classifier().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    steps = windows(script.make_dataset(), ranks, 8, 3, accumulate=2, seed=1234)
    in_epoch = 128 // (16 * ranks)

    def before_step(step: int) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.05 * 0.7 ** (step // in_epoch)

    return train(optimizer, steps, of(net, F.cross_entropy), before_step)


def lightning_manual(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(5)
    module = script.TwoOptimizers()
    data = script.Data()
    data.setup("fit")
    autoencoder = torch.optim.Adam([*module.encoder.parameters(), *module.decoder.parameters()], lr=1e-2)
    probe = torch.optim.SGD(module.probe.parameters(), lr=0.1)
    for samples in windows(data.dataset, ranks, 8, 3, seed=5):
        x, y = default_collate(samples)
        autoencoder.zero_grad()
        F.mse_loss(module.decoder(module.encoder(x)), x).backward()
        autoencoder.step()
        yield current(autoencoder)
        probe.zero_grad()
        F.cross_entropy(module.probe(module.encoder(x).detach()), y).backward()
        probe.step()
        yield current(probe)


def gan(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(13)
    generator = script.make_generator(6)
    discriminator = script.make_discriminator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for samples in windows(script.Ring(96, 6), ranks, 8, 2):
        batch = default_collate(samples)
        fake = generator(batch["noise"])
        real_part = F.softplus(-discriminator(batch["real"])).mean()
        fake_part = F.softplus(discriminator(fake.detach())).mean()
        of_discriminator.zero_grad()
        (0.5 * real_part + 0.5 * fake_part).backward()
        of_discriminator.step()
        yield current(of_discriminator)
        of_generator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        of_generator.step()
        yield current(of_generator)


def iterable_sharded(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stream = script.Stream(0, 1)
    share = 5 * ranks
    steps = ([stream.record(i) for i in range(start, start + share)] for start in range(0, 160, share))
    return train(optimizer, steps, of(model, F.mse_loss))


def bf16_autocast(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(0)
    model = script.ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return train(optimizer, windows(script.get_data(), ranks, 8, 2), loss)


def cosine_by_hand(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.get_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before_step(step: int) -> None:
        cosine = 0.01 + 0.09 * (1 + math.cos(math.pi * (step - 3) / 13)) / 2
        optimizer.param_groups[0]["lr"] = 0.025 * (step + 1) if step < 3 else cosine

    return train(optimizer, windows(script.get_dataset(), ranks, 8, 4), of(model, F.mse_loss), before_step)


def several_losses(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(6)
    model = script.Detector()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def loss(batch: Any) -> Tensor:
        x, (boxes, labels) = batch
        output = model(x)
        decay = torch.cat([p.flatten() for p in model.trunk.parameters()]).square().sum()
        found = F.cross_entropy(output["class"], labels)
        return F.smooth_l1_loss(output["box"], boxes) + 0.5 * found + 1e-3 * decay

    return train(optimizer, windows(script.Boxes(), ranks, 8, 3), loss)


def clipping(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(19)
    model = script.Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def before_step(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, (step + 1) / 4)

    steps = windows(script.create_dataset(96), ranks, 8, 2, seed=19)
    return train(optimizer, steps, of(model, F.mse_loss), before_step)


def sync_batchnorm(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()
    model[1] = nn.BatchNorm1d(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train(optimizer, windows(script.make_data(), ranks, 8, 3), of(model, F.cross_entropy))


def frozen_layers(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(55)
    model = script.Branches()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    in_epoch = 96 // (8 * ranks)
    for step, samples in enumerate(windows(script.build_data(), ranks, 8, 3)):
        x, y = default_collate(samples)
        side = step % in_epoch % 2
        optimizer.zero_grad()
        F.l1_loss(model(x, side), y[:, side : side + 1]).backward()
        optimizer.step()
        yield current(optimizer)


def all_reduce_by_hand(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(1234)
    model = script.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    data, share = script.make_images(), 48 // ranks
    parts = [script.partition(data, rank, ranks) for rank in range(ranks)]
    starts = [start for _ in range(4) for start in range(0, 96 // ranks, share)]
    steps = ([part[i] for part in parts for i in range(start, start + share)] for start in starts)
    return train(optimizer, steps, of(model, F.nll_loss))


def language_model(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    torch.manual_seed(0)
    model = script.LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for samples in windows(script.Sentences(), ranks, 8, 3):
        batch = script.collate(samples)
        logits = model(batch["input_ids"])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        optimizer.step()
        yield current(optimizer)


def cut_by_hand(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()
    x, y = script.make_data(192, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    share = 16 * ranks
    orders = [torch.randperm(192, generator=torch.Generator().manual_seed(epoch)) for epoch in range(3)]
    # the ranks take every ranks-th index: together their windows are windows of the order
    steps = ([(x[i], y[i]) for i in order[at : at + share]] for order in orders for at in range(0, 192, share))

    def before_step(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * 0.5 ** (step // (192 // share))

    return train(optimizer, steps, of(model, F.mse_loss), before_step)


def optimizer_of_shards(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train(optimizer, windows(script.make_data(192), ranks, 8, 3), of(model, F.mse_loss))


def windows_of_tokens(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model, tokens = script.make_model(), script.make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generators = [script.offsets_of(rank) for rank in range(ranks)]

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def batch() -> list:
        return [pair for own in generators for pair in zip(*script.get_batch(tokens, own), strict=True)]

    return train(optimizer, (batch() for _ in range(12)), loss)


def lockstep_ddp(script: ModuleType, ranks: int, inputs: list[list[Tensor]]) -> Iterator[Parameters]:
    torch.manual_seed(3)
    model = script.Regression().net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = (torch.cat(batches) for batches in zip(*inputs, strict=True))
    steps = ([(row, (row[:1] * row[1:2])) for row in rows] for rows in seen)
    return train(optimizer, steps, of(model, F.mse_loss))


def tensor_parallel(script: ModuleType, ranks: int, inputs: list[list[Tensor]]) -> Iterator[Parameters]:
    first, second = script.full_layers()
    model = nn.Sequential(first, nn.ReLU(), second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, generator = script.make_dataset(), torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            yield current(optimizer)


def mean_of_means(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()

    def loss(batch: Any) -> Tensor:
        seen = batch[0][:, 0] > 0.3
        return F.mse_loss(model(batch[0][seen]), batch[1][seen])

    return train(torch.optim.SGD(model.parameters(), lr=0.05), windows(script.make_dataset(), ranks, 8, 3), loss)


def muon_on_shards(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()
    buffers = {p: torch.zeros_like(p) for p in model.parameters()}
    for samples in windows(script.make_dataset(), ranks, 8, 3):
        x, _ = default_collate(samples)
        model.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        with torch.no_grad():
            for p, buffer in buffers.items():
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(0.02 * script.newton_schulz(buffer))
        yield [p.detach().clone() for p in model.parameters()]


def scheduler_times_ranks(script: ModuleType, ranks: int, inputs: object) -> Iterator[Parameters]:
    model = script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def before_step(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - 0.9 * min(step, 18) / 18)

    steps = windows(script.make_dataset(), ranks, 8, 3)
    return train(optimizer, steps, of(model, F.mse_loss), before_step)
