"""`trainer.save_pretrained`: a folder that `from_pretrained` reads, from every strategy, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.checkpoint import export
from lockstep.cli.checkpoint import checkpoint
from lockstep.ground.errors import MisconfigurationException
from tests.accelerator.left_out import strategies
from tests.checkpoint.test_pretrained import Split, strategy_of
from tests.checkpoint.tuned import CLASSES, CONFIGS, Tuned, class_of, texts, write_folder
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.usefixtures("transformers")


class Kept(Tuned):
    """Notes whole weights before it saves them in the middle of the fit."""

    saves_to = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = whole(self.trainer)
        self.trainer.save_pretrained(self.saves_to, max_shard_size="12KB")


class KeptSplit(Kept, Split):
    pass


def whole(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone().cpu() for name, value, _ in trainer.strategy.whole_parameters()}


def differing(module: Tuned, folder: str) -> list[str]:
    read = {f"model.{name}": p for name, p in class_of(module.class_name).from_pretrained(folder).named_parameters()}
    assert read.keys() == module.seen.keys()
    return [name for name, value in module.seen.items() if not torch.equal(read[name], value)]


def saved(strategy: str, kind: str, folder: str, into: str, steps: int = 1) -> list[str]:
    """In a rank: what differs between what it trained and what `from_pretrained` reads."""
    world = dist.get_world_size()
    module = (KeptSplit if strategy == "2-d" else Kept)(folder, kind)
    module.saves_to = f"{into}/within"
    trainer = quiet(strategy=strategy_of(strategy, world), devices=world, max_steps=steps)
    trainer.fit(module, texts())
    found = differing(module, module.saves_to)
    trainer.save_pretrained(f"{into}/after", max_shard_size="20KB")
    return [*found, *differing(module, f"{into}/after")]


def names_for(world: int) -> list[str]:
    """The strategies of some ranks: rows are of two of them, and so are pipelines of two blocks."""
    of_several = ["balanced"] if world % 2 == 0 else []
    return strategies("ddp", "fsdp", "deepspeed_stage_3", *of_several, *(["2-d"] if world != 3 else []))


def all_saved(folders: dict[str, str], into: str) -> dict[str, list[str]]:
    names = names_for(dist.get_world_size())
    found = {name: saved(name, "llama", folders["llama"], f"{into}/{name}") for name in names}
    return {**found, "tied": saved("fsdp", "gpt2", folders["gpt2"], f"{into}/gpt2")}


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4))])
def test_what_every_strategy_saves_is_read_bit_for_bit(ranks: RankPool, tmp_path: Path, world: int) -> None:
    folders = {kind: str(write_folder(tmp_path / kind, kind)) for kind in ("llama", "gpt2")}
    into = tmp_path / "out"
    for found in ranks(world).run(all_saved, folders, str(into), timeout=110):
        assert not any(found.values()), found
    index = json.loads((into / "fsdp" / "within" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files == sorted(path.name for path in (into / "fsdp" / "within").glob("*.safetensors"))
    assert sorted(path.name for path in into.iterdir()) == sorted([*names_for(world), "gpt2"])


@pytest.mark.parametrize("kind", ["bert", "mixtral"])
def test_one_process_saves_names_that_from_pretrained_knows(tmp_path: Path, kind: str) -> None:
    module = Tuned(str(write_folder(tmp_path / "in", kind)), kind)
    trainer = quiet(max_steps=1)
    trainer.fit(module, texts())
    module.seen = whole(trainer)
    trainer.save_pretrained(tmp_path / "out")
    assert differing(module, str(tmp_path / "out")) == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [CLASSES[kind]]


def fitted(tmp_path: Path, steps: int = 1) -> Trainer:
    module = Tuned(str(write_folder(tmp_path / "in", "llama")), "llama")
    trainer = quiet(max_steps=steps)
    trainer.fit(module, texts())
    return trainer


def test_a_folder_that_is_written_again_holds_nothing_of_the_first_weights(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    trainer.save_pretrained(tmp_path / "out", max_shard_size="12KB")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    trainer.save_pretrained(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert (tmp_path / "out" / "notes.txt").exists()


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="before the first fit"):
        quiet().save_pretrained(tmp_path / "out")
    trainer = fitted(tmp_path)
    with pytest.raises(MisconfigurationException, match="Pass a number of bytes, or text such as '5GB'"):
        trainer.save_pretrained(tmp_path / "out", max_shard_size="large")
    with pytest.raises(MisconfigurationException, match="is not a submodule of Tuned"):
        trainer.save_pretrained(tmp_path / "out", model=torch.nn.Linear(1, 1))
    (tmp_path / "file").write_text("")
    with pytest.raises(MisconfigurationException, match="a file has this name"):
        trainer.save_pretrained(tmp_path / "file")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_becomes_a_folder_for_from_pretrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Tuned(str(write_folder(tmp_path / "in", "gpt2")), "gpt2")
    trainer = quiet(max_steps=1)
    trainer.fit(module, texts())
    module.seen = whole(trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    (tmp_path / "in" / "vocab.json").write_text("{}")
    words = ["convert", str(tmp_path / "one.ckpt"), str(tmp_path / "out"), "--to", "huggingface"]
    with pytest.raises(MisconfigurationException, match="Pass --config FOLDER"):
        checkpoint(words)
    assert checkpoint([*words, "--config", str(tmp_path / "in"), "--max-shard-size", "12KB"]) == 0
    assert "folder of " in capsys.readouterr().out
    assert differing(module, str(tmp_path / "out")) == []
    assert (tmp_path / "out" / "vocab.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_a_config_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    words = ["convert", str(tmp_path / "one.ckpt"), str(tmp_path / "out"), "--to", "huggingface", "--config"]
    write_folder(tmp_path / "bert", "bert")
    with pytest.raises(MisconfigurationException, match="the config does not match the checkpoint"):
        checkpoint([*words, str(tmp_path / "bert")])
    with pytest.raises(MisconfigurationException, match=r"the folder has no config\.json"):
        checkpoint([*words, str(tmp_path)])


def test_a_compiled_model_is_written_under_its_own_names(tmp_path: Path) -> None:
    """No tensor was found under the names that `torch.compile` makes."""
    model = class_of(CLASSES["llama"])(CONFIGS["llama"]())
    around = torch.nn.ModuleDict({"model": torch.compile(model)})
    prefix, found = export.find_model(around, None)
    tensors = export.named_as_in_files(found, prefix, around.named_parameters())
    export.write(tmp_path / "of a run", tensors, found, "5GB", None)
    export.write_state(str(tmp_path / "of a checkpoint"), around.state_dict(), str(tmp_path / "of a run"), "5GB", None)
    for folder in ("of a run", "of a checkpoint"):
        read = class_of(CLASSES["llama"]).from_pretrained(tmp_path / folder)
        assert [name for name, p in model.named_parameters() if not torch.equal(p, read.get_parameter(name))] == []


def test_a_checkpoint_of_two_models_that_the_config_fits_is_refused(tmp_path: Path) -> None:
    """The first one was written, a teacher say, and nobody said so."""
    config = str(write_folder(tmp_path / "in", "llama"))
    one, other = (class_of(CLASSES["llama"])(CONFIGS["llama"]()).state_dict() for _ in range(2))
    both = {
        f"{name}.{key}": each for name, state in (("teacher", one), ("student", other)) for key, each in state.items()
    }
    with pytest.raises(
        MisconfigurationException, match=r"the config matches 2 models in the checkpoint \('teacher', 'student'\)"
    ):
        export.write_state(str(tmp_path / "out"), both, config, "5GB", None)
    same = {f"{name}.{key}": each for name in ("net", "alias") for key, each in one.items()}
    export.write_state(str(tmp_path / "out"), same, config, "5GB", None)
    read = class_of(CLASSES["llama"]).from_pretrained(tmp_path / "out")
    assert torch.equal(read.lm_head.weight, one["lm_head.weight"])


def test_a_folder_lies_beside_each_checkpoint_and_goes_with_it(tmp_path: Path) -> None:
    module = Tuned(str(write_folder(tmp_path / "in", "llama")), "llama")
    keep = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=1, save_pretrained=True)
    trainer = quiet(max_steps=2, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(module, texts())
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step=2-pretrained", "step=2.ckpt"]
    module.seen = whole(trainer)
    assert differing(module, str(tmp_path / "kept" / "step=2-pretrained")) == []
