"""States of an optimizer on the CPU: the bits of the plain optimizer, a part at a time, with hooks and counts once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.memory import offload
from lockstep.memory.offload import Copies, OffloadedStates
from lockstep.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import RankPool
from tests.equivalence.models import Plain, rows
from tests.loop.pieces import quiet

CPU = torch.device("cpu")
WIDTH = 40
ONE_WEIGHT = 4 * WIDTH * WIDTH
"""Bytes: a part holds one of the weights below, with biases."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": [*model[:2].parameters()], "weight_decay": 0.1},
        {"params": [*model[2:].parameters()], "lr": 0.003},
    ]


def give_gradients(model: nn.Module, step: int) -> None:
    """Of another weight there is none in each step."""
    model.zero_grad()
    source = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(model.parameters()):
        if number != step:
            parameter.grad = torch.randn(parameter.shape, generator=source)


class Lion(Optimizer):
    """Not torch's; it counts its steps in the group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_((mean * 0.9 + parameter.grad * 0.1).sign(), alpha=group["lr"] / group["count"])
                state["mean"] = mean * 0.99 + parameter.grad * 0.01  # another tensor in each step


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    "no states": lambda params: torch.optim.SGD(params, 0.01),
    "Adam": lambda params: torch.optim.Adam(params, 0.01, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 0.01, centered=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.01, initial_accumulator_value=0.1),
    "NAdam, each by itself": lambda params: torch.optim.NAdam(params, 0.01, foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.01),
    "Lion": lambda params: Lion(params, 0.01),
}


def trained(name: str, wrap: Callable[[Optimizer], object]) -> tuple[nn.Module, Optimizer]:
    model = net()
    optimizer = OPTIMIZERS[name](groups(model))
    wrap(optimizer)
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
    return model, optimizer


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


class Spy(Copies):
    """Writes down what is called, and which of its memory is in use."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls: list[str] = []
        self.made: list[Tensor] = []

    def host(self, like: Tensor) -> Tensor:
        self.made.append(super().host(like))
        return self.made[-1]

    def fetch(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append(f"fetch {len(hosts)}")
        return super().fetch(hosts)

    def arrive(self) -> None:
        self.calls.append("arrive")

    def put(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.calls.append(f"put {len(pairs)}")
        super().put(pairs)

    def wait(self, left: int = 0) -> None:
        self.calls.append(f"wait {left}")


@pytest.mark.everyday
@pytest.mark.parametrize("part", [1, ONE_WEIGHT, 2**30])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_has_the_bits_of_a_plain_one(name: str, part: int) -> None:
    expected, plain = trained(name, lambda optimizer: None)
    found, offloaded = trained(name, lambda optimizer: OffloadedStates(optimizer, CPU, part))
    assert all(map(torch.equal, found.parameters(), expected.parameters()))
    assert alike(offloaded.state_dict(), plain.state_dict())
    assert [[*group["params"]] for group in offloaded.param_groups] == [g["params"] for g in groups(found)]  # type: ignore[arg-type]


def test_the_next_part_comes_and_the_last_one_goes_while_one_is_updated() -> None:
    model, spy = net(), Spy()
    optimizer = torch.optim.Adam(model.parameters())
    own = optimizer.step

    def noting() -> None:
        spy.calls.append(f"update {sum(len(group['params']) for group in optimizer.param_groups)}")
        own()

    optimizer.step = noting  # type: ignore[method-assign, assignment]
    OffloadedStates(optimizer, CPU, ONE_WEIGHT + 4 * WIDTH, spy)
    give_gradients(model, -1)
    optimizer.step()
    spy.calls.clear()
    optimizer.step()
    one = ["arrive", "update 2", "put 2"]
    assert spy.calls == ["fetch 2", *["wait 1", "fetch 2", *one] * 3, *one, "wait 0"]


def test_states_are_in_the_memory_of_the_cpu_between_steps_and_it_is_used_again() -> None:
    model, spy = net(), Spy()
    optimizer = OPTIMIZERS["Lion"](model.parameters())
    OffloadedStates(optimizer, CPU, 1, spy)
    for step in range(3):
        give_gradients(model, -1)
        optimizer.step()
        large = [state["mean"] for state in optimizer.state.values() if state["mean"].numel() >= offload.SMALL]
        assert len(large) == 4
        assert all(map(torch.equal, large, spy.made)), step
        assert [value.data_ptr() for value in large] == [value.data_ptr() for value in spy.made]


def test_hooks_run_once_a_step_and_see_all_parameters() -> None:
    model, seen = net(), []
    optimizer = torch.optim.Adam(model.parameters())
    OffloadedStates(optimizer, CPU, 1)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda own, args, kwargs: seen.append(len(own.param_groups[0]["params"])))
    give_gradients(model, -1)
    optimizer.step()
    assert seen == [8, 8]


def test_a_closure_runs_once_and_its_loss_comes_back() -> None:
    model, calls = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    OffloadedStates(optimizer, CPU, 1)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        give_gradients(model, -1)
        return torch.tensor(3.0)

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert calls == [True]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_may_be_made_before_and_after(first: bool) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def schedule() -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    early = schedule() if first else None
    OffloadedStates(optimizer, CPU, 1)
    scheduler = early or schedule()
    give_gradients(model, -1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_states_are_loaded_a_part_at_a_time() -> None:
    _, plain = trained("Adam", lambda optimizer: None)
    saved = plain.state_dict()
    model, spy = net(), Spy()
    optimizer = OPTIMIZERS["Adam"](groups(model))
    own, sizes = optimizer.load_state_dict, []

    def noting(state: dict[str, Any]) -> None:
        sizes.append(len(state["state"]))
        own(state)

    optimizer.load_state_dict = noting  # type: ignore[method-assign, assignment]
    offloaded = OffloadedStates(optimizer, CPU, ONE_WEIGHT + 4 * WIDTH, spy)
    optimizer.load_state_dict(saved)
    assert sizes == [0, 2, 2, 2, 2]
    assert alike(optimizer.state_dict(), saved)
    assert len(spy.made) == 12  # weights alone
    give_gradients(model, -1)
    optimizer.step()
    offloaded.detach()
    assert optimizer.load_state_dict is noting
    assert "step" not in vars(optimizer)


def test_a_step_that_fails_leaves_the_groups_whole() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    OffloadedStates(optimizer, CPU, 1)
    give_gradients(model, -1)
    model[2].weight.grad = torch.ones(WIDTH, WIDTH).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.param_groups[0]["params"]) == 8


def test_an_optimizer_that_works_on_all_parameters_together_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS works on all parameters together"):
        OffloadedStates(torch.optim.LBFGS(net().parameters()), CPU)


# -- in a fit ------------------------------------------------------------------------------------------------


class Adam(Plain):
    """Wide enough for states that are not small; one epoch is three windows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def away(strategy: Any) -> Any:
    """Do on the CPU what is done where the run's device is another one."""

    def offload_states() -> None:
        for each in strategy._offloaded:
            each.detach()
        strategy._offloaded = [OffloadedStates(optimizer, CPU, 1) for optimizer in strategy.optimizers]

    strategy._offload_states = offload_states
    return strategy


def fitted(
    make: Callable[[], Any], precision: str, epochs: int, folder: str, resume: bool = False
) -> dict[str, Tensor]:
    trainer = quiet(
        strategy=make(),
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        max_epochs=epochs,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
    )
    trainer.seed = 5
    torch.manual_seed(1)
    module: LightningModule = Adam()
    trainer.fit(module, rows(24)(2), ckpt_path=f"{folder}/one.ckpt" if resume else None)
    if epochs == 1:
        trainer.save_checkpoint(f"{folder}/one.ckpt")
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def both_ways(kind: Callable[[], Any], precision: str, folder: str) -> bool:
    def offloading() -> Any:
        return away(kind())

    whole = fitted(kind, precision, 3, folder)
    fitted(offloading, precision, 1, folder)
    resumed = fitted(offloading, precision, 3, folder, resume=True)
    straight = fitted(offloading, precision, 3, folder)
    return all(torch.equal(value, whole[name]) for run in (resumed, straight) for name, value in run.items())


@pytest.mark.parametrize("precision", ["32-true", pytest.param("16-mixed", marks=pytest.mark.slow)])
def test_a_fit_and_its_resume_have_the_same_bits(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    assert both_ways(SingleDeviceStrategy, precision, str(tmp_path))
    assert ranks(2).run(both_ways, DDPStrategy, precision, str(tmp_path)) == [True, True]


def test_on_the_cpu_the_flag_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        quiet(strategy=SingleDeviceStrategy(offload_optimizer=True), max_steps=1).fit(Adam(), rows(24)(2))
    assert "SingleDeviceStrategy(offload_optimizer=True) has no effect: the run is on the CPU" in caplog.text


def test_what_cannot_be_is_refused() -> None:
    for strategy in (DDPStrategy, SingleDeviceStrategy):
        with pytest.raises(MisconfigurationException, match=r"\(offload_optimizer='cpu'\): give True or False"):
            strategy(offload_optimizer="cpu")
    with pytest.raises(MisconfigurationException, match=r'with offload_optimizer=True: .* strategy="fsdp_cpu_offload"'):
        DDPStrategy(shard_optimizer=True, offload_optimizer=True)


def test_cpu_offload_without_shards_is_that_of_ddp() -> None:
    """It was dropped without a word."""
    found = FSDPStrategy(sharding_strategy="NO_SHARD", cpu_offload=True).instead
    assert found is not None
    assert "offloaded optimizer" in found.saves_memory_by


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_the_bits_are_the_same_and_the_states_are_not_there() -> None:
    def steps(offloads: bool) -> tuple[list[Tensor], int, dict[str, Any]]:
        torch.manual_seed(0)
        device = torch.device("cuda")
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if offloads:
            OffloadedStates(optimizer, device, 2 * 2**22)
        x = torch.randn(64, 1024, device=device)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        if offloads:
            states = [v for s in optimizer.state.values() for v in s.values() if v.numel() >= offload.SMALL]
            assert all(value.is_pinned() for value in states)
        state = copy.deepcopy(optimizer.state_dict())
        for own in state["state"].values():
            own.update({name: value.cpu() for name, value in own.items()})
        held = torch.cuda.memory_allocated()
        return [p.detach().cpu() for p in model.parameters()], held, state

    plain, most, expected = steps(False)
    found, least, state = steps(True)
    assert all(map(torch.equal, found, plain))
    assert all(
        torch.equal(value, expected["state"][number][name])
        for number, own in state["state"].items()
        for name, value in own.items()
    )
    assert most - least > 0.9 * 2 * 16 * 4 * 2**20


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_update() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(16)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    OffloadedStates(optimizer, device, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if "Memcpy" in event.name]
    into = [event.time_range for event in events if "HtoD" in event.name]
    out = [event.time_range for event in events if "DtoH" in event.name]
    assert len(into) >= 32
    assert any(a.start < b.end and b.start < a.end for a in into for b in out)
