"""ReplayRequest of a replay, and what it found, which two processes exchange as files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.started import environment_with

REQUEST = "request.json"


class ReplayEnd(BaseException):
    """Raised to leave the script."""


class ReplayDone(ReplayEnd):
    """Raised on all ranks after the last replayed step."""


@dataclass(frozen=True)
class ReplayRequest:
    """Request to replay steps.

    Attributes:
        folder: folder for the results, where nothing else is.
        checkpoint: checkpoint to start from; "" for the start of the script.
        step: number of the step to take apart, as on the loggers' x axis.
        until: number of the last step to train; at least ``step``.
        without: places of samples to leave out, in all steps.
        devices: number of ranks.
        threads: number of threads for torch's operations; 0 for torch's default.
        orders: description of the data that the run trained on, from the checkpoint.
        kind: "samples" to take the step apart by samples and layers; "operations" to trace its operations; "hashes" to
            record the hashes of all steps into ``folder``.
        nudge: relative size of random changes of the weights before the step, to measure how rounding grows.
    """

    folder: str
    checkpoint: str
    step: int
    until: int
    without: tuple[int, ...] = ()
    devices: int = 1
    threads: int = 0
    orders: list[list[Any]] | None = None
    kind: Literal["samples", "operations", "hashes"] = "samples"
    nudge: float = 0.0

    def write(self) -> Path:
        """Write the request into its folder, and return the file."""
        file = Path(self.folder) / REQUEST
        file.write_text(json.dumps(asdict(self)))
        return file

    @classmethod
    def read(cls, file: str) -> ReplayRequest:
        """Read a request from the file that :meth:`write` has written."""
        fields = json.loads(Path(file).read_text())
        return cls(**{**fields, "without": tuple(fields["without"])})


@dataclass
class SampleNorms:
    """One sample of the step.

    Attributes:
        place: index in the data set; in a stream, number of the sample in its epoch. A list with several loaders.
        loss: loss of the sample alone.
        gradient: norm of the gradient of that loss.
        weight: factor of the loss in the mean over the step's samples.
        micro_batch: number of the micro-batch in the step.
        row: index of the sample in its micro-batch.
        batch: the sample, as a batch of one.
    """

    place: int | list[int]
    loss: float
    gradient: float
    weight: float
    micro_batch: int
    row: int
    batch: Any = None


@dataclass
class LayerNorms:
    """Norms of one layer in the step.

    Attributes:
        name: path of the submodule.
        kind: name of its class.
        activation: norm of its outputs, over all micro-batches.
        output_gradient: norm of the gradients of its outputs.
        gradient: norm of the gradients of its own parameters; 0 without parameters.
    """

    name: str
    kind: str
    activation: float = 0.0
    output_gradient: float = 0.0
    gradient: float = 0.0


@dataclass
class Findings:
    """Findings of one rank.

    Attributes:
        losses: mean loss of each replayed step, by the number of the step. Without an entry for a step in manual
            optimization, whose losses only the user's code knows.
        samples: samples of the step.
        layers: layers of the step, in the order of the forward.
        gradient: norm of the step's gradient, before clipping.
        sum_error: norm of the difference between that gradient and the sum of the samples' gradients, relative to
            that gradient; None if a sample's gradient is unknown.
        first_not_finite: description of the first tensor in the step that is not finite; "" if there is none.
        notes: what the numbers do not include, in sentences.
        refusal: why the step could not be replayed.
        torch: version of torch.
    """

    losses: dict[int, float] = field(default_factory=dict)
    samples: list[SampleNorms] = field(default_factory=list)
    layers: list[LayerNorms] = field(default_factory=list)
    gradient: float = 0.0
    sum_error: float | None = None
    first_not_finite: str = ""
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    torch: str = str(torch.__version__)

    def write(self, folder: str, rank: int) -> None:
        """Write the findings of a rank to its file in ``folder``."""
        torch.save(self, Path(folder) / f"rank-{rank}.pt")

    @staticmethod
    def read(folder: str, rank: int) -> Findings | None:
        """Read the findings of a rank. Return None if the rank has written none."""
        file = Path(folder) / f"rank-{rank}.pt"
        # own file of a moment ago; a sample may be an object of any class
        return torch.load(file, weights_only=False) if file.exists() else None


@dataclass(frozen=True)
class Script:
    """A training script that can be started again.

    Attributes:
        words: the script or ``-m`` and a module, and arguments.
        folder: folder in which it is started.
        variables: environment variables that it had.
        python: the interpreter.
    """

    words: Sequence[str]
    folder: str = "."
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def run(self, request: ReplayRequest, who: str) -> list[Findings]:
        """Start the script, let it do what is requested, and return the findings of each rank.

        Args:
            request: request of the replay.
            who: start of error messages, such as the command.

        Raises:
            MisconfigurationException: the script failed, or the step was not reached.
        """
        if not os.path.isdir(self.folder):
            raise MisconfigurationException(f"{who}: the run was started in {self.folder}, which is not there")
        os.makedirs(request.folder, exist_ok=True)
        command = [self.python, "-m", "lockstep.extensions.replay.child", str(request.write()), *self.words]
        environment = environment_with(self.variables)
        code = subprocess.run(command, cwd=self.folder, env=environment, stdout=sys.stderr, check=False).returncode
        known = [Findings.read(request.folder, rank) for rank in range(request.devices)]
        found = [each for each in known if each is not None]
        refusal = next((each.refusal for each in found if each.refusal), "")
        if refusal and not (request.kind == "hashes" and found[0].losses):  # a shorter run has fewer hashes
            raise MisconfigurationException(f"{who}: {refusal}")
        if len(found) < len(known):
            what = f"failed with exit code {code}" if code else "ended without a fit of lockstep's Trainer"
            raise MisconfigurationException(
                f"{who}: {' '.join(self.words)} {what} before step {request.step}. Its output is above"
            )
        return found
