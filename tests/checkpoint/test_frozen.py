"""Checkpoints of what is trained alone: small, with the base's hash, and as good as whole ones for a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import Callback, Checkpoint, ModelCheckpoint
from lockstep.checkpoint.frozen import hashes_of
from lockstep.checkpoint.sharded import load
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import FSDPStrategy
from tests.accelerator.left_out import strategies
from tests.checkpoint.adapted import Adapted, ByHand
from tests.checkpoint.tuned import WORDS, write_folder
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def words(batch_size: int) -> DataLoader[Any]:
    drawn = torch.randint(0, WORDS, (16, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(drawn, batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]


def strategy_of(name: str) -> Any:
    if name == "sharded":
        return FSDPStrategy(state_dict_type="sharded")
    if name == "full":
        from lockstep.strategies import DeepSpeedStrategy

        return DeepSpeedStrategy(stage=3, checkpoint_format="full")
    return name


def trainer_of(name: str, **flags: Any) -> Any:
    world = dist.get_world_size() if dist.is_initialized() else 1
    precision = "32-true" if "deepspeed" in name or name == "full" else "64-true"
    flags = {"precision": precision, "max_epochs": 2, **flags}
    return quiet(strategy=strategy_of(name) if world > 1 else "auto", devices=world, **flags)


class Teacher(ByHand):
    """With frozen weights that move a bit to the trained ones in each step, or are theirs from each epoch's end on."""

    def __init__(self, moves: bool) -> None:
        super().__init__(layers=2)
        self.moves, self.student, self.teacher = moves, nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.table(batch)
        return super().training_step(batch, batch_idx) + (self.student(x) - self.teacher(x)).square().mean()

    def follow(self, weight: float) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(1 - weight).add_(other.data, alpha=weight)  # which no version counts

    def on_train_batch_end(self, *_: Any) -> None:
        if self.moves:
            self.follow(0.5)

    def on_train_epoch_end(self) -> None:
        if not self.moves:
            self.follow(1.0)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def made(folder: str) -> LightningModule:
    if folder.startswith("teacher"):
        return Teacher(folder == "teacher that moves")
    return Adapted(folder) if folder else ByHand()


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value, _ in trainer.strategy.whole_parameters()}


class SavesBoth(Callback):
    """After three steps: the adapter alone, and all."""

    def __init__(self, into: str) -> None:
        self.into = into

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{self.into}/adapter.ckpt", trainable_only=True)
            trainer.save_checkpoint(f"{self.into}/whole.ckpt")


def written(name: str, folder: str, into: str, batch_size: int) -> dict[str, Tensor]:
    """In a rank: a whole run."""
    trainer = trainer_of(name, callbacks=[SavesBoth(into)])
    trainer.fit(made(folder), words(batch_size))
    return weights(trainer)


def resumed(name: str, folder: str, path: str, batch_size: int) -> dict[str, Tensor]:
    trainer = trainer_of(name)
    trainer.fit(made(folder), words(batch_size), ckpt_path=path)
    return weights(trainer)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]


NAMES = [
    *strategies("ddp", "fsdp", "sharded", "deepspeed_stage_2", "deepspeed_stage_3", "balanced"),
    pytest.param("full", marks=pytest.mark.extension("deepspeed")),
]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_resume_goes_on_to_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    whole = ranks(2).run(written, name, "", str(tmp_path), 4, timeout=100)[0]
    found, every = (load(tmp_path / f"{which}.ckpt") for which in ("adapter", "whole"))
    own = {name for name, parameter in ByHand().named_parameters() if parameter.requires_grad}
    assert found["state_dict"].keys() == own
    assert every["state_dict"].keys() > own
    for which in ("adapter", "whole"):
        path = str(tmp_path / f"{which}.ckpt")
        assert differing(ranks(2).run(resumed, name, "", path, 4, timeout=100)[0], whole) == [], which


ELSEWHERE = [
    pytest.param("balanced", 2, marks=pytest.mark.extension("balancing")),
    pytest.param("ddp", 1, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, marks=pytest.mark.slow),
    pytest.param("deepspeed_stage_3", 2, marks=[pytest.mark.slow, pytest.mark.extension("deepspeed")]),
]


@pytest.mark.usefixtures("peft")
@pytest.mark.parametrize(("name", "world"), ELSEWHERE)
def test_a_resume_elsewhere_is_that_from_a_whole_checkpoint(
    ranks: RankPool, tmp_path: Path, name: str, world: int
) -> None:
    folder = str(write_folder(tmp_path / "base", "llama"))
    ranks(2).run(written, "fsdp", folder, str(tmp_path), 4, timeout=100)
    one, other = (
        ranks(world).run(resumed, name, folder, str(tmp_path / f"{which}.ckpt"), 8 // world, timeout=100)[0]
        for which in ("adapter", "whole")
    )
    assert differing(one, other) == []


@pytest.mark.extension("balancing")
@pytest.mark.slow
def test_from_two_ranks_to_four_and_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(written, "balanced", "", str(tmp_path), 4, timeout=100)
    for name, world in [("fsdp", 4), ("sharded", 4), ("balanced", 4), ("ddp", 1)]:
        one, other = (
            ranks(world).run(resumed, name, "", str(tmp_path / f"{which}.ckpt"), 8 // world, timeout=100)[0]
            for which in ("adapter", "whole")
        )
        assert differing(one, other) == [], name


# -- the base that it belongs to --------------------------------------------------------------------------------


def refused(name: str, folder: str, path: str) -> str:
    with pytest.raises(MisconfigurationException) as raised:
        resumed(name, folder, path, 4)
    return str(raised.value)


def all_refused(names: list[str], folder: str, path: str) -> list[str]:
    return [refused(name, folder, path) for name in names]


@pytest.mark.usefixtures("peft")
def test_an_adapter_for_another_base_is_refused_by_name_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    one, other = (str(write_folder(tmp_path / name, "llama", seed)) for name, seed in (("one", 1), ("other", 2)))
    ranks(2).run(written, "ddp", one, str(tmp_path), 4, timeout=100)
    path = str(tmp_path / "adapter.ckpt")
    for told in ranks(2).run(all_refused, strategies("ddp", "fsdp", "balanced"), other, path, timeout=100):
        for said in told:
            assert said.startswith(f"trainer.fit(ckpt_path={path!r}): the adapter was trained on the base")
            assert (
                f"the base {one!r}, which differs from this module's base {other!r} in 21 of 21 frozen tensors" in said
            )


@pytest.mark.usefixtures("peft")
def test_a_module_made_of_it_has_base_and_adapter(tmp_path: Path) -> None:
    one, other = (str(write_folder(tmp_path / name, "llama", seed)) for name, seed in (("one", 1), ("other", 2)))
    trainer, module, path = quiet(max_epochs=1), Adapted(one), tmp_path / "adapter.ckpt"
    trainer.fit(module, words(8))
    trainer.save_checkpoint(path, trainable_only=True, weights_only=True)
    read = Adapted.load_from_checkpoint(path, folder=one)
    wanted = dict(module.named_parameters())
    assert wanted.keys() == dict(read.named_parameters()).keys()
    assert all(torch.equal(wanted[name], value) for name, value in read.named_parameters())
    with pytest.raises(MisconfigurationException, match=r"load_from_checkpoint: the adapter was trained on the base"):
        Adapted.load_from_checkpoint(path, folder=other)
    with pytest.warns(UserWarning, match="and keep their initial values"):
        Adapted.load_from_checkpoint(path, folder=other, strict=False)


@pytest.mark.usefixtures("peft")
def test_a_base_in_another_dtype_cannot_be_compared_which_is_said(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "one", "llama"))
    trainer = quiet(max_epochs=1, precision="64-true")
    trainer.fit(Adapted(folder), words(8))
    trainer.save_checkpoint(tmp_path / "adapter.ckpt", trainable_only=True)
    with pytest.warns(
        UserWarning, match="trained on frozen weights in float64, but this module's frozen weights are in float32"
    ):
        Adapted.load_from_checkpoint(tmp_path / "adapter.ckpt", folder=folder)


def test_it_is_taken_anyway_where_names_need_not_match(tmp_path: Path) -> None:
    written("", "", str(tmp_path), 8)
    module = ByHand(seed=4)
    module.strict_loading = False
    trainer_of("", max_epochs=1).fit(module, words(8), ckpt_path=tmp_path / "adapter.ckpt")


class Thaws(ByHand):
    """Trains its head for one epoch."""

    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(self.current_epoch == 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_what_was_trained_once_is_kept(tmp_path: Path) -> None:
    module = Thaws()
    module.head.requires_grad_()
    trainer = trainer_of("")
    trainer.fit(module, words(8))
    assert not module.head.weight.requires_grad
    trainer.save_checkpoint(tmp_path / "x.ckpt", trainable_only=True)
    names = load(tmp_path / "x.ckpt")["state_dict"]
    assert {"head.weight", "head.bias"} <= names.keys()
    assert "table.weight" not in names


class SavesEach(Checkpoint):
    """After each step, behind the module's hook: what was trained, by an explicit call."""

    def __init__(self, into: str) -> None:
        self.into = into

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(f"{self.into}/{trainer.global_step}.ckpt", trainable_only=True)


def taught(name: str, kind: str, into: str, batch_size: int, path: str | None = None) -> dict[str, Tensor]:
    """In a rank: two epochs of two steps, or what is left of them."""
    trainer = trainer_of(name, callbacks=[SavesEach(into)], enable_checkpointing=True)
    trainer.fit(made(kind), words(batch_size), ckpt_path=path)
    return weights(trainer)


KINDS = {"teacher that moves": [1, 2, 3, 4], "teacher of an epoch": [3, 4]}


@pytest.mark.parametrize("name", ["", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_that_change_are_kept(ranks: RankPool, tmp_path: Path, kind: str, name: str) -> None:
    def run(do: Any, path: Path) -> Any:
        return ranks(2).run(do, name, kind, str(path), 4, timeout=100)[0] if name else do(name, kind, str(path), 8)

    whole = run(taught, tmp_path)
    for step in (1, 2, 3):
        names = load(tmp_path / f"{step}.ckpt")["state_dict"].keys()
        assert ({"teacher.weight", "teacher.bias"} <= names) == (step in KINDS[kind]), step
        assert not names & {"table.weight", "head.weight", "head.bias", "blocks.0.0.base.weight"}
    for step in (1, 3):
        assert differing(run(resumed, tmp_path / f"{step}.ckpt"), whole) == [], step


def from_a_whole_one(name: str, into: str) -> None:
    """In a rank: what is saved behind a resume in which no frozen weight changes."""
    written(name, "teacher of an epoch", into, 4)
    taught(name, "teacher of an epoch", into, 4, f"{into}/whole.ckpt")


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_frozen_weights_that_a_whole_checkpoint_has_changed_are_kept(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    ranks(2).run(from_a_whole_one, name, str(tmp_path), timeout=100)
    names = load(tmp_path / "4.ckpt")["state_dict"].keys()
    assert {"teacher.weight", "teacher.bias"} <= names
    assert not names & {"table.weight", "head.weight"}


def test_a_module_with_frozen_weights_that_changed_is_made_of_its_checkpoint(tmp_path: Path) -> None:
    module = Teacher(moves=True)
    keep = ModelCheckpoint(tmp_path, save_trainable_only=True, save_last=True)
    trainer = trainer_of("", callbacks=[keep], enable_checkpointing=True, precision="32-true")
    trainer.fit(module, words(8))
    read = Teacher.load_from_checkpoint(keep.last_model_path, moves=True)
    assert differing(dict(read.named_parameters()), dict(module.named_parameters())) == []


def test_what_a_fit_has_changed_is_kept_behind_a_later_call(tmp_path: Path) -> None:
    trainer, module = trainer_of(""), Teacher(moves=True)
    trainer.fit(module, words(8))
    trainer.test(module.requires_grad_(False), words(8))
    trainer.save_checkpoint(tmp_path / "x.ckpt", trainable_only=True)
    names = load(tmp_path / "x.ckpt")["state_dict"].keys()
    assert {"teacher.weight", "student.weight"} <= names
    assert "table.weight" not in names


class Tied(ByHand):
    """Whose frozen table has two names, and changes at the fit's end."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.table

    def on_train_end(self) -> None:
        self.table.weight.data[0, 0] += 1


def test_a_frozen_weight_that_changes_is_kept_by_all_its_names(tmp_path: Path) -> None:
    trainer = trainer_of("")
    trainer.fit(Tied(), words(8))
    trainer.save_checkpoint(tmp_path / "x.ckpt", trainable_only=True)
    names = load(tmp_path / "x.ckpt")["state_dict"].keys()
    assert {"table.weight", "again.weight"} <= names
    assert "head.weight" not in names


# -- sizes and hashes -------------------------------------------------------------------------------------------


def test_a_hash_depends_on_each_bit_and_its_place() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool):
        whole = (torch.arange(24) % 2 if dtype == torch.bool else torch.arange(24)).to(dtype).reshape(4, 6)
        other, turned = whole.clone(), whole.roll(1, 0).roll(1, 1)
        other[2, 3] = 0
        each = [whole, other, turned, whole.T.contiguous(), torch.zeros(4, 6).to(dtype)]
        if dtype == torch.bool:
            del each[1:3]
        found = [hashes_of({"x": tensor})[0] for tensor in each]
        assert len(set(found)) == len(found), dtype
    assert hashes_of({"x": torch.tensor(1.0)}) != hashes_of({"x": torch.tensor(2.0)})
    assert hashes_of({"x": torch.tensor(0.0)}) != hashes_of({"x": torch.tensor(-0.0)})
