"""DeepSpeed against one process: the same numbers by stages 1 to 3, its settings, and what is refused."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engines.table import make_strategy
from lockstep.extensions.deepspeed import config as settings
from lockstep.extensions.deepspeed import package
from lockstep.extensions.deepspeed.strategy import DeepSpeedStrategy
from lockstep.ground import extensions
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.optimizers import CombinedOptimizer
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Plain, Weighted, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]

WAYS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2 offload": {"stage": 2, "offload_optimizer": True},
    "3 offload": {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    "3 recomputed": {"stage": 3, "activation_checkpointing": {nn.Sequential}},
}
OFFLOADS = [way for way in WAYS if way != "3 recomputed"]


class Deep(Plain):
    """A buffer that forwards change, a frozen parameter, a tied one, and sizes that no world divides."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def losses(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        inner = self.net[:4](x)
        inner = inner + self.again(self.tied(inner).tanh()) * self.frozen
        losses: Tensor = (self.net[4](inner).squeeze(1) - 3 * x[:, 0]).square()
        return losses

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for n, p in self.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if not n.endswith("weight")], "lr": 0.05},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def equivalent(how: str, kind: Any = Deep, length: int = 23, **flags: Any) -> EquivalenceReport:
    strategy = DeepSpeedStrategy(**WAYS[how])
    flags = {"precision": "32-true", "tolerance": 1e-6, "steps": 4, **flags}
    return check_equivalence(kind, rows(length), strategy=strategy, **flags)


class Branches(Plain):
    """Rank 1 takes another of two layers alike in the second window."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def losses(self, x: Tensor) -> Tensor:
        other = self.training and self.trainer.global_step == 1 and self.global_rank == 1
        losses: Tensor = self.branches[int(other)](x).sum(1).square()
        return losses


def branches(stage: int) -> tuple[str, int]:
    trainer = quiet(strategy=DeepSpeedStrategy(stage=stage), devices=2, max_steps=4)
    with pytest.raises(MisconfigurationException) as raised:
        trainer.fit(Branches(), rows(24)(3))
    return str(raised.value), trainer.global_step


@pytest.mark.parametrize("stage", [1, 2])  # in stage 3 the ranks' calls do not match, which a supervisor names
def test_gradients_of_different_parameters_are_not_added_up(ranks: RankPool, stage: int) -> None:
    """They were, silently, where the parameters had the same sizes."""
    for said, steps in ranks(2).run(branches, stage, timeout=60):
        assert re.search(r"rank 1 has 'branches\.1\.\w+' where rank 0 has 'branches\.0\.\w+'", said), said
        assert steps == 1


@pytest.mark.everyday(3)
@pytest.mark.parametrize("how", OFFLOADS)
def test_two_ranks_train_as_one_process_does(ranks: RankPool, how: str) -> None:
    """With windows that are cut short, shares that are uneven or empty, groups, and clipping."""
    flags = {"accumulate": 3, "gradient_clip_val": 0.5}
    for report in ranks(2).run(partial(equivalent, how, devices=2, **flags), timeout=200):
        assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", OFFLOADS)
def test_any_ranks_train_as_one_process_does(
    ranks: RankPool, how: str, accumulate: int, clip: float | None, world: int
) -> None:
    flags = {"accumulate": accumulate, "gradient_clip_val": clip, "devices": world}
    for report in ranks(world).run(partial(equivalent, how, **flags), timeout=400):
        assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("how", OFFLOADS)
def test_weights_that_training_steps_return_are_divided_out(ranks: RankPool, how: str) -> None:
    flags = {"devices": 2, "accumulate": 2, "gradient_clip_val": 0.5}
    for report in ranks(2).run(partial(equivalent, how, Weighted, **flags), timeout=300):
        assert report, report


@pytest.mark.slow
@pytest.mark.parametrize("how", ["1", "2", "3"])
def test_bfloat16_trains_within_its_rounding(ranks: RankPool, how: str) -> None:
    flags = {"precision": "bf16-mixed", "tolerance": 0.06, "devices": 2}
    for report in ranks(2).run(partial(equivalent, how, **flags), timeout=300):
        assert report, report


class Elsewhere(torch.optim.SGD):
    """Of a package that is not torch: its step may be given a closure, and does not need one."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class SteppedElsewhere(Plain):
    def configure_optimizers(self) -> Any:
        return Elsewhere(self.parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_that_may_have_a_closure_gets_none(ranks: RankPool) -> None:
    """DeepSpeedCPUAdam and others that are not torch's were refused for the closure that the loop had given them."""
    for report in ranks(2).run(partial(equivalent, "2", SteppedElsewhere, devices=2), timeout=200):
        assert report, report


class Recomputed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))

    def losses(self, x: Tensor) -> Tensor:
        inner = self.net[:4](x)
        for block in self.blocks:
            inner = inner + block(inner)
        losses: Tensor = (self.net[4](inner).squeeze(1) - 3 * x[:, 0]).square()
        return losses


def test_stage_3_computes_layers_again(ranks: RankPool) -> None:
    """A linear layer kept other tensors in the forward than in the backward's, which torch refused."""
    for report in ranks(2).run(partial(equivalent, "3 recomputed", Recomputed, devices=2), timeout=200):
        assert report, report


class Looked(Deep):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.losses(batch[0]).mean(), on_epoch=True)


def looked_at(strategy: str) -> list[float]:
    """A fit with evaluations in its middle, one after it, another fit of the same module, and one with its weights."""
    torch.manual_seed(5)
    module, found = Looked(), []
    flags: dict[str, Any] = {"strategy": strategy, "devices": 2, "max_epochs": 2, "val_check_interval": 2}
    trainer = quiet(**flags)
    trainer.fit(module, rows(16)(2), rows(9, shuffle=False)(2))
    found.append(float(trainer.callback_metrics["val"]))
    found.append(trainer.validate(module, rows(9, shuffle=False)(2), verbose=False)[0]["val"])
    again = quiet(**flags)
    again.fit(module, rows(16)(2), rows(9, shuffle=False)(2))
    found.append(float(again.callback_metrics["val"]))
    found += [value.double().sum().item() for _, value, _ in again.strategy.whole_parameters()]
    return found


@pytest.mark.everyday(1)
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3"])
def test_a_module_is_evaluated_and_trained_again(ranks: RankPool, strategy: str) -> None:
    expected = ranks(2).run(looked_at, "ddp")
    found = ranks(2).run(looked_at, strategy, timeout=200)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert mine[0] == pytest.approx(mine[1], rel=1e-5)


# -- names, and one owner for each setting -------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in extensions.strategies() if name.startswith("deepspeed")])
def test_every_name_of_deepspeed_makes_it(name: str) -> None:
    strategy = make_strategy(name, 2)
    assert isinstance(strategy, DeepSpeedStrategy)
    zero = strategy._config["zero_optimization"]
    assert zero["stage"] == next((int(part) for part in name.split("_") if part.isdigit()), 2)
    devices = {key: zero.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")}
    place = "nvme" if "nvme" in name else "cpu" if "offload" in name else None
    assert devices == {"offload_optimizer": place, "offload_param": place if "3" in name else None}


def errors(cases: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> list[str]:
    """What fits of these modules, with these arguments of the strategy and flags, end with."""
    found = []
    for kind, arguments, flags in cases:
        try:
            quiet(strategy=DeepSpeedStrategy(**arguments), max_steps=1, **flags).fit(kind(), rows(8)(4))
        except MisconfigurationException as error:
            found.append(str(error))
        else:
            found.append("no error")
    return found


def test_arguments_that_cannot_be_are_named(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{stage: 2")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"stage": 4}, r"stage=4.*choose 1 .* 2 .* 3 "),
        ({"stge": 2}, r"stge=2.*has no argument .*Did you mean stage\?"),
        ({"config": str(tmp_path / "none.json")}, r"none.json.*cannot be read"),
        ({"config": str(tmp_path / "no.json")}, r"no.json.*is not JSON"),
        ({"config": [1]}, "pass a dict"),
        ({"stage": 3, "config": {"zero_optimization": {"stage": 2}}}, r'stage=3.*"zero_optimization": {"stage": 2}'),
        ({"reduce_bucket_size": 2.5}, "pass an integer"),
        ({"offload_optimizer_device": "disk", "offload_optimizer": True}, r'choose "cpu" or "nvme"'),
        ({"zero_optimization": False}, r'strategy="ddp"'),
    ]
    for arguments, message in cases:
        with pytest.raises(MisconfigurationException, match=message):
            DeepSpeedStrategy(**arguments)


AT_ODDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 2}, {}, r'"gradient_accumulation_steps": 2.*accumulate_grad_batches=1'),
    ({"gradient_clipping": 2.0}, {"gradient_clip_val": 1.0}, r'"gradient_clipping": 2.0.*gradient_clip_val=1.0'),
    ({"bf16": {"enabled": True}}, {}, r'"bf16": {"enabled": true}.*precision="32-true".*"bf16-true"'),
    ({"zero_optimisation": {}}, {}, r'no such key: did you mean "zero_optimization"\?'),
    ({"zero_optimization": {"reduce_bucket": 1}}, {}, r'did you mean "reduce_bucket_size"\?'),
    ({"scheduler": {"type": "WarmupLR"}}, {}, "configure_optimizers"),
    ({"optimizer": {"type": "Adam"}}, {}, r'"type": "Adam".*returns SGD'),
    ({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}, {}, r'"momentum": 0.5.*SGD\(momentum=0.9\)'),
    ({"train_batch_size": 8}, {}, r'"train_batch_size": 8.*batch_size=4, which makes 4'),
    ({}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "only by the norm of the whole gradient"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        {},
        "nvme_path=None: this is not a folder",
    ),
    ({}, {"precision": "16-mixed"}, r'Use Trainer\(precision="bf16-mixed"\)'),
    ({}, {"precision": "64-true"}, "float32"),
]


def test_a_config_that_says_otherwise_is_refused_with_both_places(ranks: RankPool) -> None:
    cases = [(Plain, {"config": config}, flags) for config, flags, _ in AT_ODDS]
    (found,) = ranks(1).run(errors, cases, timeout=200)
    for text, (_, _, message) in zip(found, AT_ODDS, strict=True):
        assert re.search(message, text), text


def test_the_lock_of_a_build_that_was_killed_is_removed(tmp_path: Path) -> None:
    """A later build waited for it for ever; a build that runs holds it open."""
    lock = tmp_path / "lock"
    with lock.open("w"):
        assert not package.remove_stale_lock(tmp_path)
    assert package.remove_stale_lock(tmp_path)
    assert not lock.exists()
    assert not package.remove_stale_lock(tmp_path)


def test_a_build_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MisconfigurationException, match=r"'cpu_adam', but found no C\+\+ compiler"):
        package.check_compiler("cpu_adam")


def test_numbers_like_2e8_are_whole_and_arguments_fill_the_config() -> None:
    config = settings.merge(
        {"stage": 3, "offload_optimizer": True}, settings.read({"zero_optimization": {"reduce_bucket_size": 2e8}})
    )
    assert config["zero_optimization"] == {
        "reduce_bucket_size": 200_000_000,
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
    }
    assert json.dumps(config)


class Clips(Plain):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class LineSearch(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Matrices(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])


class Combines(Plain):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return CombinedOptimizer(torch.optim.Adam([first]), torch.optim.AdamW(others))


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Thaws(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.requires_grad_(True)


class Wide(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.double()


REFUSED = [
    (Clips, "overrides `configure_gradient_clipping`"),
    (LineSearch, "DeepSpeedStrategy does not support LBFGS"),
    (Matrices, "DeepSpeedStrategy does not support Muon, which needs full matrices: DeepSpeed splits"),
    (Combines, "Combines.configure_optimizers returned a CombinedOptimizer"),
    (Manual, "automatic_optimization=False"),
    (Wide, "is torch.float64"),
    (Thaws, "parameter 'net.0.weight' would not be trained"),
]


def test_what_the_engine_cannot_do_is_refused_by_name(ranks: RankPool) -> None:
    (found,) = ranks(1).run(errors, [(kind, {}, {}) for kind, _ in REFUSED], timeout=200)
    for text, (_, message) in zip(found, REFUSED, strict=True):
        assert message in text
