"""Launchers that call a function in new processes (``ddp_spawn``) or in forks of this one (``ddp_fork``)."""

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
from lockstep.launch.environment import ReservedPort, bind_loader_workers, inherit, share_cores
from lockstep.launch.parent_death import PARENT
from lockstep.launch.processes import GRACE, Ended, RankProcesses
from lockstep.supervise.causes import Cause, Divergence, early_cause, first_cause
from lockstep.supervise.mailbox import Mailbox
from lockstep.supervise.monitor import RankMonitor, Verdict
from lockstep.supervise.screen_text import name_cells, one_line, wipe_line
from lockstep.supervise.stack import current_stack
from lockstep.supervise.status import count_call_without_ranks, record_call, record_failure, watch_uncaught

# -- pickling ------------------------------------------------------------------------------------------------


T = TypeVar("T")

STAYS = ("cpu", "meta")
"""Types of devices whose tensors are pickled without a copy to the CPU."""


def pack(obj: object, file: IO[bytes]) -> None:
    """Write an object to a file with cloudpickle. Copy tensors to the CPU, and keep file names for tracebacks.

    The reading process may have other devices, or none. On a GPU, each reader would allocate a copy. Since version
    3.1.3, cloudpickle omits file names, and tracebacks would show "<dynamic-code>".

    Raises:
        any error of pickling: some objects cannot be pickled, such as locks and open files.
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
    """Read and return the next object that `pack` wrote."""
    return pickle.load(file)


def _on_cpu(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy


# -- new processes -------------------------------------------------------------------------------------------


# Plain processes, not those of `multiprocessing`, which import the script first, so that it has to guard its main part.
# As daemons they could not have loader workers.
_BOOT = """
import os, pickle, sys
call = os.fdopen(int(sys.argv[1]), "rb")
sys.path[:] = pickle.load(call)
from lockstep.launch.spawn import work
work(call, *sys.argv[2:])
"""


class SpawnLauncher:
    """Launcher that calls a function in a new process for each rank on the node, and returns rank 0's result.

    Function and arguments are sent with cloudpickle. Definitions of the script or notebook itself are pickled by value,
    so that the script is not run again and does not need ``if __name__ == "__main__"``. The processes end with the
    call.

    Args:
        world: world of the calling process, which takes the place of local rank 0 and is not a rank itself.
        strategy: the user's strategy, for errors; None: the name of this launcher.
    """

    name = "ddp_spawn"

    def __init__(self, world: World, strategy: str | None = None) -> None:
        self.world = world
        self.strategy = strategy or self.name

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call ``function(*args, **kwargs)`` in a new process for each rank, and wait for all of them.

        Returns:
            the result of this node's local rank 0. Its tensors are on the CPU.

        Raises:
            MisconfigurationException: function or arguments cannot be pickled.
            RuntimeError: a rank failed, and the others were ended. The last line names the rank and the reason.
            KeyboardInterrupt: a second Ctrl-C was pressed, or the first one before an orderly end was possible.
        """
        count_call_without_ranks()
        port = None if self.world.port else ReservedPort()
        world = self.world if port is None else replace(self.world, port=port.number)
        mailbox, verdicts = Mailbox(), list[Verdict]()
        processes = RankProcesses(
            is_busy=mailbox.is_inside,
            is_someone_ending=mailbox.is_someone_ending,
            failed_at=mailbox.failed_at,
            on_end=lambda rank: report(rank),
        )

        def stop(verdict: Verdict) -> None:
            verdicts.append(verdict)
            processes.stop(GRACE / 4)

        def report(rank: int) -> None:
            """Report the run's first failure to the other ranks. Errors in their collectives then name it."""
            first = early_cause(processes.failed, mailbox.read(), monitor.positions()) if processes.failed else None
            if first is not None and not mailbox.others("first"):
                mailbox.leave({"first": str(first), "rank": first.rank})

        update = processes.memory_kills.update
        monitor = RankMonitor(mailbox, stop, lambda: processes.ended, world.size, on_check=update)
        # The files are unnamed and open in parent and child: nothing is left if either is killed.
        with tempfile.TemporaryFile(prefix="lockstep-") as result, contextlib.ExitStack() as ends:
            if port is not None:
                ends.callback(port.close)
            ends.callback(mailbox.close)
            ends.callback(processes.stop)
            ends.callback(monitor.stop)
            self.start(processes, Call(function, args, kwargs, world, current_stack().location()), result, mailbox)
            monitor.start()
            try:
                processes.wait()
            except KeyboardInterrupt:
                # nothing can be lost yet, and some ranks may be gone
                if not mailbox.has_joined():
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
        """Start this node's ranks as new processes, and watch them."""
        world = call.world
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with tempfile.NamedTemporaryFile(prefix="lockstep-") as file:
            _write(call, file, self.strategy)
            for local_rank in range(world.local_size):
                rank = replace(world, rank=world.rank + local_rank, local_rank=local_rank)
                environ = {**os.environ, **rank_variables(rank), **_on_one_host(world)}
                if threading.current_thread() is threading.main_thread():
                    environ[PARENT] = str(os.getpid())
                # opened once per rank, since an inherited file shares its position
                with open(file.name, "rb") as copy:
                    handed = (copy.fileno(), result.fileno(), mailbox.descriptor)
                    words = [str(handed[0]), str(handed[1]), mailbox.address, str(rank.rank)]
                    processes.start(rank.rank, [sys.executable, *flags, "-c", _BOOT, *words], environ, handed)
        processes.watch()


def _on_one_host(world: World) -> dict[str, str]:
    return on_one_host(world.address, os.environ) if world.num_nodes == 1 else {}


@dataclass
class Call:
    """A call to run on all ranks: the function, its arguments, and the World of local rank 0."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    world: World
    called: str  #: the line of the user's code that made the call


def _write(call: Call, file: IO[bytes], strategy: str) -> None:
    """Write the call to a file, after the state of this process on which its result may depend, such as seeds."""
    pickle.dump([entry or os.getcwd() for entry in sys.path], file)
    surroundings = {
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
    pack(surroundings, file)
    try:
        pack(call, file)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise MisconfigurationException(
            f"strategy={strategy!r} sends the module, the data and the callbacks to other processes, but something in "
            f"them cannot be pickled ({error}): create it in setup() or train_dataloader(), or use strategy='ddp' or "
            "'ddp_fork', which do not pickle"
        ) from error
    file.flush()


def _traces(cause: Cause | Ended | Divergence | None) -> str:
    """Return the traceback of the first failed rank, or the stacks of diverged ranks, to start an error message."""
    if isinstance(cause, Cause) and not cause.is_exit:
        return f"a rank failed:\n\n{cause.trace}\n"
    if isinstance(cause, Divergence) and cause.trace:
        return f"the ranks diverged:\n\n{cause.trace}\n\n"
    return ""


def _failure(
    strategy: str, processes: RankProcesses, mailbox: Mailbox, verdict: Verdict | None, monitor: RankMonitor
) -> BaseException:
    """Return the exception that the calling process raises for a failed run.

    It is a KeyboardInterrupt after Ctrl-C, and otherwise an error with the first cause.
    """
    interrupted = verdict is not None and verdict.interrupted
    cause: Cause | Ended | Divergence | None = None if verdict is None else verdict.cause
    if cause is None and not interrupted:
        # a process whose exception was caught in it still runs: its note counts only if no process has failed
        ranks = {end.rank for end in processes.failed}
        noted = mailbox.read()
        caught = [note for note in noted if note.rank in ranks] or noted
        cause = first_cause(processes.failed, caught, monitor.positions(), proof=monitor.hangs.divergence())
    if interrupted or (isinstance(cause, Cause) and cause.is_interrupt):
        return KeyboardInterrupt(*([str(cause)] if isinstance(cause, Divergence) else []))
    if isinstance(cause, Ended) and monitor.interrupted_at is not None and cause.code in (-2, 130):
        return KeyboardInterrupt()
    # the first cause is the last line on the terminal
    return RuntimeError(name_cells(f"{_traces(cause)}strategy={strategy!r}: {one_line(str(cause), None)}"))


def work(file: IO[bytes], result: str, mailbox: str, rank: str) -> None:
    """Read the call from a file, and run it as a rank. This function is the entry point of new processes.

    Args:
        file: file with the call.
        result: descriptor of the file for the result, as text.
        mailbox: address of the mailbox.
        rank: global rank of this process, as text.
    """

    def read() -> Call:
        with file:
            _restore(unpack(file))
            call: Call = unpack(file)
        return call

    run_rank(read, int(result), mailbox, int(rank))


def run_rank(load: Callable[[], Call], result: int, mailbox: str, rank: int) -> NoReturn:
    """Run the call as a rank and write its result to a file, or a failure to the mailbox. Then end this process.

    Args:
        load: returns the call.
        result: descriptor of the file for the result.
        mailbox: address of the mailbox.
        rank: global rank of this process.
    """
    try:
        inherit(os.environ)
        call = load()
        share_cores(os.environ, call.world.local_size)
        bind_loader_workers()
        with record_call(rank, mailbox, call.called):
            returned = call.function(*call.args, **call.kwargs)
        with os.fdopen(result, "wb") as out:
            if rank == call.world.rank:
                pack(returned, out)
    except BaseException as error:
        record_failure(error, rank, mailbox)
        _end(1)
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    _end(0)


def _end(code: int) -> NoReturn:
    """Run the exit handlers, and end this process without freeing its memory.

    On a busy machine, freeing takes seconds, in which the other ranks cannot see that this rank has failed.
    """
    with contextlib.suppress(BaseException):  # it was printed, and did not end the call
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # a stream may be closed or missing
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    flush_open_files()
    os._exit(code)


def _deterministic() -> tuple[bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.is_deterministic_algorithms_warn_only_enabled()


def _restore(surroundings: dict[str, Any]) -> None:
    """Restore the parts of the calling process' state on which results may depend, such as seeds and precision."""
    sys.argv[:] = surroundings["argv"]
    hand_down_seed(surroundings["seed"])
    set_random_states(surroundings["random states"])
    torch.set_default_dtype(surroundings["default dtype"])
    # use_deterministic_algorithms imports torch modules for a second
    if surroundings["deterministic"] != _deterministic():
        enabled, warn_only = surroundings["deterministic"]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = surroundings["cudnn"]
    torch.set_float32_matmul_precision(surroundings["matmul"])
    torch.set_num_threads(surroundings["threads"])
    log.setLevel(surroundings["level"])


# -- forks of this process -----------------------------------------------------------------------------------


HARD = 2
"""OpenMP's ``omp_pause_hard``: release all resources."""

AUTOGRAD = "pt_autograd"
"""Prefix of the names of autograd's device threads."""

_CUDA = "it has used CUDA, which does not work in a fork: use strategy='ddp_spawn', or do not use CUDA before the call"


class ForkLauncher(SpawnLauncher):
    """Launcher that calls a function in a fork of this process for each rank on the node.

    Args:
        world: world of the calling process, which takes the place of local rank 0 and is not a rank itself.
    """

    name = "ddp_fork"

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Call ``function(*args, **kwargs)`` in a fork for each rank. See :meth:`SpawnLauncher.launch`.

        Raises:
            MisconfigurationException: a fork of this process could not work. The message gives the reason.
        """
        reason = why_not()
        if reason is not None:
            raise _refusal(self.strategy, reason)
        return super().launch(function, *args, **kwargs)

    def start(self, processes: RankProcesses, call: Call, result: IO[bytes], mailbox: Mailbox) -> None:
        """Start this node's ranks as forks of this process, and watch them."""
        # each fork would write their buffers again
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        threads = torch.get_num_threads() if end_openmp_pools() else 1
        strategy = self.strategy
        # torch builds for an absent accelerator report a bad fork in any case, which does not matter
        there = any(is_there(kind) for kind in accelerator_kinds())
        parent = {PARENT: str(os.getpid())} if threading.current_thread() is threading.main_thread() else {}
        for local_rank in range(call.world.local_size):
            rank = replace(call.world, rank=call.world.rank + local_rank, local_rank=local_rank)
            environ = {**rank_variables(rank), **_on_one_host(rank), **parent}

            def load(environ: Mapping[str, str] = environ) -> Call:
                if there and in_bad_fork():
                    raise _refusal(strategy, _CUDA)
                torch.set_num_threads(threads)
                return call

            def body(
                number: int = rank.rank, environ: Mapping[str, str] = environ, load: Callable[[], Call] = load
            ) -> None:
                os.environ.update(environ)
                run_rank(load, result.fileno(), mailbox.address, number)

            processes.add(rank.rank, _fork(body, f"lockstep-rank-{rank.rank}"))
        processes.watch()


def why_not() -> str | None:
    """Return the reason why a fork of this process could not run a rank. Return None if it could."""
    threads = []
    with contextlib.suppress(OSError):  # a system without /proc
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                threads.append(file.read().strip())
    return obstacle(
        can_fork=hasattr(os, "fork"),
        cuda=any(devices_of(kind, started=True) for kind in accelerator_kinds()),
        group=dist.is_available() and dist.is_initialized(),
        threads=threads,
    )


def obstacle(can_fork: bool, cuda: bool, group: bool, threads: list[str]) -> str | None:
    """Return the reason why a fork of a process in the given state could not run a rank. Return None if it could.

    Args:
        can_fork: whether the system supports forks.
        cuda: whether CUDA is initialized.
        group: whether there is a process group.
        threads: names of the process' threads.
    """
    if not can_fork:
        return "this system does not support forks: use strategy='ddp_spawn'"
    if cuda:
        return _CUDA
    if any(name.startswith(AUTOGRAD) for name in threads):
        return (
            "it has run a backward on a machine with GPUs, and autograd's threads for them do not exist in a fork: use "
            "strategy='ddp_spawn', or run no backward before the call"
        )
    if group:
        return (
            "it has a process group, whose threads and connections do not work in a fork: call "
            "torch.distributed.destroy_process_group() first, or use strategy='ddp_spawn'"
        )
    return None


def _refusal(strategy: str, reason: str) -> MisconfigurationException:
    return MisconfigurationException(f"strategy={strategy!r} forks the calling process, but {reason}.")


def end_openmp_pools() -> bool:
    """End the threads that libgomp has started for this thread, because they would not exist in a fork.

    The next parallel region creates new threads. Other OpenMP libraries (LLVM's, Intel's) handle forks themselves.

    Returns:
        True if a fork of this process may compute on several threads.
    """
    paths = set()
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
    try:
        return all(ctypes.CDLL(path).omp_pause_resource_all(HARD) == 0 for path in sorted(paths))
    except (OSError, AttributeError):  # older than OpenMP 5
        return False


class ForkedProcess:
    """A fork of this process that can be watched like a :class:`subprocess.Popen`.

    Attributes:
        pid: process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> int:
        """Wait for the fork to end. Return the exit code, or the negative number of the signal that killed it."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                except ChildProcessError:
                    # other code in this process has waited for it
                    self._code = 0
            return self._code


def _fork(body: Callable[[], object], name: str) -> ForkedProcess:
    """Fork this process. In the child, call ``body`` and exit. In this process, return the child."""
    # Only the child's side of multiprocessing's process is used: it resets what a fork must reset. Its parent's side
    # does not let two threads wait for a child.
    process = multiprocessing.get_context("fork").Process(target=body, name=name, daemon=False)
    wait_for_torch_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    # The child never returns: its callers' code belongs to the parent.
    code = 1
    try:
        # finalizers of the parent's garbage may wait for threads that do not exist here
        gc.freeze()
        signal.set_wakeup_fd(-1)  # for instance that of an event loop of the parent
        for number in signal.valid_signals():
            # a new process would not have the handlers that the parent has set
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        atexit._clear()  # the parent runs its own exit functions
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        code = process._bootstrap()  # type: ignore[attr-defined]
    finally:
        os._exit(code)
