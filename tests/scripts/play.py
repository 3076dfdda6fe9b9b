"""Plays the scripts of this folder under lockstep, or under Lightning with the import changed, and notes what happens.

``python -m tests.scripts.play`` writes ``golden/*.json`` from the installed Lightning 2.6.6.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.callbacks.side_by_side import recorder
from tests.golden.recorder import CALLBACK_HOOKS, MODULE_HOOKS, WORKING_HOOKS

FOLDER = Path(__file__).parent
GOLDEN = FOLDER / "golden"
SCRIPTS = ["autoencoder", "gan", "transfer_learning", "several_loaders", "prediction_writer"]
STEPS = ["training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"]
SHOWN = ("batch_idx", "dataloader_idx", "stage")


def play(package: str, script: str, folder: Path) -> dict[str, Any]:
    """Run a script's ``main``.

    Args:
        package: ``"lockstep"`` or ``"lightning.pytorch"``; the script's imports are changed to it.
        script: name of a file of this folder.
        folder: where the script may write.

    Returns:
        "hooks": each call of a hook, of a callback's or one that the script's module defines, in order; "metrics":
        what a logger was given, with its step; "returned": what ``main`` returned.
    """
    library = importlib.import_module(package)
    source = (FOLDER / f"{script}.py").read_text().replace("import lockstep as", f"import {package} as")
    names: dict[str, Any] = {"__name__": f"scripts.{script}"}
    exec(compile(source.replace("from lockstep.", f"from {package}."), f"{script}.py", "exec"), names)
    hooks: list[str] = []
    for value in list(names.values()):
        if (
            inspect.isclass(value)
            and issubclass(value, library.LightningModule)
            and value.__module__ == names["__name__"]
        ):
            for name in {*MODULE_HOOKS, *WORKING_HOOKS, *STEPS} & {*value.__dict__}:
                setattr(value, name, _noted(value.__dict__[name], "module", hooks))
    noting = {name: _noted(getattr(library.Callback, name), "callback", hooks) for name in CALLBACK_HOOKS}
    callback = type("Notes", (library.Callback,), noting)()
    logger = recorder(SimpleNamespace(Logger=importlib.import_module(f"{package}.loggers").Logger))
    flags: dict[str, Any] = {"logger": logger, "callbacks": [callback], "enable_checkpointing": False}
    flags |= {"enable_progress_bar": False, "enable_model_summary": False}
    if package == "lockstep":
        flags["order"] = "torch"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in float32, kinds of processors differ in the fifth digit
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            returned = names["main"](folder, **flags)
    finally:
        torch.set_default_dtype(default)
    metrics = [
        {**{name: float(value) for name, value in sent.items()}, "logged at": step or 0} for step, sent in logger.sent
    ]
    return {"hooks": hooks, "metrics": metrics, "returned": returned}


def _noted(original: Callable[..., Any], owner: str, lines: list[str]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        shown = [f"{name}={getattr(given[name], 'value', given[name])}" for name in SHOWN if name in given]
        lines.append(" ".join([f"{owner}.{original.__name__}", *shown]))
        return original(*args, **kwargs)

    call.__name__ = original.__name__
    call.__signature__ = signature  # type: ignore[attr-defined]  # a trainer may look at what a hook takes
    return call


def main() -> None:
    """Write the golden files."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    GOLDEN.mkdir(exist_ok=True)
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            played = play("lightning.pytorch", script, Path(folder))
        (GOLDEN / f"{script}.json").write_text(json.dumps(played, indent=0) + "\n")
        print(f"{script}: {len(played['hooks'])} hooks, {len(played['metrics'])} lines of metrics")


if __name__ == "__main__":
    main()
