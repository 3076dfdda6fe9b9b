"""`save_pretrained` of a model of peft's: its own folder, which `PeftModel.from_pretrained` reads bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import export
from lockstep.cli.run import main
from lockstep.ground.errors import MisconfigurationException
from tests.accelerator.left_out import strategies
from tests.checkpoint.adapted import Adapted
from tests.checkpoint.tuned import CLASSES, Tuned, class_of, texts, write_folder
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.usefixtures("peft")
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}


class TwoAdapters(Adapted):
    """With a second one, which has a head of its own."""

    def configure_model(self) -> None:
        from peft import LoraConfig

        super().configure_model()
        more = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])
        self.model.add_adapter("more", more)  # type: ignore[union-attr, operator]


def exported(names: list[str], folder: str, into: str, two: bool) -> dict[str, dict[str, Tensor]]:
    """In a rank: the weights of each run, which has left a folder."""
    found: dict[str, dict[str, Tensor]] = {}
    for name in names:
        module = (TwoAdapters if two else Adapted)(folder)
        trainer = quiet(strategy=name, devices=dist.get_world_size(), max_steps=2)
        trainer.fit(module, texts())
        trainer.save_pretrained(f"{into}/{name}")
        found[name] = {n: value.detach().cpu().clone() for n, value, _ in trainer.strategy.whole_parameters()}
    return found


def read_back(folder: str, adapter: Path, names: tuple[str, ...] = ("default",)) -> dict[str, Tensor]:
    from peft import PeftModel

    base = class_of(CLASSES["llama"]).from_pretrained(folder)
    where = [adapter if name == "default" else adapter / name for name in names]
    model = PeftModel.from_pretrained(base, where[0])
    for name, each in zip(names[1:], where[1:], strict=True):
        model.load_adapter(each, name)
    return {f"model.{name}": value.detach() for name, value in model.named_parameters()}


def differing(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def base(folder: Path) -> str:
    write_folder(folder, "llama")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


NAMES = strategies("ddp", "fsdp", "deepspeed_stage_3", "balanced")


def test_it_is_read_bit_for_bit_under_every_strategy(ranks: RankPool, tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    wanted = ranks(2).run(exported, NAMES, folder, str(tmp_path), False, timeout=110)[0]
    for name in NAMES:
        assert {path.name for path in (tmp_path / name).iterdir()} == FILES
        assert differing(read_back(folder, tmp_path / name), wanted[name]) == [], name
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == folder
    assert {path.name for path in tmp_path.iterdir()} == {"base", *NAMES}


def test_several_adapters_and_layers_to_save(ranks: RankPool, tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    for _ in range(2):  # the second run replaces the first one's folder
        wanted = ranks(2).run(exported, ["fsdp"], folder, str(tmp_path), True, timeout=110)[0]["fsdp"]
    assert {path.name for path in (tmp_path / "fsdp").iterdir()} == {*FILES, "more"}
    assert differing(read_back(folder, tmp_path / "fsdp", ("default", "more")), wanted) == []


def test_a_compiled_model_of_adapters_is_written(tmp_path: Path) -> None:
    """The folder had no adapter in it, and nobody said so."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    around = torch.nn.ModuleDict({"model": torch.compile(get_peft_model(layers, LoraConfig(target_modules=["0"])))})
    prefix, found = export.find_model(around, None)
    export.write_adapter(tmp_path / "out", around.named_parameters(), prefix, found, None)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sorted(name.rpartition("lora_")[2] for name in written) == ["A.weight", "B.weight"]


class ByTransformers(Tuned):
    """Adapters by transformers' own method."""

    def configure_model(self) -> None:
        from peft import LoraConfig

        super().configure_model()
        self.model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[union-attr, operator]


def test_what_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = base(tmp_path / "base")
    trainer: Any = quiet(max_epochs=1)
    trainer.fit(ByTransformers(folder, "llama"), texts())
    with pytest.raises(MisconfigurationException, match=r"Use peft\.get_peft_model"):
        trainer.save_pretrained(tmp_path / "x")
    trainer.fit(Adapted(folder), texts())
    trainer.save_checkpoint(tmp_path / "a.ckpt", trainable_only=True)
    words = ["checkpoint", "convert", "--to", "huggingface", "--config", folder, str(tmp_path / "a.ckpt")]
    assert main([*words, str(tmp_path / "x")]) != 0
    assert f"lacks the frozen weights of {folder!r}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
