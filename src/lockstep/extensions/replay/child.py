"""Process that runs a script again, with a Trainer that replays steps of an earlier run."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.extensions.replay.player import Player
from lockstep.extensions.replay.request import ReplayEnd, ReplayRequest
from lockstep.ground.device import accelerator_kinds
from lockstep.launch import script, topology
from lockstep.loggers.base import DummyLogger
from lockstep.module import LightningModule
from lockstep.trainer import Trainer


def main(words: Sequence[str]) -> None:
    """Run a script until its first fit has replayed the requested steps, and write what was found.

    Args:
        words: file of the request, and the command: a script or ``-m`` and a module, and arguments.
    """
    request = ReplayRequest.read(words[0])
    if request.threads:
        torch.set_num_threads(request.threads)
    player = Player(request)
    change_trainer(request, player)
    command = [sys.executable, "-m", "lockstep.extensions.replay.child", *words]
    for module in (script, topology):
        # a Trainer starts its other ranks by this command, not by that of the script
        module.command_line = lambda *_: command  # type: ignore[attr-defined]
    # the savers' states are not needed
    warnings.filterwarnings("ignore", message=".*the states of callbacks that this Trainer does not have")
    try:
        run_script(words[1:])
    except ReplayEnd:
        player.found.write(request.folder, player.rank)


def change_trainer(request: ReplayRequest, player: Player) -> None:
    """Change the class Trainer: its first fit continues from the request's checkpoint, and saves and logs nothing."""
    construct, fit = Trainer.__init__, Trainer.fit

    @functools.wraps(construct)
    def init(self: Trainer, **flags: Any) -> None:
        construct(self, **changed_flags(flags, request, player))

    @functools.wraps(fit)
    def fit_again(self: Trainer, model: LightningModule, *args: Any, **kwargs: Any) -> Any:
        _drop_savers(model)
        names = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs, "ckpt_path": request.checkpoint or None}
        result = fit(self, model, **arguments)
        player.refuse(f"the fit ended before step {request.until}: {result.stopped}")

    Trainer.__init__ = init  # type: ignore[method-assign]
    Trainer.fit = fit_again  # type: ignore[method-assign]
    Trainer.save_checkpoint = _save_nothing  # type: ignore[method-assign]


def changed_flags(flags: dict[str, Any], request: ReplayRequest, player: Player) -> dict[str, Any]:
    """Return the flags of a Trainer that replays: other devices, no loggers and no checkpoints.

    Callbacks stay, since they may change what is trained.

    Args:
        flags: the flags that the script gives.
        request: what to replay.
        player: callback to add.
    """
    callbacks = flags.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    changed = {
        **flags,
        "callbacks": [*_without_savers(callbacks), player],
        "logger": DummyLogger(),
        "devices": request.devices,
        "num_nodes": 1,
        "default_root_dir": request.folder,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_time": None,
        "profiler": None,
    }
    if request.kind == "hashes":  # else the script's own flag
        changed["record"] = "hashes"
    if request.devices == 1:
        changed["strategy"] = "auto"
    if not accelerator_kinds():
        changed["accelerator"] = "cpu"
    return changed


def _without_savers(callbacks: Sequence[Callback]) -> list[Callback]:
    return [callback for callback in callbacks if not isinstance(callback, Checkpoint)]


def _drop_savers(model: LightningModule) -> None:
    """Remove callbacks that save checkpoints from those that the module returns."""
    configure = model.configure_callbacks
    if type(model).configure_callbacks is not LightningModule.configure_callbacks:

        def without_savers() -> list[Callback]:
            own = configure()
            return _without_savers(own if isinstance(own, (list, tuple)) else [own])

        model.configure_callbacks = without_savers  # type: ignore[method-assign]


def _save_nothing(self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of `Trainer.save_checkpoint`: the run's checkpoints stay as they are."""


def run_script(command: Sequence[str]) -> None:
    """Run a script, or ``-m`` and a module, as ``__main__`` in this process.

    Args:
        command: its words.
    """
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
