"""What a process does that runs a script under observation."""

from __future__ import annotations

import os
import random
import runpy
import sys
import traceback
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

import numpy as np
import torch

from lockstep.extensions.verify import float64, mixed_precision, trainers
from lockstep.extensions.verify.forwards import Forwards
from lockstep.extensions.verify.functions import Functions
from lockstep.extensions.verify.groups import Groups
from lockstep.extensions.verify.imports import Imports
from lockstep.extensions.verify.loaders import Loaders
from lockstep.extensions.verify.settings import HOME, Settings, is_users, location, short
from lockstep.extensions.verify.steps import Steps
from lockstep.extensions.verify.watch import Stop, Watch, put

SEED = 20_260
"""Of what a script does not seed; ranks have several, as processes have that nobody seeds."""


def run(settings: Settings) -> None:
    """Run the script, and write down how it ended."""
    watch = Watch(settings)
    HOME[0] = settings.home
    os.chdir(settings.working_folder)
    torch.set_num_threads(settings.threads)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(SEED + settings.rank)
    if settings.float64:
        float64.enter()
    forwards = Forwards(watch)
    imports = Imports({**trainers.changes(settings), "torch.distributed.fsdp": partial(_see_sharded, watch, forwards)})
    for each in (Loaders(watch), forwards, Steps(watch, forwards), Groups(watch), imports):
        each.install()
    put(torch, "compile", _as_it_is)
    sys.addaudithook(partial(_see_process, watch))
    try:
        with Functions(watch):
            _start(list(settings.words))
    except Stop:
        watch.journal.end("done", steps=watch.steps)
    except SystemExit as error:
        status = "failed" if error.code else "ended"
        words = f"SystemExit: {error.code}" if isinstance(error.code, str) else f"exit code {error.code}"
        watch.journal.end(status, steps=watch.steps, message=words, where=_last_line(error.__traceback__))
    except BaseException as error:
        if watch.is_done:  # what follows from the early end of an epoch
            watch.journal.end("done", steps=watch.steps)
            return
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"[:2000]
        if isinstance(error, IndexError) and "sys.argv" in traceback.format_exc():
            message += " of sys.argv"
        watch.journal.end("failed", steps=watch.steps, message=message, where=_last_line(error.__traceback__))
    else:
        watch.journal.end("ended", steps=watch.steps)


def _see_sharded(watch: Watch, forwards: Forwards, module: ModuleType) -> None:
    """Change torch's module of sharded wrappers when it is imported."""
    mixed_precision.leave_out(watch, module)
    forwards.see_sharded(module)


def _see_process(watch: Watch, event: str, args: tuple[object, ...]) -> None:
    """Note that the script starts another process of Python."""
    if event == "subprocess.Popen" and "python" in os.path.basename(str(args[0])):
        watch.journal.note_once("process", where=location())


def _as_it_is(model: object = None, *args: object, **kwargs: object) -> object:
    """In the place of `torch.compile`: rounding of compiled code is another's."""
    return model if model is not None else lambda function: function


def _start(words: list[str]) -> None:
    """Run a script, or a module, as ``__main__``."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = HOME[0]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    path = os.path.join(HOME[0], words[0])
    sys.path[0] = os.path.dirname(path)
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    vars(main).update(__file__=path, __loader__=loader, __spec__=None)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))


def _last_line(trace: TracebackType | None) -> str:
    """The line of the script in which it failed."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_users(file):
            found = f"{short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
