"""Fits with communication hooks and local steps: late parameters, resumes, other ranks, memory, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.extensions.parallel.hooks import PostLocalSGDState, PowerSGDState, post_local_sgd, power_sgd
from lockstep.ground.errors import MisconfigurationException
from lockstep.memory.meter import MemoryUse
from lockstep.strategies import DDPStrategy
from tests.engines.test_late_parameters import Grow, Grows, fit
from tests.loop import test_elastic, test_memory
from tests.loop.pieces import Slope, numbers, quiet
from tests.precision import test_complex
from tests.tools.pool import RankFailure, RankPool

pytestmark = pytest.mark.timeout(90)


def local(**options: Any) -> dict[str, Any]:
    state = PostLocalSGDState(start=1, local_allreduce=False)
    return {"ddp_comm_state": state, "ddp_comm_hook": post_local_sgd, "model_averaging_period": 2, **options}


@pytest.mark.parametrize("outer", [None, {}])
def test_local_steps_average_what_was_unfrozen(ranks: RankPool, outer: dict[str, Any] | None) -> None:
    def values() -> Any:
        module = fit(Grows, local(outer_optimizer=outer), [Grow("thawed", "on_train_batch_start", 2)], max_steps=7)
        assert module.frozen.weight.requires_grad
        return [parameter.detach().clone() for parameter in module.parameters()]

    for one, other in zip(*ranks(2).run(values), strict=True):
        assert torch.equal(one, other)


def resumed_when_over(path: Path) -> list[tuple[float, float]]:
    """The weights of a fit of local steps that has ended, and of a resume that finds nothing left to train."""
    found = []
    for resume in (None, path):
        module = Slope(lr=0.1)
        trainer = quiet(strategy=DDPStrategy(**local(model_averaging_period=4)), devices=2, max_epochs=1)
        trainer.fit(module, numbers(14), ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(path)
        found.append((module.w.item(), trainer.global_step))
    return found


def test_a_fit_of_local_steps_that_was_over_leaves_the_mean_again(ranks: RankPool, tmp_path: Path) -> None:
    """Killed after its last checkpoint and run again, each rank was left with weights of its own."""
    first, second = ranks(2).run(resumed_when_over, tmp_path / "over.ckpt")
    assert first == second
    assert first[0] == first[1]


def test_errors_that_are_fed_back_go_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    make, flags = test_elastic.Rows(59, 4), {"max_epochs": 2, "module": test_elastic.Adam}
    expected = test_elastic.life(make, {**flags, "accumulate_grad_batches": 3})
    state = PowerSGDState(rank=2, start=0, min_compression_rate=0)
    hooked = {**flags, "strategy": DDPStrategy(ddp_comm_hook=power_sgd, ddp_comm_state=state)}
    cut = test_elastic.Cut(2, tmp_path / "hooked.ckpt")
    first = test_elastic.play(ranks, 3, make, hooked, None, cut)
    test_elastic.compare([first, test_elastic.play(ranks, 2, make, hooked, cut.path)], expected, 59, 0.1)


def remembered() -> MemoryUse:
    state = PowerSGDState(1, start=2)
    trainer = quiet(strategy=DDPStrategy(ddp_comm_hook=power_sgd, ddp_comm_state=state), devices=2, max_steps=4)
    trainer.fit(test_memory.Plain(), test_memory.rows(32)(4))
    return trainer.memory()


def test_what_a_communication_hook_remembers_counts(ranks: RankPool) -> None:
    """PowerSGD keeps its error, as large as the gradients of matrices."""
    for used in ranks(2).run(remembered):
        assert used.hook_state >= 4 * (131 * 6 + 131 * 57)


# -- refused ---------------------------------------------------------------------------------------------------


def test_sharded_optimizers_and_local_steps_are_refused_together() -> None:
    with pytest.raises(MisconfigurationException, match="local steps"):
        DDPStrategy(shard_optimizer=True, **local())


def unbalanced() -> str:
    with pytest.raises(MisconfigurationException, match="local steps") as raised:
        quiet(strategy=DDPStrategy(**local()), devices=2, max_epochs=1, balance=True).fit(Slope(), numbers(8))
    return str(raised.value)


@pytest.mark.extension("balancing")
def test_ranks_that_take_local_steps_cannot_be_balanced(ranks: RankPool) -> None:
    for told in ranks(2).run(unbalanced):
        assert "DDPStrategy cannot give its ranks unequal shares of a global batch, since it takes local" in told
        assert "remove `balance`" in told


def real_hook(state: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().real)
    return future


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_hook_that_drops_imaginary_parts_is_refused(ranks: RankPool) -> None:
    """Real numbers in the place of complex gradients were taken, and their imaginary parts were zero from then on."""

    def train() -> None:
        trainer = quiet(strategy=DDPStrategy(ddp_comm_hook=real_hook), devices=2, max_steps=1, precision="64-true")
        trainer.fit(test_complex.Waves(), test_complex.rows(4))

    with pytest.raises(RankFailure, match=r"real_hook contains a tensor of \d+ elements \(torch.float64"):
        ranks(2).run(train)
