"""Entry point of a trial's process: ``python -m lockstep.extensions.search.local_trial FOLDER``.

`lockstep.extensions.search.local` starts this process. Ranks that its Trainer starts with ``strategy="ddp"`` run the
same command.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from lockstep.extensions.search.local import CALL
from lockstep.extensions.search.parser import Hyperparameters
from lockstep.extensions.search.trial_process import OwnSaving, run_trial, wrap_main
from lockstep.launch.attempts import trial_here
from lockstep.launch.environment import visible_devices
from lockstep.launch.spawn import unpack


def main(folder: str) -> None:
    """Call the user's function with the hyperparameters of the trial in ``folder``.

    Args:
        folder: folder of the trial.
    """
    with open(Path(folder).parent / CALL, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, options, settings = unpack(file)
    here = trial_here()
    assert here is not None
    # test-tube passes the GPUs as the second argument.
    function = wrap_main(function, lambda: ",".join(visible_devices()))
    run_trial(function, Hyperparameters.of(options, settings), OwnSaving(), here)


if __name__ == "__main__":
    main(sys.argv[1])
