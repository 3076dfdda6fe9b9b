"""The example of a fine-tune: the same losses and folder under every strategy; killed, and resumed elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator.left_out import strategies
from tests.checkpoint.adapted import needs_peft
from tests.loop.pieces import quiet
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "finetune.py"
OF_BALANCING = pytest.mark.extension("balancing")
SMALL = ("--steps=6", "--every=3", "--layers=2", "--width=16", "--block=16", "--batch-size=4")
MEDIUM = ("--steps=20", "--every=10")
WORLDS = {"auto": 1, "2-d": 4}
"""Ranks, where they are not two."""

Run = tuple[list[str], dict[str, Tensor], str]


@pytest.fixture(autouse=True)
def packages() -> None:
    needs_peft()


def outcome(ranks: RankPool, folder: Path, strategy: str, *words: str, world: int = 0) -> tuple[int, str, str]:
    world = world or WORLDS.get(strategy, 2)
    own = [f"--strategy={strategy}", f"--devices={world}", f"--folder={folder}", *words]
    run = run_script(ranks, SCRIPT, *own, folder=folder.parent, world=world, launched=world > 1, timeout=200)[0]
    return run.returncode, run.stdout, run.stderr


def done(ranks: RankPool, folder: Path, strategy: str, *words: str, world: int = 0) -> Run:
    """Losses, the folder's tensors by name, and what the model has written."""
    code, out, error = outcome(ranks, folder, strategy, *words, world=world)
    assert code == 0, error
    return re.findall(r"^step .*", out, re.MULTILINE), tensors_in(folder), out.splitlines()[-1].partition(": ")[2]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    (tuned,) = folder.glob("*-tuned")
    return {name: each for path in tuned.glob("*.safetensors") for name, each in load_file(path).items()}


def check_same(one: Run, other: Run) -> None:
    """Losses to 5 digits, folders with the same tensors of the same values (to what float32 leaves of sums)."""
    losses = [[re.sub(r"(\.\d{4})\d+", r"\1", line) for line in run[0]] for run in (one, other)]
    assert losses[0]
    assert losses[0] == losses[1]
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert torch.allclose(other[1][name], value, rtol=1e-3, atol=2e-4), name
    assert one[2] == other[2]


Alone = Callable[..., Run]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The run of one process with these words, which is made once."""
    made: dict[tuple[str, ...], Run] = {}

    def run(*words: str) -> Run:
        if words not in made:
            made[words] = done(ranks, tmp_path_factory.mktemp("alone") / "run", "auto", *words)
        return made[words]

    return run


@pytest.mark.parametrize(
    ("strategy", "words"), [pytest.param("balanced", ["--lora"], marks=OF_BALANCING), ("fsdp", ["--model=bert"])]
)
def test_two_ranks_tune_as_one(ranks: RankPool, tmp_path: Path, alone: Alone, strategy: str, words: list[str]) -> None:
    check_same(alone(*SMALL, *words), done(ranks, tmp_path / "run", strategy, *SMALL, *words))


@pytest.mark.slow
def test_padded_texts_are_weighed_by_tokens(ranks: RankPool, tmp_path: Path, alone: Alone) -> None:
    """Batches of 4, two batches of 2 a step, and two ranks with batches of 2: losses and folders are the same."""
    words = [*SMALL, "--padded"]
    for strategy, more in (("auto", ["--accumulate=2"]), ("ddp", [])):
        check_same(alone(*words), done(ranks, tmp_path / strategy, strategy, *words, *more))


def tuned(folder: str, kind: str, world: int, batch_size: int, accumulate: int, plain: bool) -> dict[str, Tensor]:
    """What a fit in float64 makes of the example's model on padded texts."""
    from examples.finetune import FineTune

    class Plain(FineTune):
        """With the loss alone, a mean over the batch's targets."""

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    kept = (Plain if plain else FineTune)(folder, kind, False, 1e-2, batch_size, 16, True)
    trainer = quiet(
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        accumulate_grad_batches=accumulate,
        max_steps=4,
        precision="64-true",
        limit_val_batches=2,
        val_check_interval=4 * accumulate,
    )
    trainer.seed = 3
    trainer.fit(kept)
    found = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return {**found, "val_loss": trainer.callback_metrics["val_loss"].double()}


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_padded_texts_train_the_same_weights_in_float64(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    from examples.finetune import write_base

    write_base(tmp_path, kind, 1, 8, 16)
    folder = str(tmp_path)
    expected = tuned(folder, kind, 1, 4, 1, plain=False)
    for found in (tuned(folder, kind, 1, 2, 2, plain=False), *ranks(2).run(tuned, folder, kind, 2, 2, 1, False)):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"val_loss"}:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)
    other = tuned(folder, kind, 1, 2, 2, plain=True)
    assert max(float((other[name] - expected[name]).abs().max()) for name in expected) > 1e-4


def killed(
    ranks: RankPool, tmp_path: Path, whole: Run, one: tuple[str, int], other: tuple[str, int], *words: str
) -> None:
    """A run with an adapter that is killed and goes on elsewhere becomes what it would have been."""
    step = 4 if words == SMALL else 14
    code, out, error = outcome(ranks, tmp_path / "x", one[0], *words, "--lora", f"--kill-at={step}", world=one[1])
    assert code != 0
    assert "step 3" in out or "step 10" in out, error
    assert not list((tmp_path / "x").glob("*-tuned"))
    # the checkpoint was written before the validation of its step, which is made again
    check_same(whole, done(ranks, tmp_path / "x", other[0], *words, "--lora", world=other[1]))


def test_killed_and_resumed_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path, alone: Alone) -> None:
    killed(ranks, tmp_path, alone(*SMALL, "--lora"), ("ddp", 2), ("auto", 1), *SMALL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("fsdp", 2), ("ddp", 4)),
        pytest.param(("balanced", 2), ("2-d", 4), marks=OF_BALANCING),
        pytest.param(("2-d", 4), ("balanced", 2), marks=OF_BALANCING),
    ],
)
def test_killed_and_resumed_under_another_strategy(
    ranks: RankPool, tmp_path: Path, alone: Alone, one: tuple[str, int], other: tuple[str, int]
) -> None:
    killed(ranks, tmp_path, alone(*MEDIUM, "--lora"), one, other, *MEDIUM)


STRATEGIES = strategies("ddp", "fsdp", "2-d", "balanced", *(["deepspeed_stage_3"] if find_spec("deepspeed") else []))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", [[], ["--lora"], ["--model=bert"], ["--model=bert", "--lora"]], ids=str)
def test_every_strategy_tunes_as_one_process(ranks: RankPool, tmp_path: Path, alone: Alone, words: list[str]) -> None:
    for strategy in STRATEGIES:
        check_same(alone(*MEDIUM, *words), done(ranks, tmp_path / strategy, strategy, *MEDIUM, *words))
