"""Main function of an observed process, which installs the observers and runs the script."""

from __future__ import annotations

import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import NoReturn

import numpy as np
import torch

from lockstep.extensions.verify import float64, imports
from lockstep.extensions.verify.forwards import Forwards
from lockstep.extensions.verify.functions import Functions
from lockstep.extensions.verify.groups import Groups
from lockstep.extensions.verify.loaders import Loaders
from lockstep.extensions.verify.settings import HOME, Settings, call_lines, is_user_code, location, short, stack
from lockstep.extensions.verify.steps import Steps
from lockstep.extensions.verify.watch import Stop, Watch, patch

SEED = 20_260
"""Seed for scripts that set none. The rank is added, since unseeded processes differ as well."""


def run(settings: Settings) -> None:
    """Run the script under the observers, and write to a file how the script ended."""
    watch = Watch(settings)
    HOME[0] = settings.home
    os.chdir(settings.working_folder)
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(SEED + settings.rank)
    set_seed = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        watch.journal.record("seeded", seed=int(seed), where=call_lines(stack()))
        return set_seed(seed)

    patch(torch, "manual_seed", manual_seed)
    if settings.float64:
        float64.enter()
    float64.disable_autocast()
    forwards = Forwards(watch)

    def change_sharded(module: ModuleType) -> None:
        imports.drop_mixed_precision(watch, module)
        forwards.watch_sharded(module)

    changes = {**imports.trainer_changes(settings), "torch.distributed.fsdp": change_sharded}
    for each in (Loaders(watch), forwards, Steps(watch, forwards), Groups(watch), imports.Imports(changes)):
        each.install()
    # compiled code rounds in another way than eager code, and the runs compile different shapes
    patch(torch, "compile", _do_not_compile)
    patch(os, "_exit", partial(_leave, watch, os._exit, os.getpid()))
    # launchers choose a GPU before they know if there is one
    patch(torch.cuda, "set_device", lambda device: None)
    sys.addaudithook(partial(_record_process, watch))
    if settings.moved:
        # packages next to the script, such as those of src/, come from the copy as well
        sys.path[:] = [_moved(path, *settings.moved) for path in sys.path]
    try:
        with Functions(watch):
            _start(list(settings.words))
    except Stop:
        watch.journal.end("done")
    except SystemExit as error:
        status = "failed" if error.code else "ended"
        message = f"SystemExit: {error.code}" if isinstance(error.code, str) else f"exit code {error.code}"
        watch.journal.end(status, message=message, where=_last_line(error.__traceback__))
    except BaseException as error:
        if watch.is_done:
            # the script may fail because its epoch has ended early
            watch.journal.end("done")
            return
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"[:2000]
        watch.journal.end("failed", message=message, where=_last_line(error.__traceback__))
    else:
        watch.journal.end("ended")
    finally:
        for module in list(sys.modules.values()) if settings.moved else ():
            file = getattr(module, "__dict__", {}).get("__file__") or ""
            if is_user_code(file) and _moved(file, *settings.moved) != file:
                watch.journal.record("not moved", where=file)


def _moved(path: str, folder: str, copy: str) -> str:
    """Return the place of a path in the copy of a folder. Return other paths, and those of packages, unchanged."""
    is_inside = f"{path}/".startswith(f"{folder}/") and not f"{path}/".startswith(f"{copy}/")
    return copy + path[len(folder) :] if is_inside and "site-packages" not in path else path


def _leave(watch: Watch, leave: Callable[[int], NoReturn], process: int, code: int) -> NoReturn:
    """Record how the script ended, unless this was done or the process is another one, and leave the process."""
    if os.getpid() == process and not (watch.journal.folder / "end.json").exists():
        status = "done" if watch.is_done else "failed" if code else "ended"
        watch.journal.end(status, message=f"exit code {code}", where=location())
    leave(code)


def _record_process(watch: Watch, event: str, args: tuple[object, ...]) -> None:
    """Audit hook that records when the script starts another Python process."""
    if event == "subprocess.Popen" and "python" in os.path.basename(str(args[0])):
        watch.journal.record_once("process", where=location())


def _do_not_compile(model: object = None, *args: object, **kwargs: object) -> object:
    """Return the model uncompiled, in place of `torch.compile`.

    Return a decorator if there is no model, as in a use with options.
    """
    return model if model is not None else lambda function: function


def _start(words: list[str]) -> None:
    """Run a script or a module as ``__main__``."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = HOME[0]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    path = os.path.join(HOME[0], words[0])
    sys.path[0] = os.path.dirname(path)
    loader = SourceFileLoader("__main__", path)
    # a module of its own in sys.modules, not runpy.run_path: objects of the script can then be pickled
    main = ModuleType("__main__")
    vars(main).update(__file__=path, __loader__=loader, __spec__=None)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))


def _last_line(trace: TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback, or "" if it has none."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_code(file):
            found = f"{short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
