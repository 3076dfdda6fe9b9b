"""The process of a trial on this machine: ``python -m lockstep.hpc.local_trial FOLDER``.

It is started by `lockstep.hpc.local`. Ranks that a Trainer starts from it by ``strategy="ddp"`` run the same command.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.hpc.local import CALL
from lockstep.hpc.parser import Hyperparameters
from lockstep.hpc.trial_process import run_trial, takes_cluster
from lockstep.launch.attempts import trial_here
from lockstep.launch.environment import visible_devices
from lockstep.launch.spawn import unpack


class NoCluster:
    """In the place of a SlurmCluster: the function does not save by itself."""

    saves = False

    def call_save(self) -> None:
        """Nothing to do."""

    def call_load(self) -> None:
        """Nothing to do."""


def main(folder: str) -> None:
    """Call the function of the search with the hyperparameters of a trial.

    Args:
        folder: of the trial.
    """
    with open(Path(folder).parent / CALL, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, (options, settings, cluster) = unpack(file)
    here = trial_here()
    assert here is not None
    if cluster is None and takes_cluster(function):  # as test-tube calls it on GPUs
        function = partial(_with_devices, function)
    hparams = None if options is None else Hyperparameters.of(options, settings)
    run_trial(function, hparams, cluster or NoCluster(), here)


def _with_devices(function: Callable[..., object], hparams: Hyperparameters) -> object:
    return function(hparams, ",".join(visible_devices()))


if __name__ == "__main__":
    main(sys.argv[1])
