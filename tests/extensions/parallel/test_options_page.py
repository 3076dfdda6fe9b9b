"""The code blocks of Lightning's page on DDP optimizations, with the import changed, on two CPU processes.

Four GPUs become two processes, and the iterations at which PowerSGD and local steps start are lowered, so that both
really run.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from tests.engines.messages import ByStep, counted
from tests.tools.fresh import PYTHONPATH, python
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(120)

START, PERIOD, STEPS = 3, 4, 12

BLOCKS = {
    "static graph": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy

        trainer = Trainer(devices=4, strategy=DDPStrategy(static_graph=True))
    """,
    "gradients as bucket view": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy

        model = MyModel()
        trainer = Trainer(accelerator="gpu", devices=4, strategy=DDPStrategy(gradient_as_bucket_view=True))
        trainer.fit(model)
    """,
    "fp16": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default

        model = MyModel()
        trainer = Trainer(accelerator="gpu", devices=4, strategy=DDPStrategy(ddp_comm_hook=default.fp16_compress_hook))
        trainer.fit(model)
    """,
    "PowerSGD": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD

        model = MyModel()
        trainer = Trainer(
            accelerator="gpu",
            devices=4,
            strategy=DDPStrategy(
                ddp_comm_state=powerSGD.PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=1,
                    start_powerSGD_iter=5000,
                ),
                ddp_comm_hook=powerSGD.powerSGD_hook,
            ),
        )
        trainer.fit(model)
    """,
    "PowerSGD in 16 bits": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy
        from torch.distributed.algorithms.ddp_comm_hooks import (
            default_hooks as default,
            powerSGD_hook as powerSGD,
        )

        model = MyModel()
        trainer = Trainer(
            accelerator="gpu",
            devices=4,
            strategy=DDPStrategy(
                ddp_comm_state=powerSGD.PowerSGDState(
                    process_group=None,
                    matrix_approximation_rank=1,
                    start_powerSGD_iter=5000,
                ),
                ddp_comm_hook=powerSGD.powerSGD_hook,
                ddp_comm_wrapper=default.fp16_compress_wrapper,
            ),
        )
        trainer.fit(model)
    """,
    "post-local SGD": """
        from lightning.pytorch import Trainer
        from lightning.pytorch.strategies import DDPStrategy
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD

        model = MyModel()
        trainer = Trainer(
            accelerator="gpu",
            devices=4,
            strategy=DDPStrategy(
                ddp_comm_state=post_localSGD.PostLocalSGDState(
                    process_group=None,
                    subgroup=None,
                    start_localSGD_iter=8,
                ),
                ddp_comm_hook=post_localSGD.post_localSGD_hook,
                model_averaging_period=4,
            ),
        )
        trainer.fit(model)
    """,
}
CHANGES = {
    "lightning.pytorch": "lockstep",
    'accelerator="gpu", ': 'accelerator="cpu", ',
    'accelerator="gpu",\n': 'accelerator="cpu",\n',
    "devices=4": "devices=2",
    "start_powerSGD_iter=5000": f"start_powerSGD_iter={START}",
    "start_localSGD_iter=8": f"start_localSGD_iter={START}",
}


def ours(name: str) -> str:
    """The block as a script of lockstep's."""
    block = textwrap.dedent(BLOCKS[name])
    for old, new in CHANGES.items():
        block = block.replace(old, new)
    if "trainer.fit" not in block:  # the first block shows the Trainer only
        block = block.replace("devices=2", 'accelerator="cpu", devices=2') + "model = MyModel()\ntrainer.fit(model)\n"
    assert "lightning" not in block
    assert "gpu" not in block
    return block


class MyModel(LightningModule):
    """A small regression, which ends after an epoch of `STEPS` steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        return (self.net(x).squeeze(1) - x.sum(1)).square().mean()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        x = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)


def shown(name: str, apart: bool = False) -> tuple[list[list[str]], list[Tensor], Any]:
    """Run a block in a rank: what each step sent, the weights at the end, what the hook's state says.

    Args:
        name: of the block.
        apart: each rank is a node by itself, as the launcher's variables tell.
    """
    if apart:
        node = os.environ["RANK"]
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=node, GROUP_WORLD_SIZE="2")
    script = ours(name).replace("devices=2", "devices=1, num_nodes=2" if apart else "devices=2")
    with counted() as calls:
        by_step = ByStep(calls)

        class Counting(MyModel):
            def configure_callbacks(self) -> Any:
                return [by_step]

        variables: dict[str, Any] = {"MyModel": Counting}
        exec(compile(script, name, "exec"), variables)
    assert variables["trainer"].world_size == 2
    weights = [parameter.detach() for parameter in variables["model"].parameters()]
    hook = variables["trainer"].strategy._hook
    said = None if hook is None else {what: getattr(hook.state, what, None) for what in ("iter", "subgroup")}
    return by_step.steps, weights, said


def numbers(steps: list[list[str]]) -> list[int]:
    return [len(step) for step in steps]


def alike(ranks: list[Any]) -> bool:
    (_, zero, _), (_, one, _) = ranks
    return all(torch.equal(mine, theirs) for mine, theirs in zip(zero, one, strict=True))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for the logs and checkpoints that a Trainer writes by default


@pytest.mark.parametrize("name", ["static graph", "gradients as bucket view"])
def test_without_a_hook_steps_on_one_host_send_nothing(ranks: RankPool, name: str) -> None:
    """Gradients are summed in shared memory; the first step agrees on the layout, and a static graph on its record."""
    found = ranks(2).run(shown, name, timeout=60)
    assert alike(found)
    for steps, _, _ in found:
        assert len(steps) == STEPS
        assert numbers(steps)[2:] == [0] * (STEPS - 2)


def test_compression_to_16_bits_keeps_one_message_a_step(ranks: RankPool) -> None:
    """Besides the bucket, the marks of used parameters, which a hook must not see."""
    found = ranks(2).run(shown, "fp16", timeout=60)
    assert alike(found)
    for steps, _, _ in found:
        assert steps[1:] == [["all_reduce"] * 2] * (STEPS - 1)


@pytest.mark.parametrize("name", ["PowerSGD", "PowerSGD in 16 bits"])
def test_power_sgd_really_runs(ranks: RankPool, name: str) -> None:
    """From its start on, three messages a bucket: P, Q and the vectors, which it does not compress; and the marks."""
    found = ranks(2).run(shown, name, timeout=60)
    assert alike(found)
    for steps, _, state in found:
        assert numbers(steps)[1:START] == [2] * (START - 1)
        assert numbers(steps)[START:] == [4] * (STEPS - START)
        assert state["iter"] == STEPS


def test_local_steps_on_one_node_average_gradients_on_it(ranks: RankPool) -> None:
    found = ranks(2).run(shown, "post-local SGD", timeout=60)
    assert alike(found)
    for steps, _, state in found:
        averaged = [step % PERIOD == START % PERIOD and step >= START for step in range(STEPS)]
        assert numbers(steps)[1:] == [2 + average for average in averaged][1:]
        assert state == {"iter": START, "subgroup": None}  # what was lent is taken back


def test_local_steps_on_two_nodes_send_one_average_a_period(ranks: RankPool) -> None:
    found = ranks(2).run(shown, "post-local SGD", True, timeout=60)
    assert alike(found)
    for steps, _, _ in found:
        assert numbers(steps)[1:START] == [2] * (START - 1)  # the bucket and the marks
        averaged = [(step - START) % PERIOD == 0 for step in range(START, STEPS)]
        assert steps[START:] == [["all_reduce"] if average else [] for average in averaged]
        assert sum(averaged) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_is_a_script(name: str, tmp_path: Path) -> None:
    """As a user runs it: ``python script.py``, which starts the second process itself."""
    (tmp_path / "script.py").write_text(
        f"from tests.extensions.parallel.test_options_page import MyModel\n{ours(name)}"
    )
    done = python("script.py", folder=tmp_path, PYTHONPATH=PYTHONPATH)
    assert done.returncode == 0, done.stderr
    assert "trainer.fit ended" in done.stderr
