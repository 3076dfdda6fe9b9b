"""ModelSummary: the table of layers, and the callback that shows it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.callbacks.layer_table import ModelSummary, summarize
from lockstep.callbacks.model_summary import ModelSummary as SummaryCallback
from lockstep.callbacks.model_summary import RichModelSummary
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.callbacks.progress.tqdm import TQDMProgressBar
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


def test_the_printed_table() -> None:
    net = Net()
    net.head.eval()
    net.example_input_array = torch.zeros(5, 4)
    assert str(summarize(net)).splitlines() == [
        "  | Name         | Type       | Params | Mode  | FLOPs | In sizes | Out sizes",
        "-----------------------------------------------------------------------------",
        "0 | body         | Sequential | 56     | train | 320   | [5, 4]   | [5, 8]",
        "1 | head         | Linear     | 18     | eval  | 160   | [5, 8]   | [5, 2]",
        "2 | unused       | Identity   | 0      | train | 0     | ?        | ?",
        "  | other params | n/a        | 3      | n/a   | n/a   | n/a      | n/a",
        "-----------------------------------------------------------------------------",
        "59        Trainable params",
        "18        Non-trainable params",
        "77        Total params",
        "0.000     Total estimated model params size (MB)",
        "5         Modules in train mode",
        "1         Modules in eval mode",
        "480       Total FLOPs",
    ]


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


def test_shared_weights_count_once_in_the_total() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    table = ModelSummary(net)
    assert (table.param_nums, table.total_parameters, table.leftover_parameters) == ([12, 12], 15, 0)


# -- beside Lightning --------------------------------------------------------------------------------------


def module_of(library: Any) -> Any:
    class Model(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 16))
            self.rnn = nn.LSTM(16, 8, batch_first=True)
            self.head = nn.Linear(8, 2).requires_grad_(False)
            self.unused = nn.Dropout()
            self.example_input_array = torch.zeros(5, 1, 8, 8)
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.rnn(self.net(x).unsqueeze(1))
            return self.head(out[:, -1]) * self.scale

    return Model()


ATTRIBUTES = """
    layer_names layer_types param_nums in_sizes out_sizes training_modes total_training_modes total_parameters
    trainable_parameters total_layer_params model_size total_flops flop_counts _get_summary_data
"""


@pytest.mark.parametrize("depth", [0, 1, 2, -1])
@pytest.mark.parametrize("example", [True, False])
def test_the_summary_has_what_lightnings_has(depth: int, example: bool, lightning: Any) -> None:
    from lightning.pytorch.utilities.model_summary import summarize as theirs

    models = [module_of(lockstep), module_of(lightning)]
    for model in models:
        model.head.eval()
        if not example:
            model.example_input_array = None
    ours, other = summarize(models[0], max_depth=depth), theirs(models[1], max_depth=depth)
    for name in ATTRIBUTES.split():
        mine, expected = getattr(ours, name), getattr(other, name)
        if name == "_get_summary_data":
            # Lightning's "other params" are wrong where layers are nested, or none is shown
            count = len(ours.layer_names)
            mine, expected = ([(h, [c.strip() for c in cells[:count]]) for h, cells in t()] for t in (mine, expected))
        assert mine == (pytest.approx(expected) if name == "model_size" else expected), name
    assert [name for name, _ in ours.named_modules] == ours.layer_names


# -- the callbacks -----------------------------------------------------------------------------------------


def test_a_summary_of_ones_own() -> None:
    """The arguments that an override for Lightning takes."""
    given: list[Any] = []

    class Own(SummaryCallback):
        @staticmethod
        def summarize(
            summary_data: Any,
            total_parameters: int,
            trainable_parameters: int,
            model_size: float,
            total_training_modes: Any,
            total_flops: int,
            **kwargs: Any,
        ) -> None:
            given.append((dict(summary_data)["Name"], total_parameters, trainable_parameters, total_flops, kwargs))

    net = Net()
    net.example_input_array = torch.zeros(5, 4)
    FakeTrainer([Own(colour="red")]).fit(net)
    assert given == [(["body", "head", "unused", "other params"], 77, 59, 480, {"colour": "red"})]


def test_rich_draws_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = pytest.importorskip("rich")
    screen = io.StringIO()
    console = rich.console.Console(file=screen, width=100)
    monkeypatch.setattr(rich, "_console", console)
    net = Net()
    net.example_input_array = torch.zeros(5, 4)
    FakeTrainer([RichModelSummary(max_depth=2, header_style="bold")]).fit(net)
    lines = screen.getvalue().splitlines()
    (row,) = [line for line in lines if "body.0" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "1", "body.0", "Linear", "40", "train", "320", "[5, 4]", "[5, 8]",
    ]  # fmt: skip
    assert any(line.split() == ["Non-trainable", "params", "18"] for line in lines)
    assert any(line.split() == ["Total", "FLOPs", "480"] for line in lines)


@pytest.mark.parametrize(("bar", "kind"), [(RichProgressBar, RichModelSummary), (TQDMProgressBar, SummaryCallback)])
def test_the_summary_is_drawn_as_the_bars_are(bar: type, kind: type, tmp_path: Path) -> None:
    trainer = lockstep.Trainer(callbacks=bar(), logger=False, accelerator="cpu", default_root_dir=tmp_path)
    assert [type(callback) for callback in trainer.callbacks if isinstance(callback, SummaryCallback)] == [kind]
