"""What a run on many nodes costs between the nodes: played with up to 1,024 of them in one process.

    pip install -c constraints.txt -e ".[plot]"
    python benchmarks/scale.py                        # prints a table; writes docs/scale.md and docs/scale.png
    python benchmarks/scale.py --nodes 2 32 --wait 60 # fewer; prints only

The supervisors, their connections and their messages are the product's own; ranks and clock are made up
(`lockstep.testing.scale`). Processor time is that of node 0's threads, so that a busy machine changes little.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.testing.scale import Cost, SimulatedRun, meet

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
        "| nodes | ranks | start, ms | messages a second of another node, while ranks wait | node 0's part of a core | "
        "told after, s | first cause everywhere after, ms | lost node everywhere after, ms | end, ms | "
        "requests of a rank to meet | of rank 0 |"
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


def page(rows: Sequence[Row], wait: int, command: str) -> str:
    """docs/scale.md."""
    most = rows[-1]
    return f"""# A thousand nodes

Written by `{command}` (Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores).

Nodes are played in one process: supervisors, connections and messages are lockstep's own, and {RANKS_PER_NODE} ranks of
each node are made up (`lockstep.testing.scale`). In the wait all ranks but one wait in an all-reduce for
{wait} s, with `hang_timeout={TIMEOUT:.0f}`. No healthy node was lost, and the right rank was named, in every row: the
benchmark ends with an error otherwise.

{table(rows)}

![What node 0 does, and how long news takes](scale.png)

How each part grows with the number of nodes N:

- **start:** each node calls node 0 once: 2 messages for a node, 2(N-1) for node 0.
- **wait:** nobody tells anything for half of `hang_timeout`. Then each node tells node 0 what has changed of its ranks,
  at once, and that nothing has, every 2 s. Node 0 asks the nodes every 2 s. That is at most a message a second for a
  node.
- **comparison of the ranks:** one pass over their newest notes. Node 0 gives it a twentieth of a core, so that among
  thousands of ranks it comes every few seconds.
- **failure:** one claim to node 0, and one message from node 0 to each node.
- **lost node:** the system closes its connection; one message from node 0 to each node.
- **end:** one farewell of each node.
- **meeting:** ranks of an elastic run on several nodes agree on their attempt with {most.requests["another rank"]}
  requests of each rank, and 4 of rank 0 for each of them. Nobody polls.

Node 0 is the center of a star: what it sends and hears grows with the number of nodes. Each other node's part does not
grow. `docs/failures.md` has the same failures with real ranks.

Not on this page: what ranks tell one another in collectives (torch's and gloo's own connections, the agreement over
hosts, logged values). It is measured with real ranks only.
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
    options = parser.parse_args()
    rows = []
    for nodes in options.nodes:
        began = time.monotonic()
        rows.append(measure(nodes, options.wait))
        print(f"{nodes} nodes: {time.monotonic() - began:.0f} s", flush=True)
    print(table(rows))
    if options.nodes == list(NODES) and options.wait == WAIT:
        (DOCS / "scale.md").write_text(page(rows, options.wait, "python benchmarks/scale.py"))
        plot(rows, DOCS / "scale.png")


if __name__ == "__main__":
    main()
