"""``strategy="ddp_spawn"``: a call, made in as many fresh processes as there are ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, Any, TypeVar

import torch

from lockstep.cluster.base import World
from lockstep.cluster.local import rank_variables
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import current_seed, hand_down_seed, random_states, set_random_states
from lockstep.launch.causes import Cause, Notes, cause_of, first_cause, leave_note
from lockstep.launch.children import Children
from lockstep.launch.inherit import PARENT, inherit
from lockstep.launch.parcel import pack, unpack
from lockstep.launch.port import free_port
from lockstep.launch.threads import share_cores

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds that the ranks get to end by themselves after Ctrl-C, which reaches them too."""

# Plain processes, not those of `multiprocessing`: these would import the script first, which then had to guard
# its main part, and as daemons they could have no loader workers.
_BOOT = """
import os, pickle, sys
call = os.fdopen(int(sys.argv[1]), "rb")
sys.path[:] = pickle.load(call)
from lockstep.launch.spawn import work
work(call, *sys.argv[2:])
"""


class SpawnLauncher:
    """Calls functions in fresh processes, one per rank of the node, and brings rank 0's result back.

    Function and arguments travel by cloudpickle: what a script or a notebook itself defines goes by value, so
    the script is not run again and needs no ``if __name__ == "__main__"``. The processes end with the call.

    Args:
        world: of the calling process, which stands in for local rank 0 and takes no part itself.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)`` in each of the processes.

        Returns:
            what it returned on this node's local rank 0; tensors in it lie on the CPU.

        Raises:
            MisconfigurationException: function or arguments cannot travel.
            RuntimeError: a rank failed, and the others were ended. It names the rank and has its traceback.
        """
        world = replace(self.world, port=self.world.port or free_port())
        children, notes = Children(), Notes()
        # Each of the files is open in parent and child and has no name: nothing is left if either is killed.
        with tempfile.TemporaryFile(prefix="lockstep-") as result:
            try:
                _start(children, _Call(function, args, kwargs, world), result, notes)
                try:
                    children.wait()
                except KeyboardInterrupt:
                    # the ranks got it too; one that stops its training in order still has a result
                    if not children.wait(PATIENCE) or children.failed:
                        raise
                if children.failed:
                    raise _failure(children, notes)
                result.seek(0)
                returned: T = unpack(result)
                return returned
            finally:
                children.stop()
                notes.close()


@dataclass
class _Call:
    """What the ranks are to call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    world: World


def _start(children: Children, call: _Call, result: IO[bytes], notes: Notes) -> None:
    world = call.world
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    with tempfile.NamedTemporaryFile(prefix="lockstep-") as file:
        _write(call, file)
        for local_rank in range(world.local_size):
            rank = replace(world, rank=world.rank + local_rank, local_rank=local_rank)
            environ = {**os.environ, **rank_variables(rank)}
            if threading.current_thread() is threading.main_thread():
                environ[PARENT] = str(os.getpid())
            # opened once for each rank, since a file that is handed down twice has one position
            with open(file.name, "rb") as copy:
                handed = (copy.fileno(), result.fileno(), notes.descriptor)
                words = [str(handed[0]), str(handed[1]), notes.address, str(rank.rank)]
                children.start(rank.rank, [sys.executable, *flags, "-c", _BOOT, *words], environ, handed)
    children.watch()


def _write(call: _Call, file: IO[bytes]) -> None:
    """Write the call, and the state of this process that it may depend on."""
    pickle.dump([entry or os.getcwd() for entry in sys.path], file)
    pack(_surroundings(), file)
    try:
        pack(call, file)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise MisconfigurationException(
            "strategy='ddp_spawn' sends the module, the data and the callbacks to other processes, and "
            f"something in them cannot travel ({error}): make it later, in setup() or train_dataloader(), "
            "or use strategy='ddp'"
        ) from error
    file.flush()


def _failure(children: Children, notes: Notes) -> RuntimeError:
    ranks = {end.rank for end in children.failed}
    cause = first_cause(children.failed, [cause for cause in notes.read() if cause.rank in ranks])
    trace = f"\n\nIts traceback:\n\n{cause.trace}" if isinstance(cause, Cause) else ""
    return RuntimeError(f"strategy='ddp_spawn': {cause}{trace}")


def work(file: IO[bytes], result: str, notes: str, rank: str) -> None:
    """The life of a rank: read the call, make it, leave its result or a note on its failure.

    Args:
        file: with the call.
        result: descriptor of the file for the result.
        notes: address of the notes.
        rank: this process' global rank.
    """
    try:
        inherit(os.environ)
        with file:
            _restore(unpack(file))
            call: _Call = unpack(file)
        share_cores(os.environ, call.world.local_size)
        returned = call.function(*call.args, **call.kwargs)
        with os.fdopen(int(result), "wb") as out:
            if int(rank) == call.world.rank:
                pack(returned, out)
    except BaseException as error:
        leave_note(notes, cause_of(int(rank), error))
        sys.exit(1)


def _surroundings() -> dict[str, Any]:
    return {
        "argv": sys.argv,
        "seed": current_seed(),
        "random states": random_states(include_cuda=False),
        "default dtype": torch.get_default_dtype(),
        "deterministic": _deterministic(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def _deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def _restore(surroundings: dict[str, Any]) -> None:
    """Make this process as the calling one was, as far as results may depend on it."""
    sys.argv[:] = surroundings["argv"]
    hand_down_seed(surroundings["seed"])
    set_random_states(surroundings["random states"])
    torch.set_default_dtype(surroundings["default dtype"])
    if surroundings["deterministic"] != _deterministic():  # the call alone imports a second's worth of torch
        enabled, warn_only = surroundings["deterministic"]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = surroundings["cudnn"]
    torch.set_float32_matmul_precision(surroundings["matmul"])
    torch.set_num_threads(surroundings["threads"])
