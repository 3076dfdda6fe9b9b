"""What ``training_step`` returns: its loss, the weight beside it, and how both are shown to hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.data.weighing import Share, weighed_by_part
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once
from lockstep.loop.session import Session

UNEVEN = (
    "The loaders side by side are cut unevenly in this step: of one there are more samples than of another in a "
    "micro-batch or on a rank, so that one loss for all cannot weigh each as one process with the whole batch would. "
    'It is weighed by the loader with most samples. Return the losses by loader, {"loss": {"a": loss_a, "b": loss_b}}, '
    "in the nest of the batch and None where a batch is None: each is weighed by its own samples then. Or leave such "
    "rows out: DataLoader(drop_last=True) in each."
)


TARGETS = (
    "`training_step` returned a loss without a weight, and samples of this fit's first batch have different numbers of "
    "labels that are not -100. If the loss is their mean, as with models of transformers, what is trained depends on "
    'how samples are cut into micro-batches and ranks: return {"loss": loss, "weight": (labels != -100).sum()}, with '
    "labels[:, 1:] for a causal model, which predicts none of the first ones."
)


def has_uneven_targets(batch: object) -> bool:
    """Return True if a mean over the "labels" of a batch is not a mean over its samples: some are -100 here and there.

    That also holds for one sample, which may have as many as the next one or not. Waits for the device of the labels.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim < 2 or not labels.numel() or labels.is_floating_point():
        return False
    counts = (labels != -100).flatten(1).sum(1)
    is_even = len(counts) > 1 and bool((counts == counts[0]).all())
    return not is_even and bool((counts < labels[0].numel()).any())


def tell_of_uneven() -> None:
    """Warn, once, that one loss stands for loaders that are cut unevenly."""
    warn_once(UNEVEN, key="uneven loaders")


class StepOutputs:
    """Reads what ``training_step`` returns in automatic optimization.

    Attributes:
        weighs: whether it returns weights, as all ranks agree once one has returned a loss; None before.
        factor: what the gradient of the window was divided by, for a closure's loss.
    """

    def __init__(self, session: Session) -> None:
        self._fit, self._strategy = session.fit, session.strategy
        self._fit.weights = None  # the sum of the weights of this window
        self._unweighed = False  # whether a loss of this window came without one
        self._looked_at_keys = False
        self.weighs: bool | None = None
        self.factor: float | Tensor = 1.0

    def read(self, output: Any, share: float) -> tuple[Tensor | None, float | Tensor]:
        """The loss, and what it is multiplied with.

        Args:
            output: what ``training_step`` returned.
            share: of the micro-batch.
        """
        if output is None:
            warn_once(
                "`training_step` returned None: the micro-batch is skipped. If that is not meant, return the loss.",
                key="training_step None",
            )
            return None, share
        loss = output
        if not isinstance(output, Tensor):
            loss = self._loss_of(output)
            nest = self._fit.loaded.nest
            if nest is not None and not isinstance(loss, Tensor):
                self._unweighed = True
                return weighed_by_part(output, nest, share), 1.0
            if "weight" in output:
                own = output["weight"]
                self._fit.weights = own if self._fit.weights is None else self._fit.weights + own
                return loss, own
        self._unweighed = True
        if type(share) is Share:
            tell_of_uneven()
        return loss, share

    def read_padding(self, output: Any) -> Tensor | None:
        """The loss of a padding batch, whose weight counts for nothing."""
        before = self._fit.weights
        loss, _ = self.read(output, 1.0)
        if self._fit.weights is not before:
            self._fit.weights = 0.0 if before is None else before
        return loss

    def _loss_of(self, output: Any) -> Any:
        """The loss in a dict: a tensor, or a nest of them, one for each of several loaders."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        nests = (dict, list, tuple) if self._fit.loaded.nest is not None else ()
        if not isinstance(loss, (Tensor, *nests)):
            raise MisconfigurationException(
                f"`training_step` returned {type(output).__name__}: return the loss (a tensor), a dict with the key "
                '"loss", or None.'
            )
        if not self._looked_at_keys and isinstance(loss, Tensor):
            self._looked_at_keys = True
            _tell_of_unread(output)
        return loss

    def divide_weights(self) -> None:
        """Divide the weights of the window out of the gradient; all ranks do it, or none. Collective."""
        weighed, unweighed = self._fit.weights is not None, self._unweighed
        if self.weighs is None:
            kinds = torch.tensor([weighed, unweighed], dtype=torch.float32)
            weighed, unweighed = self._strategy.reduce(kinds, reduce_op="max").bool().tolist()
            self.weighs = weighed if weighed or unweighed else None
            if unweighed and self._fit.uneven_targets:
                warn_once(TARGETS, key="uneven targets")
        if (weighed and self.weighs is False) or (unweighed and self.weighs):
            raise MisconfigurationException(
                '`training_step` returned a "weight" for some micro-batches and none for others: return one with every '
                "loss, on every rank, or with none."
            )
        if self.weighs:
            self.factor = self._strategy.divide_gradients(0.0 if self._fit.weights is None else self._fit.weights)
        self._fit.weights, self._unweighed = None, False


def _tell_of_unread(output: dict[str, Any]) -> None:
    lost = [key for key in ("log", "progress_bar") if isinstance(output.get(key), dict)]
    if lost:
        rank_zero_warn(
            f"`training_step` returned the keys {lost}, as in 2019, and nothing reads them: write "
            "`self.log_dict(values)`, with prog_bar=True for the progress bar, and return the loss."
        )


# -- as `on_train_batch_end` sees it -------------------------------------------------------------------------


def with_loss(output: Any, loss: Tensor | None) -> dict[str, Any]:
    """An output in automatic optimization: the loss is as backward saw it."""
    if loss is None:
        return {}
    return {"loss": loss.detach()} if isinstance(output, Tensor) else detached({**output, "loss": loss})


def shown_by_hand(output: object) -> dict[str, Any]:
    """An output in manual optimization, where it may be whatever the user likes to be shown.

    Raises:
        MisconfigurationException: it is neither a tensor nor a dict.
    """
    if output is None:
        return {}
    if isinstance(output, Mapping):
        return detached(output)
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    raise MisconfigurationException(
        f"`training_step` returned {output!r:.80} ({type(output).__name__}): under manual optimization it may "
        "return a tensor or a dict, which `on_train_batch_end` is shown, or nothing."
    )


def detached(output: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an output without the graphs of its tensors."""
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
