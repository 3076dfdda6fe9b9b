"""What the gate before torch's collectives costs a collective: processor time of the calling thread, by turns with and
without it, the least of many rounds.

    python -m benchmarks.misfortune.gate_cost
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

CALLS, CHUNKS, ROUNDS, DEPTH = 50, 40, 20, 16
"""A chunk of so few calls fits between two interruptions, so that the least of many is what the calls cost."""


def gate_cost() -> dict[str, float]:
    """Microseconds that the gate adds to a collective, by the kind of call.

    ``"user"``: a synchronous all-reduce, called by a script. ``"async"``: one that is waited for later. ``"library"``:
    called by a package's code, `DEPTH` frames below the script's, with the Trainer telling hook and batch.

    The group is torch's "fake" one of two ranks, whose collectives return at once: a real one wakes threads, which
    costs more than all that is measured here, and never the same.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lockstep.supervise import collective_trace as gate

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.ones(64)

    def waiting() -> None:
        dist.all_reduce(tensor)

    def later() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()

    kinds = {"user": waiting, "async": later, "library": _below(DEPTH, waiting)}
    try:
        return {kind: _difference(call, gate, told=kind == "library") for kind, call in kinds.items()}
    finally:
        dist.destroy_process_group()


def _difference(call: Callable[[], object], gate: object, told: bool) -> float:
    with_gate, without = [], []
    for _ in range(ROUNDS):
        without.append(_seconds(call))
        gate.install_trace()  # type: ignore[attr-defined]
        if told:
            gate.set_location(lambda: ("training_step", 7))  # type: ignore[attr-defined]
        with_gate.append(_seconds(call))
        gate.uninstall_trace()  # type: ignore[attr-defined]
    return 1e6 * (min(with_gate) - min(without)) / CALLS


def _seconds(call: Callable[[], object]) -> float:
    call()
    least = math.inf
    for _ in range(CHUNKS):
        begun = time.thread_time()
        for _ in range(CALLS):
            call()
        least = min(least, time.thread_time() - begun)
    return least


def _below(depth: int, call: Callable[[], object]) -> Callable[[], object]:
    """``call``, that many frames below, in code that counts as an installed package's."""
    import torch._tensor as home  # any file of torch's

    for _ in range(depth):
        scope: dict[str, object] = {"call": call}
        exec(compile("def passed():\n    return call()", home.__file__, "exec"), scope)
        call = scope["passed"]  # type: ignore[assignment]
    return call


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    for kind, cost in gate_cost().items():
        print(f"{kind}: {cost:.2f} us")
