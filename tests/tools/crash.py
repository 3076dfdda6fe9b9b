"""Crash tests: a training script is killed at a chosen moment, run again until it ends, and compared bit by bit.

The script takes part in two lines: it gives its Trainer the callback :class:`KillAt` when it is run with
``--kill``, and it prints by :func:`report` what it ended with::

    parser.add_argument("--kill")
    ...
    callbacks = [*my_callbacks, *([KillAt(Kill.parse(args.kill))] if args.kill else [])]
    trainer = Trainer(devices=2, callbacks=callbacks, ...)
    trainer.fit(model, loader, ckpt_path="last")
    if trainer.is_global_zero:
        report(weights=model.state_dict())

The test then asks that deaths change nothing::

    whole = live([sys.executable, "train.py", "one_folder"])
    survive([sys.executable, "train.py", "another_folder"], [Kill(rank=1, step=9), Kill(moment="rename")], whole)

Files that the script writes are its own and stay. Its processes do not, however a life ends.

``python -m tests.tools.crash_tries --kills 20`` kills trainings of lockstep's own at random.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from lockstep import Callback, LightningModule, Trainer
from tests.tools import leaks

ROOT = Path(__file__).resolve().parents[2]

Moment = Literal["batch", "validation", "save", "write", "rename", "teardown"]

SECONDS_TO_FOLLOW = 20.0
"""How long the other ranks of a run may live on after its first process has ended."""

_LINE = re.compile(r"^digest of (\w+): ([0-9a-f]{64})$", re.MULTILINE)
_LOADER_WORKER = "pt_data_worker"  # what torch calls a loader's worker


# -- who dies, and when --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One death by SIGKILL."""

    rank: int = 0
    """Whose death it is."""
    worker: int | None = None
    """The number of a loader worker of that rank, who then dies in its place."""
    step: int = 0
    """It comes at the first such moment when so many optimizer steps are done, those before a resume included."""
    moment: Moment = "batch"
    """``"batch"``: before a micro-batch. ``"validation"``: before a batch of a validation within the fit.
    ``"teardown"``: when the fit has ended and its ranks part. ``"save"``: when the run has been collected for a
    checkpoint, and nothing is written. ``"write"``: half the file is written. ``"rename"``: all of it, but under its
    temporary name."""
    delay: float = 0.0
    """Seconds from the moment to the death, in which the run goes on: so it comes between any two instructions.
    A run that ends before waits for it."""

    def __str__(self) -> str:
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={value}" for name, value in told.items() if value is not None)

    @classmethod
    def parse(cls, text: str) -> Kill:
        """The Kill that ``str`` made ``text`` of: ``"rank=1,step=9,moment=save,delay=0.0"``."""
        kinds: dict[str, Any] = {"rank": int, "worker": int, "step": int, "moment": str, "delay": float}
        words = dict(word.split("=") for word in text.split(","))
        return cls(**{name: kinds[name](value) for name, value in words.items()})


class KillAt(Callback):
    """Carries out a :class:`Kill` from inside the run.

    The victim has no say: SIGKILL can be neither caught nor put off. A worker can be killed only where the
    loader has some; until then the callback waits.
    """

    def __init__(self, kill: Kill) -> None:
        self.kill = kill
        self._struck = False
        self._killer: subprocess.Popen[bytes] | None = None

    def _is_due(self, trainer: Trainer) -> bool:
        kill = self.kill
        return not self._struck and trainer.global_rank == kill.rank and trainer.global_step >= kill.step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self.kill.moment == "batch" and self._is_due(trainer):
            self._strike(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.kill.moment == "validation" and not trainer.sanity_checking and self._is_due(trainer):
            self._strike(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.kill.moment == "teardown" and self._is_due(trainer):
            self._strike(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.kill.moment not in ("save", "write", "rename") or not self._is_due(trainer):
            return
        if self.kill.moment == "save":
            self._strike(trainer)
        elif self.kill.moment == "write":
            self._say(trainer)
            torch.save = _save_half_and_die  # type: ignore[assignment]
        else:
            self._say(trainer)
            os.replace = os.rename = _die_before_rename

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._killer is not None:
            self._killer.wait()

    def _say(self, trainer: Trainer) -> None:
        print(f"\nstruck in epoch {trainer.current_epoch}, step {trainer.global_step}", flush=True)

    def _strike(self, trainer: Trainer) -> None:
        victim: int | None = os.getpid()
        if self.kill.worker is not None:
            workers = sorted(child.pid or 0 for child in multiprocessing.active_children())
            victim = workers[self.kill.worker % len(workers)] if workers else None
        if victim is None:
            return
        self._struck = True
        self._say(trainer)
        if self.kill.delay:
            # From outside: a thread of this process would strike only where Python lets another thread run.
            self._killer = subprocess.Popen(["sh", "-c", f"sleep {self.kill.delay:.4f}; kill -9 {victim}"])
        else:
            os.kill(victim, signal.SIGKILL)


def _save_half_and_die(content: object, file: IO[bytes], *args: object, **kwargs: object) -> NoReturn:
    whole = io.BytesIO()
    torch.serialization.save(content, whole)
    file.write(whole.getbuffer()[: whole.tell() // 2])
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def _die_before_rename(*args: object, **kwargs: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


# -- what a run ended with -----------------------------------------------------------------------------------


def digest(state: object) -> str:
    """SHA-256 of a nest of dicts, lists and tuples of tensors and plain values: the same for the same bits only.

    Names, types and shapes count, the order of a dict's keys and the device do not. Of a DTensor this rank's part
    counts.
    """
    made = hashlib.sha256()
    for part in _parts(state):
        made.update(len(part).to_bytes(8, "big") + part)
    return made.hexdigest()


def _parts(state: object) -> Iterator[bytes]:
    if isinstance(state, Tensor):
        part: Tensor = getattr(state, "_local_tensor", state)
        yield f"{part.dtype} {tuple(part.shape)}".encode()
        yield part.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(state, Mapping):
        yield f"dict {len(state)}".encode()
        for key in sorted(state, key=repr):
            yield repr(key).encode()
            yield from _parts(state[key])
    elif isinstance(state, list | tuple):
        yield f"list {len(state)}".encode()
        for item in state:
            yield from _parts(item)
    else:
        yield f"{type(state).__name__} {state!r}".encode()


def report(**states: object) -> None:
    """Prints the :func:`digest` of each state on a line of its own, for :func:`live` to read."""
    for name, state in states.items():
        print(f"digest of {name}: {digest(state)}", flush=True)


# -- lives ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One run of a script, from its start to its end or its death.

    Attributes:
        kill: how it was to die, if it was.
        code: exit status of the first process, negative for a signal.
        seconds: from its start until the last of its processes was gone.
        digests: what it has reported, by name.
        output: what its processes printed.
    """

    kill: Kill | None
    code: int
    seconds: float
    digests: dict[str, str]
    output: str


def _environment() -> dict[str, str]:
    """Variables of a script that is to be killed: it imports from the tests, and SIGABRT prints stacks of a hang."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONFAULTHANDLER": "1"}


def live(command: Sequence[str], kill: Kill | None = None, *, timeout: float = 120.0) -> Life:
    """Runs a script in a session of its own, and leaves no process and no shared memory of it behind.

    Args:
        command: the words of the command; ``--kill`` and what it says come after them if there is a ``kill``.
        kill: how this life shall end.
        timeout: seconds that it may take.

    Raises:
        TimeoutError: it took longer; or a rank went on for 20 seconds after its first process had ended.
    """
    words = [*command, *(() if kill is None else ("--kill", str(kill)))]

    def start(output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words,
            env={**os.environ, **_environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    return lived(start, " ".join(words), kill, timeout)


def lived(start: Callable[[IO[bytes]], Leader], name: str, kill: Kill | None, timeout: float) -> Life:
    """The life of what ``start`` starts in a session of its own, with its output in a file; as :func:`live`.

    Args:
        name: for messages.
    """
    memory, started = leaks.shared_memory_files(), time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = start(output)
        seen = {process.pid}
        try:
            trouble = _watch(process, seen, started + timeout)
        finally:
            _end(process, seen, memory)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if trouble:
        raise TimeoutError(f"{name}: {trouble}\n{_tail(text)}")
    code = process.returncode
    assert code is not None, "a process that was waited for has no exit status"
    return Life(kill, code, time.monotonic() - started, dict(_LINE.findall(text)), text)


class Leader(Protocol):
    """The first process of a session, as `subprocess.Popen` is one."""

    pid: int
    returncode: int | Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; gives its exit status, negative for a signal."""
        ...


def survive(command: Sequence[str], kills: Sequence[Kill], whole: Life, *, timeout: float = 120.0) -> list[Life]:
    """Lets a script die once for each of ``kills``, then live to its end, which must be that of ``whole``.

    Args:
        command: as of :func:`live`; the script resumes by itself, with ``ckpt_path="last"``.
        kills: the deaths, one a life.
        whole: the life of the same script, in another folder, that nobody disturbed.
        timeout: seconds for each life.

    Returns:
        the lives, the whole one at the end last. One whose killed worker had nothing left to do is whole, too.

    Raises:
        AssertionError: a life did not die as told, the last one failed, or it ended with other bits.
        TimeoutError: as of :func:`live`.
    """
    assert whole.code == 0, f"the undisturbed run failed ({whole.code}):\n{_tail(whole.output)}"
    assert whole.digests, f"the undisturbed run has reported nothing:\n{_tail(whole.output)}"
    lives = []
    for kill in kills:
        lives.append(live(command, kill, timeout=timeout))
        if lives[-1].code == 0:
            # a loader worker that had handed out all of its batches is missed by nobody
            struck = kill.worker is not None and "\nstruck in epoch " in lives[-1].output
            assert struck, f"a life did not die of {kill}:\n{_tail(lives[-1].output)}"
            break
    else:
        lives.append(live(command, timeout=timeout))
    last, told = lives[-1], "; ".join(map(str, kills))
    assert last.code == 0, f"the resumed run failed ({last.code}) after [{told}]:\n{_tail(last.output)}"
    other = [name for name, value in whole.digests.items() if last.digests.get(name) != value]
    assert not other, f"other bits in {', '.join(other)} after [{told}]:\n{_tail(last.output)}"
    return lives


def _watch(process: Leader, seen: set[int], until: float) -> str:
    """Waits for the first process, then for the other ranks; tells what took too long, or nothing."""
    while True:
        seen |= _session(process.pid).keys()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.25)
            break
        if time.monotonic() > until:
            _print_stacks(process.pid)
            return "it did not end in time, and was killed; the end of its output, with the stacks of its ranks:"
    until = time.monotonic() + SECONDS_TO_FOLLOW
    while True:
        ranks = _ranks(process.pid)
        if not ranks:
            return ""
        if time.monotonic() > until:
            listed = ", ".join(f"{pid} ({leaks.command_line(pid)})" for pid in ranks)
            _print_stacks(process.pid)
            return f"its first process ended, and {listed} did not; the end of its output, with their stacks:"
        time.sleep(0.02)


def _print_stacks(leader: int) -> None:
    """Has the ranks of a session print where they stand, which ends them."""
    for pid in _ranks(leader):
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))  # no core file among the user's
            os.kill(pid, signal.SIGABRT)
    time.sleep(0.5)


def _end(process: Leader, seen: set[int], memory: frozenset[str]) -> None:
    """Kills what is left of a session, waits until it is gone, and removes the shared memory that it held."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := _session(process.pid):  # a process may have left the group, and one may start another
        seen |= left.keys()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for name in leaks.shared_memory_files() - memory:
        if seen & {int(number) for number in re.findall(r"\d+", name)}:
            (leaks.SHARED_MEMORY / name).unlink(missing_ok=True)


def _ranks(leader: int) -> list[int]:
    """The processes of a session but for loader workers: those, orphaned, look for their parent every 5 seconds."""
    return [pid for pid, name in _session(leader).items() if name != _LOADER_WORKER]


def _session(leader: int) -> dict[int, str]:
    """Process ids and names of a session's processes that have not ended (none where there is no /proc)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            start, _, rest = entry.read_text().rpartition(")")
            state, _, _, session, *_ = rest.split()
            if int(session) == leader and state not in "ZX":
                found[int(entry.parent.name)] = start.partition("(")[2]
    return found


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-60:])
