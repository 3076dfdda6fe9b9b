"""ReplayReport of a replay: as text, as a file with the samples, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.extensions.replay.request import Findings, LayerNorms, ReplayRequest, SampleNorms
from lockstep.ground.errors import missing_extra
from lockstep.ground.text_table import padded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 20
"""Number of samples that the report shows."""


class ReplayReport:
    """Findings of a replay on all ranks.

    Args:
        request: what was replayed.
        found: the findings of each rank.

    Attributes:
        without: the findings of each rank in the steps without some samples; [] if none were left out.
        bits: a sentence that compares the replayed steps with the run's recording; "" without one.
    """

    def __init__(self, request: ReplayRequest, found: Sequence[Findings]) -> None:
        self.request = request
        self.found = list(found)
        self.without: list[Findings] = []
        self.bits = ""

    @property
    def samples(self) -> list[SampleNorms]:
        """The samples of the step; those whose gradient weighs most first, and before them those without a value."""
        every = [sample for found in self.found for sample in found.samples]
        return sorted(every, key=_contribution, reverse=True)

    def losses(self, found: Sequence[Findings]) -> dict[int, float]:
        """Return the mean loss over all ranks, by the number of the step."""
        steps = [step for step in found[0].losses if step >= self.request.step] if found else []
        return {step: sum(each.losses.get(step, math.nan) for each in found) / len(found) for step in steps}

    def __str__(self) -> str:
        """Return the report as text."""
        request, first = self.request, self.found[0]
        loss = self.losses(self.found).get(request.step)
        lines = [f"Step {request.step}, replayed from {request.checkpoint}", f"loss {_number(loss)}"]
        if first.layers:
            lines[1] += f", gradient norm {_number(first.gradient)}"
        bad = next((found.first_not_finite for found in self.found if found.first_not_finite), "")
        if bad:
            lines.append(f"first not finite: {bad}")
        samples = self.samples
        if samples:
            lines += ["", f"{min(SHOWN, len(samples))} of {len(samples)} samples, by their part of the gradient:"]
            lines.append(self._samples_table(samples[:SHOWN]))
        if first.sum_error is not None and first.sum_error > 1e-3:
            lines.append(
                f"The samples' gradients do not sum to that of the step (difference {first.sum_error:.1g} of its norm)"
                ": the loss depends on the whole batch, or the step draws random numbers."
            )
        if first.layers:
            lines += ["", "layers" + (" on rank 0:" if request.devices > 1 else ":"), self._layers_table(first.layers)]
        has_losses = loss is not None and (request.until > request.step or self.without)
        lines += ["", self._losses_table()] if has_losses else []
        lines += sorted({note for found in (*self.found, *self.without) for note in found.notes})
        return "\n".join([*lines, self.bits] if self.bits else lines)

    def _samples_table(self, samples: Sequence[SampleNorms]) -> str:
        total = sum(part for sample in self.samples if math.isfinite(part := _contribution(sample)))
        rows = [
            (
                str(sample.place),
                _number(sample.loss),
                _number(sample.gradient),
                f"{_contribution(sample) / total:.1%}" if total and math.isfinite(_contribution(sample)) else "-",
            )
            for sample in samples
        ]
        return _table(("place", "loss", "gradient norm", "part"), rows)

    def _layers_table(self, layers: Sequence[LayerNorms]) -> str:
        rows = [
            (
                layer.name,
                layer.kind,
                _number(layer.activation),
                _number(layer.output_gradient),
                _number(layer.gradient) if layer.gradient else "-",
            )
            for layer in layers
        ]
        return _table(("layer", "class", "activation", "its gradient", "parameters' gradient"), rows)

    def _losses_table(self) -> str:
        losses, without = self.losses(self.found), self.losses(self.without)
        rows = [
            (str(step), _number(loss), *([_number(without.get(step))] if self.without else ()))
            for step, loss in losses.items()
        ]
        return _table(("step", "loss", *(["without these samples"] if self.without else ())), rows)

    def save(self, file: Path) -> None:
        """Write all samples with their losses and norms to a file, which ``torch.load`` reads."""
        samples = [vars(sample) for sample in self.samples]
        torch.save({"step": self.request.step, "samples": samples, "losses": self.losses(self.found)}, file)

    def draw(self, file: Path) -> None:
        """Draw the samples, the layers and, if there are several, the losses of the steps to a file.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise missing_extra("matplotlib", "plot", "lockstep replay --picture") from None
        losses = self.losses(self.found)
        layers = self.found[0].layers
        figure = Figure(figsize=(12, 4 + 0.14 * max(len(layers) - 20, 0)), layout="constrained")
        axes = figure.subplots(1, 3 if len(losses) > 1 else 2)
        self._draw_samples(axes[0])
        _draw_layers(axes[1], layers)
        if len(losses) > 1:
            self._draw_losses(axes[2], losses)
        figure.savefig(file, dpi=120)

    def _draw_samples(self, axes: Axes) -> None:
        samples = self.samples[:SHOWN]
        parts = [_contribution(sample) for sample in samples]
        most = max((part for part in parts if math.isfinite(part)), default=1.0)
        names = [str(sample.place) for sample in samples]
        bars = axes.barh(range(len(samples)), [part if math.isfinite(part) else most for part in parts])
        for bar, part in zip(bars, parts, strict=True):
            if not math.isfinite(part):
                bar.set_hatch("///")
                bar.set_color("tab:red")
        axes.set_yticks(range(len(samples)), names)
        axes.invert_yaxis()
        # a bar has no start on a logarithmic axis: only for parts that are else too short to be seen
        scale = "log" if most > 1000 * min(parts, default=1.0) else "linear"
        axes.set(title=f"samples of step {self.request.step}", xscale=scale)
        axes.set(xlabel="part of the gradient's norm", ylabel="place")

    def _draw_losses(self, axes: Axes, losses: dict[int, float]) -> None:
        axes.plot([*losses], [*losses.values()], label="the run's samples")
        if self.without:
            without = self.losses(self.without)
            axes.plot([*without], [*without.values()], label="without samples")
            axes.legend()
        axes.set(title="loss", xlabel="step", yscale="log")


def _draw_layers(axes: Axes, layers: Sequence[LayerNorms]) -> None:
    at = range(len(layers))
    axes.plot([layer.activation for layer in layers], at, ".-", label="activation")
    axes.plot([layer.output_gradient for layer in layers], at, ".-", label="its gradient")
    axes.set_yticks(at, [layer.name for layer in layers], fontsize=7)
    axes.invert_yaxis()
    axes.set(title="layers", xlabel="norm", xscale="log")
    axes.legend()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, with all columns but the texts aligned to the right."""
    right = [number for number, name in enumerate(head) if name not in ("layer", "class")]
    return "\n".join("  " + "  ".join(row).rstrip() for row in padded([head, *rows], right))


def _contribution(sample: SampleNorms) -> float:
    """Return the norm of a sample's part of the gradient; infinity if it is not finite."""
    part = sample.gradient * abs(sample.weight)
    return part if math.isfinite(part) and math.isfinite(sample.loss) else math.inf


def _number(value: Any) -> str:
    return "unknown" if value is None else f"{value:.6g}"
