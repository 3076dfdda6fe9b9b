"""Runs single tests of torch's file on the ranks of a pool, each in a process of its own that is forked for it.

A rank of the pool imports the file once, and forks a child a test: what a test leaves behind, or breaks, ends with it.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tests.extensions.parallel.peers.suite import RPC_TESTS

SECONDS = 60
"""That a test may take."""
LONGER = {"test_ddp_uneven_inputs": 240, "test_ddp_compile_static_graph": 240}
SHORTER = {"test_ddp_has_finalized": 15}
GRACE = 3.0
"""Seconds that the other ranks have to end by themselves after one has failed."""


@dataclass(frozen=True)
class Verdict:
    """How a test ended."""

    word: str
    """passes, skips, fails or hangs."""
    reason: str = ""
    """Of what did not pass: the first line of the error, of the rank that failed first."""
    detail: str = ""
    """Its traceback, or the stacks of a rank that hangs."""
    made: int = 0
    """How many DistributedDataParallel a rank of a test that passed has made."""


def run(pool: Any, test: str, candidate: str) -> Verdict:
    """Runs ``test`` with the class ``candidate`` ("torch", "lockstep") on as many ranks of ``pool`` as it wants."""
    world = RPC_TESTS.get(test, 2)
    limit = {**LONGER, **SHORTER}.get(test, SECONDS)
    with _scratch() as folder:
        # The first call in a rank imports the file.
        ends = pool(world).run(_attend, test, candidate, folder, limit, timeout=limit + 120, group=False)
    order = {"fails": 0, "hangs": 1, "skips": 2, "passes": 3}
    first = min(ends, key=lambda end: (order[end["word"]], end["ended"]))
    made = max(end.get("made", 0) for end in ends)
    return Verdict(first["word"], first["reason"], first["detail"], made)


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """A folder for one test, laid out as the file wants it."""
    with tempfile.TemporaryDirectory(prefix="lockstep-peers-") as folder:
        for part in ("barrier", "test_dir"):
            (Path(folder) / part).mkdir()
        yield folder


def _attend(test: str, candidate: str, folder: str, limit: float) -> dict[str, Any]:
    """`attend`, of the module that stays imported in the rank: functions of tests travel by value."""
    from tests.extensions.parallel.peers.runner import attend

    return attend(test, candidate, folder, limit)


def attend(test: str, candidate: str, folder: str, limit: float) -> dict[str, Any]:
    """Forks the process that runs a test on this rank, and waits for it: its end, or why it was killed."""
    from tests.extensions.parallel.peers import suite

    rank = int(os.environ["RANK"])
    suite.imported(int(os.environ["WORLD_SIZE"]), suite.RPC_FILE if test in RPC_TESTS else suite.FILE)
    sys.stdout.flush()
    sys.stderr.flush()
    ears, mouth = os.pipe()
    child = os.fork()
    if not child:
        os.close(ears)
        _child(mouth, test, candidate, folder, limit)
    os.close(mouth)
    try:
        text = _hear(ears, Path(folder), time.monotonic() + limit)
        if text is None:
            stacks = _stacks(child, Path(folder) / f"stacks-{rank}")
            end = {"word": "hangs", "reason": f"no answer after {limit} s", "detail": stacks}
        elif not text:
            end = {"word": "fails", "reason": "its process died", "detail": ""}
        else:
            end = json.loads(text)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ears)
    if end["word"] != "passes":
        (Path(folder) / f"ended-{rank}").touch()
    return {"ended": time.monotonic(), **end}


def _hear(ears: int, folder: Path, deadline: float) -> str | None:
    """What the child says until it closes its end; None if it does not in time. A failure elsewhere hurries it."""
    heard, hurried = b"", False
    while (left := deadline - time.monotonic()) > 0:
        if select.select([ears], [], [], min(left, 0.2))[0]:
            more = os.read(ears, 65536)
            if not more:
                return heard.decode()
            heard += more
        elif not hurried and any(folder.glob("ended-*")):
            deadline, hurried = min(deadline, time.monotonic() + GRACE), True
    return None


def _stacks(child: int, file: Path) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
    time.sleep(0.5)
    return file.read_text() if file.exists() else ""


def _child(mouth: int, test: str, candidate: str, folder: str, limit: float) -> None:
    """Runs the test in a fresh group, says how it ended, and ends."""
    end: dict[str, Any] = {"word": "fails", "reason": "", "detail": ""}
    try:
        stacks: TextIO = open(Path(folder) / f"stacks-{os.environ['RANK']}", "w")  # noqa: SIM115  # for good
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        null = os.open(os.devnull, os.O_WRONLY)  # torch's tests and its C++ side print
        os.dup2(null, 1)
        os.dup2(null, 2)
        made, skipped = _in_group(test, candidate, folder, limit)
        end = {"word": "skips" if skipped else "passes", "reason": skipped, "detail": "", "made": made}
    except BaseException as error:
        ended = time.monotonic()  # before others see this process go, and end by it
        lines = str(error).strip().splitlines() or [""]
        reason, detail = f"{type(error).__name__}: {lines[0]}", traceback.format_exc()
        detail = detail[-8000:]  # what a pipe takes at once
        end = {"word": "fails", "reason": reason[:1000], "detail": detail, "ended": ended}
    finally:
        os.write(mouth, json.dumps(end).encode())
        os._exit(0)


def _in_group(test: str, candidate: str, folder: str, limit: float) -> tuple[int, str]:
    import torch.distributed as dist

    from tests.extensions.parallel.peers import suite

    os.environ.update(
        BACKEND="gloo",
        TEMP_DIR=folder,
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",
        TORCHINDUCTOR_CACHE_DIR=folder,
        TORCHINDUCTOR_COMPILE_THREADS="1",  # no processes that would outlive this one
    )
    tempfile.tempdir = folder
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if test not in RPC_TESTS:
        store = dist.FileStore(os.path.join(folder, "group"), world)
        timeout = datetime.timedelta(seconds=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()
    return suite.trial(test, candidate)
