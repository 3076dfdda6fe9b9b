"""Fits on one device: the same bits twice and after a resume, the loop's own losses, every precision."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.devices import accelerator_of
from benchmarks.gpu.modules import QUIET, Classifier, models, perceptron, rows
from lockstep import Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")


def run(part: Part) -> None:
    """Bits first: deterministic algorithms have to be chosen before cuBLAS is used."""
    steps = 4 if part.small else 60
    part.check("deterministic: two runs and a resume end in the same bits", same_bits, part, steps)
    torch.use_deterministic_algorithms(False)
    part.check("losses of 32-true are those of a hand-written loop, bit for bit", as_by_hand, part, steps)
    for name in models(part.small, steps):
        for precision in PRECISIONS if name == "perceptron" or not part.small else PRECISIONS[1:2]:
            part.check(f"{name}, {precision}", fitted, part, name, precision, steps)


def trainer(part: Part, **flags: Any) -> Trainer:
    """A quiet one on the device."""
    return Trainer(**{**QUIET, "accelerator": accelerator_of(part.device), "devices": 1, **flags})


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies on the CPU."""
    return [value.detach().cpu().clone() for value in module.state_dict().values()]


def same_bits(part: Part, steps: int) -> Numbers:
    """With dropout, whose numbers the device draws."""
    half = steps // 2
    ends = []
    for name, upto, resumed in (
        ("one", steps, None),
        ("other", steps, None),
        ("half", half, None),
        ("rest", steps, "half"),
    ):
        seed_everything(3, verbose=False)
        module = Classifier(perceptron(dropout=0.5))
        saved = ModelCheckpoint(dirpath=name, save_last=True, every_n_train_steps=half)
        flags = {"max_steps": upto, "deterministic": True, "enable_checkpointing": True, "callbacks": saved}
        found = trainer(part, **flags)
        found.fit(module, rows(4 * steps, 4), ckpt_path=None if resumed is None else Path(resumed) / "last.ckpt")
        ends.append(weights(module))
    one, other, _, rest = ends
    numbers = {
        "tensors that differ, two runs": sum(not torch.equal(*pair) for pair in zip(one, other, strict=True)),
        "tensors that differ, resumed": sum(not torch.equal(*pair) for pair in zip(one, rest, strict=True)),
    }
    expect(not any(numbers.values()), "the bits differ", numbers)
    return numbers


def as_by_hand(part: Part, steps: int) -> Numbers:
    """The same batches in the same order."""
    torch.manual_seed(0)
    module = Classifier(perceptron(), metric=False)
    net = perceptron()
    net.load_state_dict(module.net.state_dict())
    loader = rows(4 * steps, 4, shuffle=False)
    trainer(part, max_epochs=1).fit(module, loader)
    net.to(part.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(net(x.to(part.device)).float(), y.to(part.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    ours, theirs = (torch.stack(each).cpu() for each in (module.losses, losses))
    numbers = {"steps": steps, "losses that differ": int((ours != theirs).sum()), "last loss": float(theirs[-1])}
    expect(torch.equal(ours, theirs), "the losses differ", numbers)
    return numbers


def fitted(part: Part, name: str, precision: str, steps: int) -> Numbers:
    """Accumulation, clipping, logs, validation, a metric and a checkpoint; the loss has to come down or stay finite."""
    make, data = models(part.small, steps)[name]
    seed_everything(0, verbose=False)
    module: Classifier = make()
    flags: dict[str, Any] = {
        "precision": precision,
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "enable_checkpointing": True,
        "callbacks": ModelCheckpoint(dirpath=f"{name}-{precision}", monitor="val_loss"),
        "log_every_n_steps": 5,
    }
    found = trainer(part, **flags)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found.fit(module, data(), data())
    losses = torch.stack(module.losses).float().cpu()
    numbers: Numbers = {
        "first loss": float(losses[:5].mean()),
        "last loss": float(losses[-5:].mean()),
        "val_loss": float(found.callback_metrics["val_loss"]),
        "steps": found.global_step,
        "warnings": len({str(one.message) for one in said}),
    }
    expect(bool(losses.isfinite().all()), "a loss is not finite", numbers)
    expect(found.global_step == steps // 2 * 2 or precision == "16-mixed", "not every step was taken", numbers)
    return numbers
