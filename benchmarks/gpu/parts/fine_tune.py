"""A pretrained model on a device: its weights, adapters, matrix optimizers, compiled layers, on one and two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engine.language import GPT, Size
from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.devices import accelerator_of
from benchmarks.gpu.groups import join
from benchmarks.gpu.modules import QUIET, Language, text
from lockstep import Trainer, seed_everything
from lockstep.strategies import DDPStrategy, FSDPStrategy
from lockstep.testing import SharedCard, check_equivalence

WORLD = 2
NEEDED = ("pytest", "transformers", "safetensors")
STRATEGIES: dict[str, Callable[[], Any]] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}
OWNING: dict[str, Callable[[], Any]] = {
    **STRATEGIES,
    "ddp, sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
}
AS_EAGER = 0.02
"""How far losses of compiled code may lie from those of eager code, which rounds to bfloat16 in other places."""


def run(part: Part) -> None:
    """Compiled layers first, which need no other package."""
    part.check("compiled layers: same losses as eager layers, compiled once", compiled, part)
    part.check("the packages of the models are installed", needed, NEEDED)
    if any(find_spec(name) is None for name in NEEDED):
        return
    part.check("weights read from a folder, one process: equal to those of from_pretrained", begun_alone, part)
    for name in STRATEGIES:
        part.check(
            f"weights read from a folder, {name}: equal to those of from_pretrained", on_ranks, part, begun, name
        )
        part.check(f"a saved folder, {name}: from_pretrained reads it", on_ranks, part, written, name)
    for name in OWNING:
        part.check(f"matrix optimizer, {name}: same results as one process", on_ranks, part, matrices, name)
    part.check("peft is installed", needed, ("peft",))
    if find_spec("peft") is None:
        return
    for name in STRATEGIES:
        part.check(f"LoRA, {name}: same results as one process", on_ranks, part, adapted, name)
        part.check(f"LoRA, {name}: resumed from a checkpoint of the adapter", on_ranks, part, resumed, name)


def needed(names: tuple[str, ...]) -> Numbers:
    """Packages that checks of this part import."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise Skip(f"not installed: {', '.join(missing)}")
    return {}


# -- one process -----------------------------------------------------------------------------------------------


def compiled(part: Part) -> Numbers:
    """The same steps twice; the compiler must not begin anew behind the first epoch, whose batches are all alike."""
    from torch._dynamo.utils import counters

    if not (part.is_cuda or part.on_cpu):
        raise Skip(f"torch's compiler builds no code for {part.device}")
    steps = 4 if part.small else 30
    size = Size(32, 2, context=16) if part.small else Size(512, 8, heads=8, context=256)
    losses: list[Tensor] = []
    graphs = 0
    for compiles in (False, True):
        counters.clear()
        seed_everything(0, verbose=False)
        module = Language(GPT(size), metric=False)
        flags: dict[str, Any] = {**QUIET, "accelerator": accelerator_of(part.device), "devices": 1}
        flags |= {"precision": "bf16-mixed", "max_epochs": 2, "compile": {"blocks": True} if compiles else False}
        Trainer(**flags).fit(module, text(4 * steps, 4, size.context))
        losses.append(torch.stack(module.losses).float().cpu())
        graphs = int(counters["stats"]["unique_graphs"])
    eager, ours = losses
    numbers = {"steps": len(ours), "graphs": graphs, "largest difference": float(((ours - eager) / eager).abs().max())}
    expect(graphs == 1, "blocks of one class were not compiled once", numbers)
    expect(numbers["largest difference"] < AS_EAGER, "the losses differ from those of eager code", numbers)
    return numbers


def begun_alone(part: Part) -> Numbers:
    """Read into a model on the device."""
    return begins(folder_of(), accelerator_of(part.device), "auto", 1)


# -- two ranks -------------------------------------------------------------------------------------------------


def on_ranks(part: Part, function: Callable[..., Numbers], name: str) -> Numbers:
    """What the first of two ranks finds."""
    if not (part.is_cuda or part.on_cpu):
        raise Skip(f"lockstep.testing.SharedCard is for CUDA devices, not for {part.device}")
    accelerator: Any = SharedCard() if part.is_cuda else "cpu"
    return dict(part.ranks(WORLD, in_group, function, name, folder_of(), part.device, accelerator)[0])


def in_group(function: Callable[..., Numbers], name: str, folder: str, device: str, accelerator: Any) -> Numbers:
    """On a rank: the function, in the group of all ranks."""
    if not dist.is_initialized():
        join(device)
    return {"ranks": dist.get_world_size(), **function(name, folder, accelerator)}


def folder_of() -> str:
    """A small Llama as a folder in the part's own, written once."""
    from tests.checkpoint.tuned import write_folder

    folder = Path("llama").resolve()
    return str(folder if folder.exists() else write_folder(folder, "llama"))


def begun(name: str, folder: str, accelerator: Any) -> Numbers:
    """On a rank: what it begins with."""
    return begins(folder, accelerator, STRATEGIES[name](), WORLD)


def begins(folder: str, accelerator: Any, strategy: Any, devices: int) -> Numbers:
    """How many tensors differ from ``from_pretrained`` in a bit before the first step."""
    from tests.checkpoint.test_pretrained import differing
    from tests.checkpoint.tuned import Tuned, texts

    module = Tuned(folder, "llama")
    flags: dict[str, Any] = {**QUIET, "accelerator": accelerator, "devices": devices, "max_steps": 1}
    Trainer(**flags, strategy=strategy).fit(module, texts())
    wrong = differing(module.seen, folder, module.class_name)
    numbers = {"tensors": len(module.seen), "differ": len(wrong)}
    expect(not wrong, f"other weights: {', '.join(wrong[:3])}", numbers)
    return numbers


def written(name: str, folder: str, accelerator: Any) -> Numbers:
    """On a rank: trained, written, and read again."""
    from tests.checkpoint.tuned import CLASSES, Tuned, class_of, texts

    module = Tuned(folder, "llama")
    flags: dict[str, Any] = {**QUIET, "accelerator": accelerator, "devices": WORLD, "max_epochs": 1}
    trainer = Trainer(**flags, strategy=STRATEGIES[name]())
    trainer.fit(module, texts())
    to = f"{folder}-{name}"
    trainer.save_pretrained(to)
    whole = {key: value.detach().cpu().clone() for key, value, _ in trainer.strategy.whole_parameters()}
    dist.barrier()
    read = dict(class_of(CLASSES["llama"]).from_pretrained(to).named_parameters())
    wrong = [key for key, value in whole.items() if not torch.equal(value, read[key.removeprefix("model.")])]
    numbers = {"tensors": len(whole), "differ": len(wrong)}
    expect(not wrong, f"other weights: {', '.join(wrong[:3])}", numbers)
    return numbers


def matrices(name: str, folder: str, accelerator: Any) -> Numbers:
    """On a rank: an optimizer that needs whole matrices, beside AdamW for the rest."""
    from tests.engines.sharded.test_whole_updates import kind, rows

    make = kind("exact + adamw")
    flags: dict[str, Any] = {"accumulate": 2, "gradient_clip_val": 0.3, "batch_size": 3}
    return compared(make, rows(23), OWNING[name](), accelerator, **flags)


def adapted(name: str, folder: str, accelerator: Any) -> Numbers:
    """On a rank: peft's adapter around a base of a folder."""
    from tests.checkpoint.adapted import Adapted
    from tests.checkpoint.test_adapters import data

    return compared(partial(Adapted, folder), data, STRATEGIES[name](), accelerator, batch_size=2)


def compared(make: Callable[[], Any], data: Any, strategy: Any, accelerator: Any, **flags: Any) -> Numbers:
    """The largest difference from one process, as a part of the largest gradient."""
    found = check_equivalence(make, data, strategy=strategy, devices=WORLD, accelerator=accelerator, **flags)
    numbers = {"largest difference": found.largest}
    expect(bool(found), str(found), numbers)
    return numbers


def resumed(name: str, folder: str, accelerator: Any) -> Numbers:
    """On a rank: to the end at once, and by way of a checkpoint that has the adapter alone."""
    from tests.checkpoint.adapted import Adapted
    from tests.checkpoint.tuned import texts

    ends: list[dict[str, Tensor]] = []
    for steps, path in ((4, None), (2, None), (4, f"{folder}-{name}.ckpt")):
        seed_everything(3, verbose=False)
        flags: dict[str, Any] = {**QUIET, "accelerator": accelerator, "devices": WORLD, "max_steps": steps}
        trainer = Trainer(**flags, max_epochs=-1, strategy=STRATEGIES[name]())
        trainer.fit(Adapted(folder), texts(16), ckpt_path=path)
        ends.append({key: value.detach().cpu().clone() for key, value, _ in trainer.strategy.whole_parameters()})
        if steps == 2:
            trainer.save_checkpoint(f"{folder}-{name}.ckpt", trainable_only=True)
    straight, _, rest = ends
    wrong = [key for key, value in straight.items() if not torch.equal(value, rest[key])]
    numbers = {"tensors": len(straight), "differ": len(wrong)}
    expect(not wrong, f"other weights: {', '.join(wrong[:3])}", numbers)
    return numbers
