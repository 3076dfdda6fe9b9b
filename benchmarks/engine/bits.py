"""Whether our gradients have the bits of torch's DistributedDataParallel, step by step."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .race import task, wrapped

BEFORE = 2
"""Steps until both have the buckets that they keep."""


def gradients(runner: nn.Module, model: nn.Module, loss: Any, data: Tensor) -> list[Tensor]:
    """Of one step, in order of registration."""
    runner.zero_grad()
    loss(runner, data).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def layout_of_torch(model: nn.Module, loss: Any, batch: Any) -> list[list[str]]:
    """The buckets that torch's container comes to, by parameter names, seen through a hook.

    The copy that is asked is another than the one compared: a hook divides where torch itself multiplies.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    runner = TorchDDP(model, gradient_as_bucket_view=True)
    seen: dict[int, list[str]] = {}

    def look(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen[bucket.index()] = [names[id(parameter)] for parameter in bucket.parameters()]
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    runner.register_comm_hook(None, look)
    for step in range(BEFORE + 1):
        seen.clear()
        gradients(runner, model, loss, batch(step))
    return [seen[index] for index in sorted(seen)]


def ours_as_laid_out(model: nn.Module, plan: list[list[str]], shared_memory: bool) -> Any:
    """A step of our reducer with a given layout, and without marks at the buffers' ends."""
    from lockstep.engines.ddp.reducer import Reducer

    reducer = Reducer(model.named_parameters(), plan=plan, static_graph=True, shared_memory=shared_memory)

    def step(loss: Any, data: Tensor) -> list[Tensor]:
        model.zero_grad()
        found = loss(model, data)
        reducer.prepare()
        found.backward()
        reducer.finish()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    return step


def stepper(kind: str, origin: nn.Module, plan: list[list[str]]) -> Any:
    """A function from loss and batch to the gradients by ``kind``, on a copy of ``origin``."""
    model = copy.deepcopy(origin)
    if kind.startswith("laid out"):
        return ours_as_laid_out(model, plan, "shared" in kind)
    container = wrapped(kind, model)
    return lambda loss, data: gradients(container, model, loss, data)


def differing(model: str, kinds: list[str], steps: int) -> dict[str, list[int]]:
    """(elements whose bits differ from torch's on any rank, elements) of the gradients of ``steps`` steps, by kind.

    Args:
        model: name of a `engine.race.task`; its parameters stay as they are, the batches do not.
        kinds: ours as `engine.race.wrapped` names them, or "laid out, TCP" / "laid out, shared" for torch's offsets
            in torch's buckets.
        steps: those compared, after a few until both have the buckets that they keep.
    """
    origin, loss, batch = task(model)
    plan = layout_of_torch(copy.deepcopy(origin), loss, batch)
    theirs = stepper("torch, views", origin, plan)
    ours = {kind: stepper(kind, origin, plan) for kind in kinds}
    counts = torch.zeros(len(kinds), dtype=torch.int64)
    total = 0
    for number in range(BEFORE + steps):
        expected = theirs(loss, batch(number))
        found = {kind: step(loss, batch(number)) for kind, step in ours.items()}
        if number < BEFORE:
            continue
        total += sum(gradient.numel() for gradient in expected)
        for place, kind in enumerate(kinds):
            pairs = zip(found[kind], expected, strict=True)
            counts[place] += sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    return {kind: [int(count), total] for kind, count in zip(kinds, counts, strict=True)}
