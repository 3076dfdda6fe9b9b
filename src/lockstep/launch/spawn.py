"""``strategy="ddp_spawn"``: a call, made in as many fresh processes as there are ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, Any, NoReturn, TypeVar

import torch

from lockstep.cluster.base import World
from lockstep.cluster.local import rank_variables
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import current_seed, hand_down_seed, random_states, set_random_states
from lockstep.launch.attendance import attended, failed
from lockstep.launch.causes import Cause, Stray, first_cause
from lockstep.launch.children import GRACE, Children, Ended
from lockstep.launch.inherit import PARENT, bind_loader_workers, inherit
from lockstep.launch.judge import settled
from lockstep.launch.notes import Notes
from lockstep.launch.parcel import pack, unpack
from lockstep.launch.port import free_port
from lockstep.launch.stack import calling, one_line
from lockstep.launch.threads import share_cores
from lockstep.launch.watch import Verdict, Watch

T = TypeVar("T")

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
        strategy: what the user has chosen, for errors; None: the name that this launcher goes by.
    """

    name = "ddp_spawn"

    def __init__(self, world: World, strategy: str | None = None) -> None:
        self.world = world
        self.strategy = strategy or self.name

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)`` in each of the processes.

        Returns:
            what it returned on this node's local rank 0; tensors in it lie on the CPU.

        Raises:
            MisconfigurationException: function or arguments cannot travel.
            RuntimeError: a rank failed, and the others were ended. Its last line names the rank and the reason.
            KeyboardInterrupt: a second Ctrl-C came, or the first one while nothing can be ended in order.
        """
        world = replace(self.world, port=self.world.port or free_port())
        notes, verdicts = Notes(), list[Verdict]()
        children = Children(None, notes.is_inside, notes.is_someone_ending, notes.failed_at, lambda rank: tell(rank))

        def stop(verdict: Verdict) -> None:
            verdicts.append(verdict)
            children.stop(GRACE / 4)

        def tell(rank: int) -> None:
            """Let the others, whose collectives raise now, know why."""
            first = settled(children.failed, notes.read(), watch.stands()) if children.failed else None
            if first is not None and not notes.others("first"):
                notes.leave({"first": str(first), "rank": first.rank})

        watch = Watch(notes, world.local_size == world.size, stop, lambda: children.ended)
        # Each of the files is open in parent and child and has no name: nothing is left if either is killed.
        with tempfile.TemporaryFile(prefix="lockstep-") as result:
            try:
                self.start(children, Call(function, args, kwargs, world, calling().place()), result, notes)
                watch.start()
                try:
                    children.wait()
                except KeyboardInterrupt:
                    # a rank that stops its training in order still has a result; a second Ctrl-C ends all
                    watch.interrupt()
                    children.wait()
                if children.failed or verdicts:
                    raise _failure(self.strategy, children, notes, verdicts[0] if verdicts else None, watch)
                result.seek(0)
                returned: T = unpack(result)
                return returned
            finally:
                watch.stop()
                children.stop()
                notes.close()

    def start(self, children: Children, call: Call, result: IO[bytes], notes: Notes) -> None:
        """Start the ranks of this node, and begin to watch them."""
        world = call.world
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with tempfile.NamedTemporaryFile(prefix="lockstep-") as file:
            _write(call, file, self.strategy)
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


@dataclass
class Call:
    """What the ranks are to call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    world: World
    called: str  #: the line of the user's code that made it


def _write(call: Call, file: IO[bytes], strategy: str) -> None:
    """Write the call, and the state of this process that it may depend on."""
    pickle.dump([entry or os.getcwd() for entry in sys.path], file)
    pack(_surroundings(), file)
    try:
        pack(call, file)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise MisconfigurationException(
            f"strategy={strategy!r} sends the module, the data and the callbacks to other processes, and "
            f"something in them cannot travel ({error}): make it later, in setup() or train_dataloader(), "
            "or use strategy='ddp', or 'ddp_fork', where nothing has to travel"
        ) from error
    file.flush()


def _failure(strategy: str, children: Children, notes: Notes, verdict: Verdict | None, watch: Watch) -> BaseException:
    """What to raise in the calling process: the first cause; or that all was interrupted."""
    ranks = {end.rank for end in children.failed}
    cause: Cause | Ended | Stray | None = None if verdict is None else verdict.cause
    if cause is None and not (verdict is not None and verdict.interrupted):
        noted = notes.read()
        caught = [cause for cause in noted if cause.rank in ranks] or noted
        cause = first_cause(children.failed, caught, watch.stands(), proof=watch.divergence())
    if (verdict is not None and verdict.interrupted) or (isinstance(cause, Cause) and cause.is_interrupt):
        return KeyboardInterrupt(*([str(cause)] if isinstance(cause, Stray) else []))
    if isinstance(cause, Ended) and watch.interrupted_at is not None and cause.code in (-2, 130):
        return KeyboardInterrupt()
    before = ""  # the first cause is the last thing on the screen
    if isinstance(cause, Cause) and not cause.is_exit:
        before = f"a rank failed:\n\n{cause.trace}\n"
    elif isinstance(cause, Stray) and cause.trace:
        before = f"the ranks went different ways:\n\n{cause.trace}\n\n"
    return RuntimeError(f"{before}strategy={strategy!r}: {one_line(str(cause), None)}")


def work(file: IO[bytes], result: str, notes: str, rank: str) -> None:
    """The life of a rank in a fresh process: read the call, and make it.

    Args:
        file: with the call.
        result, notes, rank: as for :func:`live`.
    """

    def read() -> Call:
        with file:
            _restore(unpack(file))
            call: Call = unpack(file)
        return call

    live(read, int(result), notes, int(rank))


def live(take: Callable[[], Call], result: int, notes: str, rank: int) -> NoReturn:
    """The life of a rank: take over the call, make it, leave its result or a note on its failure.

    Args:
        take: gives the call.
        result: descriptor of the file for the result.
        notes: address of the notes.
        rank: this process' global rank.
    """
    try:
        inherit(os.environ)
        call = take()
        share_cores(os.environ, call.world.local_size)
        bind_loader_workers()
        with attended(rank, notes, call.called):
            returned = call.function(*call.args, **call.kwargs)
        with os.fdopen(result, "wb") as out:
            if rank == call.world.rank:
                pack(returned, out)
    except BaseException as error:
        failed(error, rank, notes)
        _end(1)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    _end(0)


def _end(code: int) -> NoReturn:
    """End this process as Python does, but leave its memory to the system: to tidy it up takes seconds on a busy
    machine, in which the others do not know yet that this rank has failed."""
    with contextlib.suppress(BaseException):  # it has been printed, and is not what ended the call
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(code)


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
