"""Parts of Lightning that a program tries by themselves: edited checkpoints, callbacks of the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.tools.extensions import owner

if TYPE_CHECKING:
    from tests.differential.play import Player
    from tests.differential.program import Program


def edit(call: str, path: str) -> None:
    """What a user does with a checkpoint: loads it, changes it, saves it."""
    if call not in ("resume edited", "resume rewritten"):
        return
    held = torch.load(path, weights_only=False)
    if call == "resume edited":
        for state in held.get("optimizer_states", []):
            for group in state["param_groups"]:
                group["lr"] = 0.011
        held["state_dict"] = {name: value * 0.5 for name, value in held["state_dict"].items()}
        held["mine"] = {"note": "edited"}
        held.pop("hyper_parameters", None)
    torch.save(held, path)


def writer(player: Player, interval: str) -> Any:
    """A callback of the user's that writes predictions."""
    base: Any = player.part("callbacks").BasePredictionWriter

    class Writer(base):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
            names = ("prediction", "batch_indices", "batch", "batch_idx", "dataloader_idx")
            player.note("writer.write_on_batch_end", dict(zip(names, given, strict=True)))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            player.note("writer.write_on_epoch_end", {"predictions": predictions, "batch_indices": batch_indices})

    return Writer(interval)


def extensions_of(program: Program) -> list[str]:
    """The extensions of lockstep whose callbacks a program has."""
    names = {f"callbacks.{kind}" for kind, _ in program.callbacks}
    return sorted({found for name in names if (found := owner(name))})
