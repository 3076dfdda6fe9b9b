"""`load_pretrained`: the weights of a folder of safetensors, under every strategy, bit for bit as `from_pretrained`."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.checkpoint.first_values import fill_whole
from lockstep.checkpoint.pretrained import WeightFiles
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.strategies import FSDPStrategy, ModelParallelStrategy
from tests.accelerator.left_out import strategies
from tests.checkpoint.tuned import (
    CLASSES,
    CONFIGS,
    WORDS,
    Tuned,
    class_of,
    llama,
    texts,
    write_folder,
)
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.usefixtures("transformers")


def expected(folder: str, name: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = class_of(name).from_pretrained(folder, **options)
    return {f"model.{name}": value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def differing(found: dict[str, Tensor], folder: str, name: str, **options: Any) -> list[str]:
    wanted = expected(folder, name, **options)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return [n for n in wanted if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]


class Split(Tuned):
    """Cut by `fully_shard` in `configure_model`, some projections by tensor parallelism first."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        super().configure_model()
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        assert self.model is not None
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            columns = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            parallelize_module(layer, tensor, {**columns, "mlp.down_proj": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        fully_shard(self.model, mesh=data)


def strategy_of(name: str, world: int) -> Any:
    if name == "2-d":
        return ModelParallelStrategy(max(1, world // 2), min(2, world))
    if name == "hybrid":
        return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, world // 2))
    if name == "offload":
        return FSDPStrategy(cpu_offload=True)
    if name == "balanced":
        return lockstep.strategies.BalancedStrategy(stages=2)
    return name


def loaded(strategy: str, folder: str, kind: str, model: str = "", **flags: Any) -> list[str]:
    """In a rank: what differs from `from_pretrained`, before the first step."""
    world = dist.get_world_size()
    module = (Split if strategy == "2-d" else Tuned)(folder, kind, model)
    quiet(strategy=strategy_of(strategy, world), devices=world, max_steps=1, **flags).fit(module, texts())
    return differing(module.seen, folder, module.class_name)


def test_one_process(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    module = Tuned(folder, "llama")
    quiet(max_steps=1).fit(module, texts())
    assert differing(module.seen, folder, CLASSES["llama"]) == []


STRATEGIES = strategies("ddp", "fsdp", "offload", "2-d", "deepspeed_stage_3")


def all_loaded(folder: str, world: int) -> dict[str, list[str]]:
    names = [name for name in STRATEGIES if name != "2-d" or world != 3]
    return {name: loaded(name, folder, "llama") for name in names}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_strategy_begins_with_the_bits_of_from_pretrained(ranks: RankPool, tmp_path: Path, world: int) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    for found in ranks(world).run(all_loaded, folder, world, timeout=110):
        assert not any(found.values()), found


OTHERS = [
    ("bert", "", {}),
    ("gpt2", "", {}),  # tied
    ("mixtral", "", {}),  # the folder's experts are joined
    ("llama", "LlamaForSequenceClassification", {}),  # a head that the folder lacks
    ("llama", "LlamaModel", {}),  # names without the prefix
    ("bert", "BertModel", {}),
]


def others_loaded(folders: dict[str, str], strategy: str) -> list[tuple[str, list[str]]]:
    """In a rank, of models that no step is made with."""
    return [(model, only_loaded(strategy, folders[kind], kind, model)) for kind, model, _ in OTHERS]


class Untrained(Tuned):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1


def only_loaded(strategy: str, folder: str, kind: str, model: str = "", **flags: Any) -> list[str]:
    world = dist.get_world_size()
    module = Untrained(folder, kind, model)
    options = flags.pop("options", {})
    quiet(strategy=strategy_of(strategy, world), devices=world, max_epochs=1, **flags).fit(module, texts())
    return differing(module.seen, folder, module.class_name, **options)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("strategy", strategies("fsdp", "deepspeed_stage_3"))
def test_names_ties_conversions_and_missing_keys_are_as_from_pretrained_has_them(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    kinds = sorted({kind for kind, _, _ in OTHERS})
    folders = {kind: str(write_folder(tmp_path / kind, kind)) for kind in kinds}
    for found in ranks(2).run(others_loaded, folders, strategy, timeout=110):
        assert found == [(model, []) for _, model, _ in OTHERS]


def other_dtypes(folder: str) -> list[list[str]]:
    half = {"precision": "bf16-true", "options": {"dtype": torch.bfloat16}}
    wide = {"options": {"dtype": torch.float32}}
    return [only_loaded(name, folder, "llama", **given) for name in ("ddp", "fsdp") for given in (half, wide)]


def test_the_runs_dtype_decides(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama", dtype=torch.bfloat16))
    for found in ranks(2).run(other_dtypes, folder, timeout=110):
        assert found == [[], [], [], []]


class Initialized(Untrained):
    """Nothing but the model's own first values."""

    def configure_model(self) -> None:
        torch.manual_seed(7)
        with torch.device("meta"):
            self.model = class_of(self.class_name)(CONFIGS[self.kind]())


def initialized(kinds: list[str]) -> list[list[str]]:
    found: list[list[str]] = []
    for kind in kinds:
        module = Initialized("", kind)
        quiet(strategy="fsdp", devices=dist.get_world_size(), max_epochs=1).fit(module, texts())
        with torch.device("meta"):
            model = class_of(module.class_name)(CONFIGS[kind]())
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        model.initialize_weights()
        model.tie_weights()
        wanted = {f"model.{n}": each.detach() for n, each in (*model.named_parameters(), *model.named_buffers())}
        assert module.seen.keys() == wanted.keys()
        found.append([name for name in wanted if not torch.equal(module.seen[name], wanted[name])])
    return found


def test_without_a_folder_a_model_on_the_meta_device_begins_as_transformers_makes_it(ranks: RankPool) -> None:
    for found in ranks(2).run(initialized, ["llama", "gpt2"], timeout=110):
        assert found == [[], []]


# -- any other module -------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A chain, and a head that shares its weight with the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(3))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        nn.init.ones_(self.scale)


class Other(Untrained):
    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = Blocks()
        lockstep.load_pretrained(self.model, self.folder)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return None

    def forward(self, batch: Tensor) -> Any:
        model: Any = self.model
        return model.head(model.blocks(model.table(batch)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())


def others(folder: str, strategies: list[str]) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for name in strategies:
        module = Other(folder, "llama")
        precision = "32-true" if name.startswith("deepspeed") else "64-true"
        trainer = quiet(strategy=name, devices=dist.get_world_size(), max_steps=2, precision=precision)
        if name == "balanced":  # leaves what other ranks hold in the folder
            trainer.predict(module, texts())
        trainer.fit(module, texts())
        found.append(module.seen)
    return found


def test_any_module_whose_names_are_those_of_the_files(ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(3)
    blocks = Blocks()
    blocks.init_weights()
    wanted = {name: each.detach().clone() for name, each in blocks.state_dict().items() if name != "head.weight"}
    save_file(wanted, tmp_path / "model.safetensors")
    names = strategies("ddp", "fsdp", "balanced", "deepspeed_stage_2")
    for found in ranks(2).run(others, str(tmp_path), names, timeout=110):
        for name, seen in zip(names, found, strict=True):
            assert seen.keys() == {f"model.{each}" for each in wanted}, name
            assert all(torch.equal(seen[f"model.{each}"].float(), value) for each, value in wanted.items()), name


# -- bad input --------------------------------------------------------------------------------------------------


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def part_gone(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def part_cut(folder: Path) -> None:
    part = sorted(folder.glob("*.safetensors"))[1]
    part.write_bytes(part.read_bytes()[:-8])


def index_cut(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-20])


def only_pickled(folder: Path) -> None:
    for each in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        each.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def emptied(folder: Path) -> None:
    only_pickled(folder)
    (folder / "pytorch_model.bin").unlink()


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))


BAD: dict[Callable[[Path], None], str] = {
    no_index: "the folder contains neither model.safetensors.index.json nor model.safetensors",
    part_gone: "is damaged (No such file or directory",
    part_cut: "is damaged (Error while deserializing header",
    index_cut: "model.safetensors.index.json is damaged",
    only_pickled: "the weights are pickled (pytorch_model.bin)",
    emptied: "the folder contains neither model.safetensors.index.json nor model.safetensors",
    quantized: "the weights are quantized (bitsandbytes in config.json)",
}


def refusals(folders: dict[str, str], strategies: list[str]) -> list[tuple[str, str]]:
    """What is said of each folder, of whose weights nothing is read."""
    found: list[tuple[str, str]] = []
    devices = dist.get_world_size() if dist.is_initialized() else 1
    for strategy in strategies:
        for name, folder in folders.items():
            with patch.object(WeightFiles, "read", side_effect=AssertionError):
                found.append((name, said_of(Tuned(folder, "llama"), strategy, devices)))
    return found


def said_of(module: Tuned, strategy: str, devices: int) -> str:
    with pytest.raises((MisconfigurationException, CorruptCheckpoint)) as raised:
        quiet(strategy=strategy, devices=devices, max_steps=1).fit(module, texts())
    return str(raised.value)


def test_a_folder_that_cannot_be_read_is_refused_with_the_way_out(ranks: RankPool, tmp_path: Path) -> None:
    folders: dict[str, str] = {}
    for spoil in BAD:
        folders[spoil.__name__] = str(write_folder(tmp_path / spoil.__name__, "llama"))
        spoil(tmp_path / spoil.__name__)
    wanted = {spoil.__name__: said for spoil, said in BAD.items()}
    of_ranks = ranks(2).run(refusals, folders, ["ddp", "fsdp"], timeout=60)
    for found in (refusals(folders, ["auto"]), *of_ranks):
        assert {name for name, _ in found} == set(wanted)
        for name, said in found:
            assert wanted[name] in said, name


def test_other_shapes_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama")
    with torch.device("meta"):
        model = class_of(CLASSES["llama"])(llama(intermediate_size=48))
    with pytest.raises(MisconfigurationException, match=r"6 tensors have different shapes .*\(40, 16\) for \(48, 16\)"):
        lockstep.load_pretrained(model, folder)


def other_shapes(folder: str) -> tuple[list[str], list[str]]:
    """In a rank: what differs from what `from_pretrained` gives under the same flag, and warnings."""
    module = Wider(folder, "llama", "LlamaForSequenceClassification")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        quiet(strategy="fsdp", devices=dist.get_world_size(), max_epochs=1).fit(module, texts())
    model = class_of(module.class_name).from_pretrained(folder, num_labels=5, ignore_mismatched_sizes=True)
    wanted = {f"model.{name}": each for name, each in model.named_parameters() if name != "score.weight"}
    assert module.seen["model.score.weight"].shape == (5, 16)
    assert module.seen["model.score.weight"].std() < 0.1
    return [name for name in wanted if not torch.equal(wanted[name], module.seen[name])], [
        str(w.message) for w in warned
    ]


class Wider(Untrained):
    """Tells more classes apart than the folder's model did."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = class_of(self.class_name)(llama(num_labels=5))
        lockstep.load_pretrained(self.model, self.folder, ignore_mismatched_sizes=True)


def test_other_shapes_may_be_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    class_of("LlamaForSequenceClassification")(llama(num_labels=2)).save_pretrained(tmp_path)
    of_ranks = ranks(2).run(other_shapes, str(tmp_path), timeout=60)
    assert [found for found, _ in of_ranks] == [[], []]
    said = [each for each in of_ranks[0][1] if "load_pretrained" in each]
    assert len(said) == 1
    assert "and are newly initialized: score.weight (2, 16) for (5, 16)." in said[0]


class Resized(Tuned):
    """Gets more words when its weights are not read yet."""

    def configure_model(self) -> None:
        super().configure_model()
        model: Any = self.model
        model.resize_token_embeddings(WORDS + 4, mean_resizing=False)


class Replaces(Tuned):
    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.lm_head = nn.Linear(16, WORDS)


OTHERWISE: list[tuple[type[Tuned], str, tuple[str, ...]]] = [
    (Tuned, "bert", ("none of the folder's 21 tensors belongs to a BertForMaskedLM", "'lm_head.weight', 'model.embed")),
    (Resized, "llama", ("has changed from (48, 16) to (52, 16) since", "resize_token_embeddings, save_pretrained")),
    (Replaces, "llama", ("with 'lm_head.weight' were replaced before",)),
]


def refused(folder: str) -> list[str]:
    return [said_of(kind(folder, model), "fsdp", dist.get_world_size()) for kind, model, _ in OTHERWISE]


def test_what_the_weights_do_not_fit_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2).run(refused, str(write_folder(tmp_path, "llama")), timeout=60):
        for said, (_, _, wanted) in zip(found, OTHERWISE, strict=True):
            assert all(words in said for words in wanted), said


def test_a_checkpoint_of_a_run_takes_the_place_of_the_folders_weights(tmp_path: Path) -> None:
    module = Tuned(str(write_folder(tmp_path, "llama")), "llama")
    trainer = quiet(max_steps=1)
    trainer.fit(module, texts())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    read = Tuned.load_from_checkpoint(tmp_path / "one.ckpt", folder=module.folder, kind="llama")
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, module.get_parameter(name)), name
    tables = dict(read.named_buffers())
    assert tables.keys() == dict(module.named_buffers()).keys()
    assert all(torch.equal(tables[name], each) for name, each in module.named_buffers())


def trained_and_read(folder: str, into: str, strategies: list[str]) -> list[list[str]]:
    """In a rank: which weights differ where a run's checkpoint was read, and the model was to come from a folder."""
    found: list[list[str]] = []
    for name in strategies:
        flags: dict[str, Any] = {"strategy": name, "devices": dist.get_world_size()}
        trainer, path = quiet(max_steps=2, **flags), f"{into}/{name}.ckpt"
        trainer.fit(Tuned(folder, "llama"), texts())
        trainer.save_checkpoint(path)
        wanted = {name: value.detach().cpu().clone() for name, value, _ in trainer.strategy.whole_parameters()}
        other = quiet(max_steps=3, limit_train_batches=0, **flags)
        other.fit(Tuned(folder, "llama"), texts(), ckpt_path=path)
        read = {name: value.detach().cpu() for name, value, _ in other.strategy.whole_parameters()}
        assert wanted.keys() == read.keys()
        found.append([name for name in wanted if not torch.equal(wanted[name], read[name])])
    return found


def test_a_resume_goes_on_with_the_checkpoints_weights_and_not_the_folders(ranks: RankPool, tmp_path: Path) -> None:
    folder, names = str(write_folder(tmp_path / "base", "llama")), strategies("ddp", "fsdp", "balanced")
    assert ranks(2).run(trained_and_read, folder, str(tmp_path), names, timeout=110) == [[[] for _ in names]] * 2


def test_a_model_with_memory_is_filled_at_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt2")
    model = class_of(CLASSES["gpt2"])(CONFIGS["gpt2"]())
    lockstep.load_pretrained(model, folder)
    found = {f"model.{name}": each for name, each in (*model.named_parameters(), *model.named_buffers())}
    assert differing(found, str(folder), CLASSES["gpt2"]) == []
    assert model.lm_head.weight is model.transformer.wte.weight


def test_one_file_comes_before_an_index_as_from_pretrained_has_it(tmp_path: Path) -> None:
    """The index's older weights were taken, or asked for where they were gone."""
    folder = write_folder(tmp_path / "parts", "llama")
    other = write_folder(tmp_path / "one", "llama", seed=2, max_shard_size="1GB")
    shutil.copy(other / "model.safetensors", folder)
    for _ in range(2):
        model = class_of(CLASSES["llama"])(CONFIGS["llama"]())
        lockstep.load_pretrained(model, folder)
        found = {f"model.{name}": each for name, each in (*model.named_parameters(), *model.named_buffers())}
        assert differing(found, str(folder), CLASSES["llama"]) == []
        for part in folder.glob("model-*.safetensors"):
            part.unlink()


def test_a_layer_that_two_folders_fill_has_the_later_ones_values(tmp_path: Path) -> None:
    """It was said to be gone."""
    from safetensors.torch import save_file

    weights = [nn.ModuleDict({"words": nn.Embedding(5, 4), "own": nn.Linear(4, 4)}) for _ in range(2)]
    for name, each in zip("ab", weights, strict=True):
        (tmp_path / name).mkdir()
        save_file(each.state_dict(), tmp_path / name / "model.safetensors")
    with torch.device("meta"):
        words = nn.Embedding(5, 4)
        models = nn.ModuleList([nn.ModuleDict({"words": words, "own": nn.Linear(4, 4)}) for _ in range(2)])
    for name, model in zip("ab", models, strict=True):
        lockstep.load_pretrained(model, tmp_path / name)
    fill_whole(models)
    found = models.state_dict()
    for number, each in enumerate(weights):
        for name, value in {**each.state_dict(), "words.weight": weights[1].state_dict()["words.weight"]}.items():
            assert torch.equal(found[f"{number}.{name}"], value), (number, name)


def test_tied_weights_of_which_the_folder_has_two_are_parted(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_folder(tmp_path, "gpt2", max_shard_size="1GB")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "lm_head.weight": torch.randn(WORDS, 16)}, folder / "model.safetensors", {"format": "pt"})
    with torch.device("meta"):
        model = class_of(CLASSES["gpt2"])(CONFIGS["gpt2"]())
    module = Around(model, str(folder))
    with pytest.warns(UserWarning, match="so they are untied"):
        quiet(max_epochs=1).fit(module, texts())
    assert differing(module.seen, str(folder), CLASSES["gpt2"]) == []


class Around(Untrained):
    def __init__(self, model: nn.Module, folder: str) -> None:
        super().__init__(folder, "gpt2")
        self.model = model

    def configure_model(self) -> None:
        lockstep.load_pretrained(self.model, self.folder)  # type: ignore[arg-type]


# -- generation -------------------------------------------------------------------------------------------------


class Generates(Untrained):
    """Goes on with texts in its validation, each rank for another length."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        model: Any = self.model
        count = 2 + 3 * dist.get_rank()
        told = model.generate(batch[:, :2], max_new_tokens=count, do_sample=False, pad_token_id=0)
        self.lengths = told.shape[1]


def generated(folder: str, strategies: list[str]) -> list[int]:
    found: list[int] = []
    for strategy in strategies:
        module = Generates(folder, "llama")
        quiet(strategy=strategy, devices=dist.get_world_size(), max_epochs=1).fit(module, texts(), texts(5))
        found.append(module.lengths)
    return found


def test_ranks_generate_until_the_last_has_ended(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    names = strategies("fsdp", "deepspeed_stage_3")
    found = ranks(2).run(generated, folder, names, timeout=60)
    assert found == [[4] * len(names), [7] * len(names)]


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_needs_its_shards_and_one_tensor(tmp_path: Path) -> None:
    from benchmarks.pretrained import measure, write

    count, size, largest = write(str(tmp_path), 16)
    assert count > 200e6
    for found in measure("fsdp", str(tmp_path), 2):
        assert found["held"] < 0.51 * size
        assert found["peak"] < 1.1 * found["held"] + largest
