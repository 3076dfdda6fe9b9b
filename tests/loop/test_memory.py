"""What a run's memory is used for: by the allocator's count, by formula, and in the error when it has run out."""

from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import is_oom_error
from lockstep.memory.meter import Activations, MemoryUse, readable
from lockstep.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.equivalence.models import rows
from tests.loop.pieces import Slope, acting, numbers, quiet
from tests.tools.pool import RankPool


class Allocated(TorchDispatchMode):
    """An independent count: the storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (getattr(leaf, "_local_tensor", leaf) for leaf in tree_leaves(out)):
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.made[reference.cdata] = reference
        return out

    def live(self) -> int:
        gc.collect()  # what has been laid out anew may lie in cycles
        alive = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.made.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


class Net(LightningModule):
    """A transformer small enough for every day."""

    def __init__(self, counts: Allocated | None = None) -> None:
        super().__init__()
        self.into = nn.Linear(6, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.counts, self.live = counts, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.into(batch[0].to(self.into.weight.dtype)).unsqueeze(1).expand(-1, 48, -1)
        loss: Tensor = self.encoder(x).square().mean()
        if self.counts is not None:
            self.live = self.counts.live()  # what a step holds at most, but for what its backward makes in passing
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


STRATEGIES: dict[str, Any] = {
    "single": SingleDeviceStrategy,
    "ddp": lambda **given: DDPStrategy(shared_memory=False, **given),
    "ddp, no views": lambda **given: DDPStrategy(shared_memory=False, gradient_as_bucket_view=False, **given),
    "ddp, sharded optimizer": lambda **given: DDPStrategy(shared_memory=False, shard_optimizer=True, **given),
    "fsdp": FSDPStrategy,
    "fsdp, gradients": lambda **given: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", **given),
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "all kept": {},
    "recomputed": {"activation_checkpointing": True},
    "all but matmuls": {"activation_checkpointing": True, "activation_checkpointing_save": "matmuls"},
}


def counted(strategy: str, precision: str, given: dict[str, Any]) -> tuple[int, MemoryUse]:
    torch.manual_seed(0)
    with Allocated() as counts:
        module = Net(counts)
        world = dist.get_world_size() if dist.is_initialized() else 1
        made = STRATEGIES[strategy](**given)
        trainer = quiet(strategy=made, devices=world, max_steps=3, precision=precision)
        trainer.fit(module, rows(64)(8))
        return module.live, trainer.memory()


@pytest.mark.everyday
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_the_total_is_what_is_allocated(precision: str, recomputed: str) -> None:
    live, used = counted("single", precision, RECOMPUTED[recomputed])
    assert used.total == pytest.approx(live, rel=0.05)
    assert used.activations > 0.05 * live


@pytest.mark.everyday(3)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_the_total_is_what_is_allocated_on_each_rank(ranks: RankPool, strategy: str, recomputed: str) -> None:
    for live, used in ranks(2).run(counted, strategy, "32-true", RECOMPUTED[recomputed]):
        assert used.total == pytest.approx(live, rel=0.05), f"{live}\n{used}"


# -- model states by formula -----------------------------------------------------------------------------------


class Plain(LightningModule):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 131), nn.Tanh(), nn.Linear(131, 57), nn.Linear(57, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def states(strategy: str) -> MemoryUse:
    trainer = quiet(strategy=STRATEGIES[strategy](), devices=dist.get_world_size(), max_steps=2)
    trainer.fit(Plain(), rows(32)(4))
    return trainer.memory()


SHAPES = [tuple(parameter.shape) for parameter in Plain().parameters()]
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
STEPS = 4 * len(SHAPES)  # Adam counts steps by parameter


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_holds_the_model_on_each_rank(ranks: RankPool, world: int) -> None:
    """4 bytes for a parameter, 4 for its gradient, 8 for Adam's two means; beside it the buckets' ends."""
    for used in ranks(world).run(states, "ddp"):
        assert (used.parameters, used.gradients) == (4 * ELEMENTS, 4 * ELEMENTS)
        assert used.optimizer_states == 8 * ELEMENTS + STEPS
        assert 0 <= used.buckets <= (0 if world == 1 else 256 + 64 * len(SHAPES))
        assert used.model_states == used.parameters + used.gradients + used.optimizer_states + used.buckets


@pytest.mark.everyday
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp, gradients"])
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp_holds_its_part_of_the_model(ranks: RankPool, world: int, strategy: str) -> None:
    """Rows of a parameter that do not divide are filled up: each rank has memory for as many as the first."""
    part = sum(math.ceil(shape[0] / world) * math.prod(shape[1:]) for shape in SHAPES)
    found = ranks(world).run(states, strategy)
    for used in found:
        assert (used.parameters, used.gradients) == (4 * part, 4 * part)
        assert used.optimizer_states <= 8 * part + STEPS
        assert used.buckets == 0
    assert sum(used.optimizer_states for used in found) == 8 * ELEMENTS + world * STEPS


# -- what is told, and when --------------------------------------------------------------------------------------


def test_the_first_step_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "lockstep"):
        quiet(max_epochs=2).fit(Net(), rows(16)(8))
    (line,) = [record.message for record in caplog.records if "memory of" in record.message]
    assert line.startswith("memory of rank 0: ")
    assert "activations" in line
    assert "most in encoder.layers.0" in line


def counting(**flags: Any) -> tuple[list[bool], Any]:
    """Whether somebody counts in each of the steps of a fit, and its Trainer."""
    seen: list[bool] = []

    def look(*_: Any) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        seen.append(bool(hooks) or bool(global_hooks._global_forward_hooks))

    trainer = quiet(max_epochs=1, **flags)
    trainer.fit(acting(training_step=look), numbers(6))
    return seen, trainer


def test_only_the_first_forward_is_counted() -> None:
    assert counting(accumulate_grad_batches=2)[0] == [True, False, False, False, False, False]


def test_nothing_is_counted_where_nothing_is_to_cost_time() -> None:
    seen, trainer = counting(log_every_n_steps=0)
    assert not any(seen)
    assert trainer.memory().activations == 0


class Transforms(Slope):
    """`torch.func` refuses hooks on what autograd keeps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        slope = torch.func.grad(lambda w: (w * batch).sin().mean())(self.w)
        return super().training_step(batch, batch_idx) + 0.0 * slope


def test_transforms_of_torch_func_work_in_a_step_that_is_counted() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Transforms(), numbers(3))
    assert trainer.memory().activations > 0
    assert torch.autograd.graph.disable_saved_tensors_hooks.__module__ == "torch.autograd.graph"


class Penalty(Net):
    """A second backward through the gradients of the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        loss = super().training_step((x, None), batch_idx)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


@pytest.mark.parametrize("module", [Net, Penalty])
def test_counting_changes_no_bits(module: type[Net]) -> None:
    weights = []
    for log_every in (0, 1):
        torch.manual_seed(4)
        made = module()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second backward
            quiet(max_steps=1, precision="64-true", log_every_n_steps=log_every).fit(made, rows(8)(8))
        weights.append([parameter.detach().clone() for parameter in made.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


class Overwrites(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        wave = (self.w * batch).exp()
        loss = wave.sum()
        wave.add_(1)
        return loss


@pytest.mark.parametrize("log_every", [0, 1])
def test_what_is_overwritten_before_the_backward_is_an_error_in_a_counted_step_too(log_every: int) -> None:
    """Where there are hooks, torch does not look for it: the first step would have had a wrong gradient."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        quiet(max_steps=1, log_every_n_steps=log_every).fit(Overwrites(), numbers(2))


def test_before_a_call_there_is_nothing_to_count() -> None:
    with pytest.raises(MisconfigurationException, match=r"trainer.memory\(\): no module has been set up"):
        quiet().memory()


def test_a_table_can_be_read() -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    activations = Activations(net)
    with activations.counting():
        net(torch.ones(1024, 256, requires_grad=True))
    used = MemoryUse.of({"parameters": list(net.parameters())}, activations=activations)
    assert str(used).splitlines() == [
        "memory of rank 0 (cpu)",
        "  parameters    258.0 KiB",
        "  activations     2.0 MiB",
        "    0             1.0 MiB",
        "    1             1.0 MiB",
        "  total           2.3 MiB",
    ]
    assert readable(1536) == "1.5 KiB"


# -- out of memory -----------------------------------------------------------------------------------------------


class Hungry(Net):
    """Asks for more than there is, in its second step or in set-up."""

    def __init__(self, when: str = "step", error: BaseException | None = None) -> None:
        super().__init__()
        self.when, self.error = when, error

    def configure_model(self) -> None:
        if self.when == "set-up":
            self.eat()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.when == "step" and batch_idx:
            self.eat()
        return super().training_step(batch, batch_idx)

    def eat(self) -> None:
        if self.error is not None:
            raise self.error
        torch.empty(2**46)


ERRORS = (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError(), torch.OutOfMemoryError("CUDA"))


@pytest.mark.parametrize("when", ["step", "set-up"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_used_up_memory_is_torchs_and_names_the_page(error: Exception, when: str) -> None:
    said = str(error)
    with pytest.raises(type(error), match=r"docs/memory\.md describes ways to use less") as caught:
        quiet(max_steps=3).fit(Hungry(when, error), rows(32)(8))
    assert caught.value is error
    assert str(error).startswith(said)
    assert is_oom_error(error)


def test_other_errors_stay_what_they_are() -> None:
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes do not match") as caught:
        quiet(max_steps=3).fit(Hungry("step", error), rows(32)(8))
    assert caught.value is error


# -- A model of three times the memory that each rank may have: FSDP trains, saves and resumes it ----------------


SCRIPT = '''
import hashlib
import resource
from pathlib import Path

import torch
import torch._dynamo  # before memory is limited
from torch import nn
from torch.distributed.fsdp import fully_shard  # noqa: F401  # the same
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.checkpoint import dcp  # noqa: F401  # the same
from lockstep.engines.sharded import sharded_init
from lockstep.strategies import FSDPStrategy

WIDTH, BLOCKS = 1250, 160
WHOLE = 4 * WIDTH * WIDTH * BLOCKS
sharded_init.BUDGET = 2**22  # what stays whole while the model is built


class Block(nn.Module):
    """Its weights are frozen, as those of a large model whose scales are tuned."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.inner(x) * self.scale


class Large(LightningModule):
    def configure_model(self):
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + WHOLE // 3, resource.RLIM_INFINITY))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_end(self):
        moved = (self.blocks[0].scale.full_tensor() - 1).abs().max()
        self.print(f"moved {float(moved.detach()) > 0}")  # in one piece: ranks write into one pipe
        print(self.trainer.memory(), flush=True)
        digest = hashlib.sha256()
        for block in self.blocks:
            for parameter in block.parameters():
                digest.update(parameter.detach().to_local().numpy())
        print(f"bits of rank {self.global_rank}: {digest.hexdigest()}", flush=True)

    def configure_optimizers(self):
        return torch.optim.Adam([block.scale for block in self.blocks])


trainer = Trainer(
    accelerator="cpu",
    devices=4,
    strategy=FSDPStrategy(state_dict_type="sharded"),
    max_steps=2,
    callbacks=ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=-1),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
saved = [str(path) for path in Path("saved").glob("*step=1.ckpt")] or [None]
torch.manual_seed(0)
trainer.fit(Large(), DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=2), ckpt_path=saved[0])
print(f"steps of rank {trainer.global_rank}: {trainer.global_step}; from {saved[0]}", flush=True)
'''


def run(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "large.py"
    script.write_text(SCRIPT)
    # glibc keeps what it has once had from the system, unless it is told otherwise
    given = ["MALLOC_TRIM_THRESHOLD_=0", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_ARENA_MAX=1"]
    command = ["env", *given, sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=840)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_fsdp_trains_saves_and_resumes_what_no_rank_could_hold(tmp_path: Path) -> None:
    """The run that resumes makes the second step of the first one again, to the same bits."""
    bits = []
    for _ in range(2):
        done = run(tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "moved True" in done.stdout
        bits.append(sorted(re.findall(r"bits of rank \d: [0-9a-f]{64}", done.stdout)))
        (folder,) = (tmp_path / "saved").glob("*step=1.ckpt")
        assert sum(file.stat().st_size for file in folder.iterdir()) > 4 * 1250 * 1250 * 160
    assert f"steps of rank 0: 2; from {folder.relative_to(tmp_path)}" in done.stdout
    assert len(bits[0]) == 4
    assert bits[0] == bits[1]
