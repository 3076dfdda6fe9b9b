"""The harness's measure, one process of the Trainer with the whole batch, is a loop that anyone would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Callback, Trainer
from tests.equivalence.models import Plain, Weighted, rows

pytestmark = pytest.mark.timeout(60)
STEPS = 5

CLIP: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "none": ({}, lambda parameters: None),
    "norm": ({"gradient_clip_val": 0.5}, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
    "value": (
        {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.05),
    ),
}


def by_hand(model: Plain, batch_size: int, clip: Callable[[Any], Any], loss_of: Callable[..., Tensor]) -> list[Tensor]:
    """Gradients of the first weight, step by step."""
    model.double()
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    gradients: list[Tensor] = []
    while len(gradients) < STEPS:
        for x, count in rows(13, shuffle=False)(batch_size):
            optimizer.zero_grad()
            loss_of(model, x.double(), count).backward()
            gradients.append(model.net[0].weight.grad.clone())  # type: ignore[union-attr, operator]
            clip(list(model.parameters()))
            optimizer.step()
            schedule.step()
            if len(gradients) == STEPS:
                break
    return gradients


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(pl_module.net[0].weight.grad.clone())


def mean_over_samples(model: Plain, x: Tensor, count: Tensor) -> Tensor:
    return model.losses(x).mean()


def mean_over_counted(model: Plain, x: Tensor, count: Tensor) -> Tensor:
    total = torch.zeros(())
    for row, prediction, n in zip(x, model.net(x), count, strict=True):
        total = total + (prediction - row)[:n].square().sum()
    return total / count.sum()


@pytest.mark.everyday
@pytest.mark.parametrize("clip", CLIP)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("make", "loss_of"), [(Plain, mean_over_samples), (Weighted, mean_over_counted)])
def test_one_process_of_the_trainer(make: Any, loss_of: Any, accumulate: int, clip: str) -> None:
    flags, clip_by_hand = CLIP[clip]
    torch.manual_seed(3)
    model, mine = make(), make()
    mine.load_state_dict(model.state_dict())
    gradients = Gradients()
    Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=-1,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[gradients],
        **flags,
    ).fit(model, rows(13, shuffle=False)(4))
    expected = by_hand(mine, 4 * accumulate, clip_by_hand, loss_of)
    assert len(gradients.seen) == STEPS
    for one, other in zip(gradients.seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * other.abs().max().item())
    for (name, one), other in zip(model.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)
