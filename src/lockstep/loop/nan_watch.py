"""What says once that a loss or a weight of a fit has become NaN; the fit goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lockstep.ground.parts import stands_in
from lockstep.ground.rank import rank_zero_warn
from lockstep.loop.logged_entry import Entry
from lockstep.loop.session import Session

OF_TRAINING = ("training_step", "on_train_batch_end", "on_before_backward")


def _norms_by_kind(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One number for each device, class and mesh of tensors, NaN where one of them holds one."""
    by_kind: dict[tuple[torch.device, type, object], list[torch.Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.device, type(tensor), getattr(tensor, "device_mesh", None))
        by_kind.setdefault(kind, []).append(tensor.detach())
    return [torch.stack(torch._foreach_norm(alike)).float().sum() for alike in by_kind.values()]


def _has_norm(p: torch.Tensor) -> bool:
    """Whether a parameter has numbers on this rank, of a kind that may be NaN."""
    return not stands_in(p) and p.is_floating_point() and p.numel() > 0 and p.layout is torch.strided


class NanWatch:
    """Looks at what a fit logs, and at its weights at the end of epochs.

    Attributes:
        told: whether it has been said in this fit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.told = False

    def look_at(self, values: list[tuple[Entry, str, torch.Tensor]]) -> None:
        """Say once that a loss that was logged is NaN; the fit goes on."""
        if self.told:
            return
        for entry, name, value in values:
            if "loss" in name.lower() and entry.key[0] in OF_TRAINING and value.isnan():
                self._tell(f"{name!r} is NaN")
                return

    def look_at_weights(self) -> None:
        """At an epoch's end, where no loss was logged: NaN gradients have left NaN weights."""
        if self.told:
            return
        weights = {name: p for name, p in self._session.module.named_parameters() if _has_norm(p)}
        if any(norm.isnan() for norm in _norms_by_kind(weights.values())):
            found = next((repr(name) for name, p in weights.items() if p.isnan().any()), None)
            self._tell("a parameter holds NaN" if found is None else f"parameter {found} holds NaN")

    def _tell(self, what: str) -> None:
        self.told = True
        progress = self._session.fit.progress
        rank_zero_warn(
            f"{what} at step {progress.global_step} (epoch {progress.epoch}): the loss was NaN there or before. The "
            "fit goes on; Trainer(detect_anomaly=True) names the operation that makes it."
        )
