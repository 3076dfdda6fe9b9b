"""How a process leaves: nothing of the process group outlives it."""

from __future__ import annotations

import subprocess
import sys

# What a script does, in one process: fit under ddp, then come to its end.
SCRIPT = """
import atexit, os
@atexit.register
def show():  # registered first, so called last: after lockstep has left the group
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    print("left:", [name for name in names if "gloo" in name])

from lockstep import Trainer
from lockstep.testing import BoringModel
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
Trainer(accelerator="cpu", devices=1, strategy="ddp", fast_dev_run=True, **quiet).fit(BoringModel())
"""


def test_gloo_threads_end_with_the_group() -> None:
    """They once outlived it, held by default arguments of torch's that were taken while the group was there.

    A thread that then asked for the interpreter's lock aborted the process: one ddp run in five ended its last rank
    with SIGABRT after all work was done.
    """
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "left: []" in done.stdout
