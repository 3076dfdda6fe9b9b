"""Host memory while a folder of safetensors becomes the shards of a model, beside ``from_pretrained`` on each rank.

    python benchmarks/pretrained.py [--ranks 2,4] [--layers 16] [--ways from_pretrained,fsdp,2-d,fsdp:whole,fsdp:lora]

A Llama of 222 million parameters (float32) is made of a config and written to a folder. Each way then loads it on each
rank, in processes of their own. Counted is what a process has allocated (``RssAnon``: pages of the files are the page
cache's), sampled each millisecond from before the model is made to the first hook of the fit, above what it was before.
A way with ``:whole`` or ``:lora`` is trained, too, for two steps of AdamW, and counted to their end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WAYS = ("from_pretrained", "ddp", "fsdp", "2-d", "deepspeed_stage_3", "balanced")
TOKENS = 64
"""Of a text that is trained on, one on each rank."""
MIB = 2**20


def config_of(layers: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    return LlamaConfig(vocab_size=8192, num_hidden_layers=layers, **sizes)


def resident() -> int:
    """Bytes that this process has written to, but for the page cache."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest number of resident bytes, above those at the beginning, while it is open."""

    def __enter__(self) -> Peak:
        self._before = self._most = resident()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.wait(0.001):
            self._most = max(self._most, resident())

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self.bytes = max(self._most, resident()) - self._before


def load(way: str, folder: str, ranks: int) -> dict[str, float]:
    """In a rank: load by a way; gives seconds, the peak, and the bytes of this rank's parameters."""
    from transformers import AutoModelForCausalLM

    if way == "from_pretrained":
        with Peak() as peak:
            begin = time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            seconds = time.perf_counter() - begin
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0)
        return {"peak": peak.bytes, "seconds": seconds, "held": sum(p.nbytes for p in model.parameters())}
    return by_trainer(way, folder, ranks)


def cut(module: Any, layers: Any) -> None:
    """MLPs over rows of two ranks, and all that over the rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    data, tensor = module.device_mesh["data_parallel"], module.device_mesh["tensor_parallel"]
    columns = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in layers:
        parallelize_module(layer, tensor, {**columns, "mlp.down_proj": RowwiseParallel()})
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)


def by_trainer(asked: str, folder: str, ranks: int) -> dict[str, float]:
    import lockstep
    from lockstep import LightningModule, Trainer
    from lockstep.ground.parameters import is_placeholder, local_part
    from lockstep.strategies import ModelParallelStrategy

    found: dict[str, float] = {}
    way, _, trained = asked.partition(":")

    class Loads(LightningModule):
        def configure_model(self) -> None:
            from transformers import AutoConfig, AutoModelForCausalLM

            self.begin = time.perf_counter()
            self.peak = Peak()
            self.peak.__enter__()
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
            lockstep.load_pretrained(self.model, folder)
            layers = self.model.model.layers
            if trained == "lora":
                from peft import LoraConfig, get_peft_model

                self.model = get_peft_model(self.model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
            if self.device_mesh is not None:
                cut(self, layers)

        def configure_optimizers(self) -> Any:
            if not trained:  # before the engine of DeepSpeed makes its own copies in float32
                self.note()
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-5)

        def note(self) -> None:
            self.peak.__exit__()
            held = [
                getattr(p, "ds_tensor", local_part(p.detach()))
                for p in self.parameters()
                if hasattr(p, "ds_tensor") or not is_placeholder(p)
            ]
            found.update(peak=self.peak.bytes, seconds=time.perf_counter() - self.begin)
            found["held"] = sum(each.nbytes for each in held)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            return loss

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return None if trained else -1

        def on_train_end(self) -> None:
            if trained:
                self.note()

    replicas = {"2-d": ranks // 2, "balanced": 1}.get(way, ranks)
    texts = torch.arange(2 * ranks * TOKENS).reshape(-1, TOKENS) % 8192
    data = torch.utils.data.DataLoader(texts, batch_size=ranks // replicas)  # type: ignore[arg-type]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    strategy = ModelParallelStrategy(ranks // 2, 2) if way == "2-d" else way
    Trainer(strategy=strategy, devices=ranks, max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(
        Loads(), data
    )
    return found


def first_imports(folder: str) -> None:
    """Bring in what is imported when a model is made: it is no part of what loading takes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def rank(way: str, folder: str, ranks: int, out: str) -> None:
    first_imports(folder)
    found = load(way, folder, ranks)
    number = os.environ.get("LOCAL_RANK", "0")  # lockstep sets this one for the ranks that it starts
    Path(out, f"{way}-{number}.json").write_text(json.dumps(found))


def measure(way: str, folder: str, ranks: int) -> list[dict[str, float]]:
    """What each rank has found."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, __file__, "--rank", way, folder, str(ranks), out]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        if way == "from_pretrained":
            started = [subprocess.Popen(words, env={**environ, "LOCAL_RANK": str(n)}) for n in range(ranks)]
        else:
            started = [subprocess.Popen(words, env=environ)]
        codes = [each.wait() for each in started]
        if any(codes):
            raise SystemExit(f"{way} on {ranks} ranks failed")
        found = [json.loads(path.read_text()) for path in sorted(Path(out).iterdir())]
        if len(found) != ranks:
            raise SystemExit(f"{way}: {len(found)} of {ranks} ranks have told what they found")
        return found


def write(folder: str, layers: int) -> tuple[int, int, int]:
    """The folder; gives parameters, bytes, and those of the largest tensor."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(config_of(layers))
    model.save_pretrained(folder, max_shard_size="200MB")
    sizes = [p.nbytes for p in model.parameters()]
    return sum(p.numel() for p in model.parameters()), sum(sizes), max(sizes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        way, folder, ranks, out = given.rank
        rank(way, folder, int(ranks), out)
        return
    with tempfile.TemporaryDirectory() as folder:
        count, size, largest = write(folder, given.layers)
        print(f"{count / 1e6:.0f} M parameters, {size / MIB:.0f} MiB; the largest tensor {largest / MIB:.0f} MiB")
        print("ranks  way                   held MiB  peak MiB  1.1 held + one tensor  seconds")
        for ranks in map(int, given.ranks.split(",")):
            for way in given.ways.split(","):
                found = measure(way, folder, ranks)
                held, peak, seconds = (max(each[key] for each in found) for key in ("held", "peak", "seconds"))
                bound = (1.1 * held + largest) / MIB
                print(f"{ranks:>5}  {way:<20} {held / MIB:>9.0f} {peak / MIB:>9.0f} {bound:>22.0f} {seconds:>8.1f}")


if __name__ == "__main__":
    main()
