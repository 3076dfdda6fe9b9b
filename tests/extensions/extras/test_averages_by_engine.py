"""Each callback that averages weights, under each engine, with steps that call the module or a layer of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import strategies
from lockstep.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lockstep.ground.extensions import is_there
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.engines.called_layers import Bare, Forward, Submodule
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankFailure, RankPool

pytestmark = pytest.mark.timeout(240)


ENGINES: dict[str, tuple[Callable[[], Any], int]] = {
    "ddp": (DDPStrategy, 2),
    "ddp, sharded optimizer": (lambda: DDPStrategy(shard_optimizer=True), 2),
    "fsdp": (FSDPStrategy, 2),
    "fsdp, grad op": (lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), 2),
    "model parallel 2 x 1": (lambda: ModelParallelStrategy(2, 1), 2),
    "model parallel 1 x 2": (lambda: ModelParallelStrategy(1, 2), 2),
    "balanced": (lambda: strategies.BalancedStrategy(split="equal"), 2),
    "balanced in one process": (lambda: strategies.BalancedStrategy(split="equal", one_process=True), 1),
    **({"dp": (lambda: "dp", 1)} if is_there("parallel") else {}),
    "deepspeed 1": (lambda: strategies.DeepSpeedStrategy(stage=1), 2),
    "deepspeed 2": (lambda: strategies.DeepSpeedStrategy(stage=2), 2),
    "deepspeed 3": (lambda: strategies.DeepSpeedStrategy(stage=3), 2),
}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "mean": WeightAveraging,
    "function": partial(WeightAveraging, avg_fn=lambda average, new, count: 0.9 * average + 0.1 * new),
    "ema": partial(EMAWeightAveraging, decay=0.9, update_starting_at_epoch=1),
    "ema on the CPU": partial(EMAWeightAveraging, device="cpu", decay=0.5, update_every_n_steps=2),
    "swa": partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1),
}
MODULES = [Submodule, Forward, Bare]
REFUSED = {("deepspeed 3", name): "changes parameters" for name in CALLBACKS} | {
    ("balanced", name): "each rank of a pipeline" for name in CALLBACKS if name != "swa"
}
OWNERS = {"deepspeed": "deepspeed", "balanced": "balancing"}
PAIRS = [
    pytest.param(engine, callback, marks=[pytest.mark.extension(own) for word, own in OWNERS.items() if word in engine])
    for engine in ENGINES
    for callback in CALLBACKS
]
EVERY_DAY = {
    ("fsdp", "ema"): [Submodule, Bare],
    ("model parallel 2 x 1", "function"): [Forward],
    ("fsdp, grad op", "swa"): [Bare],
}
"""Each kind of module under some engine."""


def played(engine: str, callback: str, kind: type[Submodule]) -> tuple[list[float], dict[str, Tensor]]:
    """What was validated and what hooks saw, and the weights that a fit leaves."""
    make, world = ENGINES.get(engine, (lambda: "auto", 1))
    devices = 2 if engine == "dp" or engine.startswith("balanced") else world
    precision: Any = "32-true" if engine.startswith("deepspeed") else "64-true"
    callbacks = [CALLBACKS[callback]()]
    flags: dict[str, Any] = {"strategy": make(), "devices": devices, "precision": precision}
    trainer = quiet(**flags, max_epochs=3, num_sanity_val_steps=2, callbacks=callbacks)
    trainer.seed = 5
    torch.manual_seed(1)
    module = kind()
    module.looks = not engine.startswith("balanced")
    shared = trainer.strategy.replicas.count if world == 1 or "1 x 2" in engine or engine == "balanced" else world
    trainer.fit(module, rows(12)(4 // shared), rows(12)(4 // shared))
    whole = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return [float(trainer.callback_metrics["val"]), module.looked], whole


def all_played(engine: str, callback: str, kinds: list[type[Submodule]]) -> list[Any]:
    found: list[Any] = []
    for kind in kinds:
        try:
            found.append(played(engine, callback, kind))
        except MisconfigurationException as error:
            found.append(str(error))
    return found


def check(ranks: RankPool, engine: str, callback: str, kinds: list[type[Submodule]]) -> None:
    (expected,) = ranks(1).run(all_played, "auto", callback, kinds, group=False)
    world = ENGINES[engine][1]
    near = 1e-5 if engine.startswith("deepspeed") else 1e-10
    for parts in ranks(world).run(all_played, engine, callback, kinds, timeout=200, group=world > 1):
        for kind, found, right in zip(kinds, parts, expected, strict=True):
            if (engine, callback) in REFUSED:
                assert REFUSED[engine, callback] in found, kind
                continue
            assert not isinstance(found, str), found
            seen, weights = found
            assert seen[0] == pytest.approx(right[0][0], rel=near), kind
            if not engine.startswith("balanced"):
                assert seen[1] == pytest.approx(right[0][1], rel=near), kind
            for name, value in weights.items():
                torch.testing.assert_close(value.double(), right[1][name].double(), rtol=near, atol=near, msg=name)


@pytest.mark.parametrize(("engine", "callback"), EVERY_DAY)
def test_an_average_is_that_of_one_process_however_steps_call_layers(
    ranks: RankPool, engine: str, callback: str
) -> None:
    """Under FSDP it died behind the first validation, which left whole parameters where it looked for shards."""
    check(ranks, engine, callback, EVERY_DAY[engine, callback])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "callback"), PAIRS)
def test_each_average_under_each_engine(ranks: RankPool, engine: str, callback: str) -> None:
    if engine.startswith("deepspeed") and find_spec("deepspeed") is None:
        pytest.skip("needs the package deepspeed")
    check(ranks, engine, callback, MODULES)


def averaged_on_a_pipeline() -> None:
    from tests.extensions.balancing.pipeline.test_balanced_contract import trained

    trained({"split": "equal"}, [EMAWeightAveraging(decay=0.9)])


@pytest.mark.extension("balancing")
def test_an_average_of_weights_on_the_ranks_of_a_pipeline_is_refused(ranks: RankPool) -> None:
    """Without validation it left NaN in the module and in each checkpoint, and said nothing."""
    with pytest.raises(RankFailure, match=r"EMAWeightAveraging: each rank of a pipeline has only .*one_process=True"):
        ranks(2).run(averaged_on_a_pipeline, timeout=40)
