"""What a script has to use for a row of the tables of differences to concern it; `lockstep migrate` reads the result.

A key is ``flag CALL(argument)``, ``flag CALL(argument=value)``, ``name X`` or ``several Trainers``:
`lockstep.extensions.lightning.migrate` looks for them.
The file also lists what a user changes by hand: hooks that are no longer called, and arguments with another name.
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
BEHAVIOUR: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("behaviour.json").read_text())
"""Differences in behaviour: "common" ones, the most frequent first, for docs/from-lightning.md; "others" for
docs/lightning.md. An entry without keys cannot be found in a script by a name."""

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
        f"name {kind}.{name}": [f"{name}: no longer called; use {instead}."]
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
    for entry in [*BEHAVIOUR["common"], *BEHAVIOUR["others"]]:
        for key in entry["keys"]:
            found.setdefault(key, []).append(shortened(f"{entry['what']}: {entry['here']}"))
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
