"""Launchers that start a call in other processes: fresh ones (``ddp_spawn``), or copies of this one (``ddp_fork``)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from types import CodeType
from typing import IO, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.cluster.local import on_one_host, rank_variables
from lockstep.cluster.world import World
from lockstep.ground.device import accelerator_kinds, devices_of, in_bad_fork, is_there
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork_and_exit import flush_open_files, wait_for_torch_threads
from lockstep.ground.rank import log
from lockstep.ground.seed import current_seed, hand_down_seed, random_states, set_random_states
from lockstep.launch.environment import HeldPort, bind_loader_workers, inherit, share_cores
from lockstep.launch.parent_death import PARENT
from lockstep.launch.processes import GRACE, Ended, RankProcesses
from lockstep.supervise.causes import Cause, Divergence, early_cause, first_cause
from lockstep.supervise.mailbox import Mailbox
from lockstep.supervise.monitor import RankMonitor, Verdict
from lockstep.supervise.screen_text import name_cells, one_line, wipe_line
from lockstep.supervise.stack import calling
from lockstep.supervise.status import failed, noted_call, watch_uncaught, without_ranks

# -- objects on their way ------------------------------------------------------------------------------------


T = TypeVar("T")

STAYS = ("cpu", "meta")
"""Types of devices whose tensors travel as they are."""


def pack(obj: object, file: IO[bytes]) -> None:
    """Write an object by cloudpickle, with all its tensors as CPU tensors, and code with the name of its file.

    A process that reads it can have other devices, or none; on a GPU each reader would allocate a copy. cloudpickle
    drops the name of a file from 3.1.3 on, and a traceback would say "<dynamic-code>".

    Raises:
        whatever pickling raises: there are objects that cannot travel, such as locks and open files.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing: object) -> Any:
            if isinstance(thing, Tensor) and thing.device.type not in STAYS:
                return _on_cpu(thing).__reduce_ex__(2)
            if isinstance(thing, CodeType):
                return _with_file, (thing.co_filename, *self.dispatch_table[CodeType](thing))
            return super().reducer_override(thing)

    Pickler(file).dump(obj)


def _with_file(name: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=name)


def unpack(file: IO[bytes]) -> Any:
    """Read the next object that `pack` wrote."""
    return pickle.load(file)


def _on_cpu(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy


# -- fresh processes -----------------------------------------------------------------------------------------


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

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """``function(*args, **kwargs)`` in each of the processes.

        Returns:
            what it returned on this node's local rank 0; tensors in it lie on the CPU.

        Raises:
            MisconfigurationException: function or arguments cannot travel.
            RuntimeError: a rank failed, and the others were ended. Its last line names the rank and the reason.
            KeyboardInterrupt: a second Ctrl-C came, or the first one while nothing can be ended in order.
        """
        without_ranks()
        held = None if self.world.port else HeldPort()
        world = self.world if held is None else replace(self.world, port=held.number)
        mailbox, verdicts = Mailbox(), list[Verdict]()
        processes = RankProcesses(
            is_busy=mailbox.is_inside,
            is_someone_ending=mailbox.is_someone_ending,
            failed_at=mailbox.failed_at,
            on_end=lambda rank: tell(rank),
        )

        def stop(verdict: Verdict) -> None:
            verdicts.append(verdict)
            processes.stop(GRACE / 4)

        def tell(rank: int) -> None:
            """Let the others, whose collectives raise now, know why."""
            first = early_cause(processes.failed, mailbox.read(), monitor.stands()) if processes.failed else None
            if first is not None and not mailbox.others("first"):
                mailbox.leave({"first": str(first), "rank": first.rank})

        look = processes.memory_kills.look
        monitor = RankMonitor(mailbox, stop, lambda: processes.ended, world.size, on_look=look)
        # Each of the files is open in parent and child and has no name: nothing is left if either is killed.
        with tempfile.TemporaryFile(prefix="lockstep-") as result, contextlib.ExitStack() as ends:
            if held is not None:
                ends.callback(held.close)
            ends.callback(mailbox.close)
            ends.callback(processes.stop)
            ends.callback(monitor.stop)
            self.start(processes, Call(function, args, kwargs, world, calling().location()), result, mailbox)
            monitor.start()
            try:
                processes.wait()
            except KeyboardInterrupt:
                if not mailbox.has_met():  # nothing can be lost yet, and some may be gone
                    raise
                # a rank that stops its training in order still has a result; a second Ctrl-C ends all
                monitor.interrupt()
                processes.wait()
            if processes.failed or verdicts:
                watch_uncaught()
                wipe_line()
                raise _failure(self.strategy, processes, mailbox, verdicts[0] if verdicts else None, monitor)
            result.seek(0)
            returned: T = unpack(result)
        return returned

    def start(self, processes: RankProcesses, call: Call, result: IO[bytes], mailbox: Mailbox) -> None:
        """Start the ranks of this node, and begin to watch them."""
        world = call.world
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with tempfile.NamedTemporaryFile(prefix="lockstep-") as file:
            _write(call, file, self.strategy)
            for local_rank in range(world.local_size):
                rank = replace(world, rank=world.rank + local_rank, local_rank=local_rank)
                environ = {**os.environ, **rank_variables(rank), **_on_one_host(world)}
                if threading.current_thread() is threading.main_thread():
                    environ[PARENT] = str(os.getpid())
                # opened once for each rank, since a file that is handed down twice has one position
                with open(file.name, "rb") as copy:
                    handed = (copy.fileno(), result.fileno(), mailbox.descriptor)
                    words = [str(handed[0]), str(handed[1]), mailbox.address, str(rank.rank)]
                    processes.start(rank.rank, [sys.executable, *flags, "-c", _BOOT, *words], environ, handed)
        processes.watch()


def _on_one_host(world: World) -> dict[str, str]:
    return on_one_host(world.address, os.environ) if world.num_nodes == 1 else {}


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


def _first_cause(processes: RankProcesses, mailbox: Mailbox, monitor: RankMonitor) -> Cause | Ended | Divergence | None:
    """What this process itself knows of the first cause."""
    ranks = {end.rank for end in processes.failed}
    noted = mailbox.read()
    caught = [cause for cause in noted if cause.rank in ranks] or noted
    return first_cause(processes.failed, caught, monitor.stands(), proof=monitor.hangs.divergence())


def _traces(cause: Cause | Ended | Divergence | None) -> str:
    """Where the ranks were, in front of the first cause."""
    if isinstance(cause, Cause) and not cause.is_exit:
        return f"a rank failed:\n\n{cause.trace}\n"
    if isinstance(cause, Divergence) and cause.trace:
        return f"the ranks went different ways:\n\n{cause.trace}\n\n"
    return ""


def _failure(
    strategy: str, processes: RankProcesses, mailbox: Mailbox, verdict: Verdict | None, monitor: RankMonitor
) -> BaseException:
    """What to raise in the calling process: the first cause; or that all was interrupted."""
    interrupted = verdict is not None and verdict.interrupted
    cause: Cause | Ended | Divergence | None = None if verdict is None else verdict.cause
    if cause is None and not interrupted:
        cause = _first_cause(processes, mailbox, monitor)
    if interrupted or (isinstance(cause, Cause) and cause.is_interrupt):
        return KeyboardInterrupt(*([str(cause)] if isinstance(cause, Divergence) else []))
    if isinstance(cause, Ended) and monitor.interrupted_at is not None and cause.code in (-2, 130):
        return KeyboardInterrupt()
    # the first cause is the last thing on the screen
    return RuntimeError(name_cells(f"{_traces(cause)}strategy={strategy!r}: {one_line(str(cause), None)}"))


def work(file: IO[bytes], result: str, mailbox: str, rank: str) -> None:
    """Be a rank in a fresh process: read the call, and make it.

    Args:
        file: with the call.
        result, mailbox, rank: as for :func:`run_rank`.
    """

    def read() -> Call:
        with file:
            _restore(unpack(file))
            call: Call = unpack(file)
        return call

    run_rank(read, int(result), mailbox, int(rank))


def run_rank(take: Callable[[], Call], result: int, mailbox: str, rank: int) -> NoReturn:
    """Be a rank: take over the call, make it, leave its result or a note on its failure.

    Args:
        take: gives the call.
        result: descriptor of the file for the result.
        mailbox: its address.
        rank: this process' global rank.
    """
    try:
        inherit(os.environ)
        call = take()
        share_cores(os.environ, call.world.local_size)
        bind_loader_workers()
        with noted_call(rank, mailbox, call.called):
            returned = call.function(*call.args, **call.kwargs)
        with os.fdopen(result, "wb") as out:
            if rank == call.world.rank:
                pack(returned, out)
    except BaseException as error:
        failed(error, rank, mailbox)
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
    flush_open_files()
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
        "level": log.level,
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
    log.setLevel(surroundings["level"])


# -- copies of this process ----------------------------------------------------------------------------------


HARD = 2
"""OpenMP's ``omp_pause_hard``: let go of everything."""

AUTOGRAD = "pt_autograd"
"""What autograd's threads for devices are called."""

_CUDA = (
    "CUDA is in use in it, and cannot be used in a copy: use strategy='ddp_spawn', or leave CUDA alone before the call"
)


class ForkLauncher(SpawnLauncher):
    """Calls functions in copies of this process, one per rank of the node, and brings rank 0's result back.

    Args:
        world: of the calling process, which stands in for local rank 0 and takes no part itself.
    """

    name = "ddp_fork"

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """``function(*args, **kwargs)`` in each of the processes; errors as of :meth:`SpawnLauncher.launch`.

        Raises:
            MisconfigurationException: a copy of this process could not work; the sentence says why.
        """
        reason = why_not()
        if reason is not None:
            raise _refusal(self.strategy, reason)
        return super().launch(function, *args, **kwargs)

    def start(self, processes: RankProcesses, call: Call, result: IO[bytes], mailbox: Mailbox) -> None:
        """Copy this process for each rank of the node, and begin to watch them."""
        for stream in (sys.stdout, sys.stderr):  # else what waits in them is written once more by each copy
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        threads = torch.get_num_threads() if end_openmp_pools() else 1
        strategy = self.strategy
        # a build for an accelerator that this machine does not have calls each copy bad, and is never asked for it
        there = any(is_there(kind) for kind in accelerator_kinds())
        parent = {PARENT: str(os.getpid())} if threading.current_thread() is threading.main_thread() else {}
        for local_rank in range(call.world.local_size):
            rank = replace(call.world, rank=call.world.rank + local_rank, local_rank=local_rank)
            environ = {**rank_variables(rank), **_on_one_host(rank), **parent}

            def take(environ: Mapping[str, str] = environ) -> Call:
                if there and in_bad_fork():
                    raise _refusal(strategy, _CUDA)
                torch.set_num_threads(threads)
                return call

            def body(
                number: int = rank.rank, environ: Mapping[str, str] = environ, take: Callable[[], Call] = take
            ) -> None:
                os.environ.update(environ)
                run_rank(take, result.fileno(), mailbox.address, number)

            processes.take(rank.rank, _fork(body, f"lockstep-rank-{rank.rank}"))
        processes.watch()


def why_not() -> str | None:
    """Why copies of this process could not work; None if they can."""
    return obstacle(
        can_fork=hasattr(os, "fork"),
        cuda=any(devices_of(kind, started=True) for kind in accelerator_kinds()),
        group=dist.is_available() and dist.is_initialized(),
        threads=_thread_names(),
    )


def obstacle(can_fork: bool, cuda: bool, group: bool, threads: list[str]) -> str | None:
    """The first thing that makes copies of a process useless; None if there is none.

    Args:
        can_fork: whether the system has forks.
        cuda: whether CUDA is initialized.
        group: whether there is a process group.
        threads: names of the process' threads.
    """
    if not can_fork:
        return "this system has no forks: use strategy='ddp_spawn'"
    if cuda:
        return _CUDA
    if any(name.startswith(AUTOGRAD) for name in threads):
        return (
            "a backward has run in it on a machine with GPUs, and autograd's threads for them cannot be copied: use "
            "strategy='ddp_spawn', or leave all backwards to the ranks"
        )
    if group:
        return (
            "it has a process group, whose threads and connections cannot be copied: call "
            "torch.distributed.destroy_process_group() before, or use strategy='ddp_spawn'"
        )
    return None


def _refusal(strategy: str, reason: str) -> MisconfigurationException:
    return MisconfigurationException(f"strategy={strategy!r} copies the calling process, but {reason}.")


def _thread_names() -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # a system without /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                names.append(file.read().strip())
    return names


def end_openmp_pools() -> bool:
    """End the threads that libgomp keeps for this thread's parallel regions; the next region makes new ones.

    Other OpenMPs (LLVM's, Intel's) see to forks themselves.

    Returns:
        whether a copy of this process may compute on several threads.
    """
    paths = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(HARD) == 0 for path in sorted(paths))
    except (OSError, AttributeError):  # older than OpenMP 5
        return False


class ForkedProcess:
    """A copy of this process, with what of :class:`subprocess.Popen` is needed to watch it.

    Attributes:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        """Wait for its end; the exit code, or the negative number of the signal that killed it."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:  # somebody else in this process has waited for it
                    self._code = 0
            return self._code


def _fork(body: Callable[[], object], name: str) -> ForkedProcess:
    """Copy this process; the copy calls ``body`` and ends."""
    # multiprocessing's own process, of which only the child's side is used: it knows what has to be made anew there,
    # while its parent's side lets no two threads wait for a child
    process = multiprocessing.get_context("fork").Process(target=body, name=name, daemon=False)
    wait_for_torch_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_a_child(process)
    return ForkedProcess(pid)


def _be_a_child(process: BaseProcess) -> NoReturn:
    """Be a copy. It never comes back: the lines that called it are the parent's."""
    code = 1
    try:
        gc.freeze()  # the parent's garbage is not ours to collect: it may wait for threads that are not here
        signal.set_wakeup_fd(-1)  # an event loop's of the parent, say
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # the parent's, as in any fresh process
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()  # the parent does these itself
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        code = process._bootstrap()  # type: ignore[attr-defined]
    finally:
        os._exit(code)
