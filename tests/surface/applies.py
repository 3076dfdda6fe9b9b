"""What a script has to use for a row of the tables of differences to concern it; `lockstep migrate` reads the result.

A key is ``flag CALL(argument)``, ``flag CALL(argument=value)``, ``name X`` or ``several Trainers``:
`lockstep.extensions.lightning.migrate` looks for them.
Beside these rows stands what is to be done by hand: hooks that nobody calls today, and arguments with another name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lockstep.loop.checks import EPOCH_ENDS
from lockstep.names.table import former_methods

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "lockstep" / "extensions" / "lightning" / "differences.json"
PAGE = ROOT / "docs" / "from-lightning.md"

RANKS = ("flag Trainer(devices)", "flag Trainer(strategy)", "flag Trainer(num_nodes)", "flag Trainer(gpus)")
RESUMED = ("flag fit(ckpt_path)", "flag Trainer(resume_from_checkpoint)")
# The rows of docs/from-lightning.md by how they begin; without keys: no name of a script tells.
PROSE: dict[str, tuple[str, ...]] = {
    "samples that do not divide": RANKS,
    "a rank that has no samples": ("name self.all_gather",),
    "batches that come ready-made": ("flag DataLoader(batch_size=None)",),
    "a loader that is no `DataLoader`": (),
    "a data set that grows or shrinks": (),
    "a sampler of yours that decides": (),
    "loaders side by side": ("name CombinedLoader",),
    "the last, partial window": ("flag Trainer(accumulate_grad_batches)",),
    "a smaller last batch": ("flag Trainer(accumulate_grad_batches)",),
    "`self.log` on several ranks": ("name self.log", "name self.log_dict"),
    "`self.all_gather` of what ranks": ("name self.all_gather",),
    "an `IterableDataset`": ("name IterableDataset",),
    "data sets of different length": (),
    "a class of loader whose": (),
    "`trainer.callbacks` that a hook": (),
    "`trainer.validate`, `test`": (),
    "Ctrl-C in `fit`": ("name KeyboardInterrupt",),
    "shuffling": ("flag DataLoader(shuffle=True)",),
    "random numbers in `__getitem__`": (),
    "resume in mid-epoch": RESUMED,
    "resume with another number of processes": RESUMED,
    "resume of an `IterableDataset`": (),
    "a data set or an order that has changed": (),
    "resume with another `batch_size`": (),
    "checkpoints": ("name load_from_checkpoint", "name save_checkpoint"),
    "a loss or gradient that is NaN": (),
    "`fit()`": (),
    "a rank that fails": (),
    "ranks that wait": (),
    "a restart by the agent": (),
    "notebooks": ("flag Trainer(strategy=ddp_notebook)",),
    "`predict` under spawn": ("flag Trainer(strategy=ddp_spawn)", "flag Trainer(strategy=ddp_fork)"),
    "a parameter or buffer that comes": ("name add_param_group", "name weight_norm"),
    "gradients of ranks on one machine": (),
    "unused parameters": (
        "flag DDPStrategy(find_unused_parameters)",
        "flag Trainer(strategy=ddp_find_unused_parameters_true)",
    ),
    "buffers (BatchNorm": ("name BatchNorm1d", "name BatchNorm2d", "name BatchNorm3d"),
    "communication hooks off CUDA": ("flag DDPStrategy(ddp_comm_hook)",),
    "post-local SGD": ("name PostLocalSGDState",),
    "`shard_optimizer=True`": (),
    "a SLURM batch script": ("name SLURMEnvironment",),
    "a SLURM job that is asked": ("name SLURMEnvironment",),
    "Trainers of different sizes": ("several Trainers",),
    "SIGTERM": ("name SIGTERM",),
    "calls of the ranks": (),
    "progress bar": (),
    "hyperparameters in checkpoints": ("name self.save_hyperparameters",),
    "`nn.Embedding(max_norm": ("flag Embedding(max_norm)", "flag EmbeddingBag(max_norm)"),
    "`loss.backward()` in manual": ("name manual_backward",),
    "LBFGS": ("name LBFGS",),
    "resume with another optimizer class": (),
    "lazy layers (`nn.LazyLinear`)": ("name LazyLinear",),
    "manual optimization under `16-mixed`": ("name self.automatic_optimization",),
    "steps of a plain optimizer in manual": ("name self.automatic_optimization",),
    "a step that `16-mixed` leaves out": ("flag Trainer(precision=16-mixed)",),
    "`ModelCheckpoint(monitor=<of validation>": ("name ModelCheckpoint",),
    "`ModelCheckpoint(every_n_train_steps": ("flag ModelCheckpoint(every_n_train_steps)",),
    "an epoch with fewer batches": (),
    "`ModelCheckpoint` and `EarlyStopping` in a fit": ("flag Trainer(check_val_every_n_epoch)",),
    "one name from several loaders": ("flag log(add_dataloader_idx=False)",),
    "`BackboneFinetuning`, `ModelPruning`": ("name BackboneFinetuning", "name ModelPruning"),
    "`accumulate_grad_batches={0: 8": ("flag Trainer(accumulate_grad_batches=dict)",),
}


# By call: arguments of years ago, and what is written today.
ARGUMENTS = {
    "fit": {"train_dataloader": "train_dataloaders=", "val_dataloader": "val_dataloaders="},
    "validate": {"val_dataloaders": "dataloaders="},
    "test": {"test_dataloaders": "dataloaders="},
    "predict": {"predict_dataloaders": "dataloaders="},
    "ModelCheckpoint": {
        "period": "every_n_epochs=",
        "filepath": "dirpath=, a folder, and filename=",
        "prefix": "filename=",
    },
}


def by_hand() -> dict[str, list[str]]:
    """Sentences by key, of what is to be done by hand."""
    outputs = {
        name: f"{new}(self), with the outputs of the steps in an attribute"
        for names in EPOCH_ENDS.values()
        for name, new in names.items()
    }
    hooks = {kind: {**former_methods("module"), **outputs} for kind in ("LightningModule", "LightningDataModule")}
    found = {
        f"name {kind}.{name}": [f"{name}: nobody calls it today; instead: {instead}."]
        for kind, names in {**hooks, "Callback": former_methods("callback")}.items()
        for name, instead in names.items()
    }
    for call, arguments in ARGUMENTS.items():
        for name, today in arguments.items():
            found[f"flag {call}({name}=)"] = [f"{call}({name}=...): today {today}."]
    found["name optimizer_idx"] = [
        "optimizer_idx: with several optimizers set self.automatic_optimization = False; step them in training_step."
    ]
    found["name self.hparams="] = ["self.hparams = ...: today self.save_hyperparameters(...)."]
    found["name lockstep.__version__"] = ["__version__ is lockstep's version, not Lightning's."]
    return dict(sorted(found.items()))


def prose() -> list[list[str]]:
    """The rows of docs/from-lightning.md: what, in Lightning, in lockstep, why."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "Lightning 2.6 |" not in line]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return [row for row in rows if len(row) == 4]


def keys_of(row: dict[str, Any]) -> list[str]:
    """The keys of a row of ``rows/*.json``."""
    kind, name = row["kind"], row["name"]
    found = re.match(r"[\w.]+", name)
    first = found[0] if found else ""
    if kind == "flag":
        return [f"flag Trainer({name})"]
    if kind == "accelerator":
        return [f"flag Trainer(accelerator={name})"]
    if kind == "registry":
        return [f"flag Trainer(strategy={name})"]
    if kind == "strategy argument":
        return [f"flag {name}"]
    if kind == "attribute":
        return [f"name trainer.{name}"]
    if kind in ("module attribute", "datamodule attribute", "hook", "callback hook"):
        owner, _, method = name.partition(".")
        return [f"name {name}", *([f"name self.{method}"] if owner == "LightningModule" else [])]
    if kind == "name":
        return [f"name {name.rpartition('.')[2]}"] if "(" not in name else []
    return [f"name {first.rpartition('.')[2]}"] if kind in ("callback", "logger", "tuner", "cli") and first else []


WIDTH = 140
"""Characters of a row of what differs; the page has the rest."""


def shortened(text: str) -> str:
    """Return a text of at most `WIDTH` characters, cut at the end of a clause or of a word."""
    text = re.sub(r" ?\(?\[[^\]]*\]\([^)]*\)\)?", "", text)  # links of the page
    if len(text) <= WIDTH:
        return text
    clause = max(text.rfind(mark, WIDTH // 2, WIDTH) for mark in ("; ", ". "))
    return f"{text[:clause]}." if clause > 0 else f"{text[: text.rfind(' ', 0, WIDTH - 4)]} ..."


def differences(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Sentences by key, of what differs, and of what is refused and no import tells."""
    found: dict[str, list[str]] = {}
    for what, _, here, _ in prose():
        (begins,) = (begin for begin in PROSE if what.startswith(begin))
        for key in PROSE[begins]:
            found.setdefault(key, []).append(shortened(f"{what}: {here}."))
    for row in rows:
        refused = row["verdict"] == "refused" and row["kind"] in ("flag", "attribute", "hook", "callback hook")
        if row["verdict"] == "differs" or refused:
            name = row["name"].rpartition(".")[2] if row["kind"] == "name" else row["name"]
            if row["reason"].endswith("see from-lightning.md"):  # whose row is there already
                continue
            text = shortened(f"{name}: {'refused: ' if refused else ''}{' '.join(row['reason'].split()).rstrip('.')}.")
            for key in keys_of(row):
                if text not in found.setdefault(key, []):
                    found[key].append(text)
    return dict(sorted(found.items()))


def text(rows: list[dict[str, Any]]) -> str:
    """The file."""
    return json.dumps({"by_hand": by_hand(), "differs": differences(rows)}, indent=1, ensure_ascii=False) + "\n"
