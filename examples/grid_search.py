"""A grid search on SLURM: nine trials, learning rate and width of a small network on handwritten digits.

    python examples/grid_search.py --log_path /shared/searches           # a folder that all nodes see
    python examples/grid_search.py --log_path searches --local           # without SLURM: on this machine
    lockstep trials /shared/searches                                     # how they stand, and the best one

The script submits itself, once for each trial. A trial that is preempted, or whose time is up, is saved, goes back into
the queue, and goes on from there.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lockstep import HyperOptArgumentParser, LightningModule, SlurmCluster, Trainer, seed_everything


class Network(LightningModule):
    """Two linear layers on 1,797 images of 8 x 8 pixels, of which every fifth is held out."""

    def __init__(self, layers: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(64, layers), nn.ReLU(), nn.Linear(layers, 10))
        images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        images = images.float() / 16
        held_out = torch.arange(len(labels)) % 5 == 0
        self.train_set = TensorDataset(images[~held_out], labels[~held_out])
        self.val_set = TensorDataset(images[held_out], labels[held_out])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log_dict({"val_loss": cross_entropy(logits, labels), "val_accuracy": accuracy}, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=64)


def main(hparams: Any) -> None:
    """One trial."""
    seed_everything(1)
    model = Network(hparams.layers, hparams.learning_rate)
    trainer = Trainer(accelerator="auto", max_epochs=hparams.epochs, enable_progress_bar=False)
    trainer.fit(model)


if __name__ == "__main__":
    parser = HyperOptArgumentParser(strategy="grid_search")
    parser.opt_list("--learning_rate", default=0.001, type=float, options=[1e-3, 1e-2, 1e-1], tunable=True)
    parser.opt_list("--layers", default=16, type=int, options=[16, 32, 64], tunable=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--log_path", default="searches", help="a folder that all nodes see")
    parser.add_argument("--gpus", type=int, default=0, help="of each trial")
    parser.add_argument("--local", action="store_true", help="play the trials here, where there is no SLURM")
    hyperparams = parser.parse_args()

    cluster = SlurmCluster(hyperparam_optimizer=hyperparams, log_path=hyperparams.log_path, local=hyperparams.local)
    cluster.add_command("export NCCL_DEBUG=WARN")
    if hyperparams.gpus:
        cluster.per_experiment_nb_gpus = hyperparams.gpus
        cluster.optimize_parallel_cluster_gpu(main, nb_trials=9, job_name="digits")
    else:
        cluster.optimize_parallel_cluster_cpu(main, nb_trials=9, job_name="digits")
