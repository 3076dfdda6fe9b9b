"""The command ``lockstep plan``, which prints memory and time of each way to train a script's model."""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import Parameter, UninitializedParameter

from lockstep.cli.run import CommandParser, check_script, number_from, split
from lockstep.extensions.balancing.planner.hardware import Hardware, described, hardware_of, parse_bytes
from lockstep.extensions.balancing.planner.plan import Plan, SavedPlan
from lockstep.extensions.balancing.plans import choice
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import Installation
from lockstep.ground.types import TrainerFn
from lockstep.module import LightningModule
from lockstep.trainer import Trainer

USAGE = "lockstep plan [options] script.py [options] [arguments of the script]"
ABOUT = """\
Run a script up to its trainer.fit(), and print memory and seconds of a step under each way to train its model, the
missing memory of those that do not fit, and the choice with its reason. Nothing is trained.

Without --memory, --link, --nodes and --chip the plan is for this machine, and some steps are measured. With one of
them it is for another machine: the model is created without memory, and seconds come from a cost model.
Options are given before the script or directly after it; later arguments are passed to the script.
"""
EXAMPLES = """\
examples:
  lockstep plan train.py --devices 2
  lockstep plan train.py --devices 8 --nodes 8 --memory 80GB --link 25GB/s --save plan.yaml
"""
PLANNED_PARAMETERS = Installation(
    "torch's hook on parameters that are registered",
    (),
    "while lockstep plan runs a script for another machine, parameters have no memory",
    stays=False,
)
ELSEWHERE = ("nodes", "memory", "link", "chip")


class _Planned(BaseException):
    """Exception that ends a script once the plan is made. The script's ``except Exception`` does not catch it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def plan(words: Sequence[str]) -> int:
    """Run ``lockstep plan``, and return its exit code: 0 if some way to train fits, 1 if none does.

    Args:
        words: the words after ``lockstep plan``.

    Raises:
        MisconfigurationException: an argument is wrong, or the script cannot be planned.
    """
    given, script = split(list(words), _parser())
    check_script("lockstep plan", None, script)
    if given.save is not None:
        if not given.save.endswith((".yaml", ".yml")):
            raise MisconfigurationException(f"--save {given.save}: pass a name that ends with .yaml")
        _check_file("--save", given.save)
    # files are checked before the work, which takes a while
    if given.csv is not None:
        _check_file("--csv", given.csv)
    found = _make_plan(given, script)
    print("\n".join(found.lines(everything=given.all)))
    if given.save is not None and found.choice is not None:
        found.save(given.save)
        saved = SavedPlan.of(found)
        nodes = "" if saved.nodes == 1 else f", num_nodes={saved.nodes}"
        print(f'\n{given.save}: use it by Trainer(strategy="{given.save}", devices={saved.devices}{nodes})')
    if given.csv is not None:
        write_csv(found, given.csv)
    return 0 if found.choice is not None else 1


def _parser() -> CommandParser:
    parser = CommandParser("lockstep plan", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("--devices", type=number_from(1), metavar="N", help="devices of each node; default: those of the Trainer")
    add("--nodes", type=number_from(1), metavar="M", help="number of machines; default: 1")
    add("--memory", metavar="BYTES", help="memory of each device: 80GB, 24GiB")
    add("--link", metavar="BYTES/S", help="speed of the slowest link (between nodes, if there are several): 25GB/s")
    add("--chip", metavar="NAME", help="GPU whose arithmetic speed is assumed: H100, A100, RTX 3090")
    add("--goal", default="speed", choices=("speed", "memory"), help="goal of the choice; default: speed")
    add("--blocks", metavar="NAMES", help="names of the submodules that are blocks, separated by commas")
    add("--all", action="store_true", help="also show pipelines, and variants of a way, that gain nothing")
    add("--save", metavar="FILE", help="write the choice, for Trainer(strategy=FILE); a name that ends with .yaml")
    add("--csv", metavar="FILE", help="write seconds of a step and bytes of a device under each way")
    return parser


def _make_plan(given: argparse.Namespace, script: list[str]) -> Plan:
    elsewhere = any(getattr(given, name) is not None for name in ELSEWHERE)
    memory = None if given.memory is None else parse_bytes("--memory", given.memory)
    link = None if given.link is None else parse_bytes("--link", given.link)
    named = [name for name in (given.blocks or "").split(",") if name]

    def fit(trainer: Trainer, model: LightningModule, *args: Any, **kwargs: Any) -> NoReturn:
        hardware: Hardware | None = None  # those of the Trainer
        if elsewhere:
            hardware = described(given.devices or trainer.world_size, given.nodes or 1, memory, link, given.chip)
        elif given.devices not in (None, trainer.world_size):
            hardware = hardware_of(trainer.strategy.root_device, given.devices)
        loader, data = args[0] if args else kwargs.get("train_dataloaders"), kwargs.get("datamodule")
        trainer._attach(TrainerFn.FITTING, model, {"train": loader}, data)
        batch = choice.first_batch(trainer)
        found = choice.plan_for(
            trainer, batch, hardware=hardware, goal=given.goal, named=named, measure=None if elsewhere else True
        )
        raise _Planned(found)

    return _run(script, fit, elsewhere)


def _run(script: list[str], fit: Any, elsewhere: bool) -> Plan:
    """Run a script up to its ``trainer.fit``, and return the plan that ``fit`` creates in place of training."""
    before, words, path = Trainer.fit, sys.argv, list(sys.path)
    Trainer.fit = fit  # type: ignore[method-assign]
    sys.argv = list(script)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script[0])))
    try:
        with _without_memory(elsewhere):
            runpy.run_path(script[0], run_name="__main__")
    except _Planned as planned:
        return planned.plan
    except SystemExit as ended:
        if ended.code:
            raise MisconfigurationException(
                f"{script[0]} ended with {ended.code!r} before its trainer.fit(), which a plan needs."
            ) from None
    finally:
        Trainer.fit = before  # type: ignore[method-assign]
        sys.argv, sys.path[:] = words, path
    raise MisconfigurationException(
        f"{script[0]} has ended without a trainer.fit(model), which a plan needs. Pass arguments of the script after "
        "its name."
    )


@contextmanager
def _without_memory(elsewhere: bool) -> Iterator[None]:
    """For a plan for other hardware (``elsewhere``), move parameters to the meta device when they are registered."""

    def place(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return parameter
        return Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    if not elsewhere:
        yield
        return
    hook: Any = place  # torch's annotation lacks hooks that replace a parameter
    with PLANNED_PARAMETERS.inside():
        handle = register_module_parameter_registration_hook(hook)
        try:
            yield
        finally:
            handle.remove()


# -- the file of numbers -----------------------------------------------------------------------------------------------


def write_csv(found: Plan, path: str) -> None:
    """Write a CSV file with a row for each way to train.

    Args:
        found: the plan.
        path: path of the file.
    """
    rows = [row for row in found.rows if row.parts]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.parts))
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["way", "devices", "fits", "samples a second", "compute", "sent", "update", "bytes", *kinds])
        for row in sorted(rows, key=lambda row: (not row.fits, -row.rate)):
            seconds = (row.compute, row.sent, row.update)
            bytes_of = [row.parts.get(kind, 0.0) for kind in kinds]
            table.writerow([row.candidate.name, row.devices, row.fits, row.rate, *seconds, row.memory, *bytes_of])


def _check_file(option: str, path: str) -> None:
    """Raise an error if the file of an option cannot be written. Runs before the file's contents are computed.

    Args:
        option: the option that names the file, for the error.
        path: the file.

    Raises:
        MisconfigurationException: its folder does not exist, or the file cannot be written there.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        why = "it is a folder: pass the name of a file"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder!r}: create it, or pass another name"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        why = "it cannot be written there: pass another name"
    else:
        return
    raise MisconfigurationException(f"{option} {path}: {why}")
