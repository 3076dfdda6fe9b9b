"""Analysis of one accumulation window: its samples, its layers, and its first tensor that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.extensions.replay.finite import FirstNotFinite, not_finite_in
from lockstep.extensions.replay.request import Findings, LayerNorms, SampleNorms
from lockstep.extensions.replay.rows import NoRows, take
from lockstep.ground.seed import random_states, set_random_states
from lockstep.ground.tree import tree_leaves, tree_map
from lockstep.loop.padding import without_trace

if TYPE_CHECKING:
    from lockstep.loop.step import Step
    from lockstep.trainer import Trainer

BATCH_NORM = (
    "Samples are computed with the running statistics of BatchNorm, since a single sample has no batch; so their "
    "gradients do not sum to that of the step."
)
SHARDED = (
    "Samples are not taken apart: {strategy} shards the model, so all ranks would have to run each sample together. "
    "Without --devices, the step is replayed on one process."
)
BY_HAND = "Samples and layers are not taken apart: in manual optimization, only `training_step` knows the losses."


class PlacedMicroBatch(NamedTuple):
    """A micro-batch of the window, with the places of its samples."""

    batch: Any
    weight: float
    """Number of samples."""
    share: float
    """Factor for the loss."""
    places: Sequence[int | list[int]]


class WindowAnalysis:
    """Runs the forward and backward of a window without an update, and restores the module afterwards.

    Each rank analyses its own micro-batches.

    Args:
        trainer: Trainer whose fit is about to run the window.
        step: runner of the fit's windows.
    """

    def __init__(self, trainer: Trainer, step: Step) -> None:
        self._module = trainer.session.module
        self._strategy = trainer.strategy
        self._fit = trainer.session.fit
        self._step = step
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._gradients: dict[str, Tensor] = {}
        self._sum: dict[str, Tensor] = {}
        self._layers: dict[str, LayerNorms] = {}

    def run(self, micro_batches: Sequence[PlacedMicroBatch], batch_idx: int, found: Findings) -> None:
        """Analyse a window.

        Args:
            micro_batches: the window.
            batch_idx: ``batch_idx`` of its first micro-batch.
            found: takes samples, layers, and the other findings.
        """
        if not self._module.automatic_optimization:
            found.notes.append(BY_HAND)
            return
        if self._strategy.cuts_parameters:
            found.notes.append(SHARDED.format(strategy=type(self._strategy).__name__))
            return
        with self._undone():
            self._run_whole(micro_batches, batch_idx)
        gradients = self._gradients = self._mean(self._gradients)
        found.layers = [layer for layer in self._layers.values() if layer.name]
        self._add_gradients(found.layers)
        found.gradient = _norm(gradients.values())
        with self._undone():
            self._run_samples(found, micro_batches, batch_idx)
        if not math.isfinite(found.gradient) or not all(math.isfinite(sample.loss) for sample in found.samples):
            found.first_not_finite = self._first_not_finite(found.samples, micro_batches, batch_idx)

    # -- the whole window ----------------------------------------------------------------------------------

    def _run_whole(self, micro_batches: Sequence[PlacedMicroBatch], batch_idx: int) -> None:
        """Run forward and backward of the window as the fit will, and record gradients and layers' norms."""
        with ExitStack() as hooks:
            for name, module in self._module.named_modules():
                hooks.callback(module.register_forward_hook(self._layer_hook(name)).remove)
            self._gradients = self._backward(micro_batches, batch_idx)

    def _layer_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, _: Any, output: Any) -> None:
            layer = self._layers.setdefault(name, LayerNorms(name, type(module).__name__))
            for tensor in tree_leaves(output, Tensor):
                if tensor.is_floating_point():
                    layer.activation = math.hypot(layer.activation, _norm([tensor]))
                    if tensor.requires_grad:
                        tensor.register_hook(lambda gradient: self._record_gradient(layer, gradient))

        return record

    def _record_gradient(self, layer: LayerNorms, gradient: Tensor) -> None:
        # the ranks' gradients are averaged
        norm = _norm([gradient]) / self._strategy.world_size
        layer.output_gradient = math.hypot(layer.output_gradient, norm)

    def _backward(self, micro_batches: Sequence[PlacedMicroBatch], batch_idx: int) -> dict[str, Tensor]:
        """Return the gradient of the window's mean loss on this rank, by the name of the parameter."""
        total: dict[str, Tensor] = {}
        for number, micro_batch in enumerate(micro_batches):
            batch = self._moved(micro_batch.batch)
            loss, factor = self._loss(batch, batch_idx + number, micro_batch.share)
            if loss is not None:
                _add(total, self._gradients_of(loss * factor))
        if self._fit.weights is not None:  # losses with the user's weights are divided by their sum
            for gradient in total.values():
                gradient /= self._fit.weights
        return total

    def _add_gradients(self, layers: list[LayerNorms]) -> None:
        """Add the norms of the parameters' gradients to their layers."""
        by_layer: dict[str, list[Tensor]] = {}
        for name, gradient in self._gradients.items():
            by_layer.setdefault(name.rpartition(".")[0], []).append(gradient)
        for layer in layers:
            layer.gradient = _norm(by_layer.get(layer.name, ()))

    def _mean(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of the ranks' gradients. Collective."""
        if self._strategy.world_size == 1:
            return gradients
        every = {name: gradients.get(name, torch.zeros_like(parameter)) for name, parameter in self._parameters.items()}
        return {name: self._strategy.reduce(gradient, reduce_op="mean") for name, gradient in every.items()}

    # -- its samples ---------------------------------------------------------------------------------------

    def _run_samples(self, found: Findings, micro_batches: Sequence[PlacedMicroBatch], batch_idx: int) -> None:
        """Run forward and backward of each sample alone."""
        if any(isinstance(module, _BatchNorm) and module.training for module in self._module.modules()):
            found.notes.append(BATCH_NORM)
        total: dict[str, Tensor] = {}
        try:
            for number, micro_batch in enumerate(micro_batches):
                batch = self._moved(micro_batch.batch)
                size = round(micro_batch.weight)
                for row in range(size if batch is not None else 0):
                    one = take(batch, [row], size)
                    norms, gradients = self._run_sample(one, batch_idx + number, micro_batch.share / size)
                    place = micro_batch.places[row] if row < len(micro_batch.places) else row
                    found.samples.append(SampleNorms(place, *norms, number, row, tree_map(Tensor.cpu, one, Tensor)))
                    _add(total, gradients)
        except NoRows as error:
            found.notes.append(f"Samples are not taken apart: {error}.")
            return
        divisor = 1.0 if self._fit.weights is None else float(self._fit.weights)
        for sample in found.samples:
            sample.weight /= divisor * self._strategy.world_size
        if self._strategy.world_size > 1:
            return
        difference = [self._gradients[name] - gradient / divisor for name, gradient in total.items()]
        found.sum_error = _norm(difference) / found.gradient if found.gradient else None

    def _run_sample(
        self, one: Any, batch_idx: int, share: float
    ) -> tuple[tuple[float, float, float], dict[str, Tensor]]:
        """Return ((loss, gradient norm, weight), gradients times weight) of one sample."""
        states = random_states()
        with self._batch_norm_fixed():
            loss, factor = self._loss(one, batch_idx, share)
            gradients = {} if loss is None else self._gradients_of(loss)
        set_random_states(states)  # all samples of a micro-batch draw the same numbers
        weight = float(factor)
        value = math.nan if loss is None else float(loss.detach())
        return (value, _norm(gradients.values()), weight), {
            name: gradient * weight for name, gradient in gradients.items()
        }

    @contextmanager
    def _batch_norm_fixed(self) -> Iterator[None]:
        fixed = [module for module in self._module.modules() if isinstance(module, _BatchNorm) and module.training]
        for module in fixed:
            module.eval()
        try:
            yield
        finally:
            for module in fixed:
                module.train()

    # -- what both share -----------------------------------------------------------------------------------

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Restore the module, the random states, and what the step has counted, after the ``with`` block."""
        update, results, absent = self._step.update, self._step._results, self._step.absent
        kept = (self._fit.weights, update.unweighed, results.muted)
        self._fit.weights, self._step.absent = None, ()
        self._step.enter_step(muted=True)
        try:
            with without_trace(self._module, self._module.buffers()), torch.enable_grad():
                yield
        finally:
            self._fit.weights, update.unweighed, results.muted = kept
            self._step.absent = absent

    def _moved(self, batch: Any) -> Any:
        return self._step.transfer(batch) if self._step.moves and batch is not None else batch

    def _loss(self, batch: Any, batch_idx: int, share: float) -> tuple[Tensor | None, float | Tensor]:
        if batch is None:
            return None, 0.0
        arguments = (batch, batch_idx) if self._step.takes_idx else (batch,)
        output = self._strategy.run(self._module.training_step, *arguments)
        return type(self._step).read_loss(self._step, output, share)

    def _gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        # not `backward`, which would start an engine's reduction
        gradients = torch.autograd.grad(loss, [*self._parameters.values()], allow_unused=True)
        return {
            name: gradient for name, gradient in zip(self._parameters, gradients, strict=True) if gradient is not None
        }

    # -- values that are not finite ------------------------------------------------------------------------

    def _first_not_finite(
        self, samples: Sequence[SampleNorms], micro_batches: Sequence[PlacedMicroBatch], batch_idx: int
    ) -> str:
        """Describe the first tensor that is not finite: a weight, a sample, or the result of an operation."""
        name = not_finite_in(dict(self._module.named_parameters()) | dict(self._module.named_buffers()))
        if name:
            return f"{name} was not finite before the step"
        for sample in samples:
            if not_finite_in({str(at): leaf for at, leaf in enumerate(tree_leaves(sample.batch, Tensor))}):
                return f"the batch itself: sample {sample.place} has values that are not finite"
        search = FirstNotFinite(self._module)
        with self._undone(), search.watching():
            self._backward(micro_batches, batch_idx)
        return search.found


def _add(total: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        total[name] = total[name] + gradient if name in total else gradient.clone()


def _norm(tensors: Any) -> float:
    """Return the 2-norm of all tensors together."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors if tensor.numel()]
    return float(torch.stack(norms).norm()) if norms else 0.0
