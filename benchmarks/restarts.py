"""How many restarts come up: `lockstep run` beside torchrun, whose attempts may read their predecessors' addresses.

    python benchmarks/restarts.py                       50 restarts of each kind, 2 processes on gloo
    python benchmarks/restarts.py --restarts 10 --only "lockstep run, one node"

In each life the ranks meet, train one step (or, in the hand-written script, reduce one tensor), and one of them kills
itself. A restart has come up if its ranks got as far as that. The time is that from the death to the next such moment:
mostly the import of torch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch.environment import free_port

RANKS = 2


@dataclass(frozen=True)
class Kind:
    """A way to start ranks anew."""

    name: str
    script: str  #: "trainer" or "by hand"
    agents: int = 1  #: nodes
    torchrun: tuple[str, ...] | None = None  #: its options; None: lockstep run


KINDS = (
    Kind("lockstep run, one node", "trainer"),
    Kind("lockstep run, two nodes", "trainer", agents=2),
    Kind("torchrun --standalone, lockstep's Trainer", "trainer", torchrun=("--standalone",)),
    Kind("torchrun, lockstep's Trainer", "trainer", torchrun=()),
    Kind("torchrun --standalone, init_process_group", "by hand", torchrun=("--standalone",)),
    Kind("torchrun, init_process_group", "by hand", torchrun=()),
)


# -- what the ranks do ---------------------------------------------------------------------------------------


def live(folder: Path, how: str, restarts: int) -> None:
    """One life of a rank: it meets the others, notes that it did, and dies unless it is the last life."""
    if how == "by hand":
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        end_or_go_on(folder, dist.get_rank(), dist.barrier, restarts)
        dist.destroy_process_group()
        return

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from lockstep import Callback, LightningModule, Trainer

    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                end_or_go_on(folder, trainer.global_rank, trainer.strategy.barrier, restarts)

    class One(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ends()],
        default_root_dir=folder,
    )
    trainer.fit(One(), DataLoader(torch.ones(8, 1)))


def end_or_go_on(folder: Path, rank: int, barrier: Any, restarts: int) -> None:
    """Note that this life has come up; in all but the last one a rank dies here."""
    lives = folder / "lives"
    number = len(lives.read_text().splitlines()) if lives.exists() else 0
    barrier()  # all have read it
    if rank == 0:
        with lives.open("a") as file:
            file.write(f"{time.time()}\n")
    if number < restarts and random.Random(number).randrange(RANKS) == rank:
        time.sleep(random.Random(number).uniform(0.02, 0.1))
        with (folder / "deaths").open("a") as file:
            file.write(f"{time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    barrier()


# -- what is measured ----------------------------------------------------------------------------------------


def command(kind: Kind, folder: Path, restarts: int, node: int, port: int) -> list[str]:
    """The words that start one node's ranks."""
    script = [__file__, "--live", str(folder), "--as", kind.script, "--restarts", str(restarts)]
    if kind.torchrun is not None:
        options = [*kind.torchrun, *(() if kind.torchrun else ("--master-port", str(port)))]
        words = ["torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", str(restarts), *options]
        return [sys.executable, "-m", *words, *script]
    words = ["lockstep", "run", "--devices", str(RANKS // kind.agents), "--max-restarts", str(restarts)]
    if kind.agents > 1:
        words += ["--nodes", str(kind.agents), "--node-rank", str(node), "--master-addr", "127.0.0.1"]
        words += ["--master-port", str(port), "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", *words, script[0], "--", *script[1:]]


def measure(kind: Kind, restarts: int) -> tuple[int, int, float]:
    """(restarts, those of them that came up, median seconds from a death to the next life's first step)."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        agents = [
            subprocess.Popen(
                command(kind, folder, restarts, node, port),
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for node in range(kind.agents)
        ]
        codes = [agent.wait() for agent in agents]
        lives = [float(line) for line in (folder / "lives").read_text().split()]
        deaths = [float(line) for line in (folder / "deaths").read_text().split()]
    took = [min(life - death for life in lives if life > death) for death in deaths if lives[-1] > death]
    up = len(lives) - 1
    # all restarts that were allowed have been used, unless the run came to its end with some left
    used = up if not any(codes) else restarts
    return used, up, statistics.median(took) if took else float("nan")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--only", help="part of a kind's name")
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="how", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.live is not None:
        live(args.live, args.how, args.restarts)
        return
    print("| | restarts | came up | seconds from a death to the next step |\n|---|---|---|---|")
    for kind in KINDS:
        if args.only is None or args.only in kind.name:
            used, up, seconds = measure(kind, args.restarts)
            print(f"| {kind.name} | {used} | {up} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
