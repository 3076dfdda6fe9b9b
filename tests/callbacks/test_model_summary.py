"""ModelSummary: the table of layers, and the callback that shows it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from lockstep.callbacks.layer_table import ModelSummary, readable_count, summarize
from lockstep.callbacks.model_summary import ModelSummary as SummaryCallback
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.fake_trainer import FakeTrainer


class Net(nn.Module):
    """Two levels, a parameter of its own, a frozen layer, a layer that does not run."""

    example_input_array: object = None

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2).requires_grad_(False)
        self.unused = nn.Identity()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        torch.rand(1)
        return self.head(self.body(x)) * times


def test_rows_and_totals() -> None:
    table = ModelSummary(Net())
    assert table.layer_names == ["body", "head", "unused"]
    assert table.layer_types == ["Sequential", "Linear", "Identity"]
    assert table.param_nums == [56, 18, 0]
    assert (table.total_parameters, table.trainable_parameters, table.leftover_parameters) == (77, 59, 3)
    assert table.model_size == pytest.approx(77 * 4 / 1e6)
    assert table.total_training_modes == {"train": 6, "eval": 0}
    assert ModelSummary(Net().double()).model_size == pytest.approx(77 * 8 / 1e6)


def test_the_printed_table() -> None:
    net = Net()
    net.head.eval()
    net.example_input_array = torch.zeros(5, 4)
    assert str(summarize(net)).splitlines() == [
        "  | Name         | Type       | Params | Mode  | In sizes | Out sizes",
        "---------------------------------------------------------------------",
        "0 | body         | Sequential | 56     | train | [5, 4]   | [5, 8]",
        "1 | head         | Linear     | 18     | eval  | [5, 8]   | [5, 2]",
        "2 | unused       | Identity   | 0      | train | ?        | ?",
        "  | other params | n/a        | 3      | n/a   | n/a      | n/a",
        "---------------------------------------------------------------------",
        "59        Trainable params",
        "18        Non-trainable params",
        "77        Total params",
        "0.000     Total estimated model params size (MB)",
        "5         Modules in train mode",
        "1         Modules in eval mode",
    ]


@pytest.mark.parametrize(("depth", "rows"), [(0, 0), (1, 3), (2, 6), (-1, 6)])
def test_depth(depth: int, rows: int) -> None:
    assert len(ModelSummary(Net(), max_depth=depth).layers) == rows


@pytest.mark.parametrize("example", [torch.zeros(5, 4), (torch.zeros(5, 4), 2), {"x": torch.zeros(5, 4)}])
def test_the_example_leaves_no_trace(example: object) -> None:
    net = Net()
    net.head.eval()
    net.example_input_array = example
    before, generator = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    table = ModelSummary(net, max_depth=-1)
    assert table.out_sizes == [[5, 8], [5, 8], [5, 8], [5, 8], [5, 2], "?"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert not net.head.training
    assert not any(module._forward_hooks for module in net.modules())


def test_an_example_that_fails_leaves_no_trace_either() -> None:
    net = Net()
    net.example_input_array = torch.zeros(5, 3)
    with pytest.raises(RuntimeError, match="shapes"):
        ModelSummary(net)
    assert net.training
    assert not any(module._forward_hooks for module in net.modules())


def test_the_example_takes_the_type_of_the_model() -> None:
    net = Net().double()
    net.example_input_array = torch.zeros(5, 4)
    assert ModelSummary(net).out_sizes[0] == [5, 8]


def test_shared_weights_count_once_in_the_total() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    table = ModelSummary(net)
    assert (table.param_nums, table.total_parameters, table.leftover_parameters) == ([12, 12], 15, 0)


def test_lazy_parameters_count_zero_and_say_so() -> None:
    with pytest.warns(UserWarning, match="lazy parameters"):
        assert ModelSummary(nn.Sequential(nn.LazyLinear(3))).total_parameters == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 K"), (61_706, "61.7 K"), (999_999, "999 K"), (2 * 10**9, "2.0 B")],
)
def test_readable_counts(number: int, text: str) -> None:
    assert readable_count(number) == text


@pytest.mark.parametrize("depth", [-2, 1.5])
def test_wrong_depth(depth: int) -> None:
    with pytest.raises(MisconfigurationException, match="max_depth"):
        SummaryCallback(max_depth=depth)


@pytest.mark.parametrize(("depth", "rank", "shown"), [(1, 0, 1), (1, 1, 0), (0, 0, 0)])
def test_shown_once_on_rank_zero(depth: int, rank: int, shown: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lockstep"):
        FakeTrainer([SummaryCallback(depth)], max_epochs=2, global_rank=rank).fit(Net())
    assert sum("Trainable params" in message for message in caplog.messages) == shown
