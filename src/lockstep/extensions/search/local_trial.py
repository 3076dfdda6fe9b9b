"""The process of a trial on this machine: ``python -m lockstep.extensions.search.local_trial FOLDER``.

It is started by `lockstep.extensions.search.local`. Ranks that a Trainer starts from it by ``strategy="ddp"`` run the
same command.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from lockstep.extensions.search.local import CALL
from lockstep.extensions.search.parser import Hyperparameters
from lockstep.extensions.search.trial_process import OwnSaving, of_hparams, run_trial
from lockstep.launch.attempts import trial_here
from lockstep.launch.environment import visible_devices
from lockstep.launch.spawn import unpack


def main(folder: str) -> None:
    """Call the function of the search with the hyperparameters of a trial.

    Args:
        folder: of the trial.
    """
    with open(Path(folder).parent / CALL, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, options, settings = unpack(file)
    here = trial_here()
    assert here is not None
    function = of_hparams(function, lambda: ",".join(visible_devices()))  # as test-tube calls it on GPUs
    run_trial(function, Hyperparameters.of(options, settings), OwnSaving(), here)


if __name__ == "__main__":
    main(sys.argv[1])
