"""Runs scripts on several ranks, and notes their parameters after each optimizer step.

    python record.py < orders

An order is a line of JSON: ``folder``, ``ranks``, ``steps``, ``dtype``, ``script``, ``arguments``. It knows torch only.
Ranks are forked, with the environment of torchrun, and print into FOLDER/printed.txt. Rank R writes FOLDER/R.pt: a
dictionary with ``steps``, a list of lists of whole parameters, one for each call of an optimizer's step, and
``inputs``, the first input of each outermost call of an ``nn.Sequential``. Ranks end together once each has made so
many steps, so that a script's end, in which torch's destructors may wait for each other, is not waited for. The answer
to an order is a line: the largest exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.utils.data
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

SECONDS = 60
"""How long a rank waits for the others at its end."""


def whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


class Recorder:
    """What one rank notes."""

    def __init__(self, folder: Path, rank: int, ranks: int, steps: int) -> None:
        self.folder = folder
        self.rank = rank
        self.ranks = ranks
        self.limit = steps
        self.steps: list[list[torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []
        self.depth = 0
        register_optimizer_step_post_hook(self.after_step)
        nn.modules.module.register_module_forward_pre_hook(self.before_forward)
        nn.modules.module.register_module_forward_hook(self.after_forward)

    def before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not isinstance(module, nn.Sequential):
            return
        self.depth += 1
        if self.depth == 1 and args and isinstance(args[0], torch.Tensor):
            self.inputs.append(args[0].detach().clone())

    def after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        if isinstance(module, nn.Sequential):
            self.depth -= 1

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: object) -> None:
        self.steps.append([whole(p) for group in optimizer.param_groups for p in group["params"]])
        if len(self.steps) == self.limit:
            self.end()

    def end(self) -> None:
        torch.save({"steps": self.steps, "inputs": self.inputs}, self.folder / f"{self.rank}.part")
        os.replace(self.folder / f"{self.rank}.part", self.folder / f"{self.rank}.pt")
        until = time.monotonic() + SECONDS
        while not all((self.folder / f"{r}.pt").exists() for r in range(self.ranks)) and time.monotonic() < until:
            time.sleep(0.01)
        sys.stdout.flush()
        os._exit(0)


def run_rank(order: dict[str, Any], rank: int) -> None:
    """Becomes a rank: does not return."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    folder, script = Path(order["folder"]), order["script"]
    os.chdir(folder.parent)
    printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_default_dtype(getattr(torch, order["dtype"]))
    sys.argv = [script, *order["arguments"]]
    sys.path[0] = str(Path(script).parent)
    recorder = Recorder(folder, rank, order["ranks"], order["steps"])
    try:
        runpy.run_path(script, run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
        recorder.end()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def carry_out(order: dict[str, Any]) -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = str(order["ranks"])
    os.environ.update(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    processes = []
    for rank in range(order["ranks"]):
        process = os.fork()
        if process == 0:
            run_rank(order, rank)
        processes.append(process)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])) for process in processes)


def main() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        print(carry_out(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
