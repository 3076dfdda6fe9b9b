"""What a container goes through beside training steps: buffers, module hooks, copies, moves, groups, compilers."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils.data import DataLoader

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.extensions.parallel.nets import batch_of, expected, is_right, make_net
from tests.tools.pool import RankPool

# -- buffers


def _seen_buffers(keep: str) -> list[list[float]]:
    """What a buffer that each rank changes in its forward is before the next one."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.seen: list[float] = []
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(float(self.count))
            self.count = self.count + dist.get_rank() + 1  # another tensor in its place
            return super().forward(x)

    net = Counting()
    model = DistributedDataParallel(net, forward_sync_buffers=keep != "off")
    if keep == "hook":

        def mean(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
            return [dist.all_reduce(b.div_(2), async_op=True).get_future() for b in buffers.values()]

        model._register_buffer_comm_hook(None, mean, _BufferCommHookLocation.POST_FORWARD)
    x = torch.ones(1, 1)
    model(x).sum().backward()
    with model.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    net.register_buffer("later", torch.full((2,), float(dist.get_rank())))
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
        model(x)
    return [net.seen, net.later.tolist()]


@pytest.mark.parametrize(
    ("keep", "first", "second"),
    [
        # rank 0's before each forward that follows a synchronised one
        ("on", [[0, 1, 2, 3, 4, 5], [0, 0]], [[0, 1, 3, 3, 4, 6], [0, 0]]),
        ("off", [[0, 1, 2, 3, 4, 5], [0, 0]], [[0, 2, 4, 6, 8, 10], [1, 1]]),
        ("hook", None, None),
    ],
)
def test_buffers_are_rank_zeros_before_a_forward(ranks: RankPool, keep: str, first: Any, second: Any) -> None:
    mine, other = ranks(2).run(_seen_buffers, keep)
    if keep == "hook":
        # the mean after each forward but the one that follows the unsynchronised one, and the last
        assert mine == [[0, 1.5, 3, 4, 6, 7.5], [0.5, 0.5]]
        assert other == [[0, 1.5, 3, 5, 6, 7.5], [0.5, 0.5]]
    else:
        assert mine == first
        assert other == second


def _two_forwards_before_a_backward() -> bool:
    """BatchNorm saves its statistics for the backward, and the second forward gets rank 0's before."""
    net = make_net(norm=True)
    net[1].eval()  # saves the buffers themselves
    model = DistributedDataParallel(net)
    one = model(batch_of(0, 0)).square().mean()
    (one + model(batch_of(1, 0)).square().mean()).backward()
    return net[0].weight.grad is not None


def test_buffers_that_a_backward_needs_may_be_taken_before_it(ranks: RankPool) -> None:
    assert all(ranks(2).run(_two_forwards_before_a_backward))


# -- hooks of modules


def _module_hooks() -> list[list[str]]:
    net = make_net()
    heard: list[str] = []
    net.register_forward_pre_hook(lambda *_: heard.append("root before"))
    net.register_forward_hook(lambda *_: heard.append("root after"))
    net[0].register_forward_hook(lambda *_: heard.append("layer after"))
    net[0].register_full_backward_hook(lambda *_: heard.append("layer backward"))
    net.register_full_backward_hook(lambda *_: heard.append("root backward"))
    model = DistributedDataParallel(net)
    model.register_forward_hook(lambda *_: heard.append("container after"))
    right = is_right(model)
    return [heard, [str(right)]]


def test_hooks_of_the_module_and_its_parts_run(ranks: RankPool) -> None:
    for heard, right in ranks(2).run(_module_hooks):
        assert right == ["True"]
        assert heard[:4] == ["root before", "layer after", "root after", "container after"]
        assert sorted(heard[4:]) == ["layer backward", "root backward"]


# -- copies


def _copies(how: str) -> list[bool]:
    model = DistributedDataParallel(
        make_net(), bucket_cap_mb=0.0002, device_ids=["cpu"], static_graph=how == "deepcopy"
    )
    own = is_right(model)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(model)
    found = [own, is_right(other), is_right(other, 1), is_right(model, 1)]
    with torch.no_grad():
        model.module[0].weight.zero_()
    found.append(bool(other.module[0].weight.abs().sum()))
    return [*found, other.reducer.rounds == 2, other.device_ids == model.device_ids]


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_copies_train_on_their_own(ranks: RankPool, how: str) -> None:
    for found in ranks(2).run(_copies, how):
        assert all(found)


def _copy_on_one_rank() -> bool:
    model = DistributedDataParallel(make_net())
    if dist.get_rank() == 0:  # an average of weights, kept by one rank only
        kept = copy.deepcopy(model)
        with torch.no_grad():
            kept(torch.ones(1, 4, dtype=torch.float64))
    return is_right(model)


def test_a_copy_needs_no_other_rank(ranks: RankPool) -> None:
    """It made its reducer, which needs all ranks, at its first forward even where that had no gradients."""
    assert all(ranks(2).run(_copy_on_one_rank))


def _of_another_group() -> str:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(make_net(), process_group=group)
    assert copy.deepcopy(model).process_group is group
    with pytest.raises(RuntimeError) as raised:
        pickle.dumps(model)
    return str(raised.value)


def test_pickling_over_another_group_than_the_default_is_refused(ranks: RankPool) -> None:
    for said in ranks(2).run(_of_another_group):
        assert "can be pickled only if it uses the default process group" in said


# -- groups, moves, modes


def _halves() -> tuple[bool, int]:
    """Two groups of two ranks train each for itself."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    net = make_net()
    model = DistributedDataParallel(net, process_group=groups[rank // 2])
    model(batch_of(0, rank)).square().mean().backward()
    alone = make_net()
    for other in (rank // 2 * 2, rank // 2 * 2 + 1):
        (alone(batch_of(0, other)).square().mean() / 2).backward()
    right = torch.allclose(net[0].weight.grad, alone[0].weight.grad, rtol=1e-12)  # type: ignore[arg-type]
    return right, model.reducer.rounds


def test_groups_of_some_ranks_train_each_for_itself(ranks: RankPool) -> None:
    assert ranks(4).run(_halves) == [(True, 1)] * 4


def _moved() -> list[bool]:
    model = DistributedDataParallel(make_net().float())
    model(batch_of(0, 0).float()).sum().backward()
    model.zero_grad()
    model.double()
    with torch.no_grad():
        for mine, right in zip(model.parameters(), make_net().parameters(), strict=True):
            mine.copy_(right)
    found = [is_right(model), is_right(model, 1)]
    assert model.eval() is model
    assert not model.module[0].training
    assert model.train().module[0].training
    return found


def test_a_container_can_be_cast_and_changes_mode(ranks: RankPool) -> None:
    assert ranks(2).run(_moved) == [[True, True]] * 2


def _static_later() -> list[bool]:
    late = DistributedDataParallel(make_net())
    late._set_static_graph()
    return [is_right(late), is_right(late, 1), is_right(late, 2)]


def test_a_static_graph_can_be_promised_later(ranks: RankPool) -> None:
    for found in ranks(2).run(_static_later):
        assert all(found)


def _own_backend(address: str) -> list[bool]:
    """Gloo under another name, which nothing knows."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("own", make, devices=["cpu"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("own", init_method=address, rank=rank, world_size=2)
    model = DistributedDataParallel(make_net(), shared_memory=False)
    return [dist.get_backend() == "own", is_right(model), is_right(model, 1)]


def test_another_backend_than_gloo_and_nccl(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(_own_backend, f"file://{tmp_path}/meet", group=False) == [[True] * 3] * 2


# -- autograd.grad on one rank only


def _grad_on_one_rank() -> bool:
    model = DistributedDataParallel(make_net(), forward_sync_buffers=False)
    if dist.get_rank() == 0:
        x = batch_of(5, 0).requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(model(x).sum(), x)
            several = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert found.shape == x.shape
        assert len(several) == 4
    return is_right(model)


def test_autograd_grad_on_one_rank_hangs_nobody(ranks: RankPool) -> None:
    assert all(ranks(2).run(_grad_on_one_rank))


def _with_func() -> list[bool]:
    """torch.func over the container on one rank, and steps before and after."""
    model = DistributedDataParallel(make_net())
    before = is_right(model)
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = batch_of(0, 0)
    loss = lambda weights: torch.func.functional_call(model, weights, (x,)).square().mean()  # noqa: E731
    found = torch.func.grad(loss)(own)
    alone = make_net()
    alone(x).square().mean().backward()
    same = [torch.allclose(found[f"module.{name}"], p.grad) for name, p in alone.named_parameters()]  # type: ignore
    return [before, all(same), model.reducer.rounds == 1, is_right(model, 1)]


def test_torch_func_differentiates_the_container(ranks: RankPool) -> None:
    """Its gradients go to the caller; the container looked for the parameters' places in a graph that has none."""
    assert ranks(2).run(_with_func) == [[True] * 4] * 2


# -- gradients that hooks change, or give other memory


def _with_hooks(how: str) -> list[bool]:
    """Hooks on the parameters, put there when the model is wrapped already, double each gradient."""
    net, alone = make_net(), make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001)

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if how == "data":
            parameter.grad.data = parameter.grad.data * 2
        elif how == "another":
            parameter.grad = parameter.grad * 2
        else:
            parameter.grad.mul_(2)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    found = []
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        model(batch_of(step, dist.get_rank())).square().mean().backward()
        for rank in range(2):
            alone(batch_of(step, rank)).square().mean().backward()  # twice the half
        pairs = zip(net.parameters(), alone.parameters(), strict=True)
        found.append(all(torch.allclose(p.grad, q.grad, rtol=1e-12) for p, q in pairs))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("how", ["in place", "another", "data"])
def test_hooks_that_were_put_on_parameters_after_wrapping_change_gradients_before_they_travel(
    ranks: RankPool, how: str
) -> None:
    """They ran behind the reducer's, while buckets were under way: gradients were doubled, or not, or half of one."""
    assert ranks(2).run(_with_hooks, how) == [[True] * 3] * 2


def _with_other_memory(big: bool, held: bool, settings: dict[str, Any]) -> list[str]:
    """Gradients of three steps after each of which ``p.grad.data`` is another tensor: where they are not right."""
    torch.manual_seed(2)
    width = 2048 if big else 5  # gradients of 4096 elements and more take another way into the buckets
    alone = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
    wrong = []
    for zero in ("to None", "in place", "never"):
        alone.zero_grad()
        net = copy.deepcopy(alone)
        model = DistributedDataParallel(net, **settings)
        for step in range(3):
            for each in (model, alone):
                if zero != "never":
                    each.zero_grad(set_to_none=zero == "to None")
            model(batch_of(step, dist.get_rank())).square().mean().backward()
            for rank in range(2):
                (alone(batch_of(step, rank)).square().mean() / 2).backward()
            old = []
            for (name, p), q in zip(net.named_parameters(), alone.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                if (p.grad - q.grad).abs().max() > 1e-12 * q.grad.abs().max():
                    wrong.append(f"{name} in step {step}, zero_grad {zero}")
                old.append(p.grad.data if held else None)
                for grad in (p.grad, q.grad):
                    grad.data = grad.data * 0.5
    return wrong


@pytest.mark.everyday
@pytest.mark.parametrize("held", [False, True], ids=["", "the old memory is kept"])
@pytest.mark.parametrize("big", [False, True], ids=["small", "big"])
def test_gradients_whose_data_was_replaced_are_averaged_in_the_next_step(
    ranks: RankPool, big: bool, held: bool
) -> None:
    """``.grad`` was a view that no longer lay in its bucket: each rank went on with gradients of its own."""
    for settings in ({}, {"shared_memory": False}) if held else ({}, {"static_graph": True}):
        assert ranks(2).run(_with_other_memory, big, held, settings) == [[], []]


# -- loader workers


def _with_workers() -> list[bool]:
    model = DistributedDataParallel(make_net())
    data = [batch_of(step, dist.get_rank()) for step in range(4)]
    found = []
    for _ in range(2):
        for step, batch in enumerate(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")):
            model.zero_grad()
            model(batch).square().mean().backward()
            grad, right = model.module[0].weight.grad, expected(step)[0]
            found.append(bool((grad - right).abs().max() <= 1e-12 * right.abs().max()))
    return found


def test_forked_loader_workers(ranks: RankPool) -> None:
    assert ranks(2).run(_with_workers) == [[True] * 8] * 2


# -- compilers


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _compiled(how: str) -> tuple[bool, list[str], bool]:
    torch.manual_seed(0)
    net = type(f"Blocks_{how.replace(' ', '_')}", (Blocks,), {})().double()  # a model is told of once
    alone = copy.deepcopy(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped: Any = net
        if how == "blocks":
            for block in net.blocks:
                block.compile(backend="eager")
        elif how == "module":
            wrapped = torch.compile(net, backend="eager")
        elif how == "in place":
            net.compile(backend="eager")
        model: Any = DistributedDataParallel(wrapped, bucket_cap_mb=0.0001)
        container = model
        if how == "container":
            model.compile(backend="eager")
        elif how == "around":
            model = torch.compile(model, backend="eager")
        right = True
        for step in range(3):
            net.zero_grad()
            model(batch_of(step, dist.get_rank())).square().mean().backward()
            alone.zero_grad()
            for rank in range(2):
                (alone(batch_of(step, rank)).square().mean() / 2).backward()
            for mine, other in zip(net.parameters(), alone.parameters(), strict=True):
                right = right and torch.allclose(mine.grad, other.grad, rtol=1e-12)  # type: ignore[arg-type]
    told = [str(warning.message) for warning in caught if "compiled as a whole" in str(warning.message)]
    assert container.reducer.rounds == 3
    return right, told, container.reducer._overlap


@pytest.mark.everyday(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "how",
    [
        "blocks",
        "module",
        pytest.param("in place", marks=pytest.mark.slow),
        pytest.param("container", marks=pytest.mark.slow),
        "around",
    ],
)
def test_compiled_models(ranks: RankPool, how: str) -> None:
    for rank, (right, told, overlap) in enumerate(ranks(2).run(_compiled, how, timeout=150)):
        assert right
        assert overlap
        assert rank or len(told) == (how != "blocks")


# -- the end


def _dropped() -> list[int]:
    net = make_net()
    loss = DistributedDataParallel(net)(batch_of(0, dist.get_rank())).square().mean()
    kept = len(net[0].weight._post_accumulate_grad_hooks)
    loss.backward()  # the outputs keep their container until here
    right = [torch.allclose(p.grad, g, rtol=1e-12) for p, g in zip(net.parameters(), expected(0), strict=True)]
    del loss
    return [kept > 0, all(right), len(net[0].weight._post_accumulate_grad_hooks)]


def test_a_container_that_nobody_uses_lets_go_of_the_model(ranks: RankPool) -> None:
    assert ranks(2).run(_dropped) == [[True, True, 0]] * 2


def _wrapped_again() -> list[bool]:
    net = make_net()
    found = []
    for _ in range(2):
        model = DistributedDataParallel(net)
        found += [is_right(model, 0), is_right(model, 1)]
    other = DistributedDataParallel(net)  # beside the last one
    return [*found, is_right(other), is_right(model), is_right(other, 2)]


def test_a_model_can_be_wrapped_again(ranks: RankPool) -> None:
    for found in ranks(2).run(_wrapped_again):
        assert all(found)
