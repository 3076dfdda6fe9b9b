"""What is saved after a fit that ran in processes of its own: `save_checkpoint` and `save_pretrained` said that no fit
had been, though its weights had come back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import FSDPStrategy
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.average import MovingAverage

pytestmark = pytest.mark.timeout(110)


class Net(Slope):
    """Adds to its checkpoints, and has a layer that FSDP can cut."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * batch).mean() + self.layer(batch.float().repeat(4)[:4]).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["epochs of mine"] = self.trainer.current_epoch


@pytest.mark.parametrize("in_parts", [False, True])
def test_after_a_fit_in_processes_of_its_own_its_weights_are_saved(in_parts: bool, tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "after.ckpt"
    strategy = FSDPStrategy(start_method="fork", state_dict_type="sharded") if in_parts else "ddp_fork"
    trainer = quiet(strategy=strategy, devices=2, max_epochs=1, callbacks=[MovingAverage(0.5)])
    trainer.fit(net, numbers(4))
    assert net.w.item() != 0
    with pytest.warns(UserWarning, match="writes the weights alone: .*in other processes"):
        trainer.save_checkpoint(path)
    trainer.save_checkpoint(tmp_path / "asked.ckpt", weights_only=True)
    saved = torch.load(path, weights_only=True)
    assert (saved["global_step"], saved["epochs of mine"], "optimizer_states" in saved) == (2, 1, False)
    again = Net.load_from_checkpoint(path)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in net.state_dict().items())
    with pytest.raises(MisconfigurationException, match=r"in other processes\. .* the optimizer states"):
        trainer.save_checkpoint(path, weights_only=False)


def test_before_such_a_fit_has_ended_nothing_has_come_back(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("no step here")

    trainer = quiet(strategy="ddp_fork", devices=2, max_epochs=1)
    with pytest.raises(Exception, match="no step here"):
        trainer.fit(Fails(), numbers(4))
    for save in (trainer.save_checkpoint, trainer.save_pretrained):
        with pytest.raises(MisconfigurationException, match="there are no weights to save"):
            save(tmp_path / "x")


def test_after_such_a_fit_a_model_is_saved_for_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )

    class Finetuned(Slope):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.model = transformers.LlamaForCausalLM(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            ids = batch.long()[None]
            return self.model(input_ids=ids, labels=ids).loss

    net = Finetuned()
    trainer = quiet(strategy="ddp_fork", devices=2, max_epochs=1)
    trainer.fit(net, numbers(8, batch_size=4))
    trainer.save_pretrained(tmp_path / "folder")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folder").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in net.model.state_dict().items())
