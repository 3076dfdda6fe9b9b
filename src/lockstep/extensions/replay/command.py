"""The command ``lockstep replay``, which makes a step of a run again and takes it apart."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.run import CommandParser, number_from
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.extensions.replay.request import ReplayRequest
    from lockstep.extensions.replay.run_checkpoints import SavedRun

USAGE = "lockstep replay RUN --step N [options] [-- script.py arguments]"
ABOUT = """\
Make step N of a run again, and show which of its samples and layers caused what it did: for each sample its place in
the data set, its loss and the norm of its gradient; for each layer the norms of activations and gradients; and the
first tensor that is not finite. The script of the run is started again on one process, and its fit continues from the
last checkpoint before N with the run's global batch. Nothing is saved or logged.
RUN is a folder with checkpoints, or a checkpoint. N counts as the loggers do.
"""
EXAMPLES = """\
exit codes: 0 replayed, 2 not possible

examples:
  lockstep replay lightning_logs/version_3 --step 41210
  lockstep replay runs/big --step 41210 --without 118223,90412 --until 41300
  lockstep replay last.ckpt --step 500 --save window.pt -- train.py --lr 0.1
"""


def replay(words: Sequence[str]) -> int:
    """Replay a step of a run, print what was found, and return the exit code.

    Args:
        words: arguments of the command.

    Raises:
        MisconfigurationException: an option is wrong, or the step cannot be replayed.
    """
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    until = options.step if options.until is None else options.until
    if until < options.step:
        raise MisconfigurationException(f"--until {until}: pass a step of at least {options.step}, the value of --step")

    # not at the top: errors in options are reported without waiting for the import of torch
    from lockstep.extensions.replay.report import ReplayReport
    from lockstep.extensions.replay.request import ReplayRequest, Script
    from lockstep.extensions.replay.run_checkpoints import find

    saved = find(options.run, options.step)
    command = saved.command(words[at + 1 :])
    for change in saved.changes():
        print(change, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as folder:
        request = ReplayRequest(
            folder=folder,
            checkpoint=os.path.abspath(saved.path),
            step=options.step,
            until=until,
            devices=options.devices,
            threads=saved.started.get("threads", 0),
            orders=saved.own["plan"].get("orders"),
        )
        script = Script(command, saved.started.get("folder", "."), saved.started.get("variables", {}))
        report = ReplayReport(request, script.run(request, "lockstep replay"))
        if options.without:
            left = replace(request, without=options.without, folder=os.path.join(folder, "without"))
            report.without = script.run(left, "lockstep replay")
        report.bits = _compared(saved, request, options.run)
    print(report)
    for file, write in ((options.save, report.save), (options.picture, report.draw)):
        if file is not None:
            write(Path(file))
            print(f"written: {file}", file=sys.stderr)
    return 0


def _compared(saved: SavedRun, request: ReplayRequest, run: str) -> str:
    """Compare the hashes of the replayed steps with the run's recording, and return a sentence.

    Return "" if one of them is not recorded, or if the replay has another number of ranks.
    """
    from lockstep.extensions.replay.parting import first_step
    from lockstep.extensions.replay.recording import read

    of_run, replayed = read(run, below=True)[saved.step :], read(request.folder)[saved.step :]
    if request.devices != saved.ranks or not len(of_run) or not len(replayed):
        return ""
    parted = first_step(of_run, replayed)
    if parted is None:
        return f"Steps {saved.step} to {request.until} have the bits of the run."
    return f"The replay parts from the run in step {saved.step + parted[0]}: other data, other code or another machine."


def _places(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of places, such as 118223,90412")
    return tuple(map(int, words))


def _parser() -> CommandParser:
    parser = CommandParser("lockstep replay", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder with the checkpoints of a run, or one of them")
    add("--step", type=number_from(0), required=True, metavar="N", help="step to take apart")
    add("--until", type=number_from(0), metavar="M", help="go on to step M, and show the loss of each step")
    add("--without", type=_places, default=(), metavar="I[,I]", help="train the steps once more without these samples "
        "of the data set, and show both losses")  # fmt: skip
    add("--devices", type=number_from(1), default=1, metavar="D", help="ranks, with the strategy of the script "
        "(default: 1, on one process)")  # fmt: skip
    add("--save", metavar="FILE", help="write all samples with their losses and gradient norms, for torch.load")
    add("--picture", metavar="FILE", help="write a picture of samples, layers and losses (needs matplotlib)")
    return parser
