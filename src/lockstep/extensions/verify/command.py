"""The command ``lockstep verify``, which checks if a script trains the same on N ranks as in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.run import CommandParser, check_script, number_from, split, words_of
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.extensions.verify.verification import Check

USAGE = "lockstep verify [options] script.py [options] [-- arguments of the script]"
ABOUT = """\
Run a training script on N ranks, and as one process that is fed the same samples, and report if both train the same;
if not, what differs first, and why. For plain PyTorch (DistributedDataParallel, fully_shard), Lightning and lockstep.
The script needs no change. It runs on this machine's CPU, and stops after a few optimizer steps.
"""
EXAMPLES = """\
exit codes: 0 alike, 1 different, 2 could not tell

examples:
  lockstep verify train.py
  lockstep verify train.py --devices 2,4 --steps 10 -- --batch-size 8
  lockstep verify --output report -m project.train
  lockstep verify train.py --simulate 64
  lockstep verify train.py --against HEAD
  lockstep verify corpus.toml --report audit.md          verify all scripts that a file lists
"""


def verify(words: Sequence[str]) -> int:
    """Verify the script in ``words``, print and write the certificates, and return the exit code.

    Args:
        words: arguments of the command.

    Raises:
        MisconfigurationException: an option has an invalid value.
    """
    options, script = split(list(words), _parser())
    least = 1 if options.against else 2
    devices = (options.devices or str(least)).split(",")
    if not all(word.strip().isdigit() and int(word) >= least for word in devices):
        raise MisconfigurationException(
            f"--devices {options.devices}: pass numbers of ranks, each at least {least}, for example 2 or 2,4"
        )
    kinds = [name for name in ("simulate", "resume", "against") if getattr(options, name)]
    if len(kinds) > 1:
        raise MisconfigurationException(f"--{' --'.join(kinds)}: run a separate command for each")
    if options.keep is not None and Path(options.keep).exists():
        raise MisconfigurationException(
            f"--keep {options.keep}: the folder exists already. Pass the name of a new folder"
        )
    check_script("lockstep verify", options.module, script)
    if options.module is None and script[0].endswith(".toml"):
        from lockstep.extensions.verify.audit import audit

        return audit(Path(script[0]), Path(options.report), options.patience)

    # not at the top: errors in options are reported without waiting for the import of torch
    from lockstep.extensions.verify.against import RevisionCheck
    from lockstep.extensions.verify.certificate import write
    from lockstep.extensions.verify.processes import Patience
    from lockstep.extensions.verify.resume import ResumeCheck
    from lockstep.extensions.verify.runs import Request
    from lockstep.extensions.verify.simulation import Simulation
    from lockstep.extensions.verify.verification import Verification
    from lockstep.extensions.verify.verification import verify as certify

    checks: dict[str, Callable[..., Check]] = {"simulate": Simulation, "resume": ResumeCheck, "against": RevisionCheck}
    check = checks[kinds[0]] if kinds else Verification
    numbers = [options.simulate] if options.simulate else [int(word) for word in devices]
    command = words_of(options.module, script)
    patience = Patience(options.patience, 10 * options.patience)
    certificates = []
    for number in numbers:
        keep = None if options.keep is None else Path(options.keep) / f"ranks-{number}"
        request = Request(command, number, options.steps, options.strategy, patience, keep, options.against)
        certificate = certify(request, check)
        certificates.append(certificate)
        print(certificate, end="\n\n", flush=True)
    for path in write(certificates, Path(options.output)):
        print(f"written: {path}", file=sys.stderr)
    # a difference on one number of ranks is worse than an unknown on another
    codes = {certificate.exit_code for certificate in certificates}
    return 1 if 1 in codes else max(codes)


def _parser() -> CommandParser:
    parser = CommandParser("lockstep verify", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="verify a module in place of a script, as `python -m` runs it")
    add("--devices", metavar="N[,N]", help="ranks that are compared with one process (default: 2; with --against: 1)")
    add("--steps", type=number_from(1), default=5, metavar="K", help="optimizer steps that are compared (default: 5)")
    add("--strategy", default="", metavar="NAME", help="strategy that Trainers of lockstep and Lightning use on the "
        "ranks, in place of their own: ddp, fsdp, ...")  # fmt: skip
    add("--resume", action="store_true", help="compare a run that is stopped after K steps and started again with one "
        "that is not, in place of ranks with one process")  # fmt: skip
    add("--against", default="", metavar="REVISION", help="compare with the script at a git revision, on the same "
        "number of ranks, in place of ranks with one process")  # fmt: skip
    add("--simulate", type=number_from(2), metavar="N", help="run two steps on each of N ranks, a few at a time and "
        "without the others, and compare their collectives, in place of ranks with one process")  # fmt: skip
    add("--output", default=".", metavar="FOLDER", help="where certificate.json and certificate.md go (default: here)")
    add("--patience", type=number_from(1), default=90, metavar="S", help="seconds without any event of a rank after "
        "which it counts as stuck; a run may take ten times as long (default: 90)")  # fmt: skip
    add("--report", default="audit.md", metavar="FILE", help="page with the verdicts on the scripts that a .toml file "
        "lists (default: audit.md); devices and steps are fields of the file")  # fmt: skip
    add("--keep", metavar="FOLDER", help="keep the recordings in a new folder (default: they are deleted)")
    return parser
