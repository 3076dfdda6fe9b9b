"""Overhead of sharded engines on a CPU, measured with small networks on two ranks of this host."""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

SMALL, WIDE = 8, 1024
STEPS = 9
"""Measured steps; their median counts."""


@dataclass(frozen=True)
class EngineCost:
    """Cost of a sharded engine: the seconds that it adds to a training step on two ranks.

    Attributes:
        step: constant seconds.
        group: seconds for each group of parameters that is gathered by itself.
        parameter: seconds for each parameter.
        byte: seconds for each byte of the parameters.
    """

    step: float = 0.0
    group: float = 0.0
    parameter: float = 0.0
    byte: float = 0.0

    def seconds(self, groups: int, parameters: int, size: float, ranks: int) -> float:
        """Return the seconds that the engine adds to a step of a network of this size on ``ranks`` ranks.

        Args:
            groups: number of groups of parameters.
            parameters: number of parameters.
            size: bytes of all parameters.
            ranks: number of ranks of a host.
        """
        # in a ring, a rank sends (ranks - 1) / ranks of each byte; with the measured two ranks, half
        sent = 2 * (ranks - 1) / ranks * size
        return self.step + groups * self.group + parameters * self.parameter + sent * self.byte


class Net(nn.Module):
    """Network for the measurement: groups of square linear layers that run one after another."""

    def __init__(self, groups: int, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        linear = [[nn.Linear(width, width, bias=False) for _ in range(layers)] for _ in range(groups)]
        self.groups = nn.ModuleList(nn.Sequential(*each) for each in linear)

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = group(x)
        return x.sum()


Step = Callable[[], object]
NETS = {"one": (1, 2, SMALL), "groups": (6, 2, SMALL), "layers": (1, 12, SMALL), "wide": (1, 2, WIDE)}


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-9)


def _plain(net: Net, updates: bool = True) -> Step:
    optimizer, x = _adam(net), torch.ones(1, net.width)

    def step() -> None:
        optimizer.zero_grad()
        net(x).backward()
        if updates:
            optimizer.step()

    return step


def _fsdp(net: Net, again: bool = True) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in net.groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=again)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    return _plain(net)


def _sharded(net: Net) -> Step:
    from lockstep.engines.ddp.owned_optimizer import OwnedOptimizers
    from lockstep.engines.ddp.reducer import Reducer

    optimizer, x = _adam(net), torch.ones(1, net.width)
    OwnedOptimizers([optimizer])
    reducer = Reducer(net.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss = net(x)
        reducer.prepare()
        loss.backward()
        reducer.finish()
        optimizer.step()

    return step


def _deepspeed(net: Net, stage: int) -> Step:
    import deepspeed
    from deepspeed import ops

    # otherwise DeepSpeed compiles an operation for shared memory
    ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    size = sum(parameter.numel() for parameter in net.parameters())
    zero = {"stage": stage, "reduce_bucket_size": size, "allgather_bucket_size": size}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    engine, x = deepspeed.initialize(model=net, optimizer=_adam(net), config=config)[0], torch.ones(1, net.width)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step


ENGINES: dict[str, Callable[[Net], Step]] = {
    "sharded": _sharded,
    "fsdp": _fsdp,
    "fsdp_grads": lambda net: _fsdp(net, again=False),
    **{f"deepspeed {stage}": lambda net, stage=stage: _deepspeed(net, stage) for stage in (1, 2, 3)},  # type: ignore[misc]
}
"""Function that creates a step of a network, by the kind of a candidate and its stage."""


def _measure_step(step: Step) -> float:
    """Return the median seconds of a step on the slowest rank."""
    for _ in range(3):
        step()
    found = []
    for _ in range(STEPS):
        # ranks start together: a wait for a late rank is not the engine's cost
        dist.barrier()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    longest = torch.tensor([statistics.median(found)], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def measure_engines() -> dict[str, EngineCost]:
    """Measure the seconds that each engine adds to a step. Return {name of the engine: its cost}.

    Collective, on two ranks of a gloo process group. DeepSpeed is omitted if it is missing or fails.
    """
    alone = {}
    for name, shape in NETS.items():
        whole, without = _measure_step(_plain(Net(*shape))), _measure_step(_plain(Net(*shape), updates=False))
        alone[name] = without + (whole - without) / dist.get_world_size()  # each rank updates its part
    found = {}
    with _silent():
        for engine, make in ENGINES.items():
            if engine.startswith("deepspeed") and find_spec("deepspeed") is None:
                continue
            try:
                added = {name: _measure_step(make(Net(*shape))) - alone[name] for name, shape in NETS.items()}
            except Exception:  # a plan without DeepSpeed is better than none
                if engine.startswith("deepspeed"):
                    continue
                raise
            found[engine] = _solve(added)
    return found


def _solve(added: dict[str, float]) -> EngineCost:
    """Compute an engine's cost from the seconds that it adds to a step of each of the four networks."""
    parameter = max((added["layers"] - added["one"]) / 10, 0.0)
    group = max((added["groups"] - added["one"] - 10 * parameter) / 5, 0.0)
    step = max(added["one"] - group - 2 * parameter, 0.0)
    return EngineCost(step, group, parameter, max(added["wide"] - added["one"], 0.0) / (4.0 * 2 * WIDE * WIDE))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside the block, suppress the output and the log of the engines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
