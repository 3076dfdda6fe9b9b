"""One rank of a pool: takes calls from its pipe, runs each in a fresh group, and puts everything back."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

from lockstep.ground.fork import protect_forks, wait_for_torch_threads
from lockstep.testing import leaks

# A signal that neither clusters nor training programs use, so that no handler of theirs hides the stacks.
STACKS_SIGNAL: int = getattr(signal, "SIGRTMAX", signal.SIGXCPU)


LEAVE = b"leave"
"""What a rank is told when all have come to the end of a call."""


@dataclass(frozen=True)
class Call:
    """One function call, as it travels to one rank."""

    rank: int
    environ: dict[str, str]
    """The launcher's variables, set for the time of the call."""
    directory: str
    """The caller's working directory."""
    path: list[str]
    """The caller's ``sys.path``."""
    store: str | None
    """A fresh file for the process group to meet at; None: the call makes its own group, or none."""
    timeout: float
    """Seconds, also for the collectives of the group."""
    body: bytes
    """The function and its arguments, by cloudpickle."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    ended: float
    """``time.monotonic()`` when the function returned or raised: the first failure causes the others."""
    value: bytes | None = None
    """What the function returned, by cloudpickle; None when it failed."""
    summary: str = ""
    """Type and message of the failure."""
    stack: str = ""
    """The traceback on that rank."""
    error: bytes | None = None
    """The exception itself, where it can be pickled."""


def serve(pipe_descriptor: int, stacks_descriptor: int) -> None:
    """Runs calls until one fails or the pool closes its end of the pipe."""
    _die_with_parent()
    faulthandler.register(STACKS_SIGNAL, file=stacks_descriptor, all_threads=True)
    pipe = Connection(pipe_descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            call: Call = pickle.loads(pipe.recv_bytes())
            before = leaks.snapshot()
            path = list(sys.path)
            outcome = run(call, before)
            pipe.send_bytes(pickle.dumps(outcome))
            if outcome.value is None:
                return  # a half-made group cannot be undone: the pool forks a fresh rank
            # torch's groups are made without a barrier: another rank may still connect to one that would leave now
            if pipe.recv_bytes() != LEAVE:
                return
            if dist.is_initialized():
                # A thread of gloo's that lets go of the group as the last one (the callback of a future may hold it)
                # would wait for its own end, which aborts the process.
                wait_for_torch_threads()
                dist.destroy_process_group()
            leaks.restore_settings(before)
            sys.path[:] = path
            pipe.send_bytes(b"ready")


def run(call: Call, before: leaks.Snapshot) -> Outcome:
    """Runs one call under the environment of a launched rank; a leak of its own making is a failure too."""
    os.environ.update(call.environ)
    os.chdir(call.directory)
    sys.path[:] = call.path
    seed(call.rank)
    try:
        if call.store is not None:
            world = int(call.environ["WORLD_SIZE"])
            protect_forks()
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(call.store, world),
                rank=call.rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=call.timeout),
            )
            dist.barrier()  # who leaves at once must not be gone while another still connects to it
        function, arguments = pickle.loads(call.body)
        value = function(*arguments)
        ended = time.monotonic()
        body = cloudpickle.dumps(value)
        del function, arguments, value
        _refuse_leaks(before)
        return Outcome(ended, body)
    except BaseException as error:  # SystemExit and pytest's own outcomes included: the pool tells them on
        return failure(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _refuse_leaks(before: leaks.Snapshot) -> None:
    left = leaks.running_leaks(before)
    if left:
        leaks.end_children(before)
        raise RuntimeError("the call left something behind: " + "; ".join(left))


def failure(error: BaseException) -> Outcome:
    """The outcome of a call that raised ``error``."""
    ended = time.monotonic()
    trace = error.__traceback__
    inner = trace.tb_next if trace is not None else None  # without `run` itself
    stack = "".join(traceback.format_exception(type(error), error, inner or trace))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        body: bytes | None = cloudpickle.dumps(error)
    except Exception:
        body = None
    return Outcome(ended, None, summary, stack, body)


def seed(rank: int) -> None:
    """Every call starts from the same random states, other ones on every rank.

    Ranks that start alike would hide a broadcast that is missing.
    """
    torch.manual_seed(rank + 1)
    np.random.seed(rank + 1)
    random.seed(rank + 1)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
