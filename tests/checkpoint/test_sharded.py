"""Checkpoints in parts: written by all ranks, read by any strategy, damaged ones named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.checkpoint import dcp, format, sharded, storage
from lockstep.engines.sharded.fully_shard import optimizer_state
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.loop import state
from lockstep.strategies import DDPStrategy, FSDPStrategy
from tests.engines.sharded.test_fsdp import Deep
from tests.equivalence.models import rows
from tests.loop.pieces import SaveAt, quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


def fsdp(**options: Any) -> FSDPStrategy:
    return FSDPStrategy(state_dict_type="sharded", **options)


def hybrid() -> FSDPStrategy:
    return fsdp(sharding_strategy="HYBRID_SHARD", device_mesh=(2, dist.get_world_size() // 2))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "slices": lambda: DDPStrategy(shard_optimizer=True),
    "fsdp": fsdp,
    "one file": FSDPStrategy,
    "gradients": lambda: fsdp(sharding_strategy="SHARD_GRAD_OP"),
    "hybrid": hybrid,
}
IN_PARTS = ("fsdp", "gradients", "hybrid")


class Adam(Deep):
    """Odd sizes, a scalar, a tied and a frozen parameter; 0-d step counts in the optimizer."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("seen", torch.arange(5))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.003)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def whole_of(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer states of a run, on every rank, gathered by other code than that of checkpoints."""
    weights = {name: value.cpu().clone() for name, value, _ in trainer.strategy.whole_parameters()}
    if isinstance(trainer.strategy, FSDPStrategy):
        states = [optimizer_state(each, True) for each in trainer.optimizers]
    else:
        states = [each or {} for each in trainer.strategy.save().optimizers or []]
    copied = [{n: {k: v.clone() for k, v in s.items()} for n, s in each.get("state", {}).items()} for each in states]
    return {"weights": weights, "states": copied}


def fit_to(steps: int, strategy: str, resume: str | None = None, save: str | None = None) -> dict[str, Any]:
    world = 1 if strategy == "single" else dist.get_world_size()
    trainer = quiet(strategy=STRATEGIES[strategy](), devices=world, max_steps=steps, precision="64-true", max_epochs=-1)
    trainer.seed = 5
    torch.manual_seed(1 if world == 1 or not dist.get_rank() else 77)
    trainer.fit(Adam(), rows(24)(24 // world // 2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return whole_of(trainer)


def check_same(checkpoint: dict[str, Any], live: dict[str, Any]) -> None:
    for name, value in live["weights"].items():
        assert torch.equal(checkpoint["state_dict"][name], value), name
    for saved, states in zip(checkpoint["optimizer_states"], live["states"], strict=True):
        assert saved["state"].keys() == states.keys()
        for number, each in states.items():
            assert saved["state"][number].keys() == each.keys()
            for name, value in each.items():
                found = saved["state"][number][name]
                assert found.dtype == value.dtype
                assert torch.equal(found, value), (number, name)


# -- from strategy to strategy -------------------------------------------------------------------------------


MOVES = [("fsdp", 2, "fsdp", 3), ("gradients", 2, "single", 1)]
ALL = [
    (a, m, b, n)
    for a in STRATEGIES
    for b in STRATEGIES
    for m in (1, 2, 3, 4)
    for n in (1, 2, 3, 4)
    if (a == "single") <= (m == 1)
    and (b == "single") <= (n == 1)
    and (a != "hybrid" or m in (2, 4))
    and (b != "hybrid" or n in (2, 4))
    and {*IN_PARTS} & {a, b}
    and (a, m, b, n) not in MOVES
]


@pytest.mark.parametrize(
    ("wrote", "many", "reads", "more"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in ALL)]
)
def test_a_checkpoint_moves(ranks: RankPool, tmp_path: Path, wrote: str, many: int, reads: str, more: int) -> None:
    path, again = str(tmp_path / "moved.ckpt"), str(tmp_path / "again.ckpt")
    live = ranks(many).run(fit_to, 3, wrote, None, path, timeout=60)[0]
    assert os.path.isdir(path) == (wrote in IN_PARTS)
    saved = sharded.load(path)
    check_same(saved, live)
    assert isinstance(saved["optimizer_states"][0]["state"][0]["step"], Tensor)
    # a fit that has its steps already saves what it has read
    for read in ranks(more).run(fit_to, 3, reads, path, again, timeout=60):
        assert all(torch.equal(read["weights"][name], value) for name, value in live["weights"].items())
    moved = sharded.load(again)
    check_same(moved, live)
    assert moved["optimizer_states"][0]["param_groups"] == saved["optimizer_states"][0]["param_groups"]
    assert moved["lr_schedulers"] == saved["lr_schedulers"]
    uninterrupted = ranks(1).run(fit_to, 5, "single", group=False)[0]["weights"]
    for found in ranks(more).run(fit_to, 5, reads, path, timeout=60):
        for name, value in found["weights"].items():
            torch.testing.assert_close(value, uninterrupted[name], rtol=1e-7, atol=1e-10, msg=name)


def in_window(strategy: Any, batch: int, path: str, resume: bool, **flags: Any) -> dict[str, Tensor]:
    """The weights of a run that saves within a window, or goes on from there."""
    callbacks = [] if resume else [SaveAt(batch, path, epoch=1)]
    own: dict[str, Any] = {"devices": 2, "max_epochs": 2, "accumulate_grad_batches": 3, "precision": "64-true"}
    trainer = quiet(strategy=strategy, callbacks=callbacks, **own, **flags)
    trainer.seed = 5
    torch.manual_seed(1 + dist.get_rank())
    trainer.fit(Adam(), rows(24)(2), ckpt_path=path if resume else None)
    return dict(whole_of(trainer)["weights"])


def resumed_to_bits(kind: str, batch: int, folder: str, shards: bool) -> bool:
    def run(resume: bool) -> dict[str, Tensor]:
        strategy = FSDPStrategy(state_dict_type=kind, accumulate_shards=shards)
        return in_window(strategy, batch, f"{folder}/at.ckpt", resume, gradient_clip_val=0.5)

    whole, again = run(False), run(True)
    return all(torch.equal(value, again[name]) for name, value in whole.items())


WITHIN = [("full", 0, True), ("full", 1, False), ("sharded", 1, True)]
SLOW = [("full", n, shards) for n in (0, 1, 2, 4) for shards in (True, False)] + [("sharded", 0, False)]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("kind", "batch", "shards"),
    [*WITHIN, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in WITHIN)],
)
def test_a_run_resumes_to_the_same_bits_within_a_window(
    ranks: RankPool, tmp_path: Path, kind: str, batch: int, shards: bool
) -> None:
    found = ranks(2).run(resumed_to_bits, kind, batch, str(tmp_path), shards, timeout=60)
    assert found == [True, True]


def through_a_window(wrote: str, reads: str, path: str) -> float:
    whole = in_window(STRATEGIES[wrote](), 1, path, False)
    resumed = in_window(STRATEGIES[reads](), 1, path, True)
    return max(float((value - resumed[name]).abs().max()) for name, value in whole.items())


ACROSS = [("fsdp", "ddp"), ("ddp", "fsdp"), ("one file", "slices"), ("slices", "gradients")]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("wrote", "reads"), [*ACROSS[:2], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ACROSS[2:])]
)
def test_gradients_of_a_window_under_way_move_to_another_strategy(
    ranks: RankPool, tmp_path: Path, wrote: str, reads: str
) -> None:
    """From shards to whole ones they were lost without a word; the other way round the fit ended with an error."""
    for far in ranks(2).run(through_a_window, wrote, reads, str(tmp_path / "at.ckpt"), timeout=60):
        assert far < 1e-12


# -- what is in the folder -----------------------------------------------------------------------------------


def written(ranks: RankPool, folder: Path) -> str:
    """A checkpoint of one rank."""
    path = str(folder / "one.ckpt")
    ranks(1).run(fit_to, 2, "fsdp", None, path, timeout=60)
    return path


@pytest.fixture(scope="module")
def sample(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks, to be copied."""
    folder = tmp_path_factory.mktemp("sample")
    ranks(2).run(fit_to, 2, "fsdp", None, str(folder / "two.ckpt"), timeout=60)
    return folder / "two.ckpt"


def test_torch_reads_the_weights_without_lockstep(sample: Path) -> None:
    expected = sharded.load(sample)["state_dict"]
    state: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(state, checkpoint_id=sample)
    assert all(torch.equal(state["model"][name], value) for name, value in expected.items())
    assert isinstance(torch.load(sample / "meta.pt", weights_only=True), dict)


def test_the_index_says_what_is_where(sample: Path) -> None:
    index = json.loads((sample / "index.json").read_text())
    assert index["about"]["strategy"] == "FSDPStrategy"
    assert index["about"]["world"] == 2
    assert index["about"]["global_step"] == 2
    here = {path.name: path.stat().st_size for path in sample.iterdir() if path.name != "index.json"}
    assert {name: file["bytes"] for name, file in index["files"].items()} == here
    assert sorted(here) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt", "rank_0.pt", "rank_1.pt"]
    assert index["tensors"]["model.into.weight"] == {
        "shape": [7, 6], "dtype": "float64", "files": ["__0_0.distcp", "__1_0.distcp"]
    }  # fmt: skip
    assert index["tensors"]["optimizer_0.state.2.exp_avg"]["shape"] == [7, 6]


def test_each_rank_writes_its_own_bytes(sample: Path) -> None:
    index = json.loads((sample / "index.json").read_text())
    sizes = [index["files"][f"__{rank}_0.distcp"]["bytes"] for rank in (0, 1)]
    assert max(sizes) < 0.7 * sum(sizes)


def test_a_module_is_loaded_from_a_folder(sample: Path) -> None:
    module = Adam.load_from_checkpoint(sample)
    expected = sharded.load(sample)["state_dict"]
    assert all(torch.equal(value, expected[name].float()) for name, value in module.state_dict().items())


def test_the_folder_runs_no_code(sample: Path, tmp_path: Path) -> None:
    """DCP's metadata is a pickle, which torch unpickles whatever it names."""
    copy = shutil.copytree(sample, tmp_path / "copy.ckpt")
    (copy / ".metadata").write_bytes(pickle.dumps(Path.cwd))
    (copy / "index.json").unlink()
    (copy / "meta.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match="it reads the attribute 'cwd' of"):
        sharded.load(copy)


# -- damaged -------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"global_step": 2', '"global_step": 3'))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a bit of a shard": ("__1_0.distcp", flip, r"__1_0.distcp' has changed since it was written .*earlier checkpoint"),
    "a bit of the rest": ("meta.pt", flip, r"meta.pt' has changed since it was written"),
    "a bit of rank 1": ("rank_1.pt", flip, r"rank_1.pt' has changed since it was written"),
    "a bit of the metadata": (".metadata", flip, r".metadata' has changed since it was written"),
    "a shard cut short": (
        "__0_0.distcp",
        lambda path: os.truncate(path, 99),
        r"__0_0.distcp' is truncated. It has 99 bytes",
    ),
    "a shard missing": ("__1_0.distcp", os.unlink, r"lacks the file __1_0.distcp"),
    "the index altered": ("index.json", edit, r"index.json' has changed since it was written"),
    "the index cut short": ("index.json", lambda path: os.truncate(path, 99), r"index.json' is damaged"),
    "the index missing": ("index.json", os.unlink, r"lacks the file index.json"),
}


def now(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.state_dict().items()}


def resume_all(folder: str) -> dict[str, tuple[str, bool]]:
    """What each damaged checkpoint's resume says on this rank, and whether the module is as it was."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        torch.manual_seed(4)
        module = Adam()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        trainer = quiet(strategy="fsdp", devices=dist.get_world_size(), max_steps=2, precision="64-true")
        try:
            trainer.fit(module, rows(24)(4), ckpt_path=path)
            said = ""
        except CorruptCheckpoint as error:
            said = str(error)
        same = all(torch.equal(value.double(), before[name].double()) for name, value in now(module).items())
        found[path.name] = said, same
    return found


def test_a_damaged_folder_is_named_before_the_model_changes(
    ranks: RankPool, sample: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, (file, damage, _) in DAMAGES.items():
        copy = shutil.copytree(sample, tmp_path / name)
        damage(copy / file)
    for found in ranks(2).run(resume_all, str(tmp_path), timeout=80):
        for name, (_, _, pattern) in DAMAGES.items():
            said, same = found[name]
            assert re.search(pattern, said), (name, said)
            assert same, name
    for name, (_, _, pattern) in DAMAGES.items():
        with pytest.raises(CorruptCheckpoint, match=pattern):
            sharded.load(tmp_path / name)


class Other(Adam):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "shape":
            self.into = nn.Linear(6, 7, bias=False)
            self.into.bias = nn.Parameter(torch.zeros(8))
        elif kind == "missing here":
            del self.again
        else:
            self.more = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.into.weight.sum() * x


def resume_others(path: str) -> dict[str, tuple[str, bool]]:
    found = {}
    for kind in ("shape", "missing here", "missing there"):
        module = Other(kind)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        trainer = quiet(strategy="fsdp", devices=dist.get_world_size(), max_steps=3)
        with pytest.raises(MisconfigurationException) as raised:
            trainer.fit(module, rows(24)(4), ckpt_path=path)
        after = now(module)
        first = {name: value.clone() for name, value in before.items()}
        for value in first.values():
            dist.broadcast(value, 0)
        found[kind] = str(raised.value), all(torch.equal(after[name], value) for name, value in first.items())
    return found


def test_a_folder_of_another_model_is_named_before_the_model_changes(ranks: RankPool, sample: Path) -> None:
    for found in ranks(2).run(resume_others, str(sample), timeout=60):
        assert all(same for _, same in found.values())
        assert (
            "size mismatch for 'into.bias': the shape is (7,) in the checkpoint, and (8,) in this module"
            in found["shape"][0]
        )
        assert "the module has no 'again.weight'" in found["missing here"][0]
        assert "the checkpoint has no 'more.weight'" in found["missing there"][0]


# -- writing -------------------------------------------------------------------------------------------------


def writes_wrongly(folder: str) -> list[str]:
    trainer = quiet(strategy=fsdp(), devices=2, max_steps=1)
    trainer.fit(Adam(), [(x.float(), y.float()) for x, y in rows(24)(4)])
    said = []

    def save(path: str) -> None:
        try:
            trainer.save_checkpoint(path)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    os.makedirs(f"{folder}/results", exist_ok=True)
    Path(f"{folder}/results/thesis.txt").write_text("mine")
    dist.barrier()
    save(f"{folder}/results")
    full = OSError(28, "no space left") if dist.get_rank() == 1 else None
    with patch.object(dcp.HashedFile, "write", side_effect=full) if full else nullcontext():
        save(f"{folder}/full.ckpt")
    return said


def test_what_cannot_be_written_is_an_error_on_all_ranks_and_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2).run(writes_wrongly, str(tmp_path), timeout=60)
    for said in found:
        assert "is a folder but not a checkpoint" in said[0]
    assert "rank 1: OSError" in found[0][1]
    assert "No space left on device" in found[1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results"]
    assert (tmp_path / "results" / "thesis.txt").read_text() == "mine"


def test_files_and_folders_take_each_others_places(ranks: RankPool, tmp_path: Path) -> None:
    path = written(ranks, tmp_path)
    first = json.loads(Path(path, "index.json").read_text())
    assert written(ranks, tmp_path) == path  # over itself
    assert os.path.isdir(path)
    checkpoint = sharded.load(path)
    format.save(checkpoint, path)
    assert os.path.isfile(path)
    written(ranks, tmp_path)
    assert json.loads(Path(path, "index.json").read_text())["tensors"] == first["tensors"]
    storage.link(tmp_path / "last.ckpt", path)
    assert sharded.load(tmp_path / "last.ckpt")["global_step"] == 2
    storage.link(path, "elsewhere")  # in the place of the folder
    assert os.path.islink(path)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "one.ckpt"]


def test_two_writers_of_one_folder_are_kept_apart(sample: Path, tmp_path: Path) -> None:
    path = shutil.copytree(sample, tmp_path / "one.ckpt")
    one, two = storage.NewFolder(path), storage.NewFolder(path)
    assert one.path != two.path
    one.commit(b"one")
    assert two.path.is_dir()  # it is locked by its writer, and no leftover
    two.commit(b"two")
    assert Path(path, "index.json").read_text() == "two"
    assert os.listdir(tmp_path) == ["one.ckpt"]


# -- the callbacks that keep checkpoints ---------------------------------------------------------------------


class Falls(Adam):
    def on_train_epoch_end(self) -> None:
        self.log("loss", 10.0 - self.current_epoch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self(batch[0]).mean())


def keeps(folder: str, link: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    keeper = ModelCheckpoint(folder, monitor="loss", save_top_k=2, save_last="link" if link else True)
    flags: dict[str, Any] = {"devices": 2, "precision": "64-true", "enable_checkpointing": True}
    trainer = quiet(strategy=fsdp(), max_epochs=4, callbacks=[keeper], **flags)
    trainer.fit(Falls(), rows(24)(4))
    here = sorted(os.listdir(folder))
    trainer.test(Falls(), rows(24)(4), ckpt_path="best", verbose=False)
    again = quiet(strategy=fsdp(), max_epochs=5, callbacks=[ModelCheckpoint(folder, save_last=True)], **flags)
    again.fit(Falls(), rows(24)(4), ckpt_path="last")
    return {"here": here, "best": os.path.basename(keeper.best_model_path), "epoch": again.current_epoch}


@pytest.mark.parametrize("link", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_model_checkpoint_keeps_folders(ranks: RankPool, tmp_path: Path, link: bool) -> None:
    for found in ranks(2).run(keeps, str(tmp_path), link, timeout=60):
        assert found["here"] == ["epoch=2-step=9.ckpt", "epoch=3-step=12.ckpt", "last.ckpt"]
        assert found["best"] == "epoch=3-step=12.ckpt"
        assert found["epoch"] == 5


# -- memory --------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            plain = isinstance(tensor, Tensor) and not tensor.is_meta and not hasattr(tensor, "to_local")
            if plain and tensor.dtype is not torch.uint8:  # those are messages, and random states
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].float().repeat(1, 22)[:, :128]
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


def largest(folder: str) -> tuple[int, int]:
    trainer = quiet(strategy=fsdp(), devices=4, max_steps=1)
    trainer.fit(Wide(), rows(24)(4))
    with Largest() as saving:
        trainer.save_checkpoint(f"{folder}/wide.ckpt")
    again, loading = quiet(strategy=fsdp(), devices=4, max_steps=1), Largest()
    read, restore = state.read, state.restore_training

    def counted(function: Any) -> Any:
        def run(*args: Any) -> Any:
            with loading:
                return function(*args)

        return run

    with patch.object(state, "read", counted(read)), patch.object(state, "restore_training", counted(restore)):
        again.fit(Wide(), rows(24)(4), ckpt_path=f"{folder}/wide.ckpt")
    return saving.bytes, loading.bytes


def test_no_rank_holds_more_than_its_shards(ranks: RankPool, tmp_path: Path) -> None:
    """The largest tensor that saving and loading make is a shard of one parameter, of a model of 12 parameters."""
    shard = 128 * 128 * 4 // 4
    for saving, loading in ranks(4).run(largest, str(tmp_path), timeout=60):
        assert saving <= shard
        assert 0 < loading <= shard


# -- others' folders, others' readers ------------------------------------------------------------------------


def test_a_folder_of_torchs_own_gives_its_weights(tmp_path: Path) -> None:
    module = Adam()
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.save({"model": module.state_dict(), "note": "x"}, checkpoint_id=tmp_path / "own")
    loaded = Adam.load_from_checkpoint(tmp_path / "own")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in loaded.state_dict().items())
