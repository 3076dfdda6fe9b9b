"""Ranks against one process, in float64: the cases that are tried on one device, on several, and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.groups import join
from lockstep import LightningModule
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lockstep.testing import check_equivalence
from tests.equivalence.models import Blocks, Normed, Plain, Sometimes, Weighted, rows

Case = tuple[type[LightningModule], Callable[[], Any], dict[str, Any]]
"""A module, what makes the strategy, and flags of `check_equivalence`."""
UNEVEN = 23
"""Samples: with micro-batches of 2 and 4 the last global batch is uneven on any number of ranks."""
CLIP = {"gradient_clip_val": 0.5}

EQUAL: dict[str, Case] = {
    "ddp": (Plain, DDPStrategy, {}),
    "ddp, accumulated and clipped": (Plain, DDPStrategy, {"accumulate": 3, **CLIP}),
    "ddp, weights returned by training_step": (Weighted, DDPStrategy, {}),
    "ddp, parameters used only for some samples": (Sometimes, DDPStrategy, {}),
    "ddp, synchronized BatchNorm": (Normed, DDPStrategy, {"sync_batchnorm": True}),
    "ddp, sharded optimizer": (Plain, lambda: DDPStrategy(shard_optimizer=True), CLIP),
    "ddp, static graph": (Plain, lambda: DDPStrategy(static_graph=True), {}),
    "fsdp": (Blocks, FSDPStrategy, CLIP),
    "fsdp, offloaded to the CPU": (Blocks, lambda: FSDPStrategy(cpu_offload=True), CLIP),
    "tensor parallel": (Blocks, lambda: ModelParallelStrategy(1, dist.get_world_size()), CLIP),
    "replicas of shards": (Blocks, lambda: ModelParallelStrategy(dist.get_world_size(), 1), CLIP),
}


def run_equal(part: Part, world: int, accelerator: Any, group: bool = True) -> None:
    """A check for each case, on ranks of the part's pool."""
    for name in EQUAL:
        part.check(f"{name}: same results as one process", compared, part, name, world, accelerator, group)


def compared(part: Part, name: str, world: int, accelerator: Any, group: bool) -> Numbers:
    """The largest difference as a part of the largest gradient."""
    reports = part.ranks(world, report, name, world, accelerator, group=group)
    wrong = next((text for equal, text, _ in reports if not equal), "")
    numbers = {"ranks": world, "largest difference": max(largest for _, _, largest in reports)}
    expect(not wrong, wrong, numbers)
    return numbers


def report(name: str, world: int, accelerator: Any) -> tuple[bool, str, float]:
    """On a rank: whether it equals one process, in what not, and the largest difference that passed."""
    if not dist.is_initialized():
        join(device_of(accelerator))
    module, strategy, flags = EQUAL[name]
    small = {"batch_size": 2} if module is Blocks else {}
    found = check_equivalence(
        module, rows(UNEVEN), strategy=strategy(), devices=world, accelerator=accelerator, **{**small, **flags}
    )
    return bool(found), str(found), found.largest


def device_of(accelerator: Any) -> str:
    """The device type of what is given to ``Trainer(accelerator=...)``."""
    return (
        {"gpu": "cuda"}.get(accelerator, accelerator) if isinstance(accelerator, str) else str(accelerator.device_type)
    )


# -- what cannot be compared with one process ------------------------------------------------------------------


class Dropped(Blocks):
    """With dropout on activations that the ranks of a row have alike: their masks must be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def losses(self, x: Tensor) -> Tensor:
        y = self.net[:2](x * self.scale)
        return (self.net[2:](self.dropout(y)).squeeze(1) - x[:, 0]).square()


HOOKS = ("fp16", "bf16", "power_sgd")


def trained(what: str, world: int, accelerator: Any, steps: int) -> list[str]:
    """On a rank: digests of the parameters that all ranks have alike, after some steps in float32."""
    from lockstep import Trainer
    from lockstep.extensions.parallel import hooks
    from lockstep.testing.equivalence import digest

    if not dist.is_initialized():
        join(device_of(accelerator))
    strategy: Any = DDPStrategy()
    module: LightningModule = Plain()
    if what == "dropout":
        module, strategy = Dropped(), ModelParallelStrategy(1, world)
    elif what in HOOKS:
        state = {"power_sgd": lambda: hooks.PowerSGDState(rank=2, start=1)}.get(what)
        strategy = DDPStrategy(ddp_comm_hook=getattr(hooks, what), ddp_comm_state=state() if state else None)
    flags: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    flags |= {"enable_model_summary": False, "max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    Trainer(strategy=strategy, devices=world, accelerator=accelerator, **flags).fit(module, rows(UNEVEN)(2))
    parted = {id(p) for p in module.parameters() if hasattr(p, "placements") and not p.placements[0].is_replicate()}
    return [digest(local(p).detach().cpu()) for p in module.parameters() if id(p) not in parted]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def alike(part: Part, what: str, world: int, accelerator: Any, group: bool = True, steps: int = 6) -> Numbers:
    """How many parameters differ in a bit between the ranks."""
    digests = part.ranks(world, trained, what, world, accelerator, steps, group=group)
    differ = sum(len(set(each)) > 1 for each in zip(*digests, strict=True))
    numbers = {"ranks": world, "parameters": len(digests[0]), "differ": differ}
    expect(differ == 0, "the ranks hold different parameters", numbers)
    return numbers


def run_alike(part: Part, world: int, accelerator: Any, group: bool = True) -> None:
    """A check for plain averaging, for each hook, and for dropout under tensor parallel."""
    for what in ("plain averaging", *HOOKS, "dropout"):
        title = "tensor parallel with dropout" if what == "dropout" else f"ddp, {what}"
        part.check(f"{title}: the same bits on all ranks", alike, part, what, world, accelerator, group)
