"""What a run on many nodes costs between the nodes: played with up to 1,024 of them in one process.

    pip install -c constraints.txt -e ".[plot]"
    python benchmarks/scale.py                        # prints a table; writes docs/scale.md and docs/scale.png
    python benchmarks/scale.py --nodes 2 32 --wait 80 # fewer; prints only
    python benchmarks/scale.py --between-ranks        # half a minute; writes the second part of the page anew

The supervisors, their connections and their messages are the product's own; ranks and clock are made up
(`tests.tools.scale`). Processor time is that of node 0's threads, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule, Trainer
from lockstep.ground import shared_pages
from tests.tools.pool import RankPool
from tests.tools.scale import Cost, SimulatedRun, draw, meet
from tests.tools.scale_messages import agree, reduce_logged

DOCS = Path(__file__).resolve().parent.parent / "docs"
NODES = (2, 8, 32, 64, 128, 256, 512, 1024)
RANKS_PER_NODE = 8
TIMEOUT = 60.0
WAIT = 600


@dataclass(frozen=True)
class Row:
    """What was measured with one number of nodes."""

    nodes: int
    start: Cost
    wait: Cost
    told: float  #: seconds after which the wait was told
    failure: Cost
    lost: Cost
    end: Cost
    requests: dict[str, int]  #: of a meeting of as many ranks as there are nodes


def measure(nodes: int, wait: int) -> Row:
    """One number of nodes; raises where a healthy node is lost, or the wrong rank is named."""
    late = RANKS_PER_NODE * nodes - 5
    with SimulatedRun(nodes, RANKS_PER_NODE, TIMEOUT) as run:
        start, waiting = run.start(), run.wait(wait, late)
        ((moment, said),) = run.told
        if run.lost or f"rank {late} is in its own code" not in said:
            raise RuntimeError(f"{nodes} nodes: lost {run.lost[:3]}, told {said}")
        failure = run.fail(5)
        if {words.startswith("rank 5 on ") for words in run.decided} != {True}:
            raise RuntimeError(f"{nodes} nodes: {set(run.decided)}")
        end = run.end()
        if run.lost:
            raise RuntimeError(f"{nodes} nodes: lost at the end: {run.lost[:3]}")
    with SimulatedRun(nodes, RANKS_PER_NODE, TIMEOUT) as run:
        run.start()
        lost = run.lose([nodes - 1])
    return Row(nodes, start, waiting, moment - 1000.0, failure, lost, end, meet(nodes))


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    head = (
        "| nodes | ranks | start, ms | messages a second of a node except node 0, while ranks wait | "
        "load of node 0's core | hang reported after, s | failure known everywhere after, ms | "
        "lost node known everywhere after, ms | end, ms | rendezvous requests of a rank except rank 0 | of rank 0 |"
    )
    lines = [head, "|" + "---|" * 11]
    for row in rows:
        cells = [
            f"{row.nodes:,}",
            f"{row.nodes * RANKS_PER_NODE:,}",
            f"{1000 * row.start.seconds:.0f}",
            f"{row.wait.most / row.wait.seconds:.2f}",
            f"{100 * row.wait.busy / row.wait.seconds:.1f} %",
            f"{row.told:.0f}",
            f"{1000 * row.failure.seconds:.1f}",
            f"{1000 * row.lost.seconds:.1f}",
            f"{1000 * row.end.seconds:.0f}",
            f"{row.requests['another rank']}",
            f"{row.requests['rank 0']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- what ranks tell one another -------------------------------------------------------------------------------


def between_ranks(nodes: Sequence[int]) -> str:
    """Messages and calls of ranks, as Markdown."""
    head = (
        f"| ranks | messages of rank 0 to reduce {NAMES} logged values | messages of another rank, at most | "
        "KB of a rank | depth | messages of a host for an exchange of requests | depth | "
        "calls of a custom sampler for a micro-batch |"
    )
    lines = [head, "|" + "---|" * 8]
    messages = size = agreements = 0.0  # the largest, divided by log2(ranks)
    for count in nodes:
        ranks = RANKS_PER_NODE * count
        logged, agreed = reduce_logged(ranks, NAMES), agree(count)
        messages = max(messages, max(logged["rank 0"], logged["another rank"]) / math.log2(ranks))
        size = max(size, logged["bytes"] / 1e3 / math.log2(ranks))
        agreements = max(agreements, agreed["most"] / math.log2(ranks))
        cells = [logged["rank 0"], logged["another rank"], round(logged["bytes"] / 1e3), logged["depth"]]
        cells += [agreed["most"], agreed["depth"], draw(ranks)]
        lines.append(f"| {ranks:,} | {' | '.join(map(str, cells))} |")
    lines += [
        "",
        f"A rank sends and receives at most {messages:.1f} log2(ranks) messages and {size:.1f} log2(ranks) KB to",
        "reduce the logged values. For an exchange of requests, a host sends and receives at most",
        f"{agreements:.1f} log2(ranks) messages.",
    ]
    return "\n".join(lines)


NAMES = 10
REAL = (2, 4, 8, 16)


class Big(LightningModule):
    """A model of 2.9 MB that is saved in the middle of a window of manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(850, 850)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.layer(batch).square().mean())
        self.log("loss", 0.0, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def real(path: str) -> tuple[int, int, int]:
    """In a rank: sockets of torch's group and in training, on two hosts, and bytes sent in tensors for a checkpoint."""
    flags: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    sent, found = [0], [0]

    def sockets() -> int:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found[0] = max(found[0], sockets())
            send = dist.send

            def counted(tensor: torch.Tensor, *to: Any) -> None:
                sent[0] += tensor.nbytes
                send(tensor, *to)

            if batch_idx == 1:
                with mock.patch.object(dist, "send", counted):
                    trainer.save_checkpoint(path)

    world = dist.get_world_size()
    dist.all_reduce(torch.ones(1))
    before = sockets()
    with mock.patch.object(shared_pages, "host", return_value=f"host {2 * dist.get_rank() // world}"):
        Trainer(accelerator="cpu", strategy="ddp", devices=world, max_epochs=1, callbacks=[Save()], **flags).fit(
            Big(), DataLoader(torch.randn(3 * world, 850), 1)
        )
    return before, found[0], sent[0]


def on_real_ranks() -> str:
    """What real ranks open and send, as Markdown."""
    head = (
        "| ranks on two hosts | sockets of torch's group | additional sockets in training | "
        "MB sent by a rank for a checkpoint in a window of manual optimization | MB of the file |"
    )
    lines = [head, "|" + "---|" * 5]
    with RankPool(max(REAL)) as pool, tempfile.TemporaryDirectory() as folder:
        for world in REAL:
            path = os.path.join(folder, f"{world}.ckpt")
            found = pool(world).run(real, path, timeout=240)
            # the pool's own sockets, those of its other ranks among them, are there before and after
            more = max(after - before for before, after, _ in found)
            sent = max(each for _, _, each in found) / 1e6
            lines.append(
                f"| {world} | {min(each for each, _, _ in found)} | {more} | {sent:.2f} | "
                f"{os.path.getsize(path) / 1e6:.1f} |"
            )
    return "\n".join(lines)


def page(rows: Sequence[Row], wait: int) -> str:
    """docs/scale.md, up to what is between ranks."""
    most = rows[-1]
    return f"""# Scaling to a thousand nodes

This page shows how lockstep's supervision of ranks (processes) and its messages scale with the number of nodes.
Written by `python benchmarks/scale.py` (Python {platform.python_version()}, torch {torch.__version__},
{os.cpu_count()} CPU cores).

## Start, hangs and failures

Each node has a supervisor, which watches the ranks of its node. In this benchmark all nodes run in one process. The
supervisors, connections and messages are lockstep's own. The {RANKS_PER_NODE} ranks of each node are simulated
(`tests.tools.scale`). For the hang, all ranks but one wait in an all-reduce for {wait} s, with
`hang_timeout={TIMEOUT:.0f}`. The benchmark fails if a healthy node is lost or a wrong rank is named.

{table(rows)}

![Load of node 0, and time until all nodes know of a failure](scale.png)

Each node is connected to node 0, and to no other node. So the traffic of node 0 grows with the number of nodes N. The
traffic of the other nodes does not.

- **Start:** each node connects to node 0. This takes 2 messages for a node, and 2(N-1) for node 0.
- **Hang, while ranks wait:** a node sends at most one message a second. When ranks start to wait, nothing is sent for
  2 s plus one second for each 256 ranks, but at most for half of `hang_timeout`. Then each node reports changes of its
  ranks at once, and "no change" every 2 s. Node 0 polls the nodes every 2 s.
- **Hang, proof by stacks:** if all ranks seem to wait, node 0 requests the stacks of all ranks twice, and each node
  sends one answer to each request. If the stacks do not prove that the wait can never end, node 0 requests them again
  after 1 s, 3 s, and so on up to a minute.
- **Hang, comparison of the ranks:** node 0 compares the newest records of all ranks in one pass. It uses at most 4 % of
  a core for this, so with thousands of ranks it compares them only every few seconds.
- **Failure:** the node of the failed rank sends one report to node 0. Node 0 sends one message to each node.
- **Lost node:** the operating system closes the node's connection. Then node 0 sends one message to each other node.
- **End:** each node sends one message.
- **Rendezvous:** in an elastic run on several nodes, the ranks agree on the number of the attempt without polling. Each
  rank makes {most.requests["another rank"]} requests, and rank 0 makes 4 requests for each rank (here counted with one
  rank on each node).

[Failures](failures.md) describes the same failures with real ranks.
"""


BETWEEN = "\n## Between ranks\n"


def second_part(ranks: str, measured: str) -> str:
    """The rest of it."""
    return f"""{BETWEEN}
Written by `python benchmarks/scale.py --between-ranks` (Python {platform.python_version()}, torch {torch.__version__}).

The table counts the messages of lockstep's own code that a rank sends and receives. All ranks are simulated in one
process (`tests.tools.scale_messages`), with {RANKS_PER_NODE} ranks on a host. Each result is compared with the
correct one. "Depth" is the largest number of messages that have to be sent one after another.

{ranks}

- **Logged values:** ranks reduce in groups of eight along a tree. The tree has log8(ranks) levels. In each level a rank
  gets at most 7 messages. Then gloo broadcasts the result. With up to 8 ranks, and between GPUs (NCCL), one all_gather
  is used instead.
- **Requests on several hosts:** before a run stops, saves or handles a signal, the ranks exchange their requests, so
  that all ranks act at the same step. Ranks of a host use a page of shared memory. Hosts exchange messages of 0.5 KB:
  up to 8 hosts directly, more hosts along a tree with groups of eight. An exchange takes place every 8 accumulation
  windows (optimizer steps) or every 50 ms, whichever comes first. If exchanges would take more than a tenth of the
  run's time, they take place less often.
- **Custom samplers:** each rank draws all indices of the sampler and uses its own part.

Real ranks on two simulated hosts, with a model of 2.9 MB:

{measured}

The checkpoint is saved within an accumulation window. Reduced gradients are the same on all ranks, so no rank sends
them, and the file contains them once. Requests are exchanged over the connections of torch's group. The connections
that torch and gloo open between each two ranks are not measured here.
"""


def plot(rows: Sequence[Row], path: Path) -> None:
    """The picture of the page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    nodes = [row.nodes for row in rows]
    left.plot(nodes, [100 * row.wait.busy / row.wait.seconds for row in rows], "o-")
    left.set(title="Node 0 while ranks wait", xlabel="nodes", ylabel="% of one core", xscale="log")
    right.plot(nodes, [1000 * row.failure.seconds for row in rows], "o-", label="a rank fails")
    right.plot(nodes, [1000 * row.lost.seconds for row in rows], "s-", label="a node is lost")
    right.set(title="Until every node knows the first cause", xlabel="nodes", ylabel="ms", xscale="log")
    right.axhline(500, color="gray", linestyle=":", label="a node waits for news")
    right.legend()
    for each in (left, right):
        each.set_xticks(nodes, [str(number) for number in nodes], fontsize=8)
        each.minorticks_off()
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Measure, print, and write the page where everything was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--wait", type=int, default=WAIT, help="seconds of the run's clock")
    parser.add_argument("--between-ranks", action="store_true", help="only what ranks tell one another")
    options = parser.parse_args()
    rows = []
    for nodes in [] if options.between_ranks else options.nodes:
        began = time.monotonic()
        rows.append(measure(nodes, options.wait))
        print(f"{nodes} nodes: {time.monotonic() - began:.0f} s", flush=True)
    if rows:
        print(table(rows))
    found = second_part(between_ranks(options.nodes), on_real_ranks())
    print(found)
    if options.nodes == list(NODES) and options.wait == WAIT:
        path = DOCS / "scale.md"
        first = page(rows, options.wait) if rows else path.read_text().partition(BETWEEN)[0]
        path.write_text(first + found)
        if rows:
            plot(rows, DOCS / "scale.png")


if __name__ == "__main__":
    main()
