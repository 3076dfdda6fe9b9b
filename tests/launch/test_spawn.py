"""``strategy="ddp_spawn"``: a call in fresh processes."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lockstep.cluster.detect import Placement
from lockstep.cluster.rendezvous import listen
from lockstep.cluster.world import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import current_seed, hand_down_seed
from lockstep.launch import script
from lockstep.launch.processes import RankProcesses
from lockstep.launch.spawn import ForkLauncher, SpawnLauncher, _failure
from lockstep.launch.topology import launcher
from lockstep.supervise import client
from lockstep.supervise.causes import Divergence
from lockstep.supervise.mailbox import Mailbox
from lockstep.supervise.monitor import RankMonitor, Verdict
from tests.tools.fresh import python

TWO = World(0, 2, 0, 2, 0, 1, "127.0.0.1", 0)

# Not guarded by `if __name__ == "__main__"`, and with classes of its own.
SCRIPT = """
import logging, os, sys, torch
from torch.utils.data import DataLoader, Dataset
from lockstep.cluster.detect import detect
from lockstep.ground.rank import rank_zero_only
from lockstep.launch.spawn import SpawnLauncher

print("script runs")

class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.tensor(float(index**2))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

def train(net, offset):
    world = detect(os.environ).world
    drawn = torch.rand(1)
    total = sum(batch.sum() for batch in DataLoader(Squares(), batch_size=2, num_workers=1))
    net.weight.data += total + offset
    return net, world, rank_zero_only.rank, sys.argv, drawn, logging.getLogger("lockstep").level

torch.manual_seed(3)
logging.getLogger("lockstep").setLevel(logging.ERROR)
net = Net()
result, world, rank, argv, drawn, level = SpawnLauncher(detect(os.environ, 2).world).launch(train, net, offset=1)
print(type(result) is Net, result.weight.item(), net.weight.item())
print(world.rank, world.size, world.port > 0, rank, argv[1:], torch.equal(drawn, torch.rand(1)), level)
"""


def test_an_unguarded_script_with_loader_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = python("train.py", "x", folder=tmp_path, seconds=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["script runs", "True 56.0 0.0", "0 2 True 0 ['x'] True 40"]


def surroundings() -> list[Any]:
    return [
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        current_seed(),
        random.getstate(),
        torch.get_rng_state(),
        torch.get_float32_matmul_precision(),
    ]


@pytest.mark.slow
def test_ranks_are_as_the_calling_process_was() -> None:
    before = current_seed()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    hand_down_seed(77)
    try:
        there, here = SpawnLauncher(TWO).launch(surroundings), surroundings()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        hand_down_seed(before)
    assert repr(there) == repr(here)
    assert torch.equal(there[4], here[4])


def is_taken(port: int) -> bool:
    """Whether a socket that asks for nothing special is refused the port."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def meeting_place() -> tuple[bool, bool]:
    """Whether the port is kept from others before the ranks meet, and whether their store may listen there."""
    port = int(os.environ["MASTER_PORT"])
    taken = is_taken(port)
    descriptor = listen("127.0.0.1", port) if os.environ["LOCAL_RANK"] == "0" else None
    return taken, descriptor is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not let a port be held")
def test_the_port_where_ranks_will_meet_is_not_given_to_others() -> None:
    """It was looked for and let go: seconds later, when rank 0 came to listen there, another process had it."""
    assert ForkLauncher(TWO).launch(meeting_place) == (True, True)  # holds it as SpawnLauncher does


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not let a port be held")
def test_a_script_holds_the_port_where_its_ranks_will_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Supervised", lambda world, command, environ: (world, environ))
    monkeypatch.setattr(script, "command_line", lambda main, argv, original: ["python"])
    monkeypatch.setattr(script, "_reserved_ports", [])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    world, environ = cast(tuple[World, dict[str, str]], script._start_supervisor(TWO))
    assert environ["MASTER_PORT"] == str(world.port)
    assert is_taken(world.port)
    script._reserved_ports[0].close()
    assert not is_taken(world.port)


def test_the_stacks_of_ranks_that_went_different_ways_come_before_the_last_line() -> None:
    """Under strategy="ddp" they stood on the screen, and here only the line that says who waits for whom."""
    children, notes = RankProcesses(), Mailbox()
    watch = RankMonitor(notes, print, dict, 2)
    verdict = Verdict(Divergence("rank 1 is stopped", "rank 0:\n    train.py:3 in wait"))
    said = str(_failure("ddp_spawn", children, notes, verdict, watch))
    watch.stop()
    notes.close()
    assert said.endswith("rank 0:\n    train.py:3 in wait\n\nstrategy='ddp_spawn': rank 1 is stopped")


@pytest.mark.parametrize(
    ("kind", "asked", "name"),
    [
        ("spawn", "ddp_notebook", "ddp_notebook"),
        ("spawn", "auto", "ddp_notebook"),
        ("spawn", object(), "ddp_spawn"),
        ("fork", "ddp_fork_find_unused_parameters_true", "ddp_fork_find_unused_parameters_true"),
        ("fork", object(), "ddp_fork"),
    ],
)
def test_errors_name_the_strategy_that_the_user_gave(kind: str, asked: Any, name: str) -> None:
    """Those of strategy="ddp_notebook" spoke of ddp_spawn."""
    assert launcher(kind, Placement(TWO, launched=False), asked).__self__.strategy == name  # type: ignore[attr-defined]


def test_what_cannot_travel_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"strategy='ddp_spawn'.*cannot be pickled .*lock.*strategy='ddp'"
    ):
        SpawnLauncher(TWO).launch(print, threading.Lock())
    with pytest.raises(MisconfigurationException, match=r"strategy='ddp_notebook'.*cannot be pickled"):
        SpawnLauncher(TWO, "ddp_notebook").launch(print, threading.Lock())
