"""Kills trainings at random, in all settings and at all moments, and says which did not survive it.

python -m tests.tools.crash_tries --kills 200 --seed 1
python -m tests.tools.crash_tries --seed 1 --only 17                      # one try again
python -m tests.tools.crash_tries --kills 9 --strategy ddp --data batch   # some of the settings
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import torch

from lockstep.launch.environment import ReservedPort
from tests.tools import crash_training
from tests.tools.crash import Kill, Life, Moment, lived
from tests.tools.crash_training import DATA, EPOCHS, EVERY, STRATEGIES, Setting, seen

OWN_RANKS = ("single", "ddp_spawn", "ddp_fork")
"""Strategies that start their ranks, or have one; for the others the ranks are started as by torchrun."""


MOMENTS: list[Moment] = ["batch", "batch", "batch", "validation", "save", "write", "rename"]


# -- processes -------------------------------------------------------------------------------------------------


class Forked:
    """A copy of this process that calls a function, in a session of its own: it need not import torch again.

    Args:
        function: what it calls; it ends with 0, or with 1 where that raises.
        output: takes what it prints.
    """

    def __init__(self, function: Callable[[], object], output: IO[bytes]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _become(function, output)

    def wait(self, timeout: float | None = None) -> int:
        """As of `subprocess.Popen`."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if until is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode


def _become(function: Callable[[], object], output: IO[bytes]) -> NoReturn:
    """Call a function as if it were the script of this process."""
    code = 1
    with contextlib.suppress(BaseException):
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            function()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _play(words: list[str], ranks: int) -> None:
    """Train in this process; with several ``ranks``, in a copy of it for each of the others, too."""
    if ranks == 1:
        return crash_training.main(words)
    held = ReservedPort()
    others = []
    for rank in range(1, ranks):
        pid = os.fork()
        if pid == 0:
            with open(os.dup(1), "wb") as output:
                _become(partial(_be_rank, rank, ranks, held.number, words), output)
        others.append(pid)
    try:
        _be_rank(0, ranks, held.number, words)
    finally:
        for pid in others:
            os.waitpid(pid, 0)
        held.close()
    return None


def _be_rank(rank: int, ranks: int, port: int, words: list[str]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": f"crash-{port}"}
    os.environ.update({name: str(value) for name, value in {**place, **where}.items()})
    crash_training.main(words)


# -- tries -----------------------------------------------------------------------------------------------------


def draw(
    seed: int, number: int, strategies: Sequence[str], data: Sequence[str], moments: Sequence[Moment] = MOMENTS
) -> tuple[Setting, list[Kill]]:
    """The setting and the deaths of one try: three, of which one in four comes before there is a checkpoint."""
    by = random.Random(f"{seed}-{number}")
    # all pairs of strategy and data in turn, so that a few hundred kills meet each of them
    strategy = strategies[number % len(strategies)]
    kind = data[(number // len(strategies) + number % len(strategies)) % len(data)]
    setting = Setting(strategy, kind, by.choice([0, 0, 2]), by.choice([1, 2]))
    first = by.randint(0, EVERY - 1) if by.random() < 0.5 else by.randint(EVERY, setting.steps // 2)
    steps = sorted([first, *(by.randint(EVERY + 1, setting.steps - 1) for _ in range(2))])
    return setting, [_death(by, setting, step, moments) for step in steps]


def _death(by: random.Random, setting: Setting, step: int, moments: Sequence[Moment]) -> Kill:
    moment: Moment = by.choice(moments)
    epochs_end = setting.steps // EPOCHS
    if moment == "validation" and step > setting.steps - epochs_end:
        step = setting.steps  # the last one
    if step >= setting.steps - 2 and by.random() < 0.5:
        moment, step = "teardown", setting.steps
    if moment in ("write", "rename"):
        return Kill(step=step, moment=moment)
    rank = by.randrange(setting.devices)
    delay = by.choice([0.0, 0.0, round(by.uniform(0.0, 0.05), 4)])
    if moment == "teardown":
        delay = 0.0  # nobody would wait for it
    if setting.workers and moment == "batch" and step < setting.steps - epochs_end and by.random() < 0.3:
        return Kill(rank=rank, worker=by.randrange(setting.workers), step=step, delay=delay)
    return Kill(rank=rank, step=step, moment=moment, delay=delay)


def life(folder: Path, setting: Setting, kill: Kill | None) -> Life:
    """One life of a training."""
    words = [str(folder), str(setting), *(("--kill", str(kill)) if kill else ())]
    ranks = 1 if setting.strategy in OWN_RANKS else setting.devices
    return lived(partial(Forked, partial(_play, words, ranks)), " ".join(words), kill, timeout=120.0)


class Tries:
    """Tries, and the undisturbed lives that they are compared with.

    Args:
        folder: for their checkpoints.

    Attributes:
        kills: deaths so far; ``late``: those that came after the first checkpoint.
        lost: numbers of the tries that did not end as the undisturbed life.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = self.late = 0
        self.lost: list[int] = []
        self._whole: dict[Setting, tuple[Life, dict[int, list[int]]]] = {}

    def whole(self, setting: Setting) -> tuple[Life, dict[int, list[int]]]:
        """The undisturbed life of a setting, and its samples."""
        if setting not in self._whole:
            folder = self.folder / f"whole-{len(self._whole)}"
            lived = life(folder, setting, None)
            if lived.code != 0 or not lived.digests:
                raise RuntimeError(f"{setting}: the undisturbed training failed ({lived.code}):\n{lived.output}")
            samples = seen(folder, setting.readers)
            if setting.data != "weighted" and list(samples.values()) != [list(range(setting.samples))] * EPOCHS:
                raise RuntimeError(f"{setting}: the undisturbed training did not see every sample once: {samples}")
            self._whole[setting] = lived, samples
        return self._whole[setting]

    def play(self, number: int, setting: Setting, deaths: Sequence[Kill]) -> None:
        """One try, and its lines of the table."""
        folder = self.folder / f"try-{number}"
        try:
            whole, samples = self.whole(setting)
            rows = []
            for kill in deaths:
                dead = life(folder, setting, kill)
                struck = [line for line in dead.output.splitlines() if line.startswith("struck in ")]
                late = any(path.suffix == ".ckpt" and not path.name.startswith(".") for path in folder.iterdir())
                if dead.code != 0 and not struck:
                    raise RuntimeError(f"a life failed before it was killed ({kill}):\n{dead.output}")
                if struck:
                    self.kills, self.late = self.kills + 1, self.late + late
                    rows.append(f"{struck[-1][10:]:18}  {'after' if late else 'before':6}  {kill}")
            last = life(folder, setting, None)
        except (RuntimeError, TimeoutError) as error:
            self.lost.append(number)
            print(f"{number:4}  {setting}: LOST\n{error}", flush=True)
            return
        bits = last.digests == whole.digests
        once = seen(folder, setting.readers) == samples
        ok = last.code == 0 and bits and once
        for row in rows:
            print(f"{number:4}  {setting!s:60}  {row:90}  {bits!s:5}  {once!s:5}", flush=True)
        if not ok:
            self.lost.append(number)
            print(f"{number:4}  LOST ({last.code}); kills: {'; '.join(map(str, deaths))}\n{last.output}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Kill as the command line says; 1 where a run was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.crash_tries", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="end after so many deaths")
    parser.add_argument("--seed", type=int, default=0, help="of the settings and moments")
    parser.add_argument("--only", type=int, help="the number of one try, to repeat it")
    parser.add_argument("--strategy", nargs="+", choices=tuple(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--moment", nargs="+", choices=sorted(set(MOMENTS)), default=MOMENTS, help="when they fall")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no try after so long")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(f"{'try':>4}  {'setting':60}  {'where':18}  {'ckpt':6}  {'kill':64}  {'bits':5}  {'once':5}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-crash-") as folder:
        tries, number, until = Tries(Path(folder)), args.only or 0, time.monotonic() + args.seconds
        while tries.kills < args.kills and time.monotonic() < until:
            tries.play(number, *draw(args.seed, number, args.strategy, args.data, args.moment))
            number += 1
            if args.only is not None:
                break
    lost = f"; lost: {', '.join(f'--only {each}' for each in tries.lost)} (--seed {args.seed})" if tries.lost else ""
    print(
        f"{tries.kills} kills, {tries.late} after the first checkpoint; {len(tries.lost)} of {number} tries lost{lost}"
    )
    return bool(tries.lost)


if __name__ == "__main__":
    sys.exit(main())
