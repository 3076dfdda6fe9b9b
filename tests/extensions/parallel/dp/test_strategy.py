"""strategy="dp": the numbers of one device with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.cluster.world import World
from lockstep.extensions.parallel.dp.strategy import DataParallelStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.equivalence import check_equivalence
from tests.loop.pieces import Slope, numbers, quiet

torchmetrics = pytest.importorskip("torchmetrics")


class Net(LightningModule):
    """Logs in every way; a metric that all parts share."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.rows: list[int] = []

    def _loss(self, batch: Any, name: str) -> Any:
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        loss = nn.functional.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True)
        self.log(f"{name}_rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="max")
        self.log_dict({f"{name}_first": x[:, 0].mean()}, on_step=False, on_epoch=True, batch_size=len(x))
        self.log(f"{name}_acc", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self._loss(batch, "train"), "seen": batch[1]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(len(outputs.get("seen", ())))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch, "val")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), [str(int(label)) for label in batch[1]]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def data(batch_size: int = 7) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(25, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (25,), generator=generator)), batch_size, shuffle=True)


def fitted(**flags: Any) -> tuple[Any, ...]:
    torch.manual_seed(5)
    module = Net()
    trainer = quiet(max_epochs=2, precision="64-true", **flags)
    trainer.fit(module, data(), data())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return trainer, module, metrics, trainer.predict(module, data())


@pytest.mark.parametrize("devices", [2, 3])
def test_dp_gives_the_numbers_of_one_device(devices: int) -> None:
    _, alone, expected, outputs = fitted(devices=1)
    trainer, module, found, parts = fitted(strategy="dp", devices=devices)
    assert trainer.world_size == 1
    assert len(trainer.device_ids) == devices
    for rows in ("train_rows", "val_rows"):  # a part has fewer rows than the batch
        assert (expected.pop(rows), found.pop(rows)) == (7.0, float(-(-7 // devices)))
    assert found == pytest.approx(expected, rel=1e-12)
    assert module.rows == alone.rows == [7, 7, 7, 4] * 2
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), parameter, rtol=1e-12, atol=1e-14)
    for (logits, labels), (whole, all_labels) in zip(parts, outputs, strict=True):
        torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-14)
        assert labels == all_labels
    assert "log" not in module.__dict__
    assert isinstance(module.accuracy, torchmetrics.Metric)


@pytest.mark.parametrize("flags", [{}, {"accumulate": 3}, {"gradient_clip_val": 0.05}, {"devices": 3}], ids=str)
def test_dp_is_equivalent_to_one_process(flags: dict[str, Any]) -> None:
    class Plain(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    report = check_equivalence(Plain, data, strategy="dp", **{"devices": 2, "batch_size": 7, **flags})
    assert report, report


def test_dp_in_16_bit_mixed_precision_works() -> None:
    """In 2019 these excluded each other."""
    seen: list[torch.dtype] = []

    class Half(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.net(batch[0].float()).dtype)
            return super().training_step((batch[0].float(), batch[1]), batch_idx)

    trainer = quiet(strategy="dp", devices=2, precision="bf16-mixed", max_epochs=1)
    trainer.fit(Half(), data())
    assert seen == [torch.bfloat16] * 8
    assert trainer.callback_metrics["train_loss"].isfinite()


def test_own_weights_are_summed_over_the_parts() -> None:
    class Tokens(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (self.w * batch).sum() / batch.sum(), "weight": batch.sum()}

    module = Tokens()
    quiet(strategy="dp", devices=2, max_epochs=1).fit(module, numbers(6, batch_size=3))
    assert module.gradients == pytest.approx([1.0, 1.0])


def test_a_reduction_is_that_of_one_device_whatever_it_is_called() -> None:
    """By a function, in capitals or by its place, parts were averaged."""

    class Reduces(Slope):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("sum", batch.sum(), reduce_fx=torch.sum)
            self.log("most", batch.max(), reduce_fx="MAX")
            self.log("least", batch.min(), False, True, False, True, "min")

    found, expected = (
        quiet(**flags).validate(Reduces(), numbers(8, batch_size=4)) for flags in ({"strategy": "dp", "devices": 2}, {})
    )
    assert found == expected


def test_what_one_process_cannot_do_is_refused() -> None:
    class Manual(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(MisconfigurationException, match=r'"dp".*automatic_optimization = False.*Use strategy="ddp"'):
        quiet(strategy="dp", devices=2).fit(Manual(), numbers(2))
    strategy = DataParallelStrategy()
    strategy.collectives.world = World(
        rank=0, size=2, local_rank=0, local_size=1, node_rank=0, num_nodes=2, address="", port=0
    )
    with pytest.raises(MisconfigurationException, match=r"num_nodes=2.*one node"):
        strategy.setup_environment()


def test_an_error_in_a_part_names_its_line() -> None:
    class Fails(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch.min() > 1:
                raise LookupError("in the second part")
            return super().training_step(batch, batch_idx)

    with pytest.raises(LookupError, match="in the second part"):
        quiet(strategy="dp", devices=2, max_epochs=1).fit(Fails(), numbers(2, batch_size=2))
